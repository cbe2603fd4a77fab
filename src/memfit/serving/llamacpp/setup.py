"""One run of llama.cpp: its model, its devices and its settings, from the options of a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.hardware import context
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.gguf import read_file
from memfit.serving.base import Device, Question, Subject
from memfit.serving.llamacpp.caches import recurrent
from memfit.serving.llamacpp.drafts import ONE_CONTEXT, Draft
from memfit.serving.llamacpp.loading import from_config, from_file
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.options import OPTIONS
from memfit.serving.llamacpp.placement import BACKENDS, Backend, Machine
from memfit.serving.llamacpp.quantize import usual
from memfit.serving.llamacpp.recipes import RECIPES
from memfit.serving.llamacpp.settings import FLASH_AUTO, FOUR_SLOTS, Settings
from memfit.units import MIB

QUESTIONS = ("longest_context", "most_slots")
# Options that a printed command repeats as they were given.
REPEATED = (
    "devices",
    "split_mode",
    "split",
    "overrides",
    "mmproj",
    "no_kv_offload",
    "no_op_offload",
    "no_mmap",
    "swa_full",
    "embedding",
    "draft",
    "draft_layers",
    "draft_context",
    "draft_cache_k",
    "draft_cache_v",
    "draft_device",
    "drafted",
    "spec_type",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One question in llama.cpp's terms."""

    engine: str
    title: str
    version: str
    model: GgufModel
    quant: str
    origin: str
    settings: Settings
    machine: Machine
    devices: tuple[Device, ...]
    placed: tuple[str, ...]  # flags of the placement, as the printed command repeats them
    asked: frozenset[str]  # options that the user set: `--fit` leaves them alone
    margin: int = 1024 * MIB
    fit: bool = True
    tower: int = 0  # bytes of a vision tower, on the first GPU
    host_bandwidth: float = 0.0  # bytes per second that the CPU reads; 0: assumed
    questions: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()


def loaded(subject: Subject, quant: str) -> tuple[GgufModel, str]:
    """The model with its types, and the name of its quantization."""
    stored = subject.config.get("gguf")
    if isinstance(stored, GgufModel):
        if quant:
            raise InputError.one(
                "a GGUF file has its own types, so `--quant` has no use",
                where="quant",
                hint="omit it, or name the model instead of the file",
            )
        return stored, "as stored"
    tensors = subject.source.tensors if subject.source is not None else None
    if tensors is not None and subject.source is not None:
        method = subject.config.get("quantization_config") or {}
        if isinstance(method, Mapping) and method.get("quant_method") == "gguf":
            model = from_file(Path(subject.source.origin))
            return model, "as stored"
    named = str(subject.config.get("gguf_quantization") or "")
    quant = quant or named or usual(subject.config)
    return from_config(subject.config, subject.name, quant), quant


def set_up(question: Question, engine: str, title: str, build: int) -> Run:
    options = question.options
    model, quant = loaded(question.subject, str(options.get("quant", "")))
    problems: list[Problem] = []
    devices = question.devices
    mode = str(options.get("split_mode", "layer"))
    if mode in ("row", "tensor"):
        problems.append(
            Problem(
                message=f"`-sm {mode}` is not supported yet", where="-sm", hint="use `-sm layer`"
            )
        )
    if mode == "none":
        devices = devices[:1]
    backend, devices = chosen(devices, options, problems)
    machine = machine_of(devices, backend, problems)
    settings = settings_of(model, options, build, problems)
    kind = str(options.get("spec_type", ""))
    if kind not in ("", "none", DRAFTS):
        message = f"`--spec-type` is not supported yet: {kind[:40]}"
        problems.append(Problem(message=message, where="--spec-type"))
    if question.draft is not None:
        settings = with_draft(question.draft, settings, model, machine, options, problems)
    if encodes(model) and "parallel" not in options:
        settings = replace(settings, **SINGLE)
    raise_errors(problems)
    remarks = list(noted(model, settings, options))
    return Run(
        engine=engine,
        title=title,
        version=question.version or f"b{build}",
        model=model,
        quant=quant,
        origin=question.subject.origin,
        settings=settings,
        machine=machine,
        devices=devices,
        placed=placement_flags(options),
        asked=frozenset(options),
        margin=int(options.get("margin", 1024)) * MIB,
        fit=options.get("fit", "on") == "on",
        tower=tower_bytes(str(options.get("mmproj", ""))),
        host_bandwidth=1e9 * float(options.get("host_bandwidth", 0.0)),
        questions=frozenset(one for one in QUESTIONS if options.get(one)),
        problems=tuple(remarks),
    )


def with_draft(
    subject: Subject,
    settings: Settings,
    model: GgufModel,
    machine: Machine,
    options: Mapping[str, Any],
    problems: list[Problem],
) -> Settings:
    """The settings with a draft model beside the model (`-md`)."""
    if any(recurrent(model, layer) for layer in range(model.layers)):
        message = "a draft beside a model with recurrent states is not supported yet"
        problems.append(Problem(message=message, where="-md"))
    device = str(options.get("draft_device", ""))
    if device and device not in machine.devices:
        message = f"`-devd {device[:40]}` must be one of {', '.join(machine.devices) or 'no GPU'}"
        problems.append(Problem(message=message, where="-devd"))
    draft = Draft(
        model=loaded(subject, "")[0],
        gpu_layers=_layers(options.get("draft_layers"), problems),
        cache_k=str(options.get("draft_cache_k", "f16")),
        cache_v=str(options.get("draft_cache_v", "f16")),
        context=int(options.get("draft_context", 0)),
        device=machine.devices.index(device) if device in machine.devices else -1,
    )
    slots = {} if "parallel" in options or settings.build >= ONE_CONTEXT else SINGLE
    drafted = int(options.get("drafted", 3)) if options.get("spec_type") == DRAFTS else 0
    return replace(settings, draft=draft, drafted=drafted, **slots)


DRAFTS = "draft-simple"
# One slot unless asked for more, while each has a draft context (pull request 17017).
SINGLE: Mapping[str, Any] = {"parallel": 1, "unified": False}


def placement_flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of the options that say where everything lies."""
    found: list[str] = []
    for option in OPTIONS:
        value = options.get(option.name)
        if option.name in REPEATED and value:
            hub = option.name == "draft" and not str(value).endswith(".gguf")
            flag = "-hfd" if hub else option.flags[0]
            found += [flag] if option.kind == "flag" else [flag, str(value)]
    return tuple(found)


def tower_bytes(path: str) -> int:
    """Weights of a vision tower's file (`--mmproj`), which go to the first GPU."""
    if not path:
        return 0
    file = read_file(Path(path).expanduser())
    if file.metadata.get("general.architecture") != "clip":
        raise InputError.one(
            f"`{file.where}` is no vision tower", where="--mmproj", hint="its name has `mmproj`"
        )
    return sum(tensor.bytes for tensor in file.tensors)


def chosen(
    devices: tuple[Device, ...], options: Mapping[str, Any], problems: list[Problem]
) -> tuple[str, tuple[Device, ...]]:
    """The backend, and the GPUs that `--device` leaves, all of them alike; without any the CPU runs
    everything."""
    backend = str(options.get("backend", ""))
    names = [one for one in str(options.get("devices", "")).split(",") if one]
    if names == ["none"]:
        return "cpu", devices
    if len(names) > max(1, len(devices)):
        message = f"`--device` names {len(names)} GPUs, {max(1, len(devices))} are there"
        hint = f"`--gpu {len(names)}xNAME` where they are alike"
        problems.append(Problem(message=message, where="--device", hint=hint))
    elif 0 < len(names) < len(devices):
        return backend, devices[: len(names)]
    return backend, devices


def machine_of(devices: tuple[Device, ...], backend: str, problems: list[Problem]) -> Machine:
    """The backend of the GPUs; without a GPU the sizes are those of CUDA on one."""
    if not backend:
        vendor = devices[0].gpu.vendor if devices and devices[0].gpu is not None else "nvidia"
        backend = {"apple": "metal", "amd": "rocm", "intel": "vulkan"}.get(vendor, "cuda")
    found: Backend = BACKENDS[backend]
    if backend == "cpu":
        return Machine(backend=found)
    return Machine(backend=found, free=tuple(room(one) for one in devices) or (1,))


def room(device: Device) -> int:
    """Bytes that are free for llama.cpp before it starts."""
    before = context(device.gpu).low if device.gpu is not None else 0
    free = device.total if device.free is None else device.free
    return max(1, free - before)


def settings_of(
    model: GgufModel, options: Mapping[str, Any], build: int, problems: list[Problem]
) -> Settings:
    four = build >= FOUR_SLOTS
    parallel = int(options.get("parallel", -1))
    slots_given = parallel > 0
    trained = model.number("context_length", 4096)
    layers = _layers(options.get("gpu_layers"), problems)
    batch = int(options.get("batch", 2048))
    return Settings(
        context=int(options.get("context") or trained),
        parallel=parallel if slots_given else 4 if four else 1,
        unified=bool(options.get("unified", four and not slots_given)),
        batch=batch,
        ubatch=min(batch, int(options.get("ubatch", 512))),
        cache_k=str(options.get("cache_k", "f16")),
        cache_v=str(options.get("cache_v", "f16")),
        flash=str(options.get("flash", "auto" if build >= FLASH_AUTO else "off")) != "off",
        gpu_layers=layers,
        cpu_moe=10**6 if options.get("cpu_moe") else int(options.get("cpu_moe_layers", 0)),
        overrides=_overrides(str(options.get("overrides", "")), problems),
        split=_shares(str(options.get("split", "")), problems),
        swa_full=bool(options.get("swa_full")),
        kv_offload=not options.get("no_kv_offload"),
        op_offload=not options.get("no_op_offload"),
        mmap=not options.get("no_mmap"),
        embedding=bool(options.get("embedding")),
        all_outputs=bool(options.get("all_outputs")),
        build=build,
    )


def _layers(text: Any, problems: list[Problem]) -> int:
    if text in (None, "auto", "all", "-1"):
        return 10**6
    try:
        count = int(str(text))
    except ValueError:
        count = -2
    if count < 0:
        problems.append(
            Problem(message=f"`-ngl {text}` must be an integer, `auto` or `all`", where="-ngl")
        )
        return 0
    return count


def _overrides(text: str, problems: list[Problem]) -> tuple[tuple[str, str], ...]:
    """`PATTERN=BUFFER`, several apart by commas."""
    import re

    found = []
    for part in filter(None, text.split(",")):
        pattern, equals, place = part.rpartition("=")
        try:
            re.compile(pattern)
        except re.error:
            equals = ""
        if not equals or not pattern or not place or len(pattern) > 200:
            problems.append(
                Problem(
                    message=f"`-ot {part[:60]}` must be PATTERN=BUFFER",
                    where="-ot",
                    hint="like `-ot exps=CPU`",
                )
            )
            continue
        found.append((pattern, place))
    return tuple(found)


def _shares(text: str, problems: list[Problem]) -> tuple[float, ...]:
    try:
        shares = tuple(float(one) for one in text.replace("/", ",").split(",") if one)
    except ValueError:
        shares = (-1.0,)
    if any(not 0 <= one < 1e9 for one in shares) or (shares and not any(shares)):
        problems.append(Problem(message=f"`-ts {text[:40]}` must be shares like 3,1", where="-ts"))
        return ()
    return shares


def encodes(model: GgufModel) -> bool:
    """Whether an encoder reads the prompt; tools/server of b11549 fails an assertion then
    ("llama_encode must be called first")."""
    return RECIPES[model.arch].layers == "encoder_decoder"


def noted(model: GgufModel, settings: Settings, options: Mapping[str, Any]) -> list[Problem]:
    """What does not stop llama.cpp but is worth saying."""
    found = []
    trained = model.number("context_length")
    if encodes(model):
        message = f"`llama-server` stops with `{model.arch}`: it does not run the encoder"
        hint = "`llama-completion` does; these are its buffers"
        found.append(Problem(level="warning", message=message, where="model", hint=hint))
    per_slot = settings.context if settings.unified else settings.context // settings.parallel
    if trained and per_slot > trained:
        found.append(
            Problem(
                level="warning",
                message=(
                    f"{per_slot:,} tokens are more than the {trained:,} that the model was trained "
                    "for"
                ),
                where="-c",
                hint="longer contexts need `--rope-scaling yarn` and cost quality",
            )
        )
    if settings.cache_v not in ("f16", "f32", "bf16") and not settings.flash:
        raise InputError.one(
            "a quantized V cache needs flash attention",
            where="-ctv",
            hint="use `-fa on`, or `-ctv f16`",
        )
    return found
