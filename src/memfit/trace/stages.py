"""Stages of a pipeline: transformers' model cut by layers, and torch's own schedules over them, of
which this rank runs its part.

A stage is what torchtitan makes one (distributed/pipeline_parallel.py `pipeline_module_split`): a
copy of the model without the layers of others, without the embedding unless it is first, without
final norm and head unless it is last. What it gets and gives is told beforehand (torch 2.13
distributed/pipelining/stage.py, static metadata): nobody is there to be asked.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job
from memfit.parallel.pipeline.check import (
    FAMILIES,
    counts,
    layered,
    micro_batches,
    of_torch,
    placed_at,
    turned,
)
from memfit.strategy import Strategy
from memfit.tape import Phase
from memfit.trace import activation_offload, inputs, meshes, prepare, steps
from memfit.trace.flat import DTYPES
from memfit.trace.optimizers import stepped
from memfit.trace.recorder import Recorder

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


class Part(torch.nn.Module):
    """One stage: hidden states to hidden states, from token ids on the first, to logits on the
    last."""

    def __init__(self, whole: Any, number: int, begins: bool, ends: bool) -> None:
        super().__init__()
        self.whole, self.number, self.begins, self.ends = whole, number, begins, ends
        self.forward_of = whole if ends else whole.base_model
        self.autocast: Any = contextlib.nullcontext

    def forward(self, x: torch.Tensor) -> Any:
        given = {"input_ids": x} if self.begins else {"inputs_embeds": x}
        with self.autocast():
            out = self.forward_of(**given, use_cache=False)
        return out.logits if self.ends else out.last_hidden_state


class Stages(torch.nn.Module):
    """The stages of one rank, in the order in which a micro-batch meets them."""

    def __init__(self, parts: list[Part], config: Any) -> None:
        super().__init__()
        self.parts, self.config = torch.nn.ModuleList(parts), config


def cut(model: Any, strategy: Strategy, split: Callable[[Any], Any]) -> Stages:
    """This rank's stages of `model`, each `split` over the ranks that share it."""
    pp = strategy.pp
    assert pp is not None
    if model.config.model_type not in FAMILIES:
        message = f"not supported yet by a trace: pipeline stages of `{model.config.model_type}`"
        raise InputError.one(message, where="use pp", hint="one of " + ", ".join(sorted(FAMILIES)))
    raise_errors([*layered(pp, len(model.base_model.layers))])
    layers = counts(pp, len(model.base_model.layers))
    assert layers is not None
    number = strategy.rank * pp.size // strategy.ranks
    return Stages(
        [part(model, index, layers, split) for index in placed_at(pp, number)], model.config
    )


def part(model: Any, index: int, layers: tuple[int, ...], split: Callable[[Any], Any]) -> Part:
    whole = copy.deepcopy(model)
    body, begin = whole.base_model, sum(layers[:index])
    body.layers = body.layers[begin : begin + layers[index]]
    begins, ends = index == 0, index == len(layers) - 1
    if not begins:
        body.embed_tokens = None
    if not ends:
        body.norm, whole.lm_head = torch.nn.Identity(), None
    return Part(split(whole), index, begins, ends)


def train(recorder: Recorder, model: Stages, job: Job, options: Any, plan: inputs.Plan) -> None:
    """Every rank has the whole batch on its GPU, as torchtitan's trainer does; the schedule cuts it
    into micro-batches."""
    strategy = options.strategy
    for one in model.parts:
        one.train()
        prepare.checkpointed(one.whole, job)
        if job.autocast:
            one.autocast = lambda: torch.autocast(
                recorder.device.type,
                dtype=torch.bfloat16 if "bf16" in job.precision else torch.float16,
            )
    around = activation_offload.stood(recorder, model, job)
    schedule = scheduled(model, job, options)
    optimizer, paths = options.optimizer(model, job), steps.paths_of(model)
    steps.states(recorder, optimizer, paths)
    first, last = (any(getattr(one, name) for one in model.parts) for name in ("begins", "ends"))
    given: dict[str, Any] = {}
    for step in range(options.steps):
        recorder.mark("prepare", step=step)
        given = inputs.training(
            recorder, model.parts[0].whole, job, plan, job.batch * micro_batches(strategy.pp, job)
        )
        recorder.mark("forward")
        with around():
            schedule.step(
                *([given["input_ids"]] if first else []),
                target=given["labels"] if last else None,
                losses=[],
                return_outputs=False,
            )
        recorder.rest()
        steps.own(
            recorder, "gradients", (one.grad for one in model.parameters() if one.grad is not None)
        )
        recorder.mark("step")
        if job.clip:
            meshes.clip([one for one in model.parameters() if one.requires_grad], job.clip)
        stepped(optimizer)
        steps.states(recorder, optimizer, paths)
        optimizer.zero_grad(set_to_none=True)
    if job.evaluate:
        given.clear()
        evaluate(recorder, model, job, options, schedule, plan)


def evaluate(
    recorder: Recorder, model: Stages, job: Job, options: Any, schedule: Any, plan: inputs.Plan
) -> None:
    """torch's `eval` of the same schedule, over micro-batches of `eval_batch` sequences; the
    neighbours would tell their shape."""
    from torch.distributed.pipelining._utils import extract_tensor_metas

    model.eval()
    recorder.mark("evaluate")
    strategy, now = options.strategy, job.replace(batch=job.eval_batch)
    for part, stage in zip(
        model.parts, getattr(schedule, "_stages", None) or [schedule._stage], strict=True
    ):
        stage._user_meta.inputs, stage._user_meta.outputs = (
            extract_tensor_metas((one,)) for one in shapes(part, now, options)
        )
    given = inputs.training(
        recorder, model.parts[0].whole, now, plan, job.eval_batch * micro_batches(strategy.pp, job)
    )
    steps.own(recorder, "inputs", given.values())
    first, last = (any(getattr(one, name) for one in model.parts) for name in ("begins", "ends"))
    with torch.no_grad():
        schedule.eval(
            *([given["input_ids"]] if first else []),
            target=given["labels"] if last else None,
            losses=[],
            return_outputs=False,
        )


def scheduled(model: Stages, job: Job, options: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    pp, group = options.strategy.pp, options.spread.mesh.get_group("pp")
    kind = get_schedule_class(SCHEDULES[pp.schedule])
    stages = [
        PipelineStage(
            options.spread.wrapped(one),
            one.number,
            pp.size * pp.virtual,
            options.device,
            *shapes(one, job, options),
            group=group,
        )
        for one in model.parts
    ]
    last = model.parts[-1].whole

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return last.loss_function(logits, labels, vocab_size=model.config.vocab_size)

    single = issubclass(kind, PipelineScheduleSingle)
    return kind(
        stages[0] if single else stages, n_microbatches=micro_batches(pp, job), loss_fn=loss
    )


def shapes(one: Part, job: Job, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a stage gets and gives: no allocations."""
    from torch.utils._python_dispatch import _disable_current_modes

    fsdp = options.strategy.fsdp
    stored = next(
        tensor.dtype
        for tensor in one.parameters()
        if tensor.is_floating_point() and tensor.dim() == 1
    )  # a norm's: no packed weight's
    dtype = DTYPES[fsdp.param_dtype] if fsdp is not None and fsdp.param_dtype else stored
    hidden = (job.batch, job.seq, one.whole.config.hidden_size)
    with _disable_current_modes():
        ids = torch.empty(hidden[:2], dtype=torch.int64, device="meta")
        state = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty(
            (*hidden[:2], one.whole.config.vocab_size),
            dtype=dtype,
            device="meta",
            requires_grad=True,
        )
    return (ids if one.begins else state, logits if one.ends else state)


def settled(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """The neighbours agree on static metadata: a vote over a few numbers, sent and read. Forwards
    and backwards are told apart, and buffers."""
    from torch.distributed.pipelining import stage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    def agree(self: Any, stages: list[Any], *_: Any) -> None:
        for one in stages:
            one._inference_mode = stage.InferenceMode.STATIC

    def marked(name: str, phase: Phase) -> tuple[Any, str, Any]:
        true = getattr(stage._PipelineStageBase, name)

        def run(self: Any, *given: Any, **named: Any) -> Any:
            if recorder.phase != "evaluate":
                recorder.mark(phase)
            return true(self, *given, **named)

        return stage._PipelineStageBase, name, run

    true_make = stage._make_tensor_from_meta

    def make(*given: Any) -> Any:
        made = true_make(*given)
        steps.own(recorder, "communication", [made])
        return made

    backwards = ("backward_one_chunk", "backward_weight_one_chunk")
    told = [
        marked("forward_one_chunk", "forward"),
        *(marked(name, "backward") for name in backwards),
    ]
    return [
        (_PipelineSchedule, "_warmup_p2p", agree),
        (stage, "_make_tensor_from_meta", make),
        *told,
    ]


def refusals(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """What torch's schedules over transformers' model are not run with, here and by the
    formulas."""
    assert strategy.pp is not None
    yield from turned(strategy.pp, job)
    yield from of_torch(job, strategy)


__all__ = ["Stages", "cut", "refusals", "settled", "train"]
