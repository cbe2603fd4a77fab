"""Inputs of a forward pass other than weights and tokens."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from memfit.formats import FORMATS, Format
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.lower.cache import Cache
from memfit.lower.engine import Engine
from memfit.lower.matrix_layout import MatrixLayout
from memfit.lower.programs import Programs
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Dim, Tensor
from memfit.program import Program


@dataclass(slots=True, kw_only=True)
class Context:
    """One pass: its job, its sizes, the device it runs on, and the tensors that all layers
    share."""

    r: Recorder
    program: Program
    programs: Programs  # whose code runs
    batch: Dim
    tokens: Dim  # of one sequence, in this pass
    keys: int  # keys that attention sees: past and present
    training: bool
    format: Format  # of activations between layers
    autocast: Format | None
    engine: Engine
    cache: Cache | None = None
    positions: Tensor | None = (
        None  # one for each token of each sequence, where the caller hands them over
    )
    cos: Tensor | None = None
    sin: Tensor | None = None
    tables: dict[bool, tuple[Tensor | None, Tensor | None]] = field(
        default_factory=dict
    )  # of layers that slide, and that do not
    masks: dict[int, Tensor | None] = field(default_factory=dict)  # by window
    unseen: Tensor | None = None  # a mask that layers are given, and attention is not
    outputs: list[Tensor] = field(
        default_factory=list
    )  # of the model, where the loop's variable keeps them
    returned: list[Tensor] = field(
        default_factory=list
    )  # the logits among the model's outputs, until its caller has got them
    held: list[Tensor] = field(
        default_factory=list
    )  # by variables of the layer that runs, until it returns
    open: list[Tensor] = field(
        default_factory=list
    )  # by variables of a mixer that adds the residual itself
    results: list[Tensor] = field(
        default_factory=list
    )  # what layers return beside the hidden state; their loop keeps the last tuple
    shared: dict[str, Tensor] = field(
        default_factory=dict
    )  # what a captured start hands to every layer, by name
    crossing: dict[str, Tensor] = field(
        default_factory=dict
    )  # what a captured layer makes for later ones: one dictionary for all layers of a pass
    scripts: dict[Any, Any] = field(
        default_factory=dict
    )  # what captured layers did in this pass, for others of their kind
    caches: list[Tensor] = field(
        default_factory=list
    )  # keys and values among a captured model's outputs
    inputs: tuple[Tensor, ...] = ()  # all that the model is given
    distances: Tensor | None = None  # added to the scores of every layer
    casts: dict[str, dict[int, Tensor]] = field(
        default_factory=dict
    )  # autocast's cache of cast weights, by the span that made them

    @property
    def matrices(self) -> MatrixLayout:
        """How ranks share the matrices."""
        return self.programs.matrices

    @property
    def job(self) -> Job:
        return self.program.job

    @property
    def capability(self) -> tuple[int, int]:
        return self.program.capability

    @property
    def torch(self) -> tuple[int, int]:
        return self.program.job.version("torch")

    @property
    def shifted(self) -> bool:
        """Labels come shifted from whoever cuts sequences, before they are cut (transformers 5.23
        trainer.py `_prepare_context_parallel_inputs`; deepspeed 0.19.8 UlyssesSPDataLoaderAdapter,
        of batches to train on alone)."""
        cp = self.program.strategy.cp
        return (
            cp is not None
            and cp.size > 1
            and not self.program.engine
            and (self.training or cp.style != "ulysses")
        )

    @property
    def decoding(self) -> bool:
        """A pass of `generate` after the prompt's, for which it changes the experts' code; a beam
        search does not (generation/utils.py _sample, _optimize_model_for_decode)."""
        return self.r.phase == "decode" and self.job.beams == 1

    @property
    def static(self) -> bool:
        """Within `generate` over a static cache."""
        return self.cache is not None and self.cache.kind == "static"

    def span(self, window: int) -> int:
        """The keys that a mask of layers with this window is made for."""
        return self.keys if self.cache is None else self.cache.span(self.tokens, window)

    def dropout(self, p: float) -> float:
        return p if self.training else 0.0


def leave_autocast(ctx: Context) -> None:
    """The outermost autocast ends, and with it the cache of cast weights; those of a layer go in
    its own span."""
    r, span = ctx.r, ctx.r.span
    for where in list(ctx.casts):
        r.mark(r.phase, where, r.at)
        del ctx.casts[where]
    r.mark(r.phase, span, r.at)


def context(
    r: Recorder,
    program: Program,
    programs: Programs,
    shape: tuple[int, ...],
    *,
    keys: int,
    training: bool,
    cache: Cache | None = None,
    engine: Engine | None = None,
) -> Context:
    """The context of a pass over `shape` = (sequences, tokens)."""
    autocast = FORMATS[program.autocast] if program.autocast else None
    return Context(
        r=r,
        program=program,
        programs=programs,
        engine=engine or Engine(r, program),
        batch=Dim(shape[0], "B"),
        tokens=Dim(shape[1], "S"),
        keys=keys,
        training=training,
        format=FORMATS[program.hidden],
        autocast=autocast,
        cache=cache,
    )
