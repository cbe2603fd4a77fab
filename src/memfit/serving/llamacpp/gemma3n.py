"""The graph of Gemma 3n: four copies of the hidden state, of which one goes through the layer and
the others are predicted from it (src/models/gemma3n.cpp of llama.cpp b11549)."""

from __future__ import annotations

from memfit.serving.llamacpp import ggml
from memfit.serving.llamacpp.builder import Builder
from memfit.serving.llamacpp.gemma import attention, layer_inputs
from memfit.serving.llamacpp.ggml import Tensor
from memfit.serving.llamacpp.recipes import RECIPES


def gemma3n(b: Builder) -> None:
    x = b.expand(ggml.same("mul", b.embedded(), ggml.given((1, b.n))))
    inputs = layer_inputs(b, x)
    copies = b.model.number("altup.num_inputs", 4)
    wide = ggml.as_float("repeat", (*x.ne[:2], copies - 1), x)
    x = _joined(x, _scaled(ggml.matmul(b.needed("altup_proj.weight"), wide), x))
    for layer in b.order:
        x = _layer(b, layer, x, inputs)
    others = _scaled(ggml.matmul(b.needed("altup_unembd_proj.weight"), _rest(x)), _slice(x))
    made = _slice(x)
    for index in range(copies - 1):
        made = ggml.same("add", made, _slice(others, index))
    (made,) = b.chosen(ggml.same("scale", made))
    logits = b.finish(made, "output_norm")
    b.expand(ggml.same("scale", ggml.same("unary", ggml.same("scale", logits))))


def _layer(b: Builder, layer: int, x: Tensor, inputs: Tensor) -> Tensor:
    p = f"blk.{layer}."
    predicted = _predicted(b, p, x)
    active = _slice(predicted)
    normed = b.norm(active, f"{p}attn_norm")
    low = b.linear(f"{p}laurel_r", b.linear(f"{p}laurel_l", normed))
    low = ggml.same("add", b.norm(low, f"{p}laurel_post_norm"), normed)
    made = b.norm(attention(b, layer, normed), f"{p}post_attention_norm")
    made = ggml.same("add", made, active)
    made = ggml.same("scale", ggml.same("add", made, low))
    fed = _feed_forward(b, layer, b.norm(made, f"{p}ffn_norm"))
    made = ggml.same("add", b.norm(fed, f"{p}post_ffw_norm"), made)
    corrected = _corrected(b, p, predicted, made)
    first = ggml.same("mul", _slice(corrected), b.needed(f"{p}altup_correct_scale.weight"))
    first = ggml.same("unary", b.linear(f"{p}inp_gate", first))
    first = b.linear(f"{p}proj", ggml.same("mul", first, _slice(inputs, layer)))
    first = b.norm(first, f"{p}post_norm")
    return _joined(_slice(corrected), ggml.same("add", _rest(corrected), first))


def _feed_forward(b: Builder, layer: int, x: Tensor) -> Tensor:
    """Gated; the first layers set all but the largest activations of the gate to zero."""
    p = f"blk.{layer}."
    up, gate = b.linear(f"{p}ffn_up", x), b.linear(f"{p}ffn_gate", x)
    if layer < RECIPES[b.model.arch].sparse:
        mean = ggml.as_float("mean", (1, b.n), gate)
        apart = ggml.same("sqr", ggml.same("sub", gate, mean))
        spread = ggml.same("scale", ggml.as_float("sum_rows", (1, b.n), apart))
        spread = ggml.same("scale", ggml.same("sqrt", spread))
        gate = ggml.same("sub", gate, ggml.same("add", mean, spread))
        gate = ggml.same("unary", gate)
    hidden = ggml.same("mul", up, ggml.same("unary", gate))
    return b.linear(f"{p}ffn_down", hidden)


def _predicted(b: Builder, p: str, x: Tensor) -> Tensor:
    """All copies from the active one: a mixture of them, with weights of each token."""
    copies = x.ne[2]
    weights = b.linear(f"{p}altup_predict_coef", _weights(b, p, _slice(x)))
    weights = ggml.reshape(weights, copies, copies, b.n)
    made = ggml.matmul(ggml.contiguous(ggml.permute(x, 1, 2, 0, 3)), weights)
    return ggml.same("add", ggml.contiguous(ggml.permute(made, 0, 2, 1, 3)), x)


def _corrected(b: Builder, p: str, predicted: Tensor, active: Tensor) -> Tensor:
    """The copies after the layer: each gets the layer's change, times a weight."""
    copies = predicted.ne[2]
    weights = b.linear(f"{p}altup_correct_coef", _weights(b, p, active))
    weights = ggml.transpose(ggml.same("scale", weights))
    weights = ggml.contiguous(weights, 1, b.n, copies)
    change = ggml.same("sub", active, _slice(predicted))
    change = ggml.as_float("repeat", predicted.ne, change)
    return ggml.same("add", ggml.same("mul", change, weights), predicted)


def _weights(b: Builder, p: str, x: Tensor) -> Tensor:
    normed = ggml.same("scale", b.norm(x, f"{p}altup_router_norm"))
    return ggml.same("unary", b.linear(f"{p}altup_router", normed))


def _scaled(x: Tensor, like: Tensor) -> Tensor:
    """x with the length of another tensor."""
    return ggml.same("div", ggml.same("mul", x, _length(like)), _length(x))


def _length(x: Tensor) -> Tensor:
    total = ggml.as_float("sum_rows", (1, *x.ne[1:]), ggml.same("sqr", x))
    return ggml.same("sqrt", total)


def _joined(first: Tensor, rest: Tensor) -> Tensor:
    return ggml.as_float("concat", (*first.ne[:2], 1 + rest.ne[2]), first, rest)


def _slice(x: Tensor, index: int = 0) -> Tensor:
    """One copy of several."""
    return ggml.view(x, x.ne[:2], (x.nb[1],), index * x.nb[2])


def _rest(x: Tensor) -> Tensor:
    """All copies but the first."""
    return ggml.view(x, (*x.ne[:2], x.ne[2] - 1), x.nb[1:3], x.nb[2])
