"""The loops: load a model, train it for some steps as a plain Trainer does, evaluate it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.strategy import Strategy
from memfit.tape import LONGEST, Part
from memfit.trace import (
    activation_offload,
    extra_inputs,
    inputs,
    meshes,
    prepare,
    standins,
    trl,
    ulysses,
    versions,
)
from memfit.trace.optimizers import backward, kept_of, stepped
from memfit.trace.paths import plain
from memfit.trace.recorder import Block, Recorder, local


def warm_up(recorder: Recorder, model: Any, job: Job) -> None:
    """One block as large as the model, given back at once, where a device_map is used (transformers
    5.23 modeling_utils.py `caching_allocator_warmup`): it is what `reserved` starts from."""
    if not job.mapped or recorder.device.type != "cuda":
        return
    recorder.mark("load")
    packed = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (standins.Linear4bit, standins.Linear8bitLt))
    }
    width = 1.0 if job.quantization == "int8" else 0.5
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}
    size = sum(
        local(one).numel() * (width if key in packed else one.element_size())
        for key, one in tensors.items()
    )
    size = min(size, recorder.device.memory - 1.2 * 2**30)
    block = torch.empty(max(0, int(size // 2)), dtype=torch.float16, device=recorder.device.type)
    del block


def load(recorder: Recorder, model: Any) -> None:
    """Every parameter and buffer arrives on the GPU once, in the model's order; tied ones share
    their storage.

    A weight that is quantized arrives whole and leaves when its packed form is made.
    """
    recorder.mark("load")
    recorder.names = {id(module): name for name, module in model.named_modules()}
    arrivals(recorder, model)


def brought(
    recorder: Recorder, model: Any, job: Job, strategy: Strategy, finish: Callable[[Any, str], Any]
) -> Any:
    """The model as `from_pretrained` leaves it on the GPU, of which `finish` makes what trains."""
    warm_up(recorder, model, job)
    load(recorder, model)
    return finish(model, recorder.device.type)


def arrivals(recorder: Recorder, model: Any) -> None:
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            recorder.arrive(parameter, "weights", path)
        if (
            isinstance(module, standins.Linear4bit) and module.quant_state is not None
        ):  # packed on the host, and sharded
            for one in module.quant_state.tensors():
                recorder.arrive(one, "weights", path)
        elif isinstance(module, (standins.Linear4bit, standins.Linear8bitLt)):
            recorder.modules.append(path)
            module.quantize()
            recorder.modules.pop()
    for name, buffer in model.named_buffers():
        recorder.arrive(buffer, "buffers", name.rpartition(".")[0])


def weights(model: Any) -> Iterator[torch.Tensor]:
    """All that the model keeps as weights, the constants of quantized ones included."""
    for parameter in model.parameters():
        yield parameter
        if isinstance(parameter, standins.Params4bit):
            yield from parameter.quant_state.tensors()
        elif isinstance(parameter, standins.Int8Params):
            yield parameter.SCB


def train(recorder: Recorder, model: Any, job: Job, options: Any, plan: inputs.Plan) -> None:
    """Forward, backward, step, zero_grad; outputs are dropped before backward unless they are
    kept."""
    begin(model, job)
    around = activation_offload.stood(recorder, model, job)
    wrapped = options.spread.wrapped(model)
    if wrapped is model:
        mixed = prepare.mixed(model, job, recorder.device.type)
    else:  # accelerate 1.15 accelerator.py prepare_model: DDP copies outputs that are fp32 already
        mixed, model.forward = wrapped, prepare.mixed(model.forward, job, recorder.device.type)
    forward = trl.called(mixed, job, plan.kind)
    name_gradients(recorder, model, job)
    optimizer, paths = options.optimizer(model, job), paths_of(model)
    states(recorder, optimizer, paths)
    recorder.optimizer = optimizer  # its states are there as long as the tape goes on
    if hasattr(optimizer, "masters"):
        own(recorder, "master", optimizer.masters())
        optimizer.tell = lambda gradients: own(recorder, "gradients", gradients)
    scaler = (
        torch.amp.GradScaler(recorder.device.type)
        if job.autocast and "fp16" in job.precision
        else None
    )
    micro = Micro(
        plan=plan,
        options=options,
        forward=forward,
        backward=lambda loss: backward(optimizer, loss),
        scaler=scaler,
        shares=job.accumulate,
    )
    recorder.loop = micro.kept  # there when the last step is over, too
    for step, now in jobs(job, options.steps).items():
        if job.zero_grad == "before_backward":
            optimizer.zero_grad(set_to_none=True)
        for last in parts(job):
            with around(), options.spread.micro_batch(wrapped, last):
                micro_step(recorder, model, now, micro, step)
        recorder.mark("step")
        update(model, optimizer, job, scaler)
        states(recorder, optimizer, paths)
        own(recorder, "weights", (one for one in model.parameters() if one.requires_grad))
        if job.zero_grad == "after_step":
            optimizer.zero_grad(set_to_none=True)
        elif job.zero_grad == "keep":
            optimizer.zero_grad(set_to_none=False)
    if job.evaluate:
        evaluate(recorder, model, forward, job, plan, options.spread)
    if job.merge and job.adapters:
        recorder.mark("save")
        with standins.installed(model):
            model.merge_and_unload()


def begin(model: Any, job: Job) -> None:
    model.train()
    if versions.cache_off(job):
        model.config.use_cache = False
    prepare.checkpointed(model, job)


def jobs(job: Job, count: int) -> dict[int, Job]:
    """What each step does: the same `count` times, and then the longest batch if there is one."""
    return dict.fromkeys(range(count), job) | (
        {LONGEST: job.replace(seq=job.longest, longest=0)} if job.longest else {}
    )


def parts(job: Job) -> Iterator[bool]:
    """The micro-batches of a step: whether one is the last."""
    return (index + 1 == job.accumulate for index in range(job.accumulate))


def name_gradients(recorder: Recorder, model: Any, job: Job) -> None:
    """Before an optimizer uses them up while backward runs."""
    if OPTIMIZERS[job.optimizer].when == "layerwise":
        for one in model.parameters():
            if one.requires_grad:
                one.register_post_accumulate_grad_hook(
                    lambda leaf: own(recorder, "gradients", [leaf.grad])
                )


@dataclass(frozen=True, kw_only=True)
class Micro:
    """What runs one batch forward and backward, and what the loop keeps of it until the next
    one."""

    plan: inputs.Plan
    options: Any
    forward: Callable[..., Any]
    backward: Callable[[Any], None]
    scaler: Any = None
    shares: int = 1  # of the loss, each part of a batch gives one; an engine may see to that itself
    kept: dict[str, Any] = field(default_factory=dict)


def micro_step(recorder: Recorder, model: Any, job: Job, how: Micro, step: int) -> None:
    recorder.mark("prepare", step=step)
    part = job.replace(
        seq=job.seq // ulysses.ranks(how.options.strategy)
    )  # what a loader hands over
    with how.options.spread.inputs(
        inputs.training(recorder, model, part, how.plan, job.batch)
    ) as given:
        how.kept["inputs"] = given  # until the next ones are there
        recorder.mark("forward")
        outputs = how.forward(**given)
        loss = extra_inputs.loss_of(model, outputs)
        if job.keep_outputs:
            how.kept["outputs"] = outputs  # overwritten now
        if not how.options.keep_outputs:
            del outputs
        if how.shares > 1:
            loss = loss / how.shares
        if how.scaler is not None:
            loss = how.scaler.scale(loss)
        recorder.mark("backward")
        how.backward(loss)
    recorder.rest()
    own(recorder, "gradients", (one.grad for one in model.parameters() if one.grad is not None))


def update(model: Any, optimizer: Any, job: Job, scaler: Any) -> None:
    if job.clip:
        if scaler is not None:
            scaler.unscale_(optimizer)
        meshes.clip([one for one in model.parameters() if one.requires_grad], job.clip)
    if scaler is None:
        stepped(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()


def evaluate(
    recorder: Recorder, model: Any, forward: Any, job: Job, plan: inputs.Plan, spread: Any
) -> None:
    """One evaluation batch with labels, logits and loss alive together, as `prediction_step` holds
    them. Of a sequence that DeepSpeed shares out (`disable_in_eval`) every rank has all of it then.
    """
    model.eval()
    recorder.mark("evaluate")
    given = inputs.training(recorder, model, job, plan, job.eval_batch)
    own(recorder, "inputs", given.values())
    with (
        spread.inputs(given)
        if ulysses.ranks(spread.strategy) == 1
        else contextlib.nullcontext(given) as given,
        torch.no_grad(),
    ):
        outputs = forward(**given)
        loss = outputs.loss.detach().mean()
        del outputs, loss


def states(recorder: Recorder, optimizer: Any, paths: Mapping[int, str]) -> None:
    """What an optimizer keeps belongs to the module of its parameter; `paths` by the parameters'
    ids."""
    for parameter, tensors in kept_of(optimizer):
        own(recorder, "optimizer", tensors, paths.get(id(parameter), ""))


def paths_of(model: Any) -> dict[int, str]:
    """The path of the module of every parameter, by the parameter's id."""
    return {id(one): plain(name.rpartition(".")[0]) for name, one in model.named_parameters()}


def own(recorder: Recorder, part: Part, tensors: Iterable[torch.Tensor], where: str = "") -> None:
    """These blocks are `part`, and of the module `where` if one is named, whatever they looked like
    before. DDP's buckets, of which gradients may be views, stay what they are."""
    for tensor in tensors:
        block = recorder.owned(tensor)
        if block is not None and block.part != "weights" and not bucket(block):
            block.part, block.where = part, where or block.where


def bucket(block: Block) -> bool:
    """Collectives' results and FSDP2's shards become gradients; what DDP made beforehand does
    not."""
    return block.part == "communication" and block.stream == 0 and block.op.startswith("empty")
