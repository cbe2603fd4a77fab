"""How units come to the GPU when FSDP1 wraps a model that lies on the host (torch 2.13
torch/distributed/fsdp/_init_utils.py _init_param_handle_from_module, 2.2 alike)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from memfit.constants import measured
from memfit.formats import Format
from memfit.lower.engine import ROOT
from memfit.lower.recorder import Recorder
from memfit.lower.shards import COMPUTE, REDUCE
from memfit.lower.tensors import Tensor
from memfit.model.quantized import method
from memfit.parallel.coalesced import COALESCED, IN_FLIGHT, Item, buckets
from memfit.parallel.flat_parameters import Lent, values
from memfit.program import Program
from memfit.tape import Sync

LAUNCHES: Annotated[
    int,
    measured("kernels that a stream takes before the host waits", "stackoverflow.com/q/53970187"),
] = 1024
FLATTENED = 2  # kernels that make the flat parameter and cut the shard
# Versions of transformers in which ranks but the first leave packed weights on `meta`
# (modeling_utils.py _load_state_dict_into_meta_model of 4.45.2 and 4.57.3; not in 4.44.2 and 5.23).
EMPTY = ((4, 45), (5, 0))


def runs_ahead(program: Program) -> bool:
    """Whether ranks but the first wrap empty weights, so that nothing makes their host wait: of
    packed weights with `cpu_ram_efficient_loading`, which accelerate materializes by `to_empty`."""
    job, layout = program.job, program.strategy.fsdp
    return (
        layout is not None
        and layout.packed
        and not layout.offload
        and job.hugging
        and EMPTY[0] <= job.version("transformers") < EMPTY[1]
        and (program.quant is not None or bool(method(program.model.config)))
    )


class Host:
    """What the host launched while units are wrapped and did not wait for. Rank 0 copies weights
    from pageable memory, which waits for the GPU. A rank that runs `ahead` is held up by the queue
    of its stream alone, and blocks that NCCL's stream used are not free until it gets there."""

    def __init__(self, r: Recorder, ahead: bool) -> None:
        self.r, self.launched = r, 0
        self.queue = LAUNCHES if ahead else 0
        # of each unit: launches once it is wrapped, and blocks of its broadcasts
        self.waiting: deque[tuple[int, int]] = deque()

    def wrapped(self, launches: int, broadcasts: int) -> None:
        self.launched += launches
        self.waiting.append((self.launched, broadcasts))
        if self.launched - self.waiting[0][0] >= self.queue:
            while self.waiting and self.launched - self.waiting[0][0] >= self.queue:
                self.waiting.popleft()
            self.sync()

    def wait(self) -> None:
        """The first batch comes from the host."""
        if self.waiting:
            self.waiting.clear()
            self.sync()

    def sync(self) -> None:
        self.r.write(Sync(COMPUTE, REDUCE, sum(blocks for _, blocks in self.waiting)))


def arrive(
    host: Host, leaves: Sequence[Tensor], format: Format, flat: int, ranks: int
) -> list[object]:
    """What is on the GPU until a unit's shard is cut: its parameters, which come one by one
    (`device_id`), and the flat one of `flat` values. What the first rank sends
    (`sync_module_states`) is copied together first, in blocks that NCCL's stream uses; a lone
    tensor is sent as it is. The allocator keeps all of it for the steps."""
    r, launches, broadcasts = host.r, FLATTENED, 0
    sizes = [format.bytes(values(leaf, format)) for leaf in leaves]
    arrived: list[object] = [r.scratch(size, "to", "weights") for size in sizes]
    flying: deque[Lent] = deque()
    for bucket in buckets([Item(size, format) for size in sizes], (COALESCED,)):
        if len(bucket) == 1:
            continue
        if len(flying) == IN_FLIGHT:
            flying.popleft().drop()
        flying.append(copied(r, sum(bucket)))
        r.comm("broadcast", sum(bucket), ranks, "fsdp", REDUCE)
        launches, broadcasts = launches + len(bucket) + 1, broadcasts + 1  # copies back, and `cat`
    for one in flying:
        one.drop()
    arrived.append(r.scratch(format.bytes(flat), "cat", "weights"))
    host.wrapped(launches, broadcasts)
    return arrived


def copied(r: Recorder, size: int) -> Lent:
    made = Lent(size, lambda: r.block(size, "broadcast", "communication"), r.write, (REDUCE,))
    made.take()
    return made


def inner_first(names: Iterable[str], spans: Mapping[str, str]) -> Iterator[str]:
    """Units in the order in which they are wrapped: those of adapters before the layer that they
    are in, the root last."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(spans[name] if name != ROOT else "", []).append(name)
    for span in sorted(layers, key=lambda span: span == ""):
        yield from sorted(layers[span], key=lambda name: name in (span, ROOT))


__all__ = ["Host", "arrive", "inner_first", "runs_ahead"]
