"""What FSDP1's units are made of: flat parameters, and storages that other streams use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from memfit.formats import UINT8, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.tensors import Elastic, Storage, Tensor
from memfit.tape import Event, Free

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = "idle", "forward", "pre-backward", "post-backward"


class Lent(Elastic):
    """A storage that other streams use: given back, it is kept for them."""

    __slots__ = ("users",)

    def __init__(
        self,
        size: int,
        take_block: Callable[[], int],
        write: Callable[[Event], None],
        users: tuple[int, ...],
    ) -> None:
        super().__init__(size, take_block, write)
        self.users = users

    def drop(self) -> None:
        if self.id >= 0:
            self.write(Free(self.id, self.users))
            self.id = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Flat:
    """A unit: `leaves` are views of its flat parameter, whose place in the graph is `whole`;
    `pieces` are what of them lies in this rank's shard."""

    name: str
    span: str
    stored: Format
    computed: Format
    reduced: Format
    count: int  # values, with what fills up
    shard: int  # of a rank
    leaves: tuple[Tensor, ...]
    pieces: tuple[Tensor, ...]
    whole: Tensor
    storage: Lent | None
    state: str = IDLE
    ahead: bool = False  # gathered before it was needed
    due: bool = False  # its forward is to come
    wanted: bool = False  # its backward is to come
    watched: Tensor | None = (
        None  # its input, whose gradient is waited for, as it has none of its own
    )
    ran: bool = False  # its pre-backward
    place: int | None = None  # in the order of the forward
    saved: Storage | None = None  # the reduced gradient, until the backward is over
    brought: Lent | None = (
        # the shard from the host, which its parameters' own views hold until they see it no more
        None
    )
    held: list[Storage | None] = field(
        default_factory=list
    )  # the gradient, which the flat parameter holds beside its views


def adapter(leaf: Tensor) -> bool:
    """Is it one of a LoRA adapter's two matrices?"""
    return leaf.name.endswith((".lora_A", ".lora_B"))


def ordered(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Adapters behind the weight that they belong to, as in the model."""
    behind: dict[str, list[Tensor]] = {}
    for leaf in leaves:
        if adapter(leaf):
            behind.setdefault(leaf.name.rpartition(".")[0], []).append(leaf)
    own = [leaf for leaf in leaves if not adapter(leaf)]
    out: list[Tensor] = []
    for place, leaf in enumerate(own):
        out.append(leaf)
        path = leaf.name.rpartition(".")[0]
        if place + 1 == len(own) or own[place + 1].name.rpartition(".")[0] != path:
            out += behind.pop(path, [])
    return out + [leaf for some in behind.values() for leaf in some]


def opaque(format: Format) -> bool:
    """Bytes that something is packed in."""
    return format is UINT8 or format.block > 1


def scales(format: Format) -> int:
    """Bytes of a packed block that are scales (AutoGPTQ 0.7 qlinear_tritonv2.py: 16 bits for a
    group)."""
    return {"gptq-4bit": 4, "gptq-8bit": 2}.get(format.name.rpartition("-")[0], 0)


def values(leaf: Tensor, stored: Format) -> int:
    """How many values of the flat parameter it is; what is packed is seen as such."""
    format = leaf.format
    if not opaque(format):
        return leaf.count
    return (
        -(-leaf.count // format.block) * (format.block_bytes - scales(format)) // stored.block_bytes
    )
