"""How units come to the GPU when FSDP1 wraps a model that lies on the host (torch 2.13
torch/distributed/fsdp/_init_utils.py _init_param_handle_from_module, 2.2 alike)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from memfit.formats import Format
from memfit.lower.engine import ROOT
from memfit.lower.recorder import Recorder
from memfit.lower.shards import COMPUTE, REDUCE
from memfit.lower.tensors import Tensor
from memfit.parallel.coalesced import COALESCED, IN_FLIGHT, Item, buckets
from memfit.parallel.flat_parameters import Lent, values
from memfit.tape import Sync


def arrive(
    r: Recorder, leaves: Sequence[Tensor], format: Format, flat: int, ranks: int
) -> list[object]:
    """What is on the GPU until a unit's shard is cut: its parameters, which come one by one
    (`device_id`), and the flat one of `flat` values. What the first rank sends
    (`sync_module_states`) is copied together first, in blocks that NCCL's stream uses; a lone
    tensor is sent as it is. The allocator keeps all of it for the steps."""
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
    for one in flying:
        one.drop()
    arrived.append(r.scratch(format.bytes(flat), "cat", "weights"))
    r.write(Sync(COMPUTE, REDUCE, 0))
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


__all__ = ["arrive", "inner_first"]
