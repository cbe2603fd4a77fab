"""ggml's tensors and operations as shapes: what each operation allocates, and in which order a
graph runs them.

Nothing is computed. Shapes and strides follow ggml/src/ggml.c; which results may take the memory of
an operand follows `ggml_op_can_inplace` of ggml/src/ggml-alloc.c (both llama.cpp b11549).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple


class Kind(NamedTuple):
    """A number type: how many values make a block, and how many bytes a block takes."""

    block: int
    bytes: int


F32, F16, I32, I64 = Kind(1, 4), Kind(1, 2), Kind(1, 4), Kind(1, 8)
Shape = tuple[int, int, int, int]

_INPLACE = "fill scale add add_id sub mul div sqr sqrt unary rope rms_norm soft_max diag_mask"
INPLACE = frozenset(_INPLACE.split())
VIEWS = frozenset(("reshape", "view", "permute", "transpose"))


def _shape(sizes: Iterable[int]) -> Shape:
    a, b, c, d = (*sizes, 1, 1, 1)[:4]
    return a, b, c, d


def _strides(ne: Shape, kind: Kind) -> Shape:
    row = ne[0] // kind.block * kind.bytes
    return kind.bytes, row, row * ne[1], row * ne[1] * ne[2]


class Tensor:
    """A node of a graph. `home`: where its bytes lie, if outside the graph (weights, caches)."""

    __slots__ = (
        "home",
        "is_input",
        "kind",
        "name",
        "nb",
        "ne",
        "offset",
        "op",
        "src",
        "view",
        "weight",
    )

    def __init__(
        self,
        op: str,
        ne: Shape,
        kind: Kind = F32,
        src: tuple[Tensor, ...] = (),
        *,
        nb: Shape | None = None,
        view: Tensor | None = None,
        offset: int = 0,
    ) -> None:
        self.op, self.ne, self.kind, self.src = op, ne, kind, src
        self.nb = nb or _strides(ne, kind)
        self.view, self.offset = view, offset
        self.is_input = self.weight = False
        self.home: str | None = None
        self.name = ""

    @property
    def bytes(self) -> int:
        """`ggml_nbytes`: from the first byte to the last, strides included."""
        if not all(self.ne):
            return 0
        row = (
            self.ne[0] // self.kind.block * self.nb[0]
            if self.kind.block > 1
            else self.kind.bytes + (self.ne[0] - 1) * self.nb[0]
        )
        return row + sum((self.ne[axis] - 1) * self.nb[axis] for axis in (1, 2, 3))

    @property
    def count(self) -> int:
        return prod(self.ne)


def outside(ne: Iterable[int], kind: Kind, home: str, *, weight: bool) -> Tensor:
    """A weight or a cache: its bytes are no business of the graph."""
    tensor = Tensor("none", _shape(ne), kind)
    tensor.home, tensor.weight = home, weight
    return tensor


def given(ne: Iterable[int], kind: Kind = F32) -> Tensor:
    """An input that the program fills before each run."""
    tensor = Tensor("none", _shape(ne), kind)
    tensor.is_input = True
    return tensor


def same(op: str, first: Tensor, *more: Tensor) -> Tensor:
    """A result of the first operand's shape."""
    return Tensor(op, first.ne, first.kind, (first, *more))


def as_float(op: str, ne: Iterable[int], *src: Tensor) -> Tensor:
    return Tensor(op, _shape(ne), F32, src)


def matmul(weight: Tensor, x: Tensor) -> Tensor:
    return Tensor("mul_mat", (weight.ne[1], x.ne[1], x.ne[2], x.ne[3]), F32, (weight, x))


def matmul_id(weight: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """The product with the experts that each token chose."""
    return Tensor("mul_mat_id", (weight.ne[1], ids.ne[0], x.ne[2], 1), F32, (weight, x, ids))


def rows(table: Tensor, ids: Tensor) -> Tensor:
    kind = I32 if table.kind is I32 else F32
    return Tensor("get_rows", (table.ne[0], *ids.ne[:3]), kind, (table, ids))


def _viewed(op: str, base: Tensor, ne: Shape, nb: Shape, offset: int = 0) -> Tensor:
    source = base.view or base
    start = (base.offset if base.view else 0) + offset
    return Tensor(op, ne, base.kind, (base,), nb=nb, view=source, offset=start)


def reshape(base: Tensor, *sizes: int) -> Tensor:
    ne = _shape(sizes)
    return _viewed("reshape", base, ne, _strides(ne, base.kind))


def view(base: Tensor, sizes: Iterable[int], strides: Iterable[int] = (), start: int = 0) -> Tensor:
    """A window on a tensor; `strides` in bytes from the second axis on."""
    ne = _shape(sizes)
    nb = [base.kind.bytes, *strides]
    first = ne[0] // base.kind.block * base.kind.bytes
    while len(nb) < 4:
        nb.append(nb[-1] * ne[len(nb) - 1] if len(nb) > 1 else first)
    return _viewed("view", base, ne, (nb[0], nb[1], nb[2], nb[3]), start)


def permute(base: Tensor, *axes: int) -> Tensor:
    """Axis i of the operand becomes axis `axes[i]` of the result."""
    ne, nb = [0] * 4, [0] * 4
    for old, new in enumerate(axes):
        ne[new], nb[new] = base.ne[old], base.nb[old]
    return _viewed("permute", base, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]))


def transpose(base: Tensor) -> Tensor:
    turned = permute(base, 1, 0, 2, 3)
    turned.op = "transpose"
    return turned


def contiguous(base: Tensor, *sizes: int) -> Tensor:
    return Tensor("cont", _shape(sizes) if sizes else base.ne, base.kind, (base,))


def cast(base: Tensor, kind: Kind) -> Tensor:
    """The same values as another type."""
    return Tensor("cpy", base.ne, kind, (base,))


def into(values: Tensor, ids: Tensor, target: Tensor) -> Tensor:
    """`ggml_set_rows`: writes into a tensor that lies elsewhere, so the result is a view of it."""
    made = _viewed("set_rows", target, target.ne, target.nb)
    made.src = (values, ids, target)
    return made


def copied(values: Tensor, target: Tensor) -> Tensor:
    """`ggml_cpy`: the result is a view of the target."""
    made = _viewed("cpy", target, target.ne, target.nb)
    made.src = (values, target)
    return made


def in_place(op: str, target: Tensor) -> Tensor:
    """An operation that writes over its operand."""
    return _viewed(op, target, target.ne, target.nb)


class Graph:
    """Nodes in the order in which they run: each result after its operands, as
    `ggml_build_forward_expand` visits them."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self._seen: set[int] = set()

    def expand(self, result: Tensor) -> Tensor:
        stack: list[tuple[Tensor, int]] = [(result, 0)]
        while stack:
            tensor, place = stack.pop()
            if place == 0:
                if id(tensor) in self._seen:
                    continue
                self._seen.add(id(tensor))
            while place < len(tensor.src) and id(tensor.src[place]) in self._seen:
                place += 1
            if place < len(tensor.src):
                stack.append((tensor, place + 1))
                stack.append((tensor.src[place], 0))
                continue
            (self.leafs if tensor.op == "none" else self.nodes).append(tensor)
        return result
