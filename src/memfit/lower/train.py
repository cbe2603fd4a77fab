"""A training run: load, then steps until it repeats itself. Gradients, states and temporaries come and go as in the real one."""

from __future__ import annotations

from memfit.formats import FORMATS
from memfit.lower import head
from memfit.lower.body import Body
from memfit.lower.context import Context
from memfit.lower.optimize import Stepper
from memfit.lower.recorder import Dim, Recorder, Tensor
from memfit.lower import ops
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program

STEPS = 2  # the first makes the optimizer's states, the second is the steady one


def train(r: Recorder, program: Program) -> None:
    body = Body(r, program)
    body.load()
    body.adapt()
    wide = frozenset(weight.name for module in program.model.embed for weight in module.weights() if weight.role == "embedding")
    stepper = Stepper(r, OPTIMIZERS[program.job.optimizer], body.trained(), wide, program.master)
    for step in range(STEPS):
        for _ in range(program.job.accumulate if program.job.accumulate == 1 else 2):
            micro_batch(r, program, body, step)
        r.mark("step", "", step)
        stepper.step(step)
        stepper.drop_gradients(step)


def micro_batch(r: Recorder, program: Program, body: Body, step: int) -> None:
    """Forward, loss, backward, as a Trainer runs them: the outputs are dropped before backward."""
    job = program.job
    b, s = Dim(job.batch, "B"), Dim(job.seq, "S")
    r.mark("forward", "", step)
    ids, labels = ops.integers(r, (b, s), "inputs"), ops.integers(r, (b, s), "inputs")
    loss = forward_loss(r, program, body, ids, labels, step)
    r.mark("backward", "", step)
    seed = r.like(loss, "ones_like")
    r.thread = "backward"
    r.backward(loss, seed)
    r.thread = "forward"


def forward_loss(r: Recorder, program: Program, body: Body, ids: Tensor, labels: Tensor, step: int) -> Tensor:
    job = program.job
    autocast = FORMATS[program.autocast] if program.autocast else None
    ctx = Context(
        r=r, job=job, batch=Dim(job.batch, "B"), tokens=Dim(job.seq, "S"), keys=job.seq, training=True, format=FORMATS[program.weights], autocast=autocast
    )
    hidden = body.forward(ids, ctx, step)
    scores = head.logits(hidden, body.model, body.ends, ctx)
    return head.loss(scores, labels, body.model, ctx)
