"""Speed of a serving engine: the time of one step over some requests, from what each block reads
and computes.

The rates are those that GPUs were measured to reach (`hardware/rates.py`). CUDA graphs take the
host's launches away, so a kernel costs its own time and no less than the smallest one measured. A
step reads every weight once, of a mixture the experts that its tokens choose, and the cache of
every request. Where an engine schedules and samples while the GPU waits, that is a constant of its
version (`host`); else it is left out, as copies between hosts are.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.hardware import Cluster, rates
from memfit.hardware.collectives import Group, seconds
from memfit.hardware.rates import KERNELS, Rates
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Block, Latent, Layer, Linear, MoE
from memfit.serving.parts import Indexer, Picking, Recurrent, pair
from memfit.serving.weights import (
    Rank,
    kept_names,
    kv_heads,
    layer_sizes,
    routed_sizes,
    table_rows,
)

FLASH = "flash-attn-3"
SMALL_ATTENTION, SMALL_EXPERTS = 3, 5  # kernels of a block that move next to nothing
NORMED = 4  # a fused norm reads the residual and the block's output, and writes both


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of an engine: `decoding` requests make a token each, with `context` tokens behind
    them; `prompt` tokens of one prompt join them, with `before` tokens behind."""

    decoding: int = 0
    context: int = 0
    prompt: int = 0
    before: int = 0

    @property
    def tokens(self) -> int:
        return self.decoding + self.prompt


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model on one rank of an engine, with the bytes of a cached number and the seconds of a step
    in which the GPU waits for the host."""

    model: Model
    rank: Rank
    cluster: Cluster
    cached: int = 2
    host: float = 0.0

    @property
    def rates(self) -> Rates | None:
        return rates(self.cluster.gpu)


def step_seconds(engine: Engine, step: Step) -> float | None:
    """Seconds of a step; None where the GPU's or the links' rates are not known."""
    known = engine.rates
    if known is None:
        return None
    total = 0.0
    for layer, places in layer_kinds(engine.model):
        kept = kept_names(layer, f"{engine.model.prefix}.{places[0]}", engine.rank.scheme)
        each = sum(block_seconds(engine, known, layer, block, kept, step) for block in layer.blocks)
        total += each * len(places)
    sums = reduced(engine, step)
    if sums is None:
        return None
    return engine.host + total + sums + head_seconds(engine, known, step)


def layer_kinds(model: Model) -> Iterator[tuple[Layer, list[int]]]:
    """Each kind of layer with the places where it is."""
    places: dict[int, list[int]] = {}
    for index, layer in enumerate(model.layers):
        places.setdefault(id(layer), []).append(index)
    for found in places.values():
        yield model.layers[found[0]], found


def block_seconds(
    engine: Engine, known: Rates, layer: Layer, block: Block, kept: frozenset[str], step: Step
) -> float:
    """One block: its products, its attention, and the small kernels between them."""
    mixer, rank = block.mixer, engine.rank
    stored = bytes_read(block, rank, kept, step.tokens)
    width = engine.model.width
    shares = products(mixer)
    whole = sum(shares) or 1
    flops = 2.0 * step.tokens / (rank.tensor if shared_by_ranks(mixer) else 1)
    math = math_of(engine, layer, kept)
    found = sum(known.product(flops * one, stored * one / whole, math) for one in shares)
    found += known.moved(NORMED * step.tokens * width * rank.width)
    if isinstance(mixer, MLP):
        inner = mixer.down.inputs // rank.tensor
        found += known.moved(3 * step.tokens * inner * rank.width)
    if isinstance(mixer, MoE):  # scores, their best, the order by experts, the activation, the sum
        found += SMALL_EXPERTS * known.launch
    if isinstance(mixer, (Attention, Latent)):  # rotary, the cache's new rows, joining splits
        found += SMALL_ATTENTION * known.launch
    return found + attention_seconds(engine, known, mixer, step)


def bytes_read(block: Block, rank: Rank, kept: frozenset[str], tokens: int) -> int:
    """Bytes of weights that a step over `tokens` tokens reads. Of the routed experts only those are
    read that at least one token chooses."""
    stored = sum(layer_sizes(Layer(blocks=(block,)), rank, kept))
    if not isinstance(block.mixer, MoE):
        return stored
    routed = sum(routed_sizes(block.mixer, rank, kept))
    return stored - routed + int(routed * touched(block.mixer, tokens))


def shared_by_ranks(mixer: object) -> bool:
    """Whether ranks share a block's products, and sum their results; an indexer is whole on
    each."""
    return not isinstance(mixer, Indexer)


def math_of(engine: Engine, layer: Layer, kept: frozenset[str]) -> str:
    """In which numbers products are computed: weights of fewer bits alone are unpacked to 16."""
    kind = engine.rank.scheme.kind
    names = {linear.name for linear in layer.linears()}
    if names and names <= kept:
        return "bf16"
    sm = engine.rank.sm
    return {"fp8": "fp8" if sm is None or sm >= (8, 9) else "bf16", "int8": "int8"}.get(
        kind, "bf16"
    )


def touched(mixer: MoE, tokens: int) -> float:
    """Share of the experts that some token chooses, each as likely as any other."""
    return float(1 - (1 - mixer.active / mixer.experts) ** max(1, tokens))


def products(mixer: object) -> list[int]:
    """Parameters that one token is multiplied by, in each product of a block: engines merge
    queries, keys and values, and gate and up."""

    def of(*linears: Linear | None) -> int:
        return sum(one.inputs * one.outputs for one in linears if one is not None)

    if isinstance(mixer, Picking):
        return [of(*mixer.project, mixer.queries, mixer.key), of(mixer.out)]
    if isinstance(mixer, Attention):
        return [of(*mixer.project), of(mixer.out)]
    if isinstance(mixer, Latent):
        low, up = of(mixer.q_a, mixer.kv_a), of(mixer.q_b, mixer.q_proj)
        return [low, up, of(mixer.kv_b), of(mixer.out)]
    if isinstance(mixer, Recurrent):
        return [of(*mixer.columns), of(mixer.out)]
    if isinstance(mixer, Indexer):
        return [of(mixer.queries), of(mixer.keys, mixer.scores)]
    if isinstance(mixer, MLP):
        return [of(mixer.gate, mixer.up), of(mixer.down)]
    if isinstance(mixer, MoE):
        one = mixer.active * mixer.inputs * mixer.width
        plain = bool(mixer.each) and mixer.each[0].gate is None
        shared = products(mixer.shared) if mixer.shared is not None else []
        return [one if plain else 2 * one, one, *shared]
    return []


def attention_seconds(engine: Engine, known: Rates, mixer: object, step: Step) -> float:
    """Reading the cache of those that decode, and attention of a prompt."""
    rank = engine.rank
    if isinstance(mixer, Recurrent):
        state = (mixer.conv + 2 * mixer.state) * engine.rank.width // rank.heads
        return known.moved(2.0 * (step.decoding + (step.prompt > 0)) * state)
    if isinstance(mixer, Attention):
        values = kv_heads(mixer.kv_heads, rank.heads) * pair(mixer)
        heads, head, window = mixer.heads // rank.heads, mixer.head, mixer.window
    elif isinstance(mixer, Latent):
        values, heads, window = mixer.cached, mixer.heads // rank.heads, 0
        head = mixer.nope + mixer.rope
    else:
        return 0.0
    seen = min(step.context, window) if window else step.context
    found = known.moved(float(step.decoding * seen * values * engine.cached))
    if step.prompt:
        behind = min(step.before, window) if window else step.before
        own = min(step.prompt, window) if window else step.prompt
        pairs = step.prompt * (behind + own / 2)
        found += known.attended(
            KERNELS[FLASH],
            4.0 * heads * head * pairs,
            float((behind + step.prompt) * values * engine.cached),
            "bf16",
            (head, behind + step.prompt),
            backward=False,
        )
    return found


def reduced(engine: Engine, step: Step) -> float | None:
    """Sums over ranks: one behind attention and one behind the feed-forward of each layer."""
    ranks = engine.rank.tensor
    if ranks < 2:
        return 0.0
    group = Group(size=ranks, stride=1, per_node=engine.cluster.gpus_per_node)
    size = step.tokens * engine.model.width * engine.rank.width
    each = seconds("all_reduce", size, group, engine.cluster)
    if each is None:
        return None
    blocks = (block for layer in engine.model.layers for block in layer.blocks)
    return each * sum(shared_by_ranks(block.mixer) for block in blocks)


def head_seconds(engine: Engine, known: Rates, step: Step) -> float:
    """Logits of the requests that make a token."""
    model, rank = engine.model, engine.rank
    rows = max(1, step.decoding + (step.prompt > 0))
    table = table_rows(model.vocab, rank, rank.tensor) * model.width
    return known.product(2.0 * rows * table, float(table * rank.width), "bf16")


__all__ = ["Engine", "Step", "step_seconds"]
