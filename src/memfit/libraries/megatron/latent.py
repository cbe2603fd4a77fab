"""Megatron's multi-head latent attention over Transformer Engine's kernels (megatron-core 0.16.1
transformer/multi_latent_attention.py, gpt_layer_specs.py with `--qk-layernorm`,
fusions/fused_mla_yarn_rope_apply.py).

The norms of the latents lie in the products behind them. Rotary positions are YaRN's, fused:
queries are turned in place, keys and values are made anew from what was projected.
"""

from __future__ import annotations

from memfit.libraries.megatron.attention import core
from memfit.libraries.megatron.ranks import Ranks, bytes_of, of
from memfit.libraries.megatron.recompute import again, asked, made_again
from memfit.libraries.megatron.te import entering, normed_product, product, rms_norm
from memfit.lower import views
from memfit.lower.bound import Bound
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Shape, Tensor
from memfit.model.modules import Block, Latent

ALONE = Ranks(
    size=1
)  # the way down to the latents is whole on every rank (TELinear, parallel_mode "duplicated")


def latent(x: Tensor, block: Block, bound: Bound, ctx: Context) -> Tensor:
    mixer, r = block.mixer, ctx.r
    assert isinstance(mixer, Latent)
    assert block.norm is not None
    norm = block.norm

    def attend(normed: Tensor) -> Tensor:
        q, k, v = projected(normed, mixer, bound, ctx)
        del normed
        r.where = bound.path(mixer.name)
        out = (
            again(r, lambda q, k, v: core(q, k, v, ctx), q, k, v)
            if asked(ctx, "core_attn")
            else core(q, k, v, ctx)
        )
        return product(
            views.reshape(r, out, *out.shape[:2], mixer.heads * mixer.value), mixer.out, bound, ctx
        )

    if asked(ctx, "layernorm"):
        return made_again(r, lambda x: rms_norm(x, norm, bound, ctx), x, attend)
    return attend(rms_norm(x, norm, bound, ctx))


def projected(
    x: Tensor, mixer: Latent, bound: Bound, ctx: Context
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (S, B, heads, size)."""
    r = ctx.r
    down = None
    if mixer.q_a is not None:
        down = entering(x, (mixer.q_a,), bound, ctx, ALONE)
    both = entering(x, (mixer.kv_a,), bound, ctx, ALONE)
    low, position = views.split(r, both, 2, mixer.latent, mixer.rope)
    del both
    if of(ctx).sequence:
        position = gathered(r, position, of(ctx))
    if down is not None:
        assert mixer.q_norm is not None
        assert mixer.q_b is not None
        q = normed_product(down, mixer.q_norm, (mixer.q_b,), bound, ctx)
    else:
        assert mixer.q_proj is not None
        q = entering(x, (mixer.q_proj,), bound, ctx, of(ctx))
    q = views.reshape(r, q, *q.shape[:2], mixer.heads, mixer.nope + mixer.rope)  # turned in place
    wide = normed_product(low, mixer.kv_norm, (mixer.kv_b,), bound, ctx)
    r.where = bound.path(mixer.name)
    return (q, *keys_and_values(r, wide, position, mixer))


def gathered(r: Recorder, x: Tensor, ranks: Ranks) -> Tensor:
    """All tokens of what each rank has a part of; backward scatters
    (core/tensor_parallel/mappings.py)."""
    return r.node("all_gather", ranks.gather(r, x), (x,), back_gathered, extra=ranks)


def back_gathered(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (node.extra.scatter(r, g),)


def keys_and_values(
    r: Recorder, wide: Tensor, position: Tensor, mixer: Latent
) -> tuple[Tensor, Tensor]:
    """Two new tensors from the projection and the position that all heads share; nothing is kept
    but the tables (ApplyMLARotaryEmbKV)."""
    shape: Shape = (*wide.shape[:2], mixer.heads)
    key = r.tensor((*shape, mixer.nope + mixer.rope), wide.format, "mla_rope")
    value = r.tensor((*shape, mixer.value), wide.format, "mla_rope")
    r.compute(
        "mla_rope",
        6 * key.count,
        bytes_of(wide) + bytes_of(key) + bytes_of(value),
        wide.format.math,
    )
    r.node("mla_rope", key, (wide, position), back_keys, extra=(wide.shape, position.shape))
    if key.node is not None:
        key.node.outputs = 2
        value.node, value.needs, value.slot = key.node, True, 1
    return key, value


def back_keys(r: Recorder, node: Node, given: dict[int, Tensor]) -> Grads:
    wide, position = node.extra
    some = next(iter(given.values()))
    return [r.tensor(wide, some.format, node.op), r.tensor(position, some.format, node.op)]
