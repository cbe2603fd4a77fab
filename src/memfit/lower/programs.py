"""Which code runs each piece of a model, as a value: `frameworks` makes one for every framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from memfit.lazy_dataclass import dataclass
from memfit.lower.matrix_layout import WHOLE, MatrixLayout
from memfit.lower.packing import Packing
from memfit.lower.recorder import Recorder
from memfit.lower.sequence_layout import ALL_TOKENS, SequenceLayout
from memfit.lower.tensors import Choices, Dim, Tensor

if TYPE_CHECKING:
    from memfit.lower.body import Body
    from memfit.lower.bound import Bound
    from memfit.lower.context import Context
    from memfit.model.model import Model
    from memfit.model.modules import Block, Layer, MoE, Weight
    from memfit.program import Program

Run: TypeAlias = (
    "Callable[[Tensor, Any, Bound, Context], Tensor]"  # a module of some style on its input
)
Order: TypeAlias = "Callable[[Tensor, Block, Bound, Context], Tensor]"
Whole: TypeAlias = "Callable[[Tensor, Layer, Bound, Context], Tensor]"
Rotary: TypeAlias = "Callable[[Tensor, Tensor, Context], tuple[Tensor, Tensor]]"
Loss: TypeAlias = "Callable[[Tensor, Tensor, Model, Bound, Context], Tensor]"
Scores: TypeAlias = "Callable[[Tensor, Model, Bound, Context], Tensor]"
Start: TypeAlias = (
    "Callable[[Tensor, Model, Bound, Context], Tensor]"  # from token ids to the first layer's input
)
Middle: TypeAlias = "Callable[[Tensor, Model, Bound, Context], Tensor]"  # between two lists
Batch: TypeAlias = "Callable[[Recorder, Program, Dim, int], tuple[Tensor, ...]]"
Buffers: TypeAlias = "Callable[[Program], tuple[Weight, ...]]"
Generates: TypeAlias = "Callable[[Recorder, Program], tuple[object, ...]]"
Experts: TypeAlias = (
    "Callable[[Tensor, Tensor, Tensor, MoE, Bound, Context, Callable[..., Tensor]], Tensor]"
)
Merge: TypeAlias = "Callable[[Recorder, Program, list[Bound], int], None]"
Kept: TypeAlias = "Callable[[Recorder, Program], Sequence[object]]"


class StageRunner(Protocol):
    """Runs the micro-batches of a rank that has some of the layers."""

    repeats: bool  # every step is like the first
    evaluates: bool  # it runs evaluations, too

    def step(self, step: int, tokens: int) -> None: ...

    def evaluate(self, step: int, batch: int, tokens: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """Programs by the `style` of the module they run (`losses`: by the job's option), and how the
    loop around them differs.

    What is None is as transformers has it."""

    norms: Mapping[str, Run]
    attention: Mapping[str, Run]
    mlps: Mapping[str, Run]
    moes: Mapping[str, Run]
    orders: Mapping[str, Order]
    losses: Mapping[str, Loss]
    experts: Experts | None = None  # a mixture's; None: this rank has all of them
    packing: Packing | None = None
    merge: Merge | None = None  # adapters into the weights, at the end of a run
    matrices: MatrixLayout = WHOLE
    sequences: SequenceLayout = ALL_TOKENS
    # names of the parameters that optimizers meet as DTensors, by what made them such
    dtensors: Callable[[Program], tuple[frozenset[str], ...]] = lambda program: ()
    stages: Callable[[Recorder, Program, Body], StageRunner] | None = None
    layer: Whole | None = None  # a layer's blocks together
    rotary: Rotary | None = None  # in place of the family's own
    start: Start | None = None
    middle: Middle | None = None  # from the last layer of a list to the first of the next one
    batch: Batch | None = None  # what a model that reads more than token ids is given
    scores: Scores | None = None  # of a head of labels, from the last hidden state
    own_head: bool = False  # it reads the last hidden state before the model casts it
    buffers: Buffers | None = None  # that the framework's own modules keep for all layers together,
    layer_buffers: Buffers | None = None  # and in each layer
    kernels: tuple[
        str, ...
        # SDPA's backends in the order in which the framework has torch ask for them; () is torch's
        # own
    ] = ()
    choices: Choices | None = None  # of selective checkpointing
    passed: Callable[[Program, int], tuple[int, ...]] | None = (
        None  # the shape of what stages of a pipeline hand on; None: (B, S, D)
    )
    kept: Kept | None = (
        None  # gradients are added up elsewhere as they come; what stays beside that for good
    )
    reentrant: bool = False  # its own checkpoints run a backward inside the backward
    whole: bool = False  # a recomputation is not stopped early
    # the loop's variable holds the logits through backward, until the next forward is over
    keeps_outputs: bool = False
    generates: Generates | None = None  # its own loop from a prompt to the last token
    plain_adapters: bool = False  # over packed weights they run as over others
    validates: bool = False  # a batch is evaluated before the first step

    def replace(self, **changes: Any) -> Programs:
        return replace(self, **changes)
