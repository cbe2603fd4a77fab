"""How tokens get to the ranks of their experts and back (megatron-core 0.16.1
transformer/moe/token_dispatcher.py, moe_utils.py permute and unpermute; TE 2.11
pytorch/permutation.py where the permutation is fused).

Rows are balanced but for the imbalance that is asked for: what a rank receives is that many times
its share. Left out: counts of tokens for each expert, and what sorting takes for itself.
"""

from __future__ import annotations

from memfit.formats import BOOL, INT32, INT64, Format
from memfit.lazy_dataclass import dataclass
from memfit.libraries.megatron.ranks import Ranks
from memfit.libraries.megatron.router import capacity, settings
from memfit.lower import ops
from memfit.lower.context import Context
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Grads, Node, Shape, Tensor
from memfit.model.modules import MoE
from memfit.strategy import EP


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """`sent` by this rank to all experts, `own` what it then has for those it holds."""

    sent: int
    own: int


def rows_of(tokens: int, module: MoE, ep: EP, each: int) -> Rows:
    """Of `tokens` tokens of this rank; `each` ranks share an expert's matrices, and all have the
    rows of each."""
    if ep.capacity and ep.padded:
        sent = capacity(tokens, module, ep) * module.experts
        return Rows(sent=sent, own=sent * each)
    most = min(1.0, ep.capacity) if ep.capacity else 1.0
    sent = int(tokens * module.active * most)
    share = min(ep.imbalance, ep.capacity) if ep.capacity else ep.imbalance
    return Rows(
        sent=sent, own=-(-int(tokens * module.active * each * max(most, share) * 1000) // 1000)
    )


def groups(ctx: Context) -> tuple[Ranks, Ranks]:
    """Ranks that exchange tokens, and those that share an expert."""
    return Ranks(size=settings(ctx).size, name="ep"), Ranks(
        size=ctx.program.strategy.expert_tensor, name="etp"
    )


# ------------------------------------------------------------------------------------- permutation
def permuted(r: Recorder, x: Tensor, map: Tensor, count: int, fused: bool) -> tuple[Tensor, Tensor]:
    """`count` rows in the order of their experts, and what leads back: a map of numbers, or the
    token of each row."""
    tokens, experts = map.shape
    if fused:
        places = r.tensor((tokens, 2 * experts + 1), INT32, "row_id_map")
        scratch = r.tensor((experts, -(-tokens // 1024)), INT32, "workspace")
        del scratch
    else:
        turned = r.tensor((experts, tokens), BOOL, "contiguous")
        places = r.tensor((count,), INT64, "masked_select")
        del turned
    out = r.tensor((count, x.shape[-1]), x.format, "permute")
    return r.node("permute", out, (x,), back_alike, (places,), x.shape), places


def weights_of(r: Recorder, weights: Tensor, map: Tensor, count: int, fused: bool) -> Tensor:
    """The weights of those rows. What is picked by a mask keeps what it was picked from, turned,
    and the mask."""
    saved: tuple[Tensor, ...] = ()
    if not fused:
        weights = r.node(
            "contiguous",
            r.tensor((weights.shape[1], weights.shape[0]), weights.format, "contiguous"),
            (weights,),
            back_turned,
        )
        saved = (weights, r.tensor((map.shape[1], map.shape[0]), BOOL, "contiguous"))
    return r.node(
        "masked_select",
        r.tensor((count,), weights.format, "masked_select"),
        (weights,),
        back_alike,
        saved,
        weights.shape,
    )


def back_turned(r: Recorder, node: Node, g: Tensor) -> Grads:
    """A view; the copy is made where the next product wants it."""
    return (Tensor((g.shape[1], g.shape[0]), g.format, g.storage),)


def unpermuted(r: Recorder, x: Tensor, places: Tensor, tokens: int) -> Tensor:
    """Rows added up at their tokens."""
    return r.node(
        "unpermute",
        r.tensor((tokens, x.shape[-1]), x.format, "unpermute"),
        (x,),
        back_alike,
        (places,),
        x.shape,
    )


def back_alike(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (r.tensor(node.extra, g.format, node.op),)


def sorted_rows(r: Recorder, x: Tensor, module: MoE, ep: EP) -> Tensor:
    """Chunks of the ranks into the order of the experts held here, or back: a copy, where there are
    several; fused, a map of it is kept."""
    if module.held == 1:
        return x
    places = r.tensor((x.shape[0],), INT32, "row_id_map") if ep.fused and not ep.padded else None
    return r.node(
        "sort_chunks",
        r.tensor(x.shape, x.format, "sort_chunks"),
        (x,),
        back_alike,
        (places,),
        x.shape,
    )


# ------------------------------------------------------------------------------------- collectives
def exchanged(r: Recorder, x: Tensor, rows: int, ranks: Ranks) -> Tensor:
    """All-to-all; among one rank the tensor itself."""
    if ranks.size == 1:
        return x
    return r.node(
        "all_to_all",
        sent(r, x.shape, rows, x.format, ranks),
        (x,),
        back_exchanged,
        extra=(x.shape[0], ranks),
    )


def sent(r: Recorder, shape: Shape, rows: int, format: Format, ranks: Ranks) -> Tensor:
    out = r.tensor((rows, *shape[1:]), format, "all_to_all", "communication")
    r.comm("all_to_all", format.bytes(out.count), ranks.size, ranks.name)
    return out


def back_exchanged(r: Recorder, node: Node, g: Tensor) -> Grads:
    rows, ranks = node.extra
    return (sent(r, g.shape, rows, g.format, ranks),)


def gathered(r: Recorder, x: Tensor, ranks: Ranks) -> Tensor:
    """All ranks' rows; backward scatters their sum."""
    return (
        r.node("all_gather", ranks.gather(r, x), (x,), back_gathered, extra=ranks)
        if ranks.size > 1
        else x
    )


def back_gathered(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (node.extra.scatter(r, g),)


def summed(r: Recorder, x: Tensor, ranks: Ranks) -> Tensor:
    """The sum, each rank with its part; backward gathers."""
    return (
        r.node("reduce_scatter", ranks.scatter(r, x), (x,), back_summed, extra=ranks)
        if ranks.size > 1
        else x
    )


def back_summed(r: Recorder, node: Node, g: Tensor) -> Grads:
    return (node.extra.gather(r, g),)


def held_experts(r: Recorder, x: Tensor, held: int) -> Tensor:
    """The columns of the experts held here, copied; backward writes them into zeros."""
    if held == x.shape[1]:
        return x
    return ops.packed(r, r.node("slice", part(x, held), (x,), back_alike, extra=x.shape))


def part(x: Tensor, held: int) -> Tensor:
    out = Tensor((x.shape[0], held), x.format, x.storage)
    out.strides = (x.shape[1], 1)
    return out
