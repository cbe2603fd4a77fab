"""Graphs of Gemma 4: caches that layers share, embeddings of each layer, experts beside a dense
feed-forward (src/models/gemma4.cpp of llama.cpp b11549)."""

from __future__ import annotations

from memfit.serving.llamacpp import ggml
from memfit.serving.llamacpp.builder import Builder, Heads
from memfit.serving.llamacpp.ggml import I32, Tensor
from memfit.serving.llamacpp.settings import LATE_OUTPUTS


def gemma4(b: Builder) -> None:
    """Values are normed, too; where they have no matrix they are the keys before their norm. A
    layer's own embedding of each token is gated by the layer's output and added to it."""
    x = ggml.same("scale", b.embedded())
    early = b.settings.build < LATE_OUTPUTS
    inputs = layer_inputs(b, x) if b.weight("per_layer_token_embd.weight") is not None else None
    for layer in b.order:
        p = f"blk.{layer}."
        made = attention(b, layer, b.norm(x, f"{p}attn_norm"))
        last = early and layer == b.order[-1]
        if last:
            made, x = b.chosen(made, x)
        x = ggml.same("add", b.norm(made, f"{p}post_attention_norm"), x)
        if b.weight(f"{p}ffn_gate_inp.weight") is None:
            fed = b.ffn(p, b.norm(x, f"{p}ffn_norm"))
        else:
            fed = _gemma4_experts(b, p, x)
        x = ggml.same("add", b.norm(fed, f"{p}post_ffw_norm"), x)
        if inputs is not None:
            own = ggml.view(inputs, inputs.ne[:2], (inputs.nb[1],), layer * inputs.nb[2])
            if last:
                (own,) = b.chosen(own)
            gate = ggml.same("unary", b.linear(f"{p}inp_gate", x))
            made = b.linear(f"{p}proj", ggml.same("mul", gate, own))
            x = ggml.same("add", x, b.norm(made, f"{p}post_norm"))
        if b.weight(f"{p}layer_output_scale.weight") is not None:
            x = ggml.same("mul", x, b.needed(f"{p}layer_output_scale.weight"))
    x = b.norm(x, "output_norm")
    logits = b.finish(x if early else b.chosen(x)[0], None)
    b.expand(ggml.same("scale", ggml.same("unary", ggml.same("scale", logits))))


def layer_inputs(b: Builder, x: Tensor) -> Tensor:
    """For each token and layer: a row of that layer's table plus a projection of the token's
    embedding (gemma4.cpp build_inp_per_layer, project_per_layer_inputs)."""
    size, layers = b.model.number("embedding_length_per_layer_input"), b.model.layers
    table = ggml.rows(b.needed("per_layer_token_embd.weight"), ggml.given((b.n,), I32))
    table = b.expand(ggml.same("scale", ggml.reshape(table, size, layers, b.n)))
    made = ggml.same("scale", b.linear("per_layer_model_proj", x))
    made = b.norm(ggml.reshape(made, size, layers, b.n), "per_layer_proj_norm")
    made = ggml.same("scale", ggml.same("add", made, table))
    return ggml.contiguous(ggml.permute(made, 0, 2, 1, 3))


def attention(b: Builder, layer: int, x: Tensor) -> Tensor:
    model, p = b.model, f"blk.{layer}."
    head, heads, kv_heads = model.head(layer), model.heads(layer), model.kv_heads(layer)
    q = ggml.reshape(b.linear(f"{p}attn_q", x), head, heads, b.n)
    q = b.rope(b.norm(q, f"{p}attn_q_norm"))
    shape = Heads(k=head, v=head, kv=kv_heads, slides=model.slides(layer))
    if model.cache_of(layer) != layer:
        return b.linear(f"{p}attn_output", b.attention(layer, shape, q, None, None))
    k = v = b.linear(f"{p}attn_k", x)
    if b.weight(f"{p}attn_v.weight") is not None:
        v = b.linear(f"{p}attn_v", x)
    k = ggml.reshape(k, head, kv_heads, b.n)
    v = ggml.same("rms_norm", ggml.reshape(v, head, kv_heads, b.n))
    k = b.rope(b.norm(k, f"{p}attn_k_norm"))
    return b.linear(f"{p}attn_output", b.attention(layer, shape, q, k, v))


def _gemma4_experts(b: Builder, p: str, x: Tensor) -> Tensor:
    dense = b.norm(b.ffn(p, b.norm(x, f"{p}ffn_norm")), f"{p}post_ffw_norm_1")
    inside = b.norm(x, f"{p}pre_ffw_norm_2")
    router = ggml.same("scale", ggml.same("rms_norm", x))
    router = ggml.same("mul", router, b.needed(f"{p}ffn_gate_inp.scale"))
    made = b.moe(p, inside, "softmax", normed=True, scaled=False, router=router)
    return ggml.same("add", dense, b.norm(made, f"{p}post_ffw_norm_2"))
