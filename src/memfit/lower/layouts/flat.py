"""What FSDP1's units are made of: flat parameters, and storages that other streams use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memfit.formats import Format
from memfit.lower.recorder import Elastic, Storage, Tensor
from memfit.tape import Event, Free

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = "idle", "forward", "pre-backward", "post-backward"


class Lent(Elastic):
    """A storage that other streams use: given back, it is kept for them."""

    __slots__ = ("users",)

    def __init__(self, size: int, take_block: Callable[[], int], write: Callable[[Event], None], users: tuple[int, ...]) -> None:
        super().__init__(size, take_block, write)
        self.users = users

    def drop(self) -> None:
        if self.id >= 0:
            self.write(Free(self.id, self.users))
            self.id = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Flat:
    """A unit: `leaves` are views of its flat parameter, whose place in the graph is `whole`; `pieces` are what of them lies in this rank's shard."""

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
    ran: bool = False  # its pre-backward
    place: int | None = None  # in the order of the forward
    saved: Storage | None = None  # the reduced gradient, until the backward is over
    held: list[Storage | None] = field(default_factory=list)  # the gradient, which the flat parameter holds beside its views
