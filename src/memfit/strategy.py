"""How the work is spread over many GPUs: which technique over how many ranks, with which settings.
The flag `--use`, the key `use` of a job file and the argument derive from these fields; `uses.py`
reads and writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from memfit.job import option
from memfit.lazy_dataclass import dataclass

NAMES = {"": "", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # of number formats


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One technique over `size` ranks."""

    size: int = option(0, "ranks; 0 means all remaining ranks", low=0, high=2**24)
    alone: ClassVar[bool] = False  # it is something on one rank, too

    @property
    def sharded(self) -> bool:
        """Whether a rank lacks some weights or optimizer states."""
        return self.size > 1


@dataclass(frozen=True, kw_only=True)
class DDP(Layout):
    """Every rank holds the whole model; gradients are added up in buckets (torch's
    DistributedDataParallel)."""

    bucket_mb: int = option(
        0, "`bucket_cap_mb`; 0 means torch's default (1 MiB, then 25)", low=0, high=2**20
    )
    bucket_view: bool = option(
        False, "`gradient_as_bucket_view`: gradients are views of the buckets", tries=(False, True)
    )
    static_graph: bool = option(False, "`static_graph`")
    find_unused: str = option(
        "auto",
        "`find_unused_parameters`; auto means as the framework sets it",
        choices=("auto", "yes", "no"),
    )
    distributed: bool = option(
        False,
        (
            "Megatron's `--use-distributed-optimizer`: shard fp32 master weights and "
            "states over replicas"
        ),
        tries=(False, True),
    )

    @property
    def sharded(self) -> bool:
        return self.distributed and self.size > 1


@dataclass(frozen=True, kw_only=True)
class FSDP(Layout):
    """Weights, gradients and states are sharded, weights gathered layer by layer (torch's FSDP2, or
    FSDP1). With `ddp`, HSDP."""

    version: int = option(
        2,
        "FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`)",
        low=1,
        high=2,
        tries=(2, 1),
    )
    reshard: bool = option(
        True,
        (
            "`reshard_after_forward`; no keeps weights gathered until the backward "
            "(FSDP1: SHARD_GRAD_OP)"
        ),
        tries=(True, False),
    )
    reshard_to: int = option(
        0,
        ("integer `reshard_after_forward`: ranks to shard the weights over after the forward"),
        low=0,
        high=2**20,
    )
    param_dtype: str = option(
        "",
        ("compute dtype of the mixed precision policy; empty means autocast's, or as stored"),
        choices=("", "bf16", "fp16", "fp32"),
    )
    reduce_dtype: str = option(
        "",
        "dtype of gradient reduction; empty means the framework's default",
        choices=("", "bf16", "fp16", "fp32"),
    )
    wrap: str = option(
        "auto",
        (
            "wrapped units: layers, layers and ends (embedding, final norm and "
            "head), none; auto means the framework's default"
        ),
        choices=("auto", "layers", "ends", "none"),
    )
    prefetch: int = option(
        0,
        (
            "units to prefetch explicitly (`set_modules_to_forward_prefetch`); 0 "
            "means torch's default"
        ),
        low=0,
        high=64,
    )
    backward_prefetch: str = option(
        "auto",
        "FSDP1: backward prefetch; auto means the framework's default",
        choices=("auto", "pre", "post", "none"),
    )
    forward_prefetch: bool = option(False, "FSDP1's `forward_prefetch`")
    orig_params: bool = option(True, "FSDP1's `use_orig_params`")
    adapters: str = option(
        "auto",
        (
            "FSDP1: adapters as separate units (PEFT's `fsdp_auto_wrap_policy`), "
            "inside their layer, or ignored"
        ),
        choices=("auto", "units", "layer", "ignored"),
    )
    checkpoint_inside: bool = option(
        False,
        (
            "FSDP1: `checkpoint_wrapper` inside units "
            "(`fsdp_activation_checkpointing`); always on from transformers 4.52"
        ),
    )
    shard: bool = option(True, "FSDP1: no means NO_SHARD (unsharded weights on every rank)")
    packed: bool = option(
        True,
        ("shard 4-bit weights (float `bnb_4bit_quant_storage`); no replicates them"),
    )
    offload: bool = option(
        False,
        "`CPUOffloadPolicy`: keep weights, gradients and states in CPU memory",
        tries=(False, True),
    )
    sync: bool = option(
        True,
        (
            "reduce gradients after every micro-batch (no: "
            "`set_requires_gradient_sync(False)` until the last)"
        ),
    )

    @property
    def sharded(self) -> bool:
        return self.shard and self.size > 1


@dataclass(frozen=True, kw_only=True)
class ZeRO(Layout):
    """DeepSpeed's ZeRO; names and defaults are those of its `zero_optimization` section."""

    alone: ClassVar[bool] = True
    stage: int = option(
        2,
        "ZeRO stage: shard states (1), also gradients (2), also weights (3)",
        low=1,
        high=3,
        tries=(1, 2, 3),
    )
    reduce_bucket: int = option(500_000_000, "`reduce_bucket_size` in values", low=1, high=2**40)
    allgather_bucket: int = option(
        500_000_000, "`allgather_bucket_size` in values", low=1, high=2**40
    )
    overlap: bool = option(False, "`overlap_comm`")
    contiguous: bool = option(True, "`contiguous_gradients`")
    round_robin: bool = option(False, "`round_robin_gradients`")
    auto: bool = option(
        False,
        ("bucket sizes and threshold as transformers sets them for `auto`"),
        tries=(True,),
    )
    prefetch_bucket: int = option(
        50_000_000, "`stage3_prefetch_bucket_size` in values", low=0, high=2**40
    )
    max_live: int = option(
        1_000_000_000, "`stage3_max_live_parameters` in values", low=0, high=2**48
    )
    max_reuse: int = option(
        1_000_000_000, "`stage3_max_reuse_distance` in values", low=0, high=2**48
    )
    sub_group: int = option(
        1_000_000_000,
        "`sub_group_size` in values (stage 3)",
        low=1,
        high=2**48,
    )
    persistence: int = option(
        100_000, "`stage3_param_persistence_threshold` in values", low=0, high=2**40
    )
    hpz: int = option(1, "`zero_hpz_partition_size` of ZeRO++, in ranks", low=1, high=1024)
    qwz: bool = option(False, "`zero_quantized_weights` of ZeRO++")
    qgz: bool = option(False, "`zero_quantized_gradients` of ZeRO++")
    offload_optimizer: str = option(
        "none",
        "place of the optimizer states",
        choices=("none", "cpu", "nvme"),
        tries=("none", "cpu"),
    )
    offload_param: str = option(
        "none",
        "place of the weights (stage 3)",
        choices=("none", "cpu", "nvme"),
        tries=("none", "cpu"),
    )
    optimizer_buffers: int = option(
        4, "`offload_optimizer.buffer_count`: pinned buffers for NVMe", low=1, high=1024
    )
    param_buffers: int = option(5, "`offload_param.buffer_count`, for NVMe", low=1, high=1024)
    param_buffer: int = option(
        100_000_000, "`offload_param.buffer_size` in values", low=1, high=2**40
    )
    max_in_cpu: int = option(
        1_000_000_000,
        ("`offload_param.max_in_cpu`: values per rank kept in CPU memory instead of NVMe"),
        low=0,
        high=2**48,
    )


@dataclass(frozen=True, kw_only=True)
class Gemini(Layout):
    """ColossalAI 0.3's Gemini: 16-bit weights in chunks, which their gradients overwrite, and fp32
    copies and states in chunks like them, each sharded; the settings are `GeminiPlugin`'s. With
    `tp`, also ColossalAI's 1D tensor parallelism."""

    alone: ClassVar[bool] = True
    placement: str = option(
        "cuda",
        "`placement_policy` (the plugin's default is `cpu`)",
        choices=("cuda", "cpu", "auto", "const"),
    )
    search_range: int = option(
        32,
        "`search_range_mb`: range of the chunk size search, in Mi values",
        low=0,
        high=2**20,
    )
    interval: int = option(
        1024, "`hidden_dim`: step of the chunk size search, in values", low=1, high=2**30
    )
    min_chunk: int = option(
        32,
        "`min_chunk_size_mb`: minimum chunk size, in Mi values",
        low=1,
        high=2**20,
    )
    keep_single: bool = option(
        False,
        ("keep weights without replicas gathered (LLMem's patch); no copies them per use (0.3.0)"),
    )


@dataclass(frozen=True, kw_only=True)
class TP(Layout):
    """Tensor parallelism: matrices split over ranks."""

    style: str = option(
        "auto",
        "implementation; auto means the framework's own",
        choices=("auto", "dtensor", "megatron", "transformers", "colossalai"),
    )
    sequence: bool = option(
        False,
        "sequence parallelism: shard norms and residuals along the sequence",
        tries=(False, True),
    )
    vocabulary: bool = option(True, "shard the embedding and the head along the vocabulary")
    parallel_loss: bool = option(
        False, "loss on sharded logits (`loss_parallel`; always on in Megatron)"
    )


@dataclass(frozen=True, kw_only=True)
class CP(Layout):
    """Context parallelism: every rank holds a part of each sequence."""

    style: str = option(
        "ring",
        ("communication of keys and values (`ulysses`: Megatron's, or DeepSpeed's with `zero`)"),
        choices=("ring", "allgather", "ulysses"),
    )


# schedules whose backwards come in two parts, the gradients of weights later
DEFERRED = ("zero-bubble", "zbv")


@dataclass(frozen=True, kw_only=True)
class PP(Layout):
    """Pipeline parallelism: every rank holds some of the layers."""

    schedule: str = option(
        "1f1b",
        (
            "pipeline schedule (torch: `bfs` is LoopedBFS, `zero-bubble` "
            "InterleavedZeroBubble, `zbv` ZBVZeroBubble)"
        ),
        choices=("1f1b", "gpipe", "interleaved", "bfs", "zero-bubble", "zbv"),
        tries=("1f1b", "interleaved"),
    )
    micro_batches: int = option(
        0, "micro-batches per step; 0 means one per stage", low=0, high=2**20
    )
    virtual: int = option(
        1, "stages per rank, for schedules with several", low=1, high=1024, tries=(1, 2)
    )
    stages: str = option("", "layers per stage, like `9/10/10/3`; empty splits them evenly")


@dataclass(frozen=True, kw_only=True)
class EP(Layout):
    """Expert parallelism: every rank holds some of the experts. Its ranks are among those of the
    other layouts within a stage (transformers: of `fsdp`). One rank (`ep=1`) leaves the settings to
    say how Megatron sends tokens to their experts."""

    capacity: float = option(0.0, "capacity factor; 0 never drops tokens", low=0.0, high=1000.0)
    padded: bool = option(
        False,
        "pad every expert to its capacity (`--moe-pad-expert-input-to-capacity`)",
    )
    imbalance: float = option(
        1.0, "tokens of the busiest rank over the average", low=1.0, high=1024.0
    )
    tensor: int = option(
        0,
        ("tensor parallel size of the experts (`--expert-tensor-parallel-size`); 0 means `tp`"),
        low=0,
        high=1024,
    )
    dispatcher: str = option(
        "alltoall",
        ("token dispatcher (`--moe-token-dispatcher-type`; Megatron's default is `allgather`)"),
        choices=("alltoall", "allgather", "flex"),
    )
    fused: bool = option(False, "fused permutation (`--moe-permute-fusion`)")
    aux_loss: bool = option(True, "load balancing loss of the router")
    router_dtype: str = option(
        "",
        ("dtype of the router (`--moe-router-dtype`); empty means that of the activations"),
        choices=("", "fp32"),
    )


@dataclass(frozen=True, kw_only=True)
class Split(Layout):
    """One process splits the layers over its GPUs, which work one after the other
    (`device_map="auto"` of transformers and accelerate). On one GPU, what does not fit stays in CPU
    memory or on disk."""

    alone: ClassVar[bool] = True
    layers: str = option("", "layers per GPU, like `20/20`; empty splits them as accelerate does")
    gpu: str = option(
        "",
        (
            "on one GPU: most bytes of weights there, like `20GiB` (`max_memory`); empty means "
            "90 % of what is free"
        ),
    )
    cpu: str = option(
        "",
        (
            "on one GPU: most bytes of weights in CPU memory, like `64GiB`, the rest stays on "
            "disk; empty means no limit"
        ),
    )

    @property
    def offloads(self) -> bool:
        """Whether weights may lie outside of GPUs."""
        return self.size == 1


def even_split(layers: int, gpus: int) -> Split:
    """A split that says how many of the `layers` each GPU has, as evenly as they go."""
    each, more = divmod(layers, gpus)
    counts = (each + (number < more) for number in range(gpus))
    return Split(size=gpus, layers="/".join(map(str, counts)))


ORDER = (
    "tp",
    "cp",
    "fsdp",
    "zero",
    "gemini",
    "ddp",
    "pp",
)  # innermost first, as torchtitan lays ranks out (distributed/parallel_dims.py)
LAYOUTS: dict[str, type[Layout]] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "zero": ZeRO,
    "gemini": Gemini,
    "tp": TP,
    "cp": CP,
    "pp": PP,
    "ep": EP,
    "split": Split,
}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a job uses several GPUs: its layouts, whose sizes multiply to the number of ranks (`ep`
    is part of the data-parallel ones)."""

    ddp: DDP | None = None
    fsdp: FSDP | None = None
    zero: ZeRO | None = None
    gemini: Gemini | None = None
    tp: TP | None = None
    cp: CP | None = None
    pp: PP | None = None
    ep: EP | None = None
    split: Split | None = None
    rank: int = 0  # whose memory is meant

    def __bool__(self) -> bool:
        return any(True for _ in self.uses())

    def uses(self) -> Iterator[tuple[str, Layout]]:
        for name in LAYOUTS:
            layout = getattr(self, name)
            if layout is not None:
                yield name, layout

    def size(self, name: str) -> int:
        layout = getattr(self, name)
        return 1 if layout is None else int(layout.size)

    def engages(self, name: str) -> bool:
        """Does this layout change anything? On one rank most do nothing; DeepSpeed's engine and
        ColossalAI's keep their own copies there, too."""
        layout = getattr(self, name)
        size = self.shards if name == "fsdp" else 0 if layout is None else layout.size
        return layout is not None and (size > 1 or layout.alone)

    @property
    def ranks(self) -> int:
        product = 1
        for name, layout in self.uses():
            product *= layout.size if name != "ep" else 1
        return product

    @property
    def groups(self) -> tuple[tuple[str, int, int], ...]:
        """(name, ranks, distance of neighbours) of the groups that a rank belongs to.
        Tensor-parallel ranks are neighbours, then come context-parallel ones, then shards, replicas
        and stages, as torchtitan's and Megatron's meshes have it."""
        found, stride = [], 1
        for name in ORDER:
            size = self.size(name)
            if name == "zero" and self.partitions > 1:
                found.append((name, self.partitions, stride // (self.partitions // size)))
            elif size > 1:
                found.append((name, size, stride))
            if name == "zero" and self.zero is not None and size > self.zero.hpz > 1:
                found.append(("hpz", self.zero.hpz, stride))
            if name == "ddp" and self.size("ep") > 1:
                found.append(("ep", self.size("ep"), self.expert_tensor))
            if (
                name == "ddp"
                and self.size("ep") > 1
                and self.fsdp is not None
                and self.expert_data > size
            ):  # shards of the same experts
                found.append(
                    ("efsdp", self.expert_data // size, self.size("ep") * self.expert_tensor)
                )
            stride *= size
        if (
            self.gemini is not None and self.ranks > 1
        ):  # barriers before the search of chunk sizes, and what no tensor parallelism cuts
            found += [("world", self.ranks, 1)] * (
                2 if self.size("tp") > 1 and self.gemini.size > 1 else 1
            )
        return tuple(found)

    def distinct(self) -> tuple[tuple[int, int], ...]:
        """(rank, how many are like it) of the ranks whose memory differs: the stages of a pipeline.
        Ranks of one stage are alike; of a ring, the last is meant, which has results of the most
        queries. Beside FSDP the others are told too: they alone have a mask (lower/masks.py
        `unseen`)."""
        if self.split is not None:
            return tuple((gpu, 1) for gpu in range(self.ranks))
        stages = self.size("pp")
        if self.cp is not None and self.cp.size > 1 and self.fsdp is not None:
            last = self.ranks // self.cp.size
            return (0, self.ranks - last), (self.size("tp") * (self.cp.size - 1), last)
        place = (
            self.size("tp") * (self.cp.size - 1)
            if self.cp is not None and self.cp.style == "ring"
            else 0
        )
        return tuple(
            (stage * (self.ranks // stages) + place, self.ranks // stages)
            for stage in range(stages)
        )

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards over: context parallelism's are among them (torchtitan, accelerate
        `dp_shard_cp`)."""
        return self.size("fsdp") * self.size("cp")

    @property
    def partitions(self) -> int:
        """Ranks that ZeRO partitions over: those of a sequence are among them (deepspeed 0.19.8
        utils/groups.py _get_sequence_data_parallel_group)."""
        return self.size("zero") * (1 if self.zero is None else self.size("cp"))

    @property
    def shard(self) -> int:
        """The index of this rank among the shards: tensor parallelism is innermost, replicas are
        outermost."""
        return self.rank // self.size("tp") % self.shards

    @property
    def data(self) -> int:
        """Ranks that see different sequences."""
        return self.size("ddp") * self.size("fsdp") * self.size("zero") * self.size("gemini")

    @property
    def offloads(self) -> bool:
        """Whether something that a step needs lives on the host."""
        zero = self.zero
        away = zero is not None and {zero.offload_optimizer, zero.offload_param} != {"none"}
        return (
            away
            or (self.fsdp is not None and self.fsdp.offload)
            or (self.gemini is not None and self.gemini.placement != "cuda")
        )

    @property
    def replica(self) -> int:
        """Which of the replicas and the ranks of context parallelism this rank is, as Megatron
        counts them together."""
        return self.rank // self.size("tp") % (self.size("cp") * self.data)

    @property
    def within(self) -> int:
        """Ranks of a stage: those that experts are spread over."""
        return self.data * self.size("cp") * self.size("tp")

    @property
    def expert_tensor(self) -> int:
        """Ranks that share the matrices of one expert: neighbours (megatron-core 0.16.1
        parallel_state.py)."""
        return self.size("tp") if self.ep is None or not self.ep.tensor else self.ep.tensor

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.within // (self.expert_tensor * self.size("ep"))

    @property
    def expert_replica(self) -> int:
        """Which of those this rank is."""
        return self.rank % self.within // (self.expert_tensor * self.size("ep"))


def from_data(data: Mapping[str, Any]) -> Strategy:
    """The inverse of `dataclasses.asdict`."""
    layouts: dict[str, Any] = {
        name: LAYOUTS[name](**value) if isinstance(value, Mapping) else value
        for name, value in data.items()
    }
    return Strategy(**layouts)


ONE = Strategy()  # all on one GPU
