"""llama.cpp: what llama-server's start-up log will say."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.errors import Problem
from memfit.hardware import GPU, context
from memfit.serving.base import Device, Option, Question, Subject
from memfit.serving.llamacpp import rows
from memfit.serving.llamacpp.fit import (
    Fitted,
    fitted,
    longest_context,
    most_slots,
    remedy,
)
from memfit.serving.llamacpp.log import log_lines
from memfit.serving.llamacpp.memory import Buffers, buffers
from memfit.serving.llamacpp.named import of_file, subject
from memfit.serving.llamacpp.options import OPTIONS, REFUSED, SILENT
from memfit.serving.llamacpp.placement import HOST, place
from memfit.serving.llamacpp.prompts import LIKELY_PROMPTS, prompt_rate
from memfit.serving.llamacpp.recipes import RECIPES
from memfit.serving.llamacpp.setup import Run, encodes, set_up
from memfit.serving.llamacpp.speed import (
    HOST_READS,
    HOSTS_READ,
    LIKELY,
    Decoding,
    on_cpu,
    token_seconds,
)
from memfit.serving.llamacpp.versions import build_number
from memfit.serving.result import Offload, Pool, PromptSpeed, ServingAnswer, Speed
from memfit.units import MIB

CITE = "llama.cpp b11549"


class LlamaCpp:
    """The engine as the registry knows it."""

    name = "llamacpp"
    title = "llama.cpp"
    options: tuple[Option, ...] = OPTIONS + SILENT + REFUSED
    needs_memory = False
    shared_flag = ""

    def read(self, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """`llama-server -m FILE …`: the model and the flags."""
        return read_command(words)

    def online(self, question: Question) -> tuple[str, ...]:
        return ()

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
    return name in (
        "llama-server",
        "llama-cli",
        "llama-completion",
        "llama-bench",
        "llama-run",
        "server",
        "main",
    )


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
    speed = None if failure else speed_of(run)
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
        offload=offload(run),
        speed=speed if isinstance(speed, Speed) else None,
        untimed=speed if isinstance(speed, str) else "",
        problems=(*run.problems, *map(note, answers.items())),
    )


SHORT = 512  # tokens behind the one whose speed is shown first
CPU_PROMPTS = "part of the model runs on the CPU"
PROMPT = 2048  # tokens of the prompt whose speed is shown first


def speed_of(run: Run) -> Speed | str | None:
    """Tokens per second of one request, or why they are not known; None where there is no GPU to
    ask about, or no text is generated."""
    gpus = [one.gpu for one in run.devices if one.gpu is not None]
    if not gpus or len(gpus) < len(run.machine.devices) or RECIPES[run.model.arch].encodes:
        return None
    if encodes(run.model):
        return "memfit has no published speeds of models with an encoder and a decoder"
    if run.settings.draft is not None:
        return "the speed with a draft model depends on how many of its tokens are accepted"
    settings = run.settings
    longest = settings.context if settings.unified else settings.context // settings.parallel
    places = place(run.model, settings, run.machine)
    decoding = Decoding(model=run.model, settings=settings, places=places)
    depths = (min(SHORT, longest), longest)
    host = run.host_bandwidth or HOST_READS
    short, full = (token_seconds(decoding, run.machine, gpus, depth, host) for depth in depths)
    if isinstance(short, str) or isinstance(full, str):
        return short if isinstance(short, str) else str(full)
    slowest, quickest, shares = short, short, on_cpu(run.model, places, run.machine)
    if shares and not run.host_bandwidth:
        slowest, quickest = (
            float(token_seconds(decoding, run.machine, gpus, depths[0], one)) for one in HOSTS_READ
        )
    low, high = LIKELY[run.machine.backend.name]
    prompt = CPU_PROMPTS if shares else prompt_of(run, tuple(gpus), longest)
    return Speed(
        tokens_per_second=1 / short,
        low=low / slowest,
        high=high / quickest,
        depth=depths[0],
        longest=longest,
        at_longest=1 / full,
        host_bandwidth=host if shares else None,
        host_assumed=shares and not run.host_bandwidth,
        prompt=prompt if isinstance(prompt, PromptSpeed) else None,
        prompt_untimed=prompt if isinstance(prompt, str) else "",
    )


def prompt_of(run: Run, gpus: tuple[GPU, ...], longest: int) -> PromptSpeed | str:
    """The speed of a prompt of usual length and of the longest one, or why it is not known."""
    tokens = min(PROMPT, longest)
    rates = []
    for length in (tokens, longest):
        found = prompt_rate(run.model, run.settings, run.machine, gpus, length)
        if isinstance(found, str):
            return found
        rates.append(found)
    usual, slowest = rates
    low, high = LIKELY_PROMPTS[run.machine.backend.name]
    return PromptSpeed(
        tokens=tokens,
        tokens_per_second=usual,
        low=low * usual,
        high=high * usual,
        seconds=tokens / usual,
        longest=longest,
        seconds_longest=longest / slowest,
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


def offload(run: Run) -> Offload | None:
    """How the layers are shared with the CPU, where it computes some of them or their experts."""
    layers = run.model.number("block_count") + 1  # the output matrix is one more
    on_gpu = min(run.settings.gpu_layers, layers)
    experts = min(run.settings.cpu_moe, layers - 1)
    if not run.machine.devices or (on_gpu == layers and not experts):
        return None
    return Offload(layers=layers, on_gpu=on_gpu, cpu_experts=experts)


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
            ("draft model", held.draft, "common/speculative.cpp"),
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
    program = "llama-completion" if encodes(run.model) else "llama-server"
    words = [program, "-m", name.rpartition("/")[2] or name]
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
    words += ["-fa", "on" if settings.flash else "off", *run.placed]
    return shlex.join(words)
