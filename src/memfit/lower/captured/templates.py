"""Operations that run by what was captured of them: which blocks their kernels take, what autograd
saves, and what their backward allocates and frees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memfit.formats import FORMATS, Format
from memfit.graph import evaluated
from memfit.graph.layer import Template
from memfit.lower import views
from memfit.lower.captured.run import Frame, Step
from memfit.lower.recorder import Recorder
from memfit.lower.strides import normal
from memfit.lower.tensors import Grads, Node, Tensor

OWN = "function."  # begins the names of functions with a backward of their own


def mask_of(needs: Sequence[bool]) -> str:
    """Which operands need a gradient, as a template's key: `01` for the second of two."""
    return "".join("1" if one else "0" for one in needs) if any(needs) else ""


def run(
    step: Step,
    args: list[Tensor | None],
    frame: Frame,
    template: Template | None,
    fresh: Callable[..., Tensor],
) -> tuple[Tensor, ...]:
    r = frame.ctx.r
    blocks: dict[str, Tensor] = {}
    outs: list[Tensor] = []
    if template is None:
        for index, spec in enumerate(step.outs):
            outs.append(
                views.seen(args[0], spec.shape, spec.strides)
                if spec.view and args[0] is not None
                else fresh(step, args, frame, index)
            )
        return tuple(outs)
    wider = widest(args) if step.op.name.startswith(OWN) else None
    for event in template.forward:
        if event[0] == "out":
            spec, index = step.outs[event[1]], event[1]
            outs.append(
                views.seen(args[event[2]], spec.shape, spec.strides)
                if len(event) > 2 and event[2] is not None
                else fresh(step, args, frame, index)
            )
        else:
            play(r, event, blocks, step, frame, wider)
    outs += [fresh(step, args, frame, index) for index in range(len(outs), len(step.outs))]
    needs = [one for one in args if one is not None and one.needs]
    if r.grad and needs and template.gradients:
        named = {f"i{number}": one for number, one in enumerate(args)}
        named |= {f"o{number}": one.detach() for number, one in enumerate(outs)}
        saved = tuple({**named, **blocks}.get(one) for one in template.saves)
        inputs = tuple(one for one in args if one is not None)
        places = [number for number, one in enumerate(args) if one is not None]
        first = next(
            (n for n, spec in enumerate(step.outs) if spec.format in ("model", "float32")), 0
        )
        back = Back(template, step, frame, places)
        r.node(step.op.name, outs[first], inputs, back, saved)
    blocks.clear()
    return tuple(outs)


def widest(args: Sequence[Tensor | None]) -> Format | None:
    """The dtype that a function of several operations computes in."""
    floats = [one.format for one in args if one is not None and one.format.math[:2] in ("fp", "bf")]
    return max(floats, key=lambda one: one.block_bytes, default=None)


def play(
    r: Recorder,
    event: tuple[Any, ...],
    blocks: dict[str, Tensor],
    step: Step,
    frame: Frame,
    like: Format | None = None,
) -> None:
    """One allocation or free of a template."""
    if event[0] == "free":
        blocks.pop(event[1], None)
        return
    _, name, shape, format, op, *rest = event
    sizes = tuple(evaluated(one, step.dims) for one in shape)
    inherits = format == "model" and like is not None and frame.casts is None
    kind = like if inherits and like is not None else frame.format(format)
    out = r.tensor(sizes, kind, op)
    if rest and rest[0] is not None:
        out.strides = normal(sizes, tuple(evaluated(one, step.dims) for one in rest[0]))
    blocks[name] = out


class Back:
    """The backward of a templated operation: its allocations and frees, then the gradients."""

    def __init__(self, template: Template, step: Step, frame: Frame, places: list[int]) -> None:
        self.template, self.step, self.places = template, step, places
        self.frame = Frame(ctx=frame.behind, bound=frame.bound, linears=frame.linears, env={})

    def __call__(self, r: Recorder, node: Node, g: Tensor) -> Grads:
        blocks: dict[str, Tensor] = {}
        for event in self.template.backward:
            play(r, event, blocks, self.step, self.frame, g.format)
        found: list[Tensor | None] = []
        for number, target in zip(self.places, node.inputs, strict=True):
            source = self.template.gradients[number] if target is not None else None
            if source is None:
                found.append(None)
                continue
            name, shape, strides = source
            sizes = tuple(evaluated(one, self.step.dims) for one in shape)
            lying = (
                None
                if strides is None
                else normal(sizes, tuple(evaluated(one, self.step.dims) for one in strides))
            )
            whole = g if name == "g" else blocks[name]
            out = Tensor(sizes, whole.format, whole.storage)
            out.strides = lying
            found.append(out)
        return found


__all__ = ["FORMATS", "OWN", "mask_of", "run"]
