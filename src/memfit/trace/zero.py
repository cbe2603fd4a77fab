"""DeepSpeed's own engine on the pretended GPU: one rank of ZeRO, in a process group that sends
nothing (tried with deepspeed 0.19.8)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from memfit.errors import Problem
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.parallel.zero.check import resolved as filled
from memfit.strategy import Strategy, ZeRO
from memfit.tape import Part, Sync, Trim
from memfit.trace import activation_offload, cuda, disk, inputs, steps, trl, ulysses, versions
from memfit.trace.collectives import tensors_of
from memfit.trace.flat import DTYPES
from memfit.trace.recorder import Recorder
from memfit.trace.shadows import count_of
from memfit.trace.sides import Sides

# What a setting is called in the `zero_optimization` section (runtime/zero/config.py).
SECTION = {
    "stage": "stage",
    "reduce_bucket": "reduce_bucket_size",
    "allgather_bucket": "allgather_bucket_size",
    "overlap": "overlap_comm",
    "contiguous": "contiguous_gradients",
    "round_robin": "round_robin_gradients",
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "max_live": "stage3_max_live_parameters",
    "max_reuse": "stage3_max_reuse_distance",
    "sub_group": "sub_group_size",
    "persistence": "stage3_param_persistence_threshold",
    "hpz": "zero_hpz_partition_size",
    "qwz": "zero_quantized_weights",
}
FOLDER = os.path.join(
    tempfile.gettempdir(), f"memfit-nvme-{os.getpid()}"
)  # of empty folders that the swappers make
OFFLOADS = ("offload_optimizer", "offload_param")
# What the engine's optimizer keeps under a name.
KEEPS: tuple[tuple[str, Part], ...] = (
    ("single_partition_of_fp32_groups", "master"),
    ("fp32_partitioned_groups_flat", "master"),
    ("temp_grad_buffer_for_gpu_offload", "gradients"),
)


def refusals(job: Job, strategy: Strategy) -> Iterator[Problem]:
    """What of ZeRO is more than Python's code."""
    zero = strategy.zero
    assert zero is not None
    for name, layout in strategy.uses():
        if (
            name != "zero"
            and layout.size > 1
            and not (name == "cp" and ulysses.ranks(strategy) > 1)
        ):
            yield Problem(
                message=f"not supported yet by a trace: ZeRO with `{name}`",
                where=f"use {name}",
                hint="use `zero` on all ranks",
            )
    if importlib.util.find_spec("deepspeed") is None:
        message = "a trace of ZeRO needs `deepspeed`, which is not installed"
        yield Problem(
            message=message,
            where="use zero",
            hint="run `pip install deepspeed`, or use `--by formula`",
        )
    if zero.qgz:
        message = "a trace does not support quantized gradients"
        yield Problem(message=message, where="use zero.qgz", hint="remove it")
    if job.quantization != "none" and zero.stage == 3:
        yield Problem(
            message="a trace cannot shard quantized weights",
            where="job.quant",
            hint="use `stage=2`, or LoRA on 16-bit weights",
        )
    if OPTIMIZERS[job.optimizer].when != "after":
        message = f"`{job.optimizer}` steps during the backward pass, but ZeRO steps after it"
        yield Problem(message=message, where="job.optimizer", hint="use another `--optimizer`")


def settings(job: Job, zero: ZeRO) -> dict[str, Any]:
    """The job in DeepSpeed's words."""
    section: dict[str, Any] = {word: getattr(zero, name) for name, word in SECTION.items()}
    section |= {
        name: {"device": getattr(zero, name), "pin_memory": True, "nvme_path": FOLDER}
        for name in OFFLOADS
        if getattr(zero, name) != "none"
    }
    half = half_of(job)
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.accumulate,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": section,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": job.clip,
        **({half: {"enabled": True}} if half else {}),
    }


def half_of(job: Job) -> str:
    """The 16 bits that DeepSpeed trains in; none of a job in fp32."""
    return next((one for one in ("bf16", "fp16") if one in job.precision), "")


class Rank(Sides):
    """A recorder for an engine that asks whether any gradient has overflowed: none has."""

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and args[0].is_meta
            and not args[0].dtype.is_floating_point
        ):
            self.caught_up()
            return 0
        return super().dispatch(func, args, kwargs)

    def caught_up(self) -> None:
        """The program waits for the GPU: nothing is lent to any stream."""
        self.events.extend(Sync(self.stream, stream) for stream in self.lent)

    def too_large(self, func: Any, args: Any, kwargs: Any) -> bool:
        """On the host as well, floats have no values: what is real and what is not cannot be a
        tensor and its gradient."""
        kind = (
            kwargs.get("dtype")
            or next((one.dtype for one in args if isinstance(one, torch.Tensor)), None)
            or torch.get_default_dtype()
        )
        return bool(kind.is_floating_point) and count_of(args) != 1

    def fetched(self, tensor: torch.Tensor, kind: Any) -> torch.Tensor:
        kind = tensor.dtype if kind is None else kind
        if not kind.is_floating_point or tensor.numel() == 1:
            return super().fetched(tensor, kind)
        return self.apart(
            torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device="meta")
        )

    def elements(self, parameter: Any) -> int:
        return int(getattr(parameter, "ds_numel", parameter.numel()))


class Parked(activation_offload.Away, Rank):
    """Its activations wait on the host, too."""


# ------------------------------------------------------------------------------------- the machine
def load(strategy: Strategy) -> None:
    """Imported while the machine is still seen as it is; told what that is, it does not say that it
    looked in vain."""
    if strategy.zero is not None and "deepspeed" not in sys.modules:
        with set_in_environment({"DS_ACCELERATOR": "cpu"}):
            importlib.import_module("deepspeed")


def version(strategy: Strategy) -> dict[str, str]:
    return {} if strategy.zero is None else {"deepspeed": importlib.metadata.version("deepspeed")}


@contextlib.contextmanager
def set_in_environment(values: Mapping[str, object]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def resolved(strategy: Strategy, model: Any) -> Strategy:
    if strategy.zero is None:
        return strategy
    return replace(
        strategy, zero=filled(strategy.zero, versions.text_config(model.config).hidden_size)
    )


@contextlib.contextmanager
def engaged(recorder: Any, strategy: Strategy) -> Iterator[None]:
    """What a launcher and a GPU would say to DeepSpeed; its modules keep groups and settings, which
    are as before afterwards."""
    if strategy.zero is None:
        yield
        return
    import deepspeed
    from deepspeed.accelerator import cuda_accelerator, real_accelerator
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import groups

    told = {
        "RANK": strategy.rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": strategy.ranks,
        "LOCAL_SIZE": strategy.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    kept: list[tuple[Any, dict[str, Any]]] = []
    before, level = (real_accelerator.ds_accelerator, comm.cdb), deepspeed.utils.logger.level
    real_accelerator.ds_accelerator = cuda_accelerator.CUDA_Accelerator()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    try:
        with (
            set_in_environment(told),
            cuda.patched([*answers(recorder), *disk.answers(recorder)]),
            ulysses.left_alone(strategy) as more,
        ):
            kept += [
                (one, dict(vars(one)))
                for one in (groups, partition_parameters.Init, partition_parameters, *more)
            ]
            comm.cdb = comm.TorchBackend("nccl", comm.default_pg_timeout, None)
            yield
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
        real_accelerator.ds_accelerator, comm.cdb = before
        deepspeed.utils.logger.setLevel(level)
        for owner, attributes in kept:
            for name, value in attributes.items():
                if not name.startswith("__") and vars(owner)[name] is not value:
                    setattr(owner, name, value)


def answers(recorder: Any) -> list[tuple[Any, str, Any]]:
    """(owner, name, value): what it asks a GPU for, and other ranks; `linear` is what it puts its
    own in place of."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3
    from torch.utils._python_dispatch import _disable_current_modes

    true_zeros = torch.zeros_like

    def zeros_like(*args: Any, **given: Any) -> torch.Tensor:
        if given.get("device") != "meta":
            return true_zeros(*args, **given)
        with _disable_current_modes():  # shapes alone
            return true_zeros(*args, **given)

    def free(*_: Any) -> int:
        live = sum(one.size for one in recorder.blocks.values() if one.alive)
        return recorder.device.memory - live

    quantizer, gather = partition_parameters.CUDAQuantizer, partition_parameters._dist_allgather_fn
    quiet: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    found: list[tuple[Any, str, Any]] = [
        (torch.nn.functional, "linear", torch.nn.functional.linear),
        (torch, "zeros_like", zeros_like),
        (torch.cuda, "empty_cache", lambda: recorder.events.append(Trim())),
        (torch.cuda, "synchronize", lambda *_: recorder.caught_up()),
        (torch.cuda.Stream, "synchronize", lambda self: recorder.caught_up()),
        (
            torch.cuda.Event,
            "query",
            lambda self: False,
        ),  # the program is ahead of the GPU, as far as it lets itself be
        (torch.Tensor, "pin_memory", lambda self, *_: self),
        (torch.Tensor, "is_pinned", lambda self, *_: False),
        (
            partition_parameters,
            "_dist_allgather_fn",
            lambda *given, **named: Work(gather(*given, **named)),
        ),
        (quantizer, "quantizer_cuda_module", Quantizer()),
        (quantizer, "group_size_cache", {}),
        (CUDA_Accelerator, "range_push", quiet),
        (CUDA_Accelerator, "range_pop", quiet),
        (CUDA_Accelerator, "available_memory", free),
        (CUDA_Accelerator, "ByteTensor", maker(torch.uint8)),
        (CUDA_Accelerator, "FloatTensor", maker(torch.float32)),
    ]
    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
            found += [(module, name, quiet)] if hasattr(module, name) else []
    return found


class Work:
    """A collective on its way: what is sent is held until somebody waits for it (torch 2.13
    ProcessGroupNCCL.cpp WorkNCCL::unstash)."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()


class Quantizer:
    """ZeRO++'s kernels (deepspeed 0.19.8 ops/csrc/quantization/pt_binding.cpp): a byte a value and
    an fp32 scale a group, and fp16 again."""

    Symmetric = 0

    def quantize(
        self, values: torch.Tensor, groups: int, bits: int, kind: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return made(values.shape, torch.int8), made((groups, 1), torch.float32)

    def dequantize(
        self, codes: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int
    ) -> torch.Tensor:
        return made(codes.shape, torch.float16)


def made(shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten.empty.memory_format(shape, dtype=kind, device="cuda")
    return found


def maker(kind: torch.dtype) -> property:
    """A type of tensors of old: `FloatTensor([1.0])` is on the GPU."""
    return property(lambda self: lambda values: torch.tensor(values, dtype=kind).to("cuda"))


# -------------------------------------------------------------------------------------- the engine
def brought(
    recorder: Recorder, model: Any, job: Job, strategy: Strategy, finish: Callable[[Any, str], Any]
) -> Any:
    """The model as it is handed to DeepSpeed: on the host, or in parts if the third stage was known
    of before it was made. What is packed is packed on the GPU. `finish` makes of it what trains."""
    zero = strategy.zero
    assert zero is not None
    assert isinstance(recorder, Rank)
    recorder.mark("load")
    recorder.names = {id(module): name for name, module in model.named_modules()}
    if job.quantization != "none":
        steps.arrivals(recorder, model)
        return finish(model, recorder.device.type)
    for tensor in (*model.parameters(), *model.buffers()):
        recorder.apart(tensor)
    if zero.stage == 3:
        from deepspeed.runtime.zero import Init

        half = DTYPES[half_of(job)]
        for tensor in model.parameters() if half is not None else ():
            tensor.data = tensor.data.to(half)
        Init(module=model, config_dict_or_path=settings(job, zero))
        # Of a model made under `Init`, which makes tensors on the GPU and shards parameters alone
        for name, buffer in model.named_buffers():
            recorder.arrive(buffer, "buffers", name.rpartition(".")[0])
    return finish(model, recorder.device.type if zero.stage == 3 else "cpu")


def train(recorder: Recorder, model: Any, job: Job, options: Any, plan: inputs.Plan) -> None:
    """Forward, backward and step by the engine, as accelerate calls it."""
    steps.begin(model, job)
    paths = steps.paths_of(model)
    around = activation_offload.stood(recorder, model, job)
    engine = engine_of(recorder, model, job, options)
    forward = trl.called(engine, job, plan.kind)
    micro = steps.Micro(plan=plan, options=options, forward=forward, backward=engine.backward)
    recorder.optimizer, recorder.loop = engine, micro.kept
    count = (
        max(options.steps, 3) if options.strategy.zero.stage == 3 else options.steps
    )  # it learns in the first, then gathers ahead
    for step, now in steps.jobs(job, count).items():
        for last in steps.parts(job):
            with around():
                steps.micro_step(recorder, model, now, micro, step)
                if last:
                    recorder.mark("step")
                engine.step()
        states(recorder, engine, paths)
    if job.evaluate:
        steps.evaluate(recorder, model, forward, job, plan, options.spread)


def engine_of(recorder: Recorder, model: Any, job: Job, options: Any) -> Any:
    import deepspeed

    recorder.mark("prepare")
    stepper = grouped(
        options.optimizer(
            model, job.replace(precision="bf16") if job.precision == "bf16-master" else job
        )
    )
    beside = ulysses.registered(recorder, model, job, options.strategy)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=stepper, config=settings(job, options.strategy.zero), **beside
    )
    for name, part in KEEPS:
        settled(recorder, part, tensors_of([getattr(engine.optimizer, name, None)]))
    for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
        settled(recorder, "communication", tensors_of([getattr(bucket, "buffer", None)]))
    states(recorder, engine, steps.paths_of(model))
    return engine


def states(recorder: Recorder, engine: Any, paths: Any) -> None:
    steps.states(recorder, engine.optimizer.optimizer, paths)


def settled(recorder: Recorder, part: Part, tensors: Iterable[torch.Tensor]) -> None:
    for one in tensors:
        block = recorder.owned(one)
        if block is not None:
            block.part = part


def grouped(stepper: Any) -> Any:
    """The Trainer's two groups, with weight decay and without: norms and biases, which have one
    dimension (transformers 5.23 trainer.py get_decay_parameter_names)."""
    split = [
        {**group, "params": some}
        for wide in (True, False)
        for group in stepper.param_groups
        if (some := [one for one in group["params"] if (len(shape_of(one)) > 1) is wide])
    ]
    stepper.param_groups[:] = split
    return stepper


def shape_of(parameter: Any) -> Any:
    """Of a parameter that is cut, the whole one's."""
    return getattr(parameter, "ds_shape", parameter.shape)


__all__ = [
    "Parked",
    "Rank",
    "brought",
    "engaged",
    "load",
    "refusals",
    "resolved",
    "settings",
    "train",
    "version",
]
