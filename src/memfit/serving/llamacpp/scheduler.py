"""Which device runs each operation of a graph, and what is copied between devices.

Rules: `ggml_backend_sched_split_graph` of ggml/src/ggml-backend.cpp (llama.cpp b11549). Operations
run where their weights lie; the rest follow their neighbours, GPUs first; the CPU comes last. A
device that reads a tensor of another one has a copy of it for the length of a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.serving.llamacpp.allocator import GraphAllocator, Pool
from memfit.serving.llamacpp.ggml import VIEWS, Graph, Tensor

COPIES = 4  # GGML_SCHED_MAX_COPIES
OFFLOADED_FROM = 32  # tokens; ggml-cuda.cu `min_batch_size`
MOST_INPUTS = 30  # GGML_SCHED_MAX_SPLIT_INPUTS


def _tokens(node: Tensor) -> int:
    """`get_op_batch_size` of ggml-cuda.cu."""
    if node.op == "get_rows":
        return 0
    if node.op == "mul_mat":
        return node.ne[1]
    if node.op in ("mul_mat_id", "rope"):
        return node.ne[2]
    return node.ne[1] * node.ne[2] * node.ne[3]


class Scheduler:
    """`devices` in order of priority, the CPU last; `fixed` are nodes that the program itself put
    on a device."""

    def __init__(
        self,
        devices: Sequence[str],
        pools: Mapping[str, Pool],
        *,
        op_offload: bool = True,
        copies: int = 1,
        kept: Sequence[Tensor] = (),
        fixed: Mapping[int, str] | None = None,
    ) -> None:
        self.devices, self.pools, self.copies = list(devices), pools, copies
        self.cpu = self.devices[-1]
        self.offload = op_offload and len(self.devices) > 1
        self.where: dict[int, str] = dict(fixed or {})
        self.kept = kept
        self.splits = 0
        self.made: dict[tuple[int, str], list[Tensor]] = {}
        self.placed_first: list[tuple[Tensor, str]] = []

    def _own(self, tensor: Tensor) -> str | None:
        """The device that a tensor's own place or its weights demand."""
        home = tensor.home or (tensor.view.home if tensor.view is not None else None)
        if home is not None:
            return home
        if tensor.is_input:
            return self.cpu
        if tensor.op == "rope":
            return None
        for source in tensor.src:
            if source.weight and source.home is not None:
                if self.offload and source.home == self.cpu and _tokens(tensor) >= OFFLOADED_FROM:
                    return self.devices[0]
                return source.home
        return None

    def assign(self, graph: Graph) -> None:
        where = self.where
        for tensor in (*graph.leafs, *graph.nodes):
            if id(tensor) not in where:
                own = self._own(tensor)
                if own is not None:
                    where[id(tensor)] = own
        real = [node for node in graph.nodes if node.op not in VIEWS]
        for gpus_only, order in (
            (True, real),
            (True, real[::-1]),
            (False, real),
            (False, real[::-1]),
        ):
            current: str | None = None
            for node in order:
                device = where.get(id(node))
                if device is not None:
                    current = None if gpus_only and device == self.cpu else device
                elif current is not None:
                    where[id(node)] = current
        for node in graph.nodes:
            if node.view is not None and id(node) not in where:
                where[id(node)] = self._device(node.view)
            for source in node.src:
                if id(source) not in where:
                    source_view = source.view
                    where[id(source)] = (
                        where.get(id(source_view), self._device(node))
                        if source_view is not None
                        else self._device(node)
                    )

    def _device(self, tensor: Tensor) -> str:
        return self.where.get(id(tensor), self.cpu)

    def _readable(self, tensor: Tensor, device: str) -> bool:
        source = tensor.view or tensor
        home = source.home or self._device(source)
        return home == device

    def _copy(self, source: Tensor, device: str) -> Tensor:
        """What stands for `source` on a device that cannot read it."""
        made = [Tensor("none", source.ne, source.kind, nb=source.nb) for _ in range(self.copies)]
        self.made[id(source), device] = made
        if self.copies > 1:
            self.placed_first.extend((one, device) for one in made)
        return made[0]

    def schedule(self, graph: Graph) -> dict[str, int]:
        """Bytes of compute buffer on each device."""
        self.assign(graph)
        allocator = GraphAllocator(self.pools)
        allocator.kept = {id(tensor) for tensor in self.kept}
        nodes = self._split(graph)
        if self.copies > 1:
            allocator.kept |= {id(tensor) for tensor, _ in self.placed_first}
        first = self.placed_first + [(leaf, self._device(leaf)) for leaf in graph.leafs]
        allocator.run(nodes, first)
        return allocator.peaks()

    def _split(self, graph: Graph) -> list[tuple[Tensor, str]]:
        """The nodes with the copies that each split begins with."""
        splits: list[tuple[list[Tensor], list[tuple[Tensor, str]]]] = []
        current, inputs = "", 0
        pending: list[tuple[Tensor, str]] = []
        for node in graph.nodes:
            device = self._device(node)
            if node.op in VIEWS:
                (splits[-1][1] if splits else pending).append((node, device))
                continue
            if device != current or (inputs and self._starts_anew(node, current, inputs)):
                splits.append(([], pending))
                pending, current, inputs = [], device, 0
            for place, source in enumerate(node.src):
                if source.is_input and self.copies > 1:
                    self._multiply(source)
                if self._device(source) == current or self._readable(source, current):
                    continue
                copies = self.made.get((id(source), current))
                if copies is None:
                    splits[-1][0].append(source)
                    inputs += 1
                    stand_in = self._copy(source, current)
                else:
                    stand_in = copies[0]
                node.src = (*node.src[:place], stand_in, *node.src[place + 1 :])
            splits[-1][1].append((node, device))
        self.splits = len(splits)
        return self._listed(splits)

    def _listed(
        self, splits: list[tuple[list[Tensor], list[tuple[Tensor, str]]]]
    ) -> list[tuple[Tensor, str]]:
        nodes: list[tuple[Tensor, str]] = []
        for sources, inside in splits:
            real = next((device for node, device in inside if node.op not in VIEWS), self.cpu)
            for source in sources:
                waits = Tensor(
                    "none", source.ne, source.kind, (source,), view=source.view or source
                )
                nodes.append((waits, self._device(source)))
                nodes.append((self.made[id(source), real][0], real))
            nodes.extend(inside)
        return nodes

    def _multiply(self, source: Tensor) -> None:
        """An input of a pipeline has as many copies as batches can be under way."""
        device = self._device(source)
        if (id(source), device) in self.made:
            return
        more = [Tensor("none", source.ne, source.kind) for _ in range(self.copies - 1)]
        self.made[id(source), device] = [source, *more]
        self.placed_first.extend((one, device) for one in (source, *more))

    def _starts_anew(self, node: Tensor, current: str, inputs: int) -> bool:
        """A weight from elsewhere opens a new split: the place of the last one is reused."""
        for source in node.src:
            if source.weight and source.home not in (None, current):
                return True
            full = inputs >= MOST_INPUTS and (id(source), current) not in self.made
            if full and self._device(source) != current and not self._readable(source, current):
                return True
        return False
