"""SGLang's answer: what its start-up log will say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.errors import InputError
from memfit.hardware.outside import context, page_records
from memfit.lazy_dataclass import dataclass
from memfit.serving import separate_drafts
from memfit.serving.base import Device, Option, Question, Subject, shared_memory
from memfit.serving.drafts import draft_sizes
from memfit.serving.links import communicator_bytes
from memfit.serving.result import Pool, ServingAnswer
from memfit.serving.sglang.ascend import loaded_bytes
from memfit.serving.sglang.options import OPTIONS
from memfit.serving.sglang.pools import Pools, cells, pools, stateless
from memfit.serving.sglang.setup import GUESSES, MODELSLIM_KINDS, Setup, latent, set_up
from memfit.serving.weights import (
    LARGER,
    allocate,
    enough_ranks,
    rank_bytes,
    rank_sizes,
    table_rows,
)
from memfit.units import GIB, MIB

TORCH = (2, 8)  # that SGLang 0.5 installs
# Of the memory that is free once the weights are loaded, 24 start-up logs (rows sglang-0004 to
# 0027)
LOGGED = "up to 1.5 GiB less"
LEAST_RUNNING, MOST_RUNNING = 2048, 4096
WORKSPACE = (
    512 * MIB
)  # flashinfer's buffer (flashinfer_backend.py, SGLANG_FLASHINFER_WORKSPACE_SIZE)


@dataclass(frozen=True, kw_only=True)
class SGLang:
    """The engine. Everything that it knows is in the files beside this one."""

    name: str = "sglang"
    title: str = "SGLang"
    needs_memory = True
    shared_flag = "--tp"
    options: tuple[Option, ...] = OPTIONS

    def read(self, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """`python -m sglang.launch_server --model-path MODEL …`, or `sglang serve …`."""
        rest = list(words)
        if rest[:2] == ["sglang", "serve"]:
            rest = rest[2:]
        elif rest and rest[0].startswith("python") and "sglang.launch_server" in rest[:3]:
            rest = rest[rest.index("sglang.launch_server") + 1 :]
        else:
            raise InputError.one(
                f"`{' '.join(rest[:2])[:60]}` does not start SGLang",
                where="command",
                hint="write `-- python -m sglang.launch_server --model-path MODEL …`",
            )
        named = ""
        for index, word in enumerate(rest):
            flag, equals, value = word.partition("=")
            if flag in ("--model-path", "--model"):
                named = value if equals else rest[index + 1] if index + 1 < len(rest) else ""
        return named, tuple(rest)

    def subject(self, name: str, offline: bool = False) -> Subject | None:
        return None

    def row_figures(self, figures: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def row_subject(self, name: str, options: Mapping[str, Any]) -> Subject | None:
        return None

    def online(self, question: Question) -> tuple[str, ...]:
        return ()

    def row_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a published row, by name."""
        known = {option.name for option in OPTIONS if not option.silent}
        found = {name: value for name, value in row.items() if name in known and value is not None}
        for name, ours in (
            ("effective_max_running_requests", "max_running_requests"),
            ("effective_context_len", "context_length"),
            ("tensor_parallel_size", "tp_size"),
        ):
            if row.get(name) and not found.get(ours):
                found[ours] = row[name]
        return found

    def answer(self, question: Question) -> ServingAnswer:
        """What the log will say."""
        setup = set_up(question)
        device = question.devices[0] if question.devices else None
        # model_runner.py load_model: the free memory that went missing, so all that was reserved
        weights = loaded(setup)
        if device is None:
            full, sliding = cells(setup)
            need = setup.length * (full + sliding)
            found = (
                Pool(name="weights", bytes=weights),
                Pool(name="KV cache", bytes=need, how=f"{setup.length} tokens"),
            )
            return answer_of(setup, None, found, {"weights_gib": weights / GIB}, "", "")
        return whole(setup, device, weights)


def loaded(setup: Setup) -> int:
    """Bytes of the free memory that loading the weights takes."""
    if setup.rank.scheme.kind not in MODELSLIM_KINDS.values():
        return rank_bytes(setup.model, setup.rank, reserved=True)
    sizes = tuple(rank_sizes(setup.model, setup.rank))
    return loaded_bytes(sizes, setup.version, setup.fused, not latent(setup.model))


def whole(setup: Setup, device: Device, weights: int) -> ServingAnswer:
    """With a GPU: the pools get the static share less the weights."""
    before = before_loading(setup, device)
    weights += page_records(device.gpu, weights)
    free = device.total - before if device.free is None else device.free
    draft, copies = draft_bytes(setup)
    share = free - weights - free * (1 - setup.fraction)
    rest = int(share - draft - copies if setup.draft_in_pool else share)
    made = pools(setup, rest)
    running = setup.running or min(
        max(int(made.tokens / setup.length * 512), LEAST_RUNNING), MOST_RUNNING
    )
    table = (running + 1) * (setup.length + 4) * 4
    found = (
        Pool(name="CUDA context", bytes=device.total - free),
        Pool(name="weights", bytes=weights),
        Pool(name="KV cache", bytes=made.full),
        Pool(name="KV cache of sliding layers", bytes=made.sliding),
        Pool(name="states", bytes=made.states),
        Pool(name="states of guessed tokens", bytes=made.guessed),
        Pool(name="draft layers", bytes=draft),
        Pool(name="KV cache of draft layers", bytes=made.draft),
        Pool(name="request table", bytes=table),
        Pool(name="page records", bytes=page_records(device.gpu, made.bytes + draft + table)),
        Pool(name="attention workspace", bytes=WORKSPACE),
    )
    host = Pool(
        name="KV cache in CPU memory",
        bytes=setup.host or int(made.bytes * setup.host_ratio),
        where="cpu",
    )
    figures = {
        "weights_gib": weights / GIB,
        "used_gib": sum(pool.bytes for pool in found[1:]) / GIB,
        "avail_before_load_gb": free / GIB,
        "avail_after_load_gb": (free - weights) / GIB,
        "kv_gib": made.bytes / GIB,
        "kv_tokens": made.tokens,
        "max_running_requests": running,
        "max_concurrency": made.tokens / setup.length if setup.length else 0.0,
        "max_concurrency_len": setup.length,
    }
    failure, remedy = failure_of(setup, made, weights, free)
    return answer_of(setup, device, (*found, host), figures, failure, remedy, made)


# kv_cache_configurator.py resolve_max_num_reqs, 0.5.18
STATELESS = (
    "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests."
)


def failure_of(setup: Setup, made: Pools, weights: int, free: int) -> tuple[str, str]:
    """The error of a server that does not start, and the setting that works; else nothing."""
    ranks = enough_ranks(setup.model, setup.tensor, weights, 0.8 * free)
    more = f"--tp {ranks}" if ranks else LARGER
    if weights > free:
        return "torch.OutOfMemoryError: CUDA out of memory", more
    if made.tokens <= 0:
        least = (weights + 2048 * sum(cells(setup))) / free
        failure = (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
            f"Current value: mem_fraction_static={setup.fraction}"
        )
        raised = f"--mem-fraction-static {-(-1000 * least // 1) / 1000:g}"
        return failure, raised if least < 0.95 else more
    if stateless(setup, made):
        fewer = f"--speculative-num-draft-tokens {GUESSES}"
        return STATELESS, fewer if setup.guesses > GUESSES else more
    return "", ""


def draft_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of the draft, and of its copies of the embedding and the head, which are there while
    the pool is sized and freed afterwards (eagle_worker.py, 0.5.15 to 0.5.18;
    sgl-project/sglang#36452)."""
    model, rank = setup.model, setup.rank
    if setup.separate is not None:
        sizes = separate_drafts.sizes(setup.separate, model, rank)
        copies = separate_drafts.copied(setup.separate, model, rank)
        return allocate(list(sizes)).reserved, copies
    if not setup.draft:
        return 0, 0
    rows = table_rows(model.vocab, rank, rank.tensor) * model.width * rank.width
    sizes = draft_sizes(setup.draft, model, rank)
    return allocate(list(sizes)).reserved, rows * (1 if model.tied else 2)


def before_loading(setup: Setup, device: Device) -> int:
    """What is in use when SGLang first looks at the free memory: the context and NCCL's buffers
    (model_runner.py init_torch_distributed, 0.5.9)."""
    ranks = communicator_bytes(device, setup.tensor, TORCH)
    return ranks + (0 if device.gpu is None else context(device.gpu).low)


def answer_of(
    setup: Setup,
    device: Device | None,
    found: tuple[Pool, ...],
    figures: Mapping[str, float],
    failure: str,
    remedy: str,
    made: Pools | None = None,
) -> ServingAnswer:
    shared = None if device is None else shared_memory(device, LOGGED)
    return ServingAnswer(
        engine="sglang",
        title="SGLang",
        version=setup.version,
        model=setup.subject.name,
        origin=setup.subject.origin,
        parameters=setup.model.parameters,
        gpu="" if device is None else device.name,
        gpus=setup.gpus,
        usable=None if device is None else device.total,
        pools=found,
        figures=dict(figures),
        log=() if failure or made is None else log_lines(figures, made),
        failure=failure,
        remedy=remedy,
        problems=(*setup.problems, *([] if shared is None else [shared])),
    )


def log_lines(figures: Mapping[str, float], made: Pools) -> tuple[str, ...]:
    """The lines of the start-up log, in SGLang's words; its GB are GiB."""
    lines = [
        (
            f"Load weight end. avail mem={figures['avail_after_load_gb']:.2f} GB, "
            f"mem usage={figures['weights_gib']:.2f} GB."
        ),
    ]
    if made.sliding:
        lines.append(
            f"Use sliding window memory pool. full_layer_tokens={made.tokens}, "
            f"swa_layer_tokens={made.sliding_tokens}"
        )
    half = made.full / 2 / GIB
    lines.append(
        f"KV Cache is allocated. #tokens: {made.tokens}, K size: {half:.2f} GB, "
        f"V size: {half:.2f} GB"
    )
    lines.append(f"max_total_num_tokens={made.tokens}")
    return tuple(lines)
