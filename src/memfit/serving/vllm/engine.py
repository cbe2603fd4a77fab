"""vLLM's answer: every step of its start-up, in order, and the lines of its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.errors import InputError, Problem
from memfit.hardware.outside import context, page_records
from memfit.lazy_dataclass import dataclass
from memfit.serving import separate_drafts
from memfit.serving.base import Device, Option, Question, Subject
from memfit.serving.drafts import draft_sizes
from memfit.serving.result import Pool, ServingAnswer
from memfit.serving.vllm import compressed
from memfit.serving.vllm.activations import activations
from memfit.serving.vllm.assumed import assumed
from memfit.serving.vllm.cache import Layout, layout
from memfit.serving.vllm.graphs import counted, graph_bytes
from memfit.serving.vllm.options import OPTIONS
from memfit.serving.vllm.outside import non_torch
from memfit.serving.vllm.pooling import longer_than_a_step
from memfit.serving.vllm.setup import COMPILED, Setup, set_up
from memfit.serving.vllm.specs import layer_specs
from memfit.serving.weights import LARGER, enough_ranks, rank_bytes
from memfit.units import GIB

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory"


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """The engine. Everything that it knows is in the files beside this one."""

    name: str = "vllm"
    title: str = "vLLM"
    needs_memory = True
    shared_flag = "--tensor-parallel-size"
    options: tuple[Option, ...] = OPTIONS

    def read(self, words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """`vllm serve MODEL …`, or `python -m vllm.entrypoints.… --model MODEL …`."""
        rest = list(words)
        model = ""
        if rest[:2] == ["vllm", "serve"]:
            rest = rest[2:]
            if rest and not rest[0].startswith("-"):
                model = rest.pop(0)
        elif rest and rest[0].startswith("python"):
            rest = rest[3:] if rest[1:2] == ["-m"] else rest[2:]
        else:
            raise InputError.one(
                f"`{' '.join(rest[:2])[:60]}` does not start vLLM",
                where="command",
                hint="write `-- vllm serve MODEL …`",
            )
        for index, word in enumerate(rest):
            if word == "--model" and index + 1 < len(rest):
                model = rest[index + 1]
        return model, tuple(rest)

    def subject(self, name: str, offline: bool = False) -> Subject | None:
        return None

    def row_figures(self, figures: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def row_subject(self, name: str, options: Mapping[str, Any]) -> Subject | None:
        return None

    def online(self, question: Question) -> tuple[str, ...]:
        """quantization/fp8.py uses_meta_device and bitsandbytes_loader.py, 0.24; older versions
        hold the 16-bit weights first."""
        return () if question.version else ("fp8", "bitsandbytes")

    def row_options(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a published row, by name. Words that stand for JSON are left out."""
        known = {COMPILED, *(option.name for option in OPTIONS)}
        nested = {option.name for option in OPTIONS if option.kind == "json"}
        return {
            name: value
            for name, value in row.items()
            if name in known
            and value is not None
            and not (name in nested and isinstance(value, str))
        }

    def answer(self, question: Question) -> ServingAnswer:
        """What the log will say."""
        setup = set_up(question)
        device = question.devices[0] if question.devices else None
        # platforms/rocm.py get_current_memory_usage: total less free, so all that was reserved
        rocm = device is not None and device.gpu is not None and device.gpu.vendor == "amd"
        draft = list(draft_sizes(setup.draft, setup.model, setup.rank))
        if setup.separate is not None:
            draft += separate_drafts.sizes(setup.separate, setup.model, setup.rank)
        draft += [*compressed.buffers(setup), per_layer_inputs(setup), *image_features(setup)]
        weights = rank_bytes(setup.model, setup.rank, reserved=rocm, more=draft)
        # model_executor/models/utils.py maybe_offload_to_cpu: parameters until the budget is spent
        offloaded = min(weights, setup.offload)
        weights -= offloaded
        activation = activations(setup)
        outside = non_torch(setup, device)
        outside += page_records(None if device is None else device.gpu, weights)
        graphs = graph_bytes(setup)
        made = (
            compressed.packed(setup)
            if compressed.is_compressed(setup.model)
            else layout(layer_specs(setup), setup.rules, hybrid=setup.hybrid)
        )
        taken = weights + activation + outside + (graphs if counted(setup) else 0)
        sizes = Sizes(weights, activation, outside, graphs, taken, offloaded)
        if device is None:
            return sizes_only(setup, sizes, made)
        return whole(setup, device, sizes, made)


def per_layer_inputs(setup: Setup) -> int:
    """Inputs of every layer that Gemma 3n and the small Gemma 4 keep for a step (models/
    gemma3n_mm.py and gemma4_mm.py per_layer_embeddings, 0.11.0 to 0.24.0)."""
    text = setup.subject.config.get("text_config")
    inner = text if isinstance(text, Mapping) else setup.subject.config
    each = int(inner.get("hidden_size_per_layer_input") or 0)
    return setup.batched * len(setup.model.layers) * each * setup.width


def image_features(setup: Setup) -> list[int]:
    """Features of images that Qwen3-VL's first layers add, for a step (models/qwen3_vl.py
    deepstack_input_embeds, 0.13.0 to 0.27.1)."""
    vision = setup.subject.config.get("vision_config")
    deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    each = setup.batched * setup.model.width * setup.width
    return [each for _ in deep or ()] if setup.rank.towers else []


@dataclass(frozen=True)
class Sizes:
    weights: int
    activation: int
    outside: int
    graphs: int
    taken: int
    offloaded: int = 0


def sizes_only(setup: Setup, sizes: Sizes, made: Layout) -> ServingAnswer:
    """Without a GPU: what one request of the full length needs."""
    need = made.request_bytes(setup.length, setup.in_flight)
    figures = {"weights_gib": sizes.weights / GIB}
    failure, remedy = compressed.refused_cache(setup)
    return replace(
        described(setup),
        pools=pools(setup, sizes, need),
        failure=failure,
        remedy=remedy,
        figures=figures | (step_figures(setup) if setup.uncached else {"kv_gib": need / GIB}),
    )


def described(setup: Setup) -> ServingAnswer:
    """An answer that says only what was asked."""
    return ServingAnswer(
        engine="vllm",
        title="vLLM",
        version=setup.version,
        model=setup.subject.name,
        origin=setup.subject.origin,
        parameters=setup.model.parameters,
        gpus=setup.gpus,
        pools=(),
        figures={},
        problems=setup.problems,
        command=setup.command,
    )


def pools(setup: Setup, sizes: Sizes, cache: int) -> tuple[Pool, ...]:
    found = [
        Pool(name="model weights", bytes=sizes.weights),
        Pool(name="peak activation", bytes=sizes.activation),
        Pool(name="non-torch memory", bytes=sizes.outside),
        Pool(name="KV cache", bytes=cache),
        Pool(name="CUDA graphs", bytes=sizes.graphs),
        Pool(name="weights in CPU memory", bytes=sizes.offloaded, where="cpu"),
        Pool(name="KV cache in CPU memory", bytes=setup.kept_cache, where="cpu"),
    ]
    return tuple(found)


def whole(setup: Setup, device: Device, sizes: Sizes, made: Layout) -> ServingAnswer:
    """With a GPU: the cache gets what is left of the budget."""
    before = context(device.gpu).low if device.gpu is not None else 0
    free = device.total - before if device.free is None else device.free
    if setup.uncached:
        return without_cache(setup, device, before, free, sizes)
    budget = int(device.total * setup.utilization)
    available = setup.cache_bytes or budget - sizes.taken
    if setup.fitted:  # v1/core/kv_cache_utils.py _auto_fit_max_model_len, 0.24.0
        longest = made.longest(available, setup.length, setup.in_flight)
        setup = replace(setup, length=longest or setup.length)
    blocks = setup.blocks or made.blocks(available)
    cache = blocks * made.per_block
    failure, remedy = refusal(setup, device, free, budget, available, sizes, made)
    concurrency = made.concurrency(blocks, setup.length, setup.in_flight)
    tokens = made.tokens(blocks, setup.length, setup.in_flight, setup.rules)
    figures = {
        "weights_gib": sizes.weights / GIB,
        "activation_gib": sizes.activation / GIB,
        "non_torch_gib": sizes.outside / GIB,
        "total_gpu_memory_gib": device.total / GIB,
        "budget_gib": budget / GIB,
        "available_kv_gib": available / GIB,
        "kv_gib": available / GIB,
        "gpu_blocks": blocks,
        "kv_tokens": tokens,
        "max_concurrency": concurrency,
        "max_concurrency_len": setup.length,
    }
    held = (Pool(name="CUDA context", bytes=before), *pools(setup, sizes, max(0, cache)))
    return replace(
        described(setup),
        gpu=device.name,
        usable=device.total,
        pools=held,
        figures=figures,
        log=() if failure else log_lines(setup, figures),
        failure=failure,
        remedy=remedy,
        problems=(*setup.problems, *assumed(setup, device)),
    )


def without_cache(
    setup: Setup, device: Device, before: int, free: int, sizes: Sizes
) -> ServingAnswer:
    """An encoder on a GPU: vLLM neither profiles it nor takes more than it needs, but for a start
    as much has to be free as for any other model."""
    failure, remedy = too_little(setup, device, free, sizes)
    figures = {
        "weights_gib": sizes.weights / GIB,
        "activation_gib": sizes.activation / GIB,
        "non_torch_gib": sizes.outside / GIB,
        "graphs_gib": sizes.graphs / GIB,
        "total_gpu_memory_gib": device.total / GIB,
        **step_figures(setup),
    }
    log = [f"Model loading took {figures['weights_gib']:.4f} GiB"]
    if sizes.graphs:
        log.append(f"Graph capturing finished in … secs, took {figures['graphs_gib']:.2f} GiB")
    return replace(
        described(setup),
        parameters=setup.subject.parameters or setup.model.parameters,
        gpu=device.name,
        usable=device.total,
        pools=(Pool(name="CUDA context", bytes=before), *pools(setup, sizes, 0)),
        figures=figures,
        log=() if failure else tuple(log),
        failure=failure,
        remedy=remedy,
        problems=(*setup.problems, *assumed(setup, device)),
    )


def step_figures(setup: Setup) -> dict[str, float]:
    """What a step holds, by the names of the options."""
    return {
        "max_num_batched_tokens": setup.batched,
        "max_num_seqs": setup.requests,
        "max_model_len": setup.length,
    }


def too_little(setup: Setup, device: Device, free: int, sizes: Sizes) -> tuple[str, str]:
    """The error of an encoder's start, or of its largest step, and what works."""
    budget = int(device.total * setup.utilization)
    if setup.batched < setup.length:
        return (
            longer_than_a_step(setup.batched, setup.length),
            f"--max-num-batched-tokens {setup.length} or --max-model-len {setup.batched}",
        )
    if sizes.weights > free:
        return OUT_OF_MEMORY, more_gpus(setup, sizes, device)
    if free < budget:
        return not_free(setup, device, free, budget)
    if sizes.taken + sizes.graphs > free:
        room = free - (sizes.taken + sizes.graphs - sizes.activation)
        tokens = setup.batched * room // max(1, sizes.activation)
        shorter = f" --max-model-len {tokens}" if tokens < setup.length else ""
        ways = f"--max-num-batched-tokens {tokens}{shorter}" if tokens > 0 else ""
        return OUT_OF_MEMORY, ways or more_gpus(setup, sizes, device)
    return "", ""


def log_lines(setup: Setup, figures: Mapping[str, float]) -> tuple[str, ...]:
    """The lines of the start-up log, in vLLM's words."""
    return (
        f"Model loading took {figures['weights_gib']:.4f} GiB",
        f"Available KV cache memory: {figures['available_kv_gib']:.2f} GiB",
        f"GPU KV cache size: {int(figures['kv_tokens']):,} tokens",
        (
            f"Maximum concurrency for {setup.length:,} tokens per request: "
            f"{figures['max_concurrency']:.2f}x"
        ),
    )


def refusal(
    setup: Setup, device: Device, free: int, budget: int, available: int, sizes: Sizes, made: Layout
) -> tuple[str, str]:
    """The error that vLLM raises in place of starting, and what works; both empty if it starts."""
    refused = compressed.refused_cache(setup)
    if any(refused):
        return refused
    if sizes.weights > free:
        return OUT_OF_MEMORY, more_gpus(setup, sizes, device)
    if free < budget:
        return not_free(setup, device, free, budget)
    if available <= 0:
        needed = sizes.taken + made.request_bytes(1, setup.batched)
        return "ValueError: No available memory for the cache blocks", share_for(
            setup, device, needed, free
        ) or more_gpus(setup, sizes, device)
    need = made.request_bytes(setup.length, setup.in_flight)
    if need > available:
        longest = made.longest(available, setup.length, setup.in_flight)
        share = share_for(setup, device, sizes.taken + need, free)
        ways = [f"--max-model-len {longest}"] if longest else []
        return (
            f"ValueError: To serve at least one request with the models's max seq len "
            f"({setup.length}), ({need / GIB:.2f} GiB KV cache is needed, which is larger than the "
            f"available KV cache memory ({available / GIB:.2f} GiB). Based on the available "
            f"memory, the estimated maximum model length is {longest}."
        ), " or ".join([*ways, *([share] if share else [])])
    return few_states(setup, setup.blocks or made.blocks(available), made)


def not_free(setup: Setup, device: Device, free: int, budget: int) -> tuple[str, str]:
    """The error where less is free than the share that vLLM may use, and the share that works."""
    less = int(1000 * free / device.total) / 1000
    return (
        f"ValueError: Free memory on device ({free / GIB:.2f}/{device.total / GIB:.2f} GiB) on "
        f"startup is less than desired GPU memory utilization ({setup.utilization}, "
        f"{budget / GIB:.2f} GiB)"
    ), f"--gpu-memory-utilization {less}"


def few_states(setup: Setup, blocks: int, made: Layout) -> tuple[str, str]:
    """The error where a hybrid model has fewer blocks than requests at once, and what works; both
    empty if it starts (config/compilation.py resolve_cudagraph_mode_and_sizes, 0.20.2)."""
    kept = any(group.spec.kind == "state" for group in made.groups)
    if not (kept and setup.rules.state_for_each) or setup.eager or setup.requests <= blocks:
        return "", ""
    return (
        f"ValueError: max_num_seqs ({setup.requests}) exceeds available Mamba cache blocks "
        f"({blocks}). Each decode sequence requires one Mamba cache block, so CUDA graph capture "
        f"cannot proceed. Please lower max_num_seqs to at most {blocks} or increase "
        "gpu_memory_utilization."
    ), f"--max-num-seqs {blocks}"


def share_for(setup: Setup, device: Device, needed: int, free: int) -> str:
    """The utilization that gives `needed` bytes, or nothing where the GPU has too few."""
    share = -(-1000 * needed // device.total) / 1000
    return (
        f"--gpu-memory-utilization {share}" if share * device.total <= free and share <= 1 else ""
    )


def more_gpus(setup: Setup, sizes: Sizes, device: Device) -> str:
    """A tensor parallel size that holds the weights."""
    ranks = enough_ranks(setup.model, setup.tensor, sizes.weights, 0.8 * device.total)
    return f"--tensor-parallel-size {ranks}" if ranks else LARGER


__all__ = ["VLLM", "Problem"]
