"""What one estimate tells of candidates that run the same passes, or of other kernels in the same
layout."""

from __future__ import annotations

from typing import NamedTuple

from memfit.estimate import Estimate
from memfit.hardware import rates
from memfit.optimizers import OPTIMIZERS
from memfit.plan.memory_lower_bounds import passes
from memfit.simulate.host_step import away
from memfit.simulate.pace import calls, stepped
from memfit.simulate.peaks import spans
from memfit.simulate.settings import ROUNDING
from memfit.simulate.time import PASSES
from memfit.tape import Alloc, Comm, Mark
from memfit.units import round_up


class Passed(NamedTuple):
    """Of a candidate whatever its optimizer: seconds of the passes, those of their kernels, bytes
    that they hold at most beside the optimizer's states; seconds of calls that the optimizer's step
    waits for, and of the engine's own kernels there."""

    seconds: float
    kernels: float
    held: int
    sent: float
    rest: float = 0.0


class Beyond(NamedTuple):
    """What a layout adds to the passes of one GPU, seen with so many micro-batches: seconds of
    calls, and of kernels of its own."""

    times: int
    calls: float
    kernels: float


def passed(found: Estimate, seconds: float) -> Passed:
    """An optimizer that steps behind the passes changes nothing of them but what it keeps: not less
    than all that it ever made."""
    tape = found.memory.tape
    states = sum(
        round_up(event[1], ROUNDING) * span.times
        for span in spans(tape)
        for event in tape.events[span.first : span.last]
        if type(event) is Alloc and event[2] == "optimizer"
    )
    most = max(
        (
            one.allocated
            for one in found.memory.timeline
            if one.moment == "steady step" and one.phase in PASSES
        ),
        default=0,
    )
    if found.time is None:
        return Passed(seconds, 0.0, most - states, 0.0)
    kernels = passes(found.time.parts)
    return Passed(
        found.time.seconds - found.time.stepping, kernels, most - states, waited(found), rest(found)
    )


def waited(found: Estimate) -> float:
    """Seconds of the step's calls that run beside nothing, whatever the optimizer."""
    assert found.cluster is not None
    call, tape, sums, step = (
        calls(found.cluster, found.strategy),
        found.memory.tape,
        dict[int, float](),
        0,
    )
    for span in spans(tape):
        for event in tape.events[span.first : span.last]:
            if type(event) is Mark:
                step = event.step if event.phase == "step" else 0
            elif type(event) is Comm and step and not event.stream and event.group != "host":
                sums[step] = sums.get(step, 0.0) + (call(event) or 0.0) * span.times
    return sums.get(max(sums), 0.0) if sums else 0.0


def rest(found: Estimate) -> float:
    """Seconds of the step's kernels that are not the optimizer's own: norms and casts of an engine.
    Not known (0) where the optimizer has temporaries, which are kernels of its own, too."""
    optimizer = OPTIMIZERS[found.job.optimizer]
    known = None if found.cluster is None else rates(found.cluster.gpu)
    if known is None or found.time is None or any(rule.step for rule in optimizer.rules):
        return 0.0
    own, trained = 0.0, found.parameters.trainable
    if found.cluster is not None and away(found.cluster, found.strategy, trained, 2) is None:
        own = known.moved(
            optimizer.moved
            * stepped(found.memory, found.job, found.strategy, trained, found.model.dtype)
        )
    return max(0.0, found.time.parts.get("optimizer", 0.0) - own) * (1 - 1e-9)


def sending(found: Estimate) -> float:
    """Seconds of the calls of the passes, those beside kernels, too; with copies, which nobody
    waits for, they are not known."""
    assert found.time is not None
    stepping = max(0.0, found.time.stepping - found.time.parts.get("optimizer", 0.0))
    waiting = found.time.parts.get("communication", 0.0) - stepping
    return max(0.0, waiting + (0.0 if found.strategy.offloads else found.time.hidden))


__all__ = ["Beyond", "Passed", "passed", "sending"]
