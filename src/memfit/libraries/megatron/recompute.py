"""What Megatron's `--recompute-granularity selective` runs again, module by module (megatron-core
0.16.1 tensor_parallel/random.py: CheckpointFunction, and CheckpointWithoutOutput, whose results are
given back once they were used and made again when the gradient of what used them is there).

Left out: of a norm that is made again the numbers of its rows (4 bytes a row), which stay.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.lower.context import Context
from memfit.lower.engine import gate
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Elastic, Grads, Node, Tensor
from memfit.techniques.base import names
from memfit.techniques.recompute import MODULES


def asked(ctx: Context, module: str) -> bool:
    """Whether this one is among `--recompute-modules`."""
    job = ctx.job
    return (
        ctx.training
        and job.checkpointing == "selective"
        and module in (names(job.recompute_modules) or MODULES[:1])
    )


def again(r: Recorder, run: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Arguments are kept as they are, the core of attention's value as a view of all that was
    projected (CheckpointFunction)."""
    if not r.grad:
        return run(*given)
    r.grad = False
    out = run(*given).detach()
    r.grad = True

    def back(r: Recorder, node: Node, g: Tensor) -> Grads:
        fresh = [one.detach() for one in node.saved]
        for one in fresh:
            one.needs = True
        part, r.part = r.part, "activations"
        result = run(*fresh)
        r.part = part
        r.backward(result, g)
        return [one.grad for one in fresh]

    return r.node("checkpoint", out, given, back, given)


def made_again(
    r: Recorder, make: Callable[[Tensor], Tensor], given: Tensor, use: Callable[[Tensor], Tensor]
) -> Tensor:
    """CheckpointWithoutOutput of `make`: its result goes when `use` has returned, and is there
    again from the gradient of what that returned until its own node has run."""
    if not r.grad:
        return use(make(given))
    held: list[Elastic] = []
    made = make(gate(r, given, held.clear))
    assert made.storage is not None
    block = r.elastic(made.storage.size, "recompute", r.part)
    block.join(made.storage)
    made.storage = block
    waiting = [block]
    out = use(made)
    del made
    block.drop()
    del block

    def remake() -> None:
        held.append(waiting.pop())
        held[0].take()

    return gate(r, out, remake)
