"""Published speeds of llama.cpp and Ollama against what memfit predicts.

Each line of `data/llama_speed.jsonl.gz` is one figure. Constants are fitted to the sources whose
name hashes to an even number; only the others are evidence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from memfit.constants import setting
from memfit.errors import InputError
from memfit.hardware import GPU, find_gpu
from memfit.hardware.apple import apple_gpu
from memfit.hardware.gpu import variants
from memfit.lazy_dataclass import dataclass
from memfit.model.source import from_catalog
from memfit.serving.base import Device
from memfit.serving.llamacpp.fit import fits
from memfit.serving.llamacpp.loading import from_config
from memfit.serving.llamacpp.memory import buffers, storage
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import BACKENDS, Machine
from memfit.serving.llamacpp.prompts import prompt_rate
from memfit.serving.llamacpp.settings import FLASH_AUTO, NEWEST, Settings
from memfit.serving.llamacpp.setup import room
from memfit.serving.llamacpp.speed import Decoding, token_seconds
from memfit.serving.llamacpp.tags import resolve
from memfit.truth.served import lines, number

ROWS = Path(__file__).parent / "data" / "llama_speed.jsonl.gz"
APART: Annotated[float, setting("speeds that differ by more have an order")] = 0.1
# Builds of rows that have a date alone: before kernels were fused, and before CUDA graphs ran on
# Turing (serving/llamacpp/speed.py); the newest one else.
DATED = (("2025-08", 5000), ("2026-07-24", 9990))
USUAL = 4096  # tokens of context where a row does not state them
BATCH, UBATCH = 2048, 512  # tokens of a prompt that are read at once, where the row does not say
ALL = 999  # layers on the GPU
SHORT = 256  # tokens of an answer whose length is not stated
LARGEST = 192  # GB of a Mac, where only the chip counts
MARGIN = 2**30  # bytes that `--fit` leaves
NO_GPU = "the GPU is not in the catalog"
NO_MODEL = "the model is not in the catalog, or has no graph"
DEFAULTS = {"nvidia": "cuda", "amd": "rocm", "apple": "metal"}


@dataclass(frozen=True, kw_only=True)
class LlamaRow:
    """One figure: tokens per second of one request. `depth`: tokens before the first that counts;
    `tokens`: how many count; `whole`: whether the row says what the GPU holds: everything,
    or `gpu_layers`, or all but the experts of `cpu_moe` layers."""

    id: str
    source: str
    model: str
    quant: str
    gpu: str
    gpus: int
    backend: str
    decoding: bool
    depth: int
    tokens: int
    ubatch: int
    build: int
    flash: bool
    cache: str
    whole: bool
    gpu_layers: int | None
    cpu_moe: int
    measured: float
    confidence: str

    @property
    def held_out(self) -> bool:
        return held_out(self.source)


def source_of(text: str) -> str:
    """A repository, a thread, or one contributor's folder in a collection; without commit."""
    name, _, path = text.partition("@")
    folder = re.search(r":community/([^/]+)/", path)
    return f"{name}:{folder[1]}" if folder else name


def held_out(source: str) -> bool:
    """Half of the sources, whatever they contain: the first hexadecimal digit of the SHA-256 of
    their name is odd."""
    return int(hashlib.sha256(source.encode()).hexdigest()[0], 16) % 2 == 1


def read_llama_rows(path: str | Path | None = None) -> list[LlamaRow]:
    return [llama_row(value) for value in lines(ROWS if path is None else Path(path))]


def llama_row(value: Mapping[str, Any]) -> LlamaRow:
    build = build_of(value)
    flash, decoding = value.get("flash"), value.get("phase") == "decode"
    held = str(value.get("on_gpu"))
    layers, experts = re.fullmatch(r"ngl (\d+)", held), re.fullmatch(r"ncmoe (\d+)", held)
    ubatch = re.search(r"n_ubatch (\d+)", f"{value.get('test')} {value.get('notes')}")
    return LlamaRow(
        id=str(value.get("id")),
        source=source_of(str(value.get("source"))),
        model=str(value.get("model") or ""),
        quant=str(value.get("quant") or ""),  # of tags of Ollama's library the tag tells
        gpu=str(value.get("gpu")),
        gpus=int(number(value.get("gpus")) or 1),
        backend=str(value.get("backend") or ""),
        decoding=decoding,
        depth=int(number(value.get("depth"))),
        tokens=int(number(value.get("tokens"))) or SHORT,
        ubatch=int(ubatch[1]) if ubatch and not decoding else UBATCH,
        build=build,
        flash=build >= FLASH_AUTO if flash is None else bool(flash),
        cache=str(value.get("cache") or "f16"),
        whole=held != "not stated",
        gpu_layers=int(layers[1]) if layers else None,
        cpu_moe=int(experts[1]) if experts else 0,
        measured=number(value.get("tokens_per_second")),
        confidence=str(value.get("confidence")),
    )


def build_of(value: Mapping[str, Any]) -> int:
    found = re.fullmatch(r"b(\d+)", str(value.get("version") or ""))
    if found:
        return int(found[1])
    date = str(value.get("date") or "")
    return next((build for until, build in DATED if date < until), NEWEST)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A row's model on its GPU."""

    decoding: Decoding
    machine: Machine
    gpu: GPU


@dataclass(frozen=True, kw_only=True)
class LlamaOutcome:
    """A row with the speed that memfit predicts, or why it predicts none."""

    row: LlamaRow
    predicted: float = 0.0
    gpu: str = ""
    reason: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.row.measured - 1


def judge_llama(row: LlamaRow) -> LlamaOutcome:
    """The speed of the row's model on its GPU: of its prompt, or in the middle of the tokens that
    count."""
    try:
        placed = place_row(row)
    except InputError as error:
        unknown = error.problems[0].where == "gpu"
        return LlamaOutcome(row=row, reason=NO_GPU if unknown else NO_MODEL)
    if isinstance(placed, str):
        return LlamaOutcome(row=row, reason=placed)
    name = placed.gpu.name.removesuffix(f" {LARGEST}GB")
    found = predicted(row, placed)
    if isinstance(found, str):
        return LlamaOutcome(row=row, gpu=name, reason=found)
    return LlamaOutcome(row=row, gpu=name, predicted=found)


def predicted(row: LlamaRow, placed: Placed) -> float | str:
    """Tokens per second, or why they are not known."""
    decoding, machine, gpus = placed.decoding, placed.machine, (placed.gpu,) * row.gpus
    if row.decoding:
        seconds = token_seconds(decoding, machine, gpus, row.depth + row.tokens / 2)
        return seconds if isinstance(seconds, str) else 1 / seconds
    return prompt_rate(
        decoding.model, decoding.settings, machine, gpus, tokens=row.tokens, behind=row.depth
    )


def place_row(row: LlamaRow) -> Placed | str:
    """The row's model with every layer on its GPU, or why it is not compared."""
    if row.confidence == "low":
        return "the figure is not trusted"
    gpu = gpu_of(row.gpu)
    if row.backend and row.backend != DEFAULTS.get(gpu.vendor):
        return f"{row.backend} on a GPU of {gpu.vendor}: not yet"
    model = model_of(row.model, row.quant)
    context = row.depth + row.tokens if row.whole else max(USUAL, row.depth + row.tokens)
    settings = Settings(
        context=context,
        parallel=1,
        flash=row.flash,
        cache_k=row.cache,
        cache_v=row.cache,
        build=row.build,
        batch=max(BATCH, row.ubatch),
        ubatch=row.ubatch,
        gpu_layers=ALL if row.gpu_layers is None else row.gpu_layers,
        cpu_moe=row.cpu_moe,
    )
    device = Device(name=gpu.name, total=gpu.memory, free=gpu.free, gpu=gpu)
    backend = BACKENDS[DEFAULTS[gpu.vendor]]
    machine = Machine(backend=backend, free=(room(device),) * row.gpus)
    held = storage(model, settings, machine)
    if not row.whole:
        need = buffers(model, settings, machine)
        if not fits(need, machine, MARGIN):
            return "layers on the CPU, which the row does not state"
    decoding = Decoding(model=model, settings=held.settings, places=held.places)
    return Placed(decoding=decoding, machine=machine, gpu=gpu)


@cache
def model_of(name: str, quant: str) -> GgufModel:
    """The GGUF model of a name of the catalog with a quantization, or of a tag of Ollama's."""
    if not quant:
        name, quant = resolve(name) or (name, "")
    return from_config(from_catalog(name).config, name, quant)


def gpu_of(name: str) -> GPU:
    """The GPU that a row names; of several sizes, the one with the fastest memory."""
    mac = apple_gpu(f"{name} {LARGEST}GB") if name.startswith("Apple ") else None
    if mac is not None:
        return mac
    try:
        return find_gpu(name)
    except InputError:
        several = variants(name)
        if not several:
            raise
    return max(several, key=lambda one: one.bandwidth or 0.0)


def ordered(rows: Iterable[LlamaOutcome]) -> Iterator[bool]:
    """Whether ours have the order of theirs, for each pair of one source and GPU, or of one source
    and model, whose figures differ."""
    for one, other in combinations(rows, 2):
        a, b = one.row, other.row
        same = a.source == b.source and (
            a.gpu == b.gpu or (a.model, a.quant, a.depth) == (b.model, b.quant, b.depth)
        )
        if same and abs(a.measured - b.measured) > APART * min(a.measured, b.measured):
            yield (a.measured < b.measured) == (one.predicted < other.predicted)


__all__ = ["LlamaOutcome", "LlamaRow", "judge_llama", "ordered", "place_row", "read_llama_rows"]
