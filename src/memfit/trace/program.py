"""Build the real model, optimizer and loop of a Job, and run them under a Recorder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from memfit.errors import InputError, Problem, raise_errors
from memfit.job import Job
from memfit.libraries.trl import check as own_heads
from memfit.model.equivalents import converted
from memfit.parallel.ddp import settings as ddp_settings
from memfit.parallel.fsdp2.check import resolved
from memfit.strategy import ONE, Strategy
from memfit.tape import Tape
from memfit.techniques import activation_offload as offload_check
from memfit.trace import (
    activation_offload,
    autocast,
    classes,
    cuda,
    experts,
    failures,
    flash_attn,
    hub_kernels,
    inputs,
    kernels_of,
    label,
    liger,
    masks,
    older,
    packed_weights,
    prepare,
    quanto,
    ranks,
    runtime,
    serve,
    sides,
    stages,
    standins,
    steps,
    stored,
    trl,
    versions,
    zero,
)
from memfit.trace.optimizers import optimizer_of
from memfit.trace.paths import plain
from memfit.trace.recorder import Recorder
from memfit.trace.rules import References, learn
from memfit.trace.spread import UNSPREAD, Spread

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "autocast-bf16": torch.float32,
    "autocast-fp16": torch.float32,
    "bf16-autocast": torch.bfloat16,
    "fp16-autocast": torch.float16,
    "bf16-master": torch.bfloat16,
}

ATTENTION = {
    "sdpa": None,
    "flash": "sdpa",
    "efficient": "sdpa",
    "math": "sdpa",
    "cudnn": "sdpa",
    "eager": "eager",
    "flash-attn-2": "flash_attention_2",
    "flash-attn-3": "flash_attention_3",
}  # None: what the class takes by default


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a trace needs beside the Job. `keep_outputs`: the loop holds the model's outputs through
    backward, as hand-written ones do. `decode_all`: every token of an answer is generated, not only
    the first and the last ones. `watch` is shown the recorder. `sends`: on a CPU, collectives are
    gloo's; no: of a group that sends nothing."""

    layers: int | None = None
    steps: int = 2
    keep_outputs: bool = False
    decode_all: bool = False
    gpu: Any = None
    device: str = "cuda"
    watch: Any = None
    strategy: Strategy = ONE
    spread: Spread = UNSPREAD
    sends: bool = True
    optimizer: Callable[[Any, Job], Any] = optimizer_of
    recorder: type[Recorder] | None = None  # one that writes down more
    perform: Callable[..., None] | None = None  # in place of the job's own loop


def replicated(strategy: Strategy, job: Job, model: Any) -> Strategy:
    """What DDP's and DeepSpeed's settings become with this model."""
    tower = hasattr(model.config, "vision_config")
    return ddp_settings.resolved(zero.resolved(strategy, model), job, tower=tower)


def run(config: Mapping[str, Any], job: Job, options: Options) -> Tape:
    """Trace `job` on the model of `config`."""
    import transformers

    if job.training and importlib.util.find_spec("peft") is not None:
        importlib.import_module(
            "peft"
        )  # it imports bitsandbytes, if that is there, which must still see the true machine
    job, options = checked(config, job, options)
    device = device_of(options)
    if not References.known[0]:
        learn(Recorder(device))
    kernels_of.install(device)
    masks.install()
    with quiet(), flash_attn.installed(job.attention):
        with failing():
            kind, model = built(config, job, options)
        options = dataclasses.replace(options, strategy=replicated(options.strategy, job, model))
        recorder = (options.recorder or recorder_of(options.strategy, job))(device, job.router_skew)
        recorder.sends = options.sends
        if options.watch is not None:
            options.watch(recorder)
        packed = stored.kept(
            config, job, None if device.type == "cpu" else getattr(options.gpu, "sm", None)
        )
        generators = cuda.patched([(torch, "Generator", runtime.generator_type())])
        with (
            generators,
            quanto.installed(not job.training and job.cache == "quantized"),
            cuda.pretended(device),
            autocast.emulated(device.type),
            kernels_of.forced(job.attention),
            hub_kernels.installed(),
            older.counted(),
            trl.without_kernels(job),
            packed_weights.installed(packed),
            failing(SIGHTED if inputs.sees(model) and not job.images else ""),
        ):
            with Recorder(device):
                plan = inputs.plan(
                    model, kind, job, device.type
                )  # of the model before its weights are packed
                recorder.parameters = count(model.parameters(), recorder.elements), 0
                quantize(recorder, model, config, job, packed)
            grouped(recorder, model, job, options, plan)
        label.settle(recorder, versions.vocabulary(model.config))
    used = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **zero.version(options.strategy),
    }
    notes = (*plan.notes, *recorder.assumed.values())
    return Tape(
        events=recorder.finished(),
        source="trace",
        versions=used,
        notes=notes,
        parameters=recorder.parameters,
        rank=options.strategy.rank,
    )


def quantize(
    recorder: Recorder, model: Any, config: Mapping[str, Any], job: Job, packed: str
) -> None:
    """The weights as the job or the checkpoint stores them, and what is assumed about them."""
    if job.quantization != "none":
        prepare.quantized(model, job)
    if packed:
        packed_weights.pack(model, config, trains=job.training)
    if packed and packed not in ("fp8", "gptq", "awq"):
        recorder.assume(
            "stored",
            f"weights are counted as `{packed}` stores them, the rest as if transformers had "
            "kernels for them",
            "config.quantization_config",
            "serving engines use other buffers for such weights",
        )
    if without := prepare.left_out(model, job):
        names = ", ".join(f"`{one}`" for one in without)
        recorder.assume(
            "adapters",
            f"`all-linear` leaves out {names}, which PEFT does not adapt in this model",
            "job.targets",
            "the real run needs `exclude_modules` in its LoraConfig",
        )


def checked(config: Mapping[str, Any], job: Job, options: Options) -> tuple[Job, Options]:
    """The job and its layout as the libraries settle them, or all that a trace does not support."""
    job = trl.settled(job)
    of_layout = (
        *ranks.refusals(job, options.strategy),
        *offload_check.engines(job, options.strategy),
    )
    raise_errors(
        [*refusals(job), *stored.refusals(config, job, options.gpu, options.device), *of_layout]
    )
    with quiet():
        trl.load(job)
        zero.load(options.strategy)
    return job, dataclasses.replace(options, strategy=resolved(options.strategy, job))


def recorder_of(strategy: Strategy, job: Job) -> type[Recorder]:
    """One that knows the host beside the GPU, where an engine uses it."""
    if job.training and job.activation_offload != "none":
        return (
            zero.Parked
            if strategy.zero is not None
            else activation_offload.OfShards
            if strategy.offloads
            else activation_offload.Away
        )
    if strategy.zero is not None:
        return zero.Rank
    return sides.Offloaded if strategy.offloads else Recorder


def grouped(recorder: Recorder, model: Any, job: Job, options: Options, plan: inputs.Plan) -> None:
    """The run as one rank of its group."""
    device = recorder.device.type
    with (
        ranks.group(options.strategy, device) as mesh,
        ranks.followed(recorder, mesh),
        zero.engaged(recorder, options.strategy),
        activation_offload.engaged(recorder, job, followed=mesh is not None),
        liger.applied(model, job),
    ):
        apart = experts.mesh_of(options.strategy, device)
        recorder.imbalance, named = experts.named(options.strategy, apart)
        recorder.groups.update(named)
        spread = Spread(options.strategy, mesh, job.autocast, apart)
        options = dataclasses.replace(options, spread=spread)
        (options.perform or perform)(recorder, model, job, options, plan)


def perform(recorder: Recorder, model: Any, job: Job, options: Options, plan: inputs.Plan) -> None:
    """Load the model, make of it what trains, and run it."""
    total = recorder.parameters[0]
    late = not options.spread.cuts or (
        job.quantization != "none" and options.strategy.fsdp is None
    )  # packed as they arrive
    if options.spread.cuts:
        with Recorder(recorder.device):  # it is cut on the host: the GPU meets only what is left
            model = options.spread.split(model)
            for one in [
                one for one in model.modules() if isinstance(one, standins.Linear4bit) and not late
            ]:
                one.quantize(DTYPES[job.precision])  # `bnb_4bit_quant_storage`
            if not late:
                model = prepared(model, job, plan.kind, recorder.device.type)
            if options.strategy.fsdp is not None:
                activation_offload.stood(recorder, model, job)
            model = options.spread.cut(model)
    with module_stack(recorder), recorder:
        brought, run = ways_of(job, options.strategy)
        model = brought(
            recorder,
            model,
            job,
            options.strategy,
            lambda one, on: prepared(one, job, plan.kind, on) if late else one,
        )
        trained = (one for one in model.parameters() if one.requires_grad and job.training)
        recorder.parameters = total, count(trained, recorder.elements)
        paths = steps.paths_of(model)
        for one in steps.weights(model):
            steps.own(recorder, "weights", [one], paths.get(id(one), ""))
        recorder.names = {id(module): plain(name) for name, module in model.named_modules()}
        run(recorder, model, job, options, plan)


def ways_of(job: Job, strategy: Strategy) -> tuple[Callable[..., Any], Callable[..., None]]:
    """How the model comes to the GPU, and what is done with it there."""
    if not job.training:
        return steps.brought, serve.infer
    if strategy.zero is not None:
        return zero.brought, zero.train
    return steps.brought, steps.train if strategy.pp is None else stages.train


def prepared(model: Any, job: Job, kind: str, device: str) -> Any:
    """With what the job trains, and the head that does it; of a pipeline each stage, whose adapters
    stand in transformers' own model."""
    if isinstance(model, stages.Stages):
        for one in model.parts:
            prepared(one.whole, job, kind, device)
        return model
    if job.training and job.prepared:
        model = prepare.kbit(model, job)
    if job.training:
        model = trl.headed(prepare.trainable(model, job, device), job, kind)
    return model


def count(
    parameters: Iterable[torch.Tensor], elements: Callable[[torch.Tensor], int] = torch.Tensor.numel
) -> int:
    return sum(elements(one) for one in {id(one): one for one in parameters}.values())


def refusals(job: Job) -> Iterator[Problem]:
    """What the job asks for that the code run here is not, all at once."""
    if not job.hugging:
        message = f"a trace runs transformers' code, not `{job.framework}`"
        yield Problem(message=message, where="job.framework", hint="use `transformers` or `trl`")
    if job.precision not in DTYPES:
        yield Problem(
            message=f"a trace does not support precision `{job.precision}`",
            where="job.precision",
            hint="one of " + ", ".join(DTYPES),
        )
    if job.attention not in ATTENTION:
        yield Problem(
            message=f"a trace does not support attention `{job.attention}`",
            where="job.attention",
            hint="one of " + ", ".join(ATTENTION),
        )
    if job.training:
        yield from own_heads.refusals(job)
        yield from trl.missing(job)
    if (
        not job.training
        and job.cache == "quantized"
        and (job.cache_bits not in (2, 4) or job.beams > 1)
    ):
        message = "a trace supports a quantized cache of 2 or 4 bits, without beams"
        yield Problem(
            message=message,
            where="job.cache_bits" if job.cache_bits not in (2, 4) else "job.beams",
            hint="use `--cache dynamic`",
        )
    if not job.training and job.cache_tokens:
        yield Problem(
            message="not supported yet: a trace with a static cache of a stated size",
            where="job.cache_tokens",
            hint="remove `cache_tokens`, or ask the formulas",
        )
    for library in (
        "torch",
        "transformers",
        "peft",
        "accelerate",
        *(("trl",) if own_heads.head_of(job) != "plain" else ()),
    ):
        asked, installed = job.version(library), version_of(library)
        if (
            f"{library}=" in job.versions.replace(" ", "")
            and installed is not None
            and asked != installed
        ):
            message = (
                f"the trace would run the installed {library} {installed[0]}.{installed[1]}, "
                f"not {asked[0]}.{asked[1]}"
            )
            yield Problem(
                message=message,
                where="job.versions",
                hint="use `--python` with an environment that has it",
            )


@functools.cache
def version_of(library: str) -> tuple[int, int] | None:
    try:
        major, minor = importlib.metadata.version(library).split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def device_of(options: Options) -> cuda.Device:
    """The A100 unless a GPU is given (a `hardware.GPU`, or anything with name, sm, sms and
    memory)."""
    major, minor = (int(one) for one in torch.__version__.split(".")[:2])
    gpu = options.gpu
    if options.device == "cpu":
        return cuda.Device(type="cpu", name="CPU", version=(major, minor))
    if gpu is None:
        return cuda.Device(version=(major, minor))
    known = {
        name: getattr(gpu, name)
        for name in ("name", "sms", "memory")
        if getattr(gpu, name, None) is not None
    }
    if getattr(gpu, "sm", None) is not None:
        known["capability"] = gpu.sm
    return cuda.Device(version=(major, minor), **known)


def built(config: Mapping[str, Any], job: Job, options: Options) -> tuple[str, Any]:
    """The kind of model that `config` and `job` ask for, and the model on meta."""
    head, model = made(config, job, options.layers, torch.device("meta"))
    off_host(model)
    loaded(model, DTYPES[job.precision])
    return head, model


def made(
    config: Mapping[str, Any], job: Job, layers: int | None, device: torch.device
) -> tuple[str, Any]:
    """The class that transformers has for `config`, built on `device`."""
    wanted = configuration(config, layers)
    head, builder = classes.chosen(wanted, job.head)
    if job.labels:
        wanted.num_labels = job.labels
    if (
        head == "classification"
        and getattr(text := versions.text_config(wanted), "pad_token_id", None) is None
    ):
        text.pad_token_id = 0  # several sequences are refused without one
    try:
        with device:
            model = builder.from_config(
                wanted,
                attn_implementation=ATTENTION[job.attention],
                **{versions.DTYPE: DTYPES[job.precision]},
            )
    except ValueError as bad:
        raise InputError.one(
            str(bad).split(". ")[0][:300].rstrip("."), where="model.config"
        ) from None
    return head, model


def loaded(model: Any, kind: torch.dtype) -> None:
    """The dtypes that `from_pretrained` would leave."""
    if versions.TRANSFORMERS < (5, 0):
        narrow(model, kind)
    keep_wide(model, kind)


def off_host(model: Any) -> None:
    """Parameters that a class makes with values of its own (`torch.normal`) are real; like the
    others they become meta."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and not tensor.is_meta:
                made = moved.setdefault(
                    id(tensor),
                    torch.nn.Parameter(tensor.to("meta"), requires_grad=tensor.requires_grad),
                )
                module._parameters[name] = made
        for name, tensor in module._buffers.items():
            if tensor is not None and not tensor.is_meta and tensor.is_floating_point():
                module._buffers[name] = tensor.to("meta")


def narrow(model: Any, kind: torch.dtype) -> None:
    """Cast every parameter to the model's dtype, also those that the class creates in another one.
    `from_pretrained` does so before transformers 5; later it keeps the parameter's dtype (5.23
    core_model_loading.py convert_and_load_state_dict_in_model)."""
    for tensor in model.parameters():
        if tensor.is_floating_point() and tensor.dtype != kind:
            tensor.data = tensor.data.to(kind)


def keep_wide(model: Any, kind: torch.dtype) -> None:
    """What the class keeps in fp32 though the rest is loaded in 16 bits (`from_pretrained` does so,
    `from_config` does not)."""
    plan = model._get_dtype_plan(kind) if hasattr(model, "_get_dtype_plan") else {}
    patterns = [
        re.compile(r"(?:^|\.)" + ".*".join(map(re.escape, key.split("*"))) + r"(?:\.|$)")
        for key in plan
    ]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype == kind and any(one.search(name) for one in patterns):
            tensor.data = tensor.data.float()


def configuration(config: Mapping[str, Any], layers: int | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    config = converted(config)
    values = {
        key: value
        for key, value in config.items()
        if key
        not in ("transformers_version", "auto_map", "quantization_config", "dtype", "torch_dtype")
    }
    if layers is not None:
        names = [
            key
            for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
            if key in values
        ]
        for key in names or ["num_hidden_layers"]:
            values[key] = layers
        if isinstance(values.get("layer_types"), list):
            values["layer_types"] = values["layer_types"][:layers]
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise InputError.one("the configuration has no `model_type`", where="model.config")
    try:
        return AutoConfig.for_model(kind, **values)
    except rejections() as bad:
        known = kind in CONFIG_MAPPING
        message = (
            f"this transformers version rejects the configuration of `{kind[:60]}`"
            if known
            else f"transformers does not support the model type `{kind[:60]}`"
        )
        raise InputError(
            Problem(
                message=message,
                where="model.config" if known else "model.config.model_type",
                hint=" ".join(str(bad).split())[:200]
                if known
                else "`--like NAME` uses the formulas of another family",
            )
        ) from None


def rejections() -> tuple[type[Exception], ...]:
    """What transformers raises for a configuration that it does not take; since version 5 its
    configs are dataclasses that check their fields."""
    from huggingface_hub import errors

    strict = getattr(errors, "StrictDataclassError", None)
    return (ValueError,) if strict is None else (ValueError, strict)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers and torch warn about devices that are not there."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)


@contextlib.contextmanager
def module_stack(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module is running, also when it ends by an exception (early stop of
    recomputation)."""
    original = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.enter(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.leave()

    with cuda.patched([(torch.nn.Module, "__call__", call)]):
        yield


IMAGES = re.compile(r"image|pixel|vision|patch", re.IGNORECASE)
SIGHTED = "the model also supports images: add `--images 1`"


@contextlib.contextmanager
def failing(hint: str = "") -> Iterator[None]:
    """The program's own failures are bad input: the real run would end the same way. `hint` is for
    failures that speak of images."""
    try:
        yield
    except (InputError, KeyboardInterrupt, MemoryError):
        raise
    except ImportError as bad:
        message, hint = failures.lacking(bad, "the model's own code")
        raise InputError.one(message, where="model.config", hint=hint) from bad
    except Exception as bad:
        frames = [
            one
            for one in traceback.extract_tb(bad.__traceback__)
            if "memfit" not in one.filename and "/torch/" not in one.filename
        ]
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
        text = " ".join(str(bad).split())[:300]
        raise InputError.one(
            f"the model's code failed with {type(bad).__name__}: {text}".rstrip("."),
            where=place,
            hint=hint if IMAGES.search(f"{text} {place}") else "",
        ) from bad
