"""The weights of one rank, tensor by tensor, as vLLM and SGLang allocate them.

Both merge the projections of queries, keys and values, and those of gate and up; split heads and
feed-forwards over tensor parallel ranks; copy key and value heads that are fewer than the ranks;
pad the vocabulary; and keep a table of rotary cosines and sines. Sources: vLLM 0.11.0
`model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `rotary_embedding/base.py`,
`fused_moe/layer.py`. The caching allocator hands out whole blocks, and `torch.cuda` counts them
whole, so the sizes go through the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from memfit.formats import FORMATS
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Latent, Layer, Module, MoE, Norm
from memfit.serving.parts import Compressed, Indexer, Picking, Recurrent, pair
from memfit.serving.stored import PLAIN, Matrix, Scheme, ceil, tensors
from memfit.simulate.allocator import Allocator

ROW_ENDS = ("o_proj", "down_proj", "dense", "out_proj", "c_proj")  # layers split by their inputs
SPLIT = ("linear", "bias", "other")  # roles of a tower's weights that ranks share
LARGER = "a larger GPU, or weights in fewer bits"  # where more ranks are no way out
VOCAB_PAD = 64  # vocab_parallel_embedding.py DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's share, and what decides how it stores weights. `attention` is the tensor
    parallelism of attention where it differs (data parallel attention: 1); `experts` the number of
    ranks that share the experts instead of splitting each of them."""

    tensor: int = 1
    attention: int = 0
    experts: int = 1
    sm: tuple[int, int] | None = None
    sms: int = 0  # multiprocessors, where they are known
    width: int = 2  # bytes of the model's own numbers
    scheme: Scheme = PLAIN
    positions: int = 0  # rows of the rotary table
    absorb: bool = True  # MLA keeps its value and key projections once more, in 16 bits
    layers: tuple[int, int] = (0, 1 << 30)  # of a pipeline stage
    towers: bool = True  # of images and sounds
    first: bool = True
    last: bool = True
    headed: bool = True  # the output head is loaded
    pad: int = VOCAB_PAD
    adapters: int = 0  # LoRA adapters at once
    adapter_rank: int = 0
    adapter_vocab: int = 0
    shared_whole: bool = False  # shared experts are whole on every rank
    table: int = 0  # ranks that share the token embedding, where they are others
    head: int = 0  # ranks that share the output head, where they are others
    dense_whole: bool = False  # feed-forwards without experts are whole on every rank

    @property
    def heads(self) -> int:
        return self.attention or self.tensor


def attention_heads(model: Model) -> int | None:
    """Query heads of the first layer that has attention; None in a model without."""
    return next(
        (
            block.mixer.heads
            for layer in model.layers
            for block in layer.blocks
            if isinstance(block.mixer, (Attention, Latent, Compressed))
        ),
        None,
    )


def layers_of(rank: Rank, model: Model) -> Sequence[Layer]:
    """The decoder layers of this rank's pipeline stage."""
    return model.layers[rank.layers[0] : rank.layers[1]]


def splits(heads: int) -> str:
    """Numbers of ranks that share so many heads: `1, 2, 4, 8`."""
    return ", ".join(str(one) for one in (1, 2, 4, 8) if heads % one == 0)


def enough_ranks(model: Model, tensor: int, weights: int, room: float) -> int:
    """The fewest tensor parallel ranks, more than `tensor`, that share the heads evenly and whose
    weights are within `room` bytes; 0 where sixteen are too few."""
    heads = attention_heads(model)
    for ranks in (2, 4, 8, 16):
        shared = heads is None or heads % ranks == 0
        if ranks > tensor and shared and weights * tensor / ranks < room:
            return ranks
    return 0


def number_width(model: Model, named: object = "") -> int:
    """Bytes of the model's own numbers; fp32 checkpoints are loaded in 16 bits unless fp32 is
    named."""
    name = str(named or "auto")
    if name in ("float", "float32"):
        return 4
    if name != "auto" or model.dtype == "float32":
        return 2
    return FORMATS.find(model.dtype).block_bytes


def rank_sizes(model: Model, rank: Rank) -> list[int]:
    """Bytes of every tensor, in the order of allocation. The checkpoint's are the same for every
    length and every number of adapters, of which a plan asks thousands."""
    alike = replace(rank, positions=0, adapters=0, adapter_rank=0, adapter_vocab=0)
    loaded = checkpoint_sizes(Same(model), alike)
    return [*loaded, *rotary_tables(model, rank), *lora_slots(model, rank)]


class Same:
    """A model as a key of a cache: none but itself is equal to it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.model is self.model


@lru_cache(64)
def checkpoint_sizes(one: Same, rank: Rank) -> tuple[int, ...]:
    """Bytes of the tensors that are read from the checkpoint."""
    model = one.model
    known: dict[tuple[int, frozenset[str]], list[int]] = {}
    # towers are split as the text model is; norms and positions, which are not, are small
    sizes = [
        weight.count * rank.width // (rank.tensor if weight.role in SPLIT else 1)
        for weight in (model.towers if rank.towers else ())
    ]
    if rank.first or (rank.last and model.tied):
        sizes += ends(model.embed, rank)
    for index, layer in enumerate(layers_of(rank, model), rank.layers[0]):
        kept = kept_names(layer, f"{model.prefix}.{index}", rank.scheme)
        if (id(layer), kept) not in known:
            known[id(layer), kept] = list(layer_sizes(layer, rank, kept))
        sizes += known[id(layer), kept]
    if rank.last:
        sizes += ends(model.final, rank)
        if rank.headed and not model.tied and not model.headless:
            rows = table_rows(model.vocab, rank, rank.head or rank.tensor)
            head = "lm_head" if rank.scheme.named else ""
            kept = frozenset() if head else frozenset([head])
            sizes += stored(head, model.width, (rows,), rank, kept)
    return tuple(sizes)


def rank_bytes(model: Model, rank: Rank, reserved: bool = False, more: Iterable[int] = ()) -> int:
    """Bytes that `torch.cuda.memory_allocated` shows after loading, or all that the allocator
    reserved. `more` are sizes of tensors that are loaded behind the model's."""
    allocator = allocate([*rank_sizes(model, rank), *more])
    return allocator.reserved if reserved else allocator.allocated


def allocate(sizes: Sequence[int]) -> Allocator:
    """The allocator with tensors of these sizes in it."""
    allocator = Allocator()
    for number, size in enumerate(sizes):
        allocator.malloc(number, size)
    return allocator


def table_rows(vocab: int, rank: Rank, ranks: int) -> int:
    """Rows of the vocabulary on one of so many ranks: padded, then split."""
    return ceil(ceil(vocab, rank.pad) * rank.pad, ranks)


def ends(modules: Sequence[Module], rank: Rank) -> list[int]:
    """Embeddings are split by rows of the padded vocabulary; everything else is whole."""
    found = []
    for module in modules:
        for weight in module.weights():
            if weight.role == "buffer":
                continue
            if weight.role == "embedding" and getattr(module, "style", "") == "tokens":
                rows, width = weight.shape
                shared = rank.table or rank.tensor
                found.append(table_rows(rows, rank, shared) * width * rank.width)
            else:
                size = FORMATS.find(weight.format).block_bytes if weight.format else rank.width
                found.append(weight.count * size)
    return found


def kept_names(layer: Layer, path: str, scheme: Scheme) -> frozenset[str]:
    """Linear layers and expert stacks of this layer that a quantization leaves as they are."""
    if scheme.kind == "plain":
        return frozenset()
    names = [linear.name for linear in layer.linears()]
    stacks = [block.mixer.name for block in layer.blocks if isinstance(block.mixer, MoE)]
    kept = {name for name in names if scheme.only_experts or scheme.keeps(f"{path}.{name}")}
    kept |= {name for name in stacks if scheme.keeps(f"{path}.{name}.experts.0.up_proj")}
    return frozenset(kept)


def layer_sizes(layer: Layer, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    for block in layer.blocks:
        mixer = block.mixer
        if isinstance(mixer, Attention):
            yield from attention_sizes(mixer, rank, kept)
        elif isinstance(mixer, Latent):
            yield from latent_sizes(mixer, rank, kept)
        elif isinstance(mixer, MoE):
            yield from expert_sizes(mixer, rank, kept)
        elif isinstance(mixer, Recurrent):
            yield from recurrent_sizes(mixer, rank, kept)
        elif isinstance(mixer, Indexer):
            yield from indexer_sizes(mixer, rank, kept)
        elif isinstance(mixer, Compressed):
            yield from compressed_sizes(mixer, rank, kept)
        else:
            alone = replace(rank, tensor=1) if rank.dense_whole else rank
            yield from mlp_sizes(mixer, alone, kept)
    for block in layer.blocks:
        for norm in (block.norm, block.post_norm):
            yield from norm_sizes(norm, rank)


def norm_sizes(norm: Norm | None, rank: Rank) -> Iterator[int]:
    if norm is not None:
        yield from (weight.count * rank.width for weight in norm.weights())


def stored(
    name: str,
    inputs: int,
    parts: tuple[int, ...],
    rank: Rank,
    kept: frozenset[str],
    *,
    bias: bool = False,
    experts: int = 0,
) -> Iterator[int]:
    """The tensors of one matrix, quantized unless its name is among the kept."""
    matrix = Matrix(name=name, inputs=inputs, parts=parts, bias=bias, experts=experts)
    scheme = PLAIN if name in kept else rank.scheme.of(name)
    yield from tensors(matrix, scheme, rank.sm, rank.width)


def kv_heads(heads: int, ranks: int) -> int:
    """Key and value heads of one rank; fewer than the ranks are copied."""
    return max(1, heads // ranks)


def attention_sizes(mixer: Attention, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    query = mixer.project[0]
    heads, pairs = mixer.heads // rank.heads, kv_heads(mixer.kv_heads, rank.heads)
    if len(mixer.project) == 3:
        gate = query.outputs // (mixer.heads * mixer.head)  # 2 where a gate comes with the queries
        values = pairs * (pair(mixer) - mixer.head)
        parts: tuple[int, ...] = (heads * mixer.head * gate, pairs * mixer.head, values)
    else:
        parts = ((heads + 2 * pairs) * mixer.head,)
    bias = any(one.bias for one in mixer.project)
    yield from stored(query.name, query.inputs, parts, rank, kept, bias=bias)
    if mixer.sinks:
        yield heads * rank.width
    out = mixer.out
    yield from stored(out.name, out.inputs // rank.heads, (out.outputs,), rank, kept, bias=out.bias)
    for norm in (mixer.q_norm, mixer.k_norm):
        yield from norm_sizes(norm, rank)
    if isinstance(mixer, Picking):
        yield from picking_sizes(mixer, rank, kept)


def picking_sizes(mixer: Picking, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    one = mixer.queries
    heads = kv_heads(one.outputs // mixer.index, rank.heads)
    yield from stored(one.name, one.inputs, (heads * mixer.index, mixer.index), rank, kept)
    for norm in (mixer.query_norm, mixer.key_norm):
        yield from norm_sizes(norm, rank)


def latent_sizes(mixer: Latent, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    heads = mixer.heads // rank.heads
    low = mixer.kv_a
    if mixer.q_a is not None and mixer.q_b is not None:
        yield from stored(
            low.name, low.inputs, (mixer.q_a.outputs, low.outputs), rank, kept, bias=low.bias
        )
        yield from norm_sizes(mixer.q_norm, rank)
        query = mixer.q_b
    else:
        assert mixer.q_proj is not None
        yield from stored(low.name, low.inputs, (low.outputs,), rank, kept, bias=low.bias)
        query = mixer.q_proj
    yield from stored(
        query.name, query.inputs, (heads * (mixer.nope + mixer.rope),), rank, kept, bias=query.bias
    )
    yield from norm_sizes(mixer.kv_norm, rank)
    both = heads * (mixer.nope + mixer.value)
    yield from stored(mixer.kv_b.name, mixer.latent, (both,), rank, kept, bias=mixer.kv_b.bias)
    out = mixer.out
    yield from stored(out.name, out.inputs // rank.heads, (out.outputs,), rank, kept, bias=out.bias)
    if rank.absorb:  # W_UK_T and W_UV (mla/common.py process_weights_after_loading)
        yield heads * mixer.nope * mixer.latent * rank.width
        yield heads * mixer.value * mixer.latent * rank.width


def recurrent_sizes(mixer: Recurrent, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    ranks = rank.heads
    yield mixer.kernel // ranks * rank.width
    for one in mixer.columns:
        yield from stored(one.name, one.inputs, (one.outputs // ranks,), rank, kept)
    yield mixer.vectors // ranks * rank.width
    out = mixer.out
    yield from stored(out.name, out.inputs // ranks, (out.outputs,), rank, kept)


def indexer_sizes(mixer: Indexer, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    for one in (mixer.queries, mixer.keys):
        yield from stored(one.name, one.inputs, (one.outputs,), rank, kept)
    yield mixer.scores.inputs * mixer.scores.outputs * rank.width
    yield from norm_sizes(mixer.key_norm, rank)


def compressed_sizes(mixer: Compressed, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    for one in mixer.whole:
        yield from stored(one.name, one.inputs, (one.outputs,), rank, kept)
    for one in mixer.columns:
        yield from stored(one.name, one.inputs, (one.outputs // rank.heads,), rank, kept)
    out = mixer.out
    yield from stored(out.name, out.inputs // rank.heads, (out.outputs,), rank, kept)
    yield from (one.inputs * one.outputs * rank.width for one in mixer.plain)
    yield mixer.tables


def mlp_sizes(mixer: MLP, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    up, down = mixer.up, mixer.down
    inner = down.inputs // rank.tensor
    parts = (
        (inner, inner) if mixer.gate is not None or mixer.fused else (up.outputs // rank.tensor,)
    )
    yield from stored(up.name, up.inputs, parts, rank, kept, bias=up.bias)
    yield from stored(down.name, inner, (down.outputs,), rank, kept, bias=down.bias)


def expert_sizes(mixer: MoE, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    router = FORMATS.find(mixer.router_format).block_bytes if mixer.router_format else rank.width
    inputs = mixer.inputs if mixer.gate is None else mixer.gate.inputs
    yield mixer.experts * inputs * router
    if mixer.router_bias:
        yield mixer.experts * rank.width
    if mixer.correction_bias:
        yield mixer.experts * 4
    yield from routed_sizes(mixer, rank, kept)
    if mixer.shared is not None:
        alone = replace(rank, tensor=1) if rank.shared_whole else rank
        yield from mlp_sizes(mixer.shared, alone, kept)
    if mixer.shared_gate is not None:
        yield mixer.shared_gate.outputs * mixer.shared_gate.inputs * rank.width


def routed_sizes(mixer: MoE, rank: Rank, kept: frozenset[str]) -> Iterator[int]:
    """The experts that a token is sent to, without the router and the shared ones."""
    experts = ceil(mixer.experts, rank.experts)
    inner = mixer.width if rank.experts > 1 else mixer.width // rank.tensor
    names = kept | {f"{mixer.name}.up", f"{mixer.name}.down"} if mixer.name in kept else kept
    yield from stored(
        f"{mixer.name}.up",
        mixer.inputs,
        (inner,) if mixer.each and mixer.each[0].gate is None else (inner, inner),
        rank,
        names,
        bias=mixer.expert_bias,
        experts=experts,
    )
    yield from stored(
        f"{mixer.name}.down",
        inner,
        (mixer.inputs,),
        rank,
        names,
        bias=mixer.expert_bias,
        experts=experts,
    )


def lora_slots(model: Model, rank: Rank) -> list[int]:
    """Room for adapters beside every linear layer (vLLM 0.11.0 lora/layers/): A of each merged part
    is whole, B is split where the layer is, A where its inputs are."""
    if not rank.adapters:
        return []
    each = rank.adapters * rank.adapter_rank * rank.width
    sizes: list[int] = []
    for layer in model.layers:
        for linear in layer.linears():
            into = linear.inputs // (rank.tensor if linear.name.endswith(ROW_ENDS) else 1)
            out = linear.outputs // (1 if linear.name.endswith(ROW_ENDS) else rank.tensor)
            sizes += [each * into, each * out]
    if rank.adapter_vocab:  # Llama's embedding and head take adapters, and tokens of their own
        rows = model.vocab + rank.adapter_vocab
        sizes += [each * rows, each * model.width, each * model.width, each * rows]
    return sizes


def rotary_tables(model: Model, rank: Rank) -> list[int]:
    """One table per kind of rotary embedding: positions × rotated values."""
    kinds = set()
    for layer, _ in model.kinds:
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention) and mixer.rotary:
                kinds.add((bool(mixer.window) and two_thetas(model), mixer.rotary))
            elif isinstance(mixer, Latent):
                kinds.add((False, mixer.rope))
            elif isinstance(mixer, Compressed):  # in fp32, and with a base of their own
                kinds.add((mixer.ratio > 1, mixer.rope * 4 // rank.width))
    return [rank.positions * rotary * rank.width for _, rotary in sorted(kinds)]


def two_thetas(model: Model) -> bool:
    """Whether sliding layers rotate by a base of their own."""
    text = model.config.get("text_config")
    config = text if isinstance(text, Mapping) else model.config
    parameters = config.get("rope_parameters")
    return (
        bool(config.get("rope_local_base_freq"))
        or (isinstance(parameters, Mapping) and "sliding_attention" in parameters)
        or model.family.startswith("gemma3")
    )


__all__ = [
    "Rank",
    "allocate",
    "attention_heads",
    "enough_ranks",
    "kv_heads",
    "layers_of",
    "number_width",
    "rank_bytes",
    "rank_sizes",
    "routed_sizes",
    "splits",
    "table_rows",
]
