"""ggml's graph allocator: where each result of a graph lies, and so how large the compute buffer of
each device becomes.

Rules: ggml/src/ggml-alloc.c of llama.cpp (b11549; the same since b6800, where blocks of a limited
size came in). The free block that fits best is taken, the open end only where none fits; a result
takes the place of an operand that nothing else reads, if their layouts are equal; inputs are
placed first and freed after their last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp.ggml import INPLACE, Tensor

OPEN = 2**62


@dataclass(frozen=True, kw_only=True)
class Pool:
    """How a backend places tensors: its alignment, and rows of quantized matrices padded to
    `row_padding` values (ggml-cuda.cu MATRIX_ROW_PADDING)."""

    alignment: int = 32
    row_padding: int = 0

    def size(self, tensor: Tensor) -> int:
        size = tensor.bytes
        kind = tensor.kind
        if self.row_padding and kind.block > 1 and tensor.ne[0] % self.row_padding:
            extra = self.row_padding - tensor.ne[0] % self.row_padding
            size += extra // kind.block * kind.bytes
        return self.aligned(size)

    def aligned(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment


CPU = Pool(alignment=64)
CUDA = Pool(alignment=128, row_padding=512)
METAL = Pool(alignment=32)
VULKAN = Pool(alignment=16)


class _Blocks:
    """Free blocks in order of address; the last one is open-ended."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.free: list[list[int]] = [[0, OPEN]]
        self.peak = 0

    def take(self, size: int) -> int:
        best, found = -1, OPEN
        for index in range(len(self.free) - 1):
            length = self.free[index][1]
            if size <= length <= found:
                best, found = index, length
        block = self.free[best]
        start = block[0]
        block[0] += size
        block[1] -= size
        if not block[1]:
            del self.free[best]
        self.peak = max(self.peak, start + size)
        return start

    def give(self, start: int, size: int) -> None:
        blocks = self.free
        for index, block in enumerate(blocks):
            if block[0] + block[1] == start:
                block[1] += size
                if index + 1 < len(blocks) and block[0] + block[1] == blocks[index + 1][0]:
                    block[1] += blocks[index + 1][1]
                    del blocks[index + 1]
                return
            if start + size == block[0]:
                block[0], block[1] = start, block[1] + size
                if index and blocks[index - 1][0] + blocks[index - 1][1] == start:
                    blocks[index - 1][1] += block[1]
                    del blocks[index]
                return
        place = sum(block[0] < start for block in blocks)
        blocks.insert(place, [start, size])


class _Use:
    """Who still reads a tensor, and where it lies."""

    __slots__ = ("device", "owned", "readers", "start", "views")

    def __init__(self) -> None:
        self.readers = self.views = self.start = 0
        self.owned, self.device = False, ""


class GraphAllocator:
    """Places the tensors of one graph."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.blocks = {name: _Blocks(pool) for name, pool in pools.items()}
        self.uses: dict[int, _Use] = {}
        self.kept: set[int] = set()

    def use(self, tensor: Tensor) -> _Use:
        found = self.uses.get(id(tensor))
        if found is None:
            found = self.uses[id(tensor)] = _Use()
        return found

    def place(self, tensor: Tensor, device: str) -> None:
        use = self.use(tensor)
        if tensor.home is not None or use.owned or tensor.view is not None:
            return
        use.owned = True
        if tensor.op in INPLACE:
            for parent in tensor.src:
                if self._reuse(tensor, use, parent):
                    return
        blocks = self.blocks[device]
        use.device = device
        use.start = blocks.take(blocks.pool.size(tensor))

    def _reuse(self, tensor: Tensor, use: _Use, parent: Tensor) -> bool:
        other = self.use(parent)
        if parent.view is not None or parent.home is not None or not other.owned:
            return False  # a view owns nothing, and so is never taken over
        if id(parent) in self.kept or other.readers != 1 or other.views:
            return False
        if tensor.kind != parent.kind or tensor.ne != parent.ne or tensor.nb != parent.nb:
            return False
        use.device, use.start = other.device, other.start
        other.owned = False
        blocks = self.blocks[other.device]
        before, after = blocks.pool.size(parent), blocks.pool.size(tensor)
        if before > after:
            blocks.give(use.start + after, before - after)
        return True

    def release(self, tensor: Tensor) -> None:
        if id(tensor) in self.kept:
            return
        use = self.use(tensor)
        blocks = self.blocks[use.device]
        blocks.give(use.start, blocks.pool.size(tensor))
        use.owned = False

    def run(self, nodes: Sequence[tuple[Tensor, str]], first: Sequence[tuple[Tensor, str]]) -> None:
        """Place a whole graph; `first` are tensors that lie there from the start."""
        for tensor, device in first:
            self.place(tensor, device)
        for node, device in nodes:
            if node.view is not None and node.op != "none":
                self.use(node.view).views += 1
            for parent in (node, *node.src):
                if parent is not node:
                    self.use(parent).readers += 1
                if parent.is_input:
                    self.place(parent, device)
        for node, device in nodes:
            for parent in node.src:
                self.place(parent, device)
            self.place(node, device)
            for parent in node.src:
                self._read(parent)

    def _read(self, parent: Tensor) -> None:
        use = self.use(parent)
        use.readers -= 1
        if use.readers or use.views:
            return
        if parent.view is None:
            if use.owned:
                self.release(parent)
            return
        base = self.use(parent.view)
        base.views -= 1
        if not base.views and not base.readers and base.owned:
            self.release(parent.view)

    def peaks(self) -> dict[str, int]:
        return {name: blocks.peak for name, blocks in self.blocks.items()}
