"""llama.cpp: what llama-server's start-up log will say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.hardware import context
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.gguf import read_file
from memfit.serving.base import Device, Option, Question, Subject
from memfit.serving.llamacpp import rows
from memfit.serving.llamacpp.fit import (
    Fitted,
    fitted,
    longest_context,
    most_slots,
    remedy,
)
from memfit.serving.llamacpp.loading import from_config, from_file
from memfit.serving.llamacpp.log import log_lines
from memfit.serving.llamacpp.memory import Buffers, buffers
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.named import of_file, subject
from memfit.serving.llamacpp.options import OPTIONS, REFUSED, SILENT
from memfit.serving.llamacpp.placement import BACKENDS, HOST, Backend, Machine
from memfit.serving.llamacpp.settings import FLASH_AUTO, FOUR_SLOTS, Settings
from memfit.serving.llamacpp.versions import build_number
from memfit.serving.result import Pool, ServingAnswer
from memfit.units import MIB

DEFAULT_QUANT = "Q4_K_M"  # what `-hf` looks for where no quantization is named (common/arg.cpp)
CITE = "llama.cpp b11549"


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
    asked: frozenset[str]  # options that the user set: `--fit` leaves them alone
    margin: int = 1024 * MIB
    fit: bool = True
    tower: int = 0  # bytes of a vision tower, on the first GPU
    questions: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()


class LlamaCpp:
    """The engine as the registry knows it."""

    name = "llamacpp"
    title = "llama.cpp"
    options: tuple[Option, ...] = OPTIONS + SILENT + REFUSED
    needs_memory = False

    def read(self, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """`llama-server -m FILE …`: the model and the flags."""
        return read_command(words)

    def row_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a published row."""
        return rows.row_options(row)

    def row_figures(self, figures: Mapping[str, Any]) -> dict[str, float]:
        return rows.row_figures(figures)

    def row_subject(self, name: str, options: Mapping[str, Any]) -> Subject | None:
        return rows.row_subject(name, options)

    def subject(self, spec: str, offline: bool = False) -> Subject | None:
        """GGUF files, and names with a quantization; None for everything else."""
        return subject(spec, offline)

    def answer(self, question: Question) -> ServingAnswer:
        build = int(question.options.get("build") or build_number(question.version))
        return answered(set_up(question, self.name, self.title, build))


def read_command(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The model of a command line, and its flags; a bare `-fa` means on, several `-ot` are one, and
    a file of a repository names its quantization."""
    rest = [word for word in words if not _program(word)]
    flags: list[str] = []
    named, file, overrides = "", "", []
    at = 0
    while at < len(rest):
        word = rest[at]
        at += 1
        flag, equals, value = word.partition("=")
        following = rest[at] if at < len(rest) else ""
        if flag in ("-m", "--model", "-hf", "-hfr", "--hf-repo") and (equals or following):
            named = value if equals else following
            at += not equals
        elif flag in ("-hff", "--hf-file") and (equals or following):
            file = value if equals else following
            at += not equals
        elif flag in ("-fa", "--flash-attn") and following not in ("on", "off", "auto", "1", "0"):
            flags += ["-fa", value or "on"]
        elif flag in ("-fa", "--flash-attn"):
            flags += ["-fa", {"1": "on", "0": "off"}.get(following, following)]
            at += 1
        elif flag in ("-ot", "--override-tensor") and not equals:
            overrides.append(following)
            at += 1
        else:
            flags.append(word)
    if overrides:
        flags += ["-ot", ",".join(overrides)]
    return of_file(named, file) if named and file else named, tuple(flags)


def _program(word: str) -> bool:
    name = word.rpartition("/")[2].removesuffix(".exe")
    return name in ("llama-server", "llama-cli", "llama-bench", "llama-run", "server", "main")


# ------------------------------------------------------------------ setting up


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
    quant = quant or named or DEFAULT_QUANT
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
        asked=frozenset(options),
        margin=int(options.get("margin", 1024)) * MIB,
        fit=options.get("fit", "on") == "on",
        tower=tower_bytes(str(options.get("mmproj", ""))),
        questions=frozenset(one for one in QUESTIONS if options.get(one)),
        problems=tuple(remarks),
    )


QUESTIONS = ("longest_context", "most_slots")


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


def noted(model: GgufModel, settings: Settings, options: Mapping[str, Any]) -> list[Problem]:
    """What does not stop llama.cpp but is worth saying."""
    found = []
    trained = model.number("context_length")
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


# ------------------------------------------------------------------ answering


def answered(run: Run) -> ServingAnswer:
    """The buffers, what fills each device, and the settings that work where these do not."""
    found: Fitted | None = None
    if run.tower and run.machine.free:
        left = (max(1, run.machine.free[0] - run.tower), *run.machine.free[1:])
        run = replace(run, machine=replace(run.machine, free=left))
    known = bool(run.devices) and all(one.total for one in run.devices)
    usable = min((room_in_all(one) for one in run.devices), default=0) if known else None
    if known and run.fit:
        found = fitted(run.model, run.settings, run.machine, run.asked, run.margin)
        run = replace(run, settings=found.settings)
    held = found.buffers if found is not None else buffers(run.model, run.settings, run.machine)
    failure, works = "", ""
    if known:
        failure = shortage(run, held)
        if failure:
            works = remedy(run.model, run.settings, run.machine)
    answers = inverse(run) if known else {}
    return ServingAnswer(
        engine=run.engine,
        title=run.title,
        version=run.version,
        model=run.model.name if run.quant == "as stored" else f"{run.model.name} {run.quant}",
        origin=run.origin,
        parameters=run.model.parameters,
        gpu=run.devices[0].name if run.devices else "",
        gpus=max(1, len(run.devices)),
        usable=usable,
        pools=pools(run, held),
        figures={**figures(run, held), **answers},
        log=log_lines(run.model, run.settings, run.machine, held),
        command=command(run),
        failure=failure,
        remedy=works,
        problems=(*run.problems, *map(note, answers.items())),
    )


TITLES = {
    "longest_context": "the longest context that fits: {:,} tokens over all slots",
    "most_slots": "slots of this context that fit: {:,}",
}


def note(answer: tuple[str, float]) -> Problem:
    return Problem(level="note", message=TITLES[answer[0]].format(int(answer[1])), where="")


def inverse(run: Run) -> dict[str, float]:
    """The longest context, and the most slots of this context, that fit."""
    found: dict[str, float] = {}
    if "longest_context" in run.questions:
        trained = run.model.number("context_length")
        found["longest_context"] = longest_context(
            run.model, run.settings, run.machine, most=max(trained, run.settings.context)
        )
    if "most_slots" in run.questions:
        found["most_slots"] = most_slots(run.model, run.settings, run.machine)
    return found


def room_in_all(device: Device) -> int:
    return device.total if device.free is None else device.free


def shortage(run: Run, held: Buffers) -> str:
    """The error that llama.cpp raises, or nothing."""
    for index, name in enumerate(run.machine.devices):
        need, free = held.on(name), run.machine.free[index]
        if need > free:
            return (
                f"{name}: out of memory, {need / MIB:,.0f} MiB of buffers and "
                f"{free / MIB:,.0f} MiB free"
            )
    return ""


def pools(run: Run, held: Buffers) -> tuple[Pool, ...]:
    """By purpose, each device apart."""
    made: list[Pool] = []
    for index, name in enumerate((*run.machine.devices, HOST)):
        where = "cpu" if name == HOST else "gpu" if index == 0 else f"gpu{index}"
        if name != HOST and index < len(run.devices) and run.devices[index].gpu is not None:
            gpu = run.devices[index].gpu
            assert gpu is not None
            span = context(gpu)
            if span.low:
                made.append(Pool(name="context", bytes=span.low, where=where, cite=span.cite))
        for title, part, cite in (
            ("model", held.model, "src/llama-model.cpp load_tensors"),
            ("KV cache", held.kv, "src/llama-kv-cache.cpp"),
            ("KV cache, windows", held.kv_window, "src/llama-kv-cache-iswa.cpp"),
            ("recurrent state", held.state, "src/llama-memory-recurrent.cpp"),
            ("compute", held.compute, "ggml/src/ggml-alloc.c, src/llama-graph.cpp"),
        ):
            if part.get(name):
                made.append(Pool(name=title, bytes=part[name], where=where, cite=f"{cite}, {CITE}"))
        if run.tower and where == "gpu":
            made.append(Pool(name="vision tower", bytes=run.tower, where=where))
        if name == HOST and held.output:
            made.append(Pool(name="output", bytes=held.output, where=where))
    return tuple(made)


def figures(run: Run, held: Buffers) -> dict[str, float]:
    """The sums over the GPUs, and the host's part, in MiB as the log prints them."""
    gpus = run.machine.devices

    def total(part: Mapping[str, int]) -> float:
        return sum(part.get(name, 0) for name in gpus) / MIB

    kv = {name: held.kv.get(name, 0) + held.kv_window.get(name, 0) for name in (*gpus, HOST)}
    sizes = {
        "model_mib": total(held.model),
        "kv_mib": total(kv),
        "rs_mib": total(held.state),
        "compute_mib": total(held.compute),
        "device_mib": sum(held.on(name) for name in gpus) / MIB,
        "host_model_mib": held.model.get(HOST, 0) / MIB,
        "host_kv_mib": kv[HOST] / MIB,
        "host_compute_mib": held.compute.get(HOST, 0) / MIB,
        "output_mib": held.output / MIB,
    }
    settings = {"context": run.settings.context, "slots": run.settings.parallel}
    return {**rows.in_gib(sizes), **settings}


def command(run: Run) -> str:
    """The command that gives these buffers, ready to copy."""
    settings = run.settings
    name = run.model.origin if run.quant == "as stored" else f"{run.model.name}-{run.quant}.gguf"
    words = ["llama-server", "-m", name.rpartition("/")[2] or name]
    layers = run.model.number("block_count") + 1
    words += ["-ngl", str(min(settings.gpu_layers, layers))]
    if settings.cpu_moe:
        words += ["--n-cpu-moe", str(min(settings.cpu_moe, layers - 1))]
    words += ["-c", str(settings.context), "-np", str(settings.parallel)]
    words += ["--kv-unified"] * (settings.unified and settings.parallel > 1)
    if (settings.batch, settings.ubatch) != (2048, 512):
        words += ["-b", str(settings.batch), "-ub", str(settings.ubatch)]
    if (settings.cache_k, settings.cache_v) != ("f16", "f16"):
        words += ["-ctk", settings.cache_k, "-ctv", settings.cache_v]
    words += ["-fa", "on" if settings.flash else "off"]
    return " ".join(words)
