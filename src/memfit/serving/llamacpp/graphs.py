"""The graph of each architecture: what its layers compute, in llama.cpp's order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from memfit.serving.llamacpp import encoder_decoder, gemma, gemma3n, ggml, indexed, states
from memfit.serving.llamacpp.builder import Builder, Heads
from memfit.serving.llamacpp.ggml import Tensor
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.recipes import RECIPES, Recipe
from memfit.serving.llamacpp.settings import LATENT_ONLY

Mixer = Callable[[Builder, Recipe, int, Tensor], Tensor]


def build(builder: Builder) -> None:
    """Fill the builder's graph."""
    recipe = RECIPES[builder.model.arch]
    LAYERS[recipe.layers](builder, recipe)


# ------------------------------------------------------------------ shared


def projections(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of a layer, one head an axis."""
    model, p = b.model, f"blk.{layer}."
    head, value = model.head(layer), model.value_head(layer)
    heads, kv_heads = model.heads(layer), model.kv_heads(layer)
    if b.weight(f"{p}attn_qkv.weight") is not None:
        joined = b.linear(f"{p}attn_qkv", x)
        if model.facts.get("attention.clamp_kqv"):
            joined = ggml.in_place("clamp", joined)
        row, step = joined.nb[1], head * 4
        q = ggml.view(joined, (head, heads, b.n), (step, row))
        k = ggml.view(joined, (head, kv_heads, b.n), (step, row), heads * step)
        v = ggml.view(joined, (value, kv_heads, b.n), (step, row), (heads + kv_heads) * step)
        return q, k, v
    made = []
    for name, width, count in (("q", head, heads), ("k", head, kv_heads), ("v", value, kv_heads)):
        one = b.linear(f"{p}attn_{name}", x)
        if model.facts.get("attention.clamp_kqv"):
            one = ggml.in_place("clamp", one)
        weight = b.weight(f"{p}attn_{name}_norm.weight")
        whole = weight is not None and weight.ne[0] != head
        if whole:
            one = b.norm(one, f"{p}attn_{name}_norm", recipe.norm)
        one = ggml.reshape(one, width, count, b.n)
        if weight is not None and not whole:
            one = b.norm(one, f"{p}attn_{name}_norm", recipe.norm)
        made.append(one)
    return tuple(made)


def attention(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> Tensor:
    """Softmax attention with its output projection."""
    model, p = b.model, f"blk.{layer}."
    if not model.kv_heads(layer):
        return b.linear(f"{p}attn_output", x)
    q, k, v = projections(b, recipe, layer, x)
    if recipe.rope and rotates(model, layer):
        q, k = b.rope(q), b.rope(k)
    if recipe.scales_query:
        q = ggml.same("scale", q)
    shape = Heads(
        k=model.head(layer),
        v=model.value_head(layer),
        kv=model.kv_heads(layer),
        slides=model.slides(layer),
        softcap=recipe.softcap,
    )
    mixed = b.attention(layer, shape, q, k, v)
    if b.weight(f"{p}attn_gate.weight") is not None:  # one number for each head (step35.cpp)
        gate = ggml.same("unary", b.linear(f"{p}attn_gate", x))
        each = ggml.reshape(mixed, shape.v, model.heads(layer), b.n)
        each = ggml.same("mul", each, ggml.reshape(gate, 1, *each.ne[1:3]))
        mixed = ggml.reshape(each, *mixed.ne[:2])
    made = b.linear(f"{p}attn_output", mixed)
    return ggml.same("scale", made) if model.facts.get("attention.value_scale") else made


def rotates(model: GgufModel, layer: int) -> bool:
    """Some models rotate only where a window is seen, or leave out every fourth layer."""
    if model.arch in ("cohere2", "exaone4") and model.window:
        return model.slides(layer)
    if model.arch == "smollm3":
        return (layer + 1) % 4 != 0
    if model.arch == "baichuan":
        return model.layers == 32  # the 13B has position biases instead
    if model.arch == "llama4":
        return model.slides(layer)
    return True


def feed_forward(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> Tensor:
    p = f"blk.{layer}."
    if b.weight(f"{p}ffn_gate_inp.weight") is None:
        return b.ffn(p, x, recipe.act)
    made = b.moe(p, x, recipe.gating, normed=recipe.normed, scaled=recipe.scaled)
    if b.weight(f"{p}ffn_up_shexp.weight") is None:
        return made
    shared = b.ffn(p, x, recipe.act, "_shexp")
    if b.weight(f"{p}ffn_gate_inp_shexp.weight") is not None:
        gate = ggml.matmul(b.needed(f"{p}ffn_gate_inp_shexp.weight"), x)
        shared = ggml.same("mul", shared, ggml.same("unary", gate))
    return ggml.same("add", made, shared)


def opened(b: Builder, recipe: Recipe) -> Tensor:
    """The input of the first layer."""
    x = b.embedded()
    if recipe.scales_embedding or b.model.facts.get("embedding_scale"):
        x = ggml.same("scale", x)
    if b.weight("position_embd.weight") is not None:
        x = ggml.same("add", x, ggml.rows(b.needed("position_embd.weight"), b.positions))
    if b.weight("token_embd_norm.weight") is not None:
        x = b.norm(x, "token_embd_norm", recipe.norm)
    return x


def closed(b: Builder, recipe: Recipe, x: Tensor) -> None:
    logits = b.finish(x, "output_norm", recipe.norm)
    facts = b.model.facts
    if facts.get("final_logit_softcapping"):
        logits = ggml.same("scale", ggml.same("unary", ggml.same("scale", logits)))
    elif facts.get("logit_scale"):
        logits = ggml.same("scale", logits)
    b.expand(logits)


# ------------------------------------------------------------------ decoders


def decoder(b: Builder, recipe: Recipe, mixer: Mixer = attention) -> None:
    """Norm, attention, add; norm, feed-forward, add."""
    x = opened(b, recipe)
    for layer in b.order:
        x = _layer(b, recipe, layer, x, mixer, last=layer == b.order[-1])
    closed(b, recipe, x)


def _first_norm(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> Tensor:
    p = f"blk.{layer}."
    if b.weight(f"{p}attn_norm.weight") is not None:
        return b.norm(x, f"{p}attn_norm", recipe.norm)
    return x if b.model.arch in ("olmo2", "exaone4", "modern-bert") else b.norm(x, None, "norm")


def _layer(
    b: Builder, recipe: Recipe, layer: int, x: Tensor, mixer: Mixer, *, last: bool
) -> Tensor:
    p = f"blk.{layer}."
    if not b.model.heads(layer):
        return _no_attention(b, recipe, layer, x, last=last)
    normed = _first_norm(b, recipe, layer, x)
    if b.weight(f"{p}attn_norm_2.weight") is not None:
        attended = mixer(b, recipe, layer, b.norm(x, f"{p}attn_norm_2", recipe.norm))
    else:
        attended = mixer(b, recipe, layer, normed)
    parallel = recipe.parallel and b.weight(f"{p}ffn_norm.weight") is None
    if last:
        if parallel:
            attended, x, normed = b.chosen(attended, x, normed)
        else:
            attended, x = b.chosen(attended, x)
    if parallel:
        fed = feed_forward(b, recipe, layer, normed)
        if b.model.arch == "phi2":
            return ggml.same("add", ggml.same("add", attended, fed), x)
        return ggml.same("add", ggml.same("add", fed, x), attended)
    return _second_half(b, recipe, layer, attended, x)


def _no_attention(b: Builder, recipe: Recipe, layer: int, x: Tensor, *, last: bool) -> Tensor:
    """A feed-forward alone, or nothing (deci.cpp)."""
    if last:
        (x,) = b.chosen(x)
    if b.weight(f"blk.{layer}.ffn_norm.weight") is None:
        return x
    fed = feed_forward(b, recipe, layer, b.norm(x, f"blk.{layer}.ffn_norm", recipe.norm))
    return ggml.same("add", fed, x)


def _second_half(b: Builder, recipe: Recipe, layer: int, attended: Tensor, x: Tensor) -> Tensor:
    """What follows attention: norms of its output, the sum, the feed-forward."""
    p = f"blk.{layer}."
    scale = bool(b.model.facts.get("residual_scale"))
    after, before, last = norm_roles(b.model.by_name, p)
    if after:
        attended = b.norm(attended, f"{p}{after}", recipe.norm)
    if scale:
        attended = ggml.same("scale", attended)
    x = ggml.same("add", attended, x)
    if before:
        normed = b.norm(x, f"{p}{before}", recipe.norm)
    else:
        normed = x if last else b.norm(x, None, "norm")
    fed = feed_forward(b, recipe, layer, normed)
    if last:
        fed = b.norm(fed, f"{p}{last}", recipe.norm)
    if scale:
        fed = ggml.same("scale", fed)
    return ggml.same("add", fed, x)


def norm_roles(names: Collection[str], prefix: str) -> tuple[str, str, str]:
    """Which norm comes after attention, before the feed-forward, and after it; empty: none. The
    same name has different places in different architectures."""

    def first(*options: str) -> str:
        return next((one for one in options if f"{prefix}{one}.weight" in names), "")

    last = first("post_ffw_norm", "layer_output_norm")
    before, after = first("ffn_norm"), first("post_attention_norm", "attn_output_norm")
    if before or last:
        return after, before, last
    return "", after, ""


# ------------------------------------------------------------------ latent attention


def _latent(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> Tensor:
    """DeepSeek's attention with the up-projection absorbed: one key for all heads."""
    model, p, n = b.model, f"blk.{layer}.", b.n
    rope, latent = model.number("rope.dimension_count"), model.number("attention.kv_lora_rank")
    full = model.number("attention.key_length_mla")
    nope, heads = full - rope, model.heads(layer)
    masked = None
    if b.weight(f"{p}attn_q_a.weight") is not None:
        q = b.norm(b.linear(f"{p}attn_q_a", x), f"{p}attn_q_a_norm")
        if "attention.indexer.top_k" in model.facts:
            masked = partial(indexed.only, b, indexed.chosen_tokens(b, layer, x, q))
        q = b.linear(f"{p}attn_q_b", q)
    else:
        q = b.linear(f"{p}attn_q", x)
    step = full * 4
    q_nope = ggml.view(q, (nope, heads, n), (step, step * heads))
    q_rope = ggml.view(q, (rope, heads, n), (step, step * heads), nope * 4)
    kv = b.linear(f"{p}attn_kv_a_mqa", x)
    row = (latent + rope) * 4
    compressed = ggml.view(kv, (latent, n), (row,))
    k_rope = ggml.view(kv, (rope, 1, n), (row, row), latent * 4)
    q_rope, k_rope = b.rope(q_rope), b.rope(k_rope)
    compressed = b.norm(compressed, f"{p}attn_kv_a_norm")
    absorbed = ggml.matmul(b.needed(f"{p}attn_k_b.weight"), ggml.permute(q_nope, 0, 2, 1, 3))
    absorbed = ggml.permute(absorbed, 0, 2, 1, 3)
    compressed = ggml.reshape(compressed, latent, 1, n)
    newer = b.settings.build >= LATENT_ONLY  # the rotated part comes last since then
    q_parts, k_parts = (absorbed, q_rope), (compressed, k_rope)
    q = ggml.as_float("concat", (rope + latent, heads, n), *q_parts[:: 1 if newer else -1])
    k = ggml.as_float("concat", (rope + latent, 1, n), *k_parts[:: 1 if newer else -1])
    shape = Heads(
        k=rope + latent,
        v=latent,
        kv=1,
        after=lambda mixed: ggml.matmul(b.needed(f"{p}attn_v_b.weight"), mixed),
        v_in_k=b.settings.build >= LATENT_ONLY,
        masked=masked,
    )
    made = b.attention(layer, shape, q, k, compressed)
    return b.linear(f"{p}attn_output", made)


def latent(b: Builder, recipe: Recipe) -> None:
    decoder(b, recipe, _latent)


# ------------------------------------------------------------------ recurrent layers


def _mixed(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> Tensor:
    """A layer's own kind of mixing: attention, or one of those with a state."""
    names, p = b.model.by_name, f"blk.{layer}."
    if f"{p}shortconv.conv.weight" in names:
        return states.short_convolution(b, layer, x)
    if f"{p}ssm_alpha.weight" in names or f"{p}ssm_ba.weight" in names:
        return states.delta_net(b, layer, x)
    if f"{p}ssm_x.weight" in names:
        return states.mamba(b, layer, x)
    if f"{p}ssm_in.weight" in names:
        return states.mamba2(b, layer, x)
    if recipe.gated_attention:
        b.expand(x)
        return states.gated_attention(b, layer, x)
    return attention(b, recipe, layer, x)


def hybrid(b: Builder, recipe: Recipe) -> None:
    decoder(b, recipe, _mixed)


def single(b: Builder, recipe: Recipe) -> None:
    """Each layer is one thing: a state, attention or a feed-forward (Mamba, Nemotron-H)."""
    x = opened(b, recipe)
    if recipe.expands_input:
        b.expand(x)
    for layer in b.order:
        p = f"blk.{layer}."
        normed = b.norm(x, f"{p}attn_norm", recipe.norm)
        feeds = f"{p}ffn_up.weight" in b.model.by_name or f"{p}ffn_gate_inp.weight" in (
            b.model.by_name
        )
        mix = _latent_feed_forward if feeds else _mixed
        made = mix(b, recipe, layer, normed)
        if layer == b.order[-1]:
            made, x = b.chosen(made, x)
        x = ggml.same("add", made, x)
    closed(b, recipe, x)


def _latent_feed_forward(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> Tensor:
    """Experts that may work in a narrower space, beside a shared one that does not."""
    p = f"blk.{layer}."
    if b.weight(f"{p}ffn_latent_down.weight") is None:
        return feed_forward(b, recipe, layer, x)
    narrow = b.linear(f"{p}ffn_latent_down", x)
    made = b.moe(p, narrow, recipe.gating, normed=recipe.normed, scaled=recipe.scaled, router=x)
    made = b.linear(f"{p}ffn_latent_up", made)
    return ggml.same("add", made, b.ffn(p, x, recipe.act, "_shexp"))


# ------------------------------------------------------------------ encoders


def encoder(b: Builder, recipe: Recipe) -> None:
    """BERT and what follows it: norms come after the sums, and no cache is kept."""
    model = b.model
    x = b.embedded()
    kinds = b.weight("token_types.weight")
    if kinds is not None:
        x = ggml.same("add", x, ggml.view(kinds, (model.width,)))
    if b.weight("position_embd.weight") is not None:
        x = ggml.same("add", ggml.rows(b.needed("position_embd.weight"), b.positions), x)
    x = b.norm(x, "token_embd_norm", recipe.norm)
    for layer in b.order:
        p = f"blk.{layer}."
        made = _attention_within(b, recipe, layer, x)
        if layer == b.order[-1]:
            made, x = b.chosen(made, x)
        x = b.norm(ggml.same("add", made, x), f"{p}attn_output_norm", recipe.norm)
        fed = b.ffn(p, x, recipe.act)
        x = b.norm(ggml.same("add", fed, x), f"{p}layer_output_norm", recipe.norm)
    b.expand(x)
    if b.settings.embedding and model.number("pooling_type") == MEAN:
        weights = ggml.given((b.n, b.settings.parallel))
        b.expand(ggml.matmul(ggml.contiguous(ggml.transpose(x)), weights))


MEAN = 1  # llama_pooling_type


def _attention_within(b: Builder, recipe: Recipe, layer: int, x: Tensor) -> Tensor:
    q, k, v = projections(b, recipe, layer, x)
    if recipe.rope:
        q, k = b.rope(q), b.rope(k)
    made = b.attention_within(q, k, v, slides=b.model.slides(layer))
    return b.linear(f"blk.{layer}.attn_output", made)


def modern_encoder(b: Builder, recipe: Recipe) -> None:
    """ModernBERT: norms come first, as in decoders (src/models/modern-bert.cpp)."""
    x = opened(b, recipe)
    for layer in b.order:
        x = _layer(b, recipe, layer, x, _attention_within, last=layer == b.order[-1])
    b.expand(b.norm(x, "output_norm", recipe.norm))


LAYERS: Mapping[str, Callable[[Builder, Recipe], None]] = {
    "decoder": decoder,
    "latent": latent,
    "hybrid": hybrid,
    "encoder": encoder,
    "modern_encoder": modern_encoder,
    "encoder_decoder": lambda b, recipe: encoder_decoder.decoder(b),
    "gemma3n": lambda b, recipe: gemma3n.gemma3n(b),
    "gemma4": lambda b, recipe: gemma.gemma4(b),
    "single": single,
}
__all__ = ["build"]
