"""vLLM's settings after its defaults by version and GPU, and what vLLM refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import Problem, raise_errors
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import Layer
from memfit.serving.base import Device, Question, Subject, silicon_problems
from memfit.serving.flags import AUTO
from memfit.serving.separate_drafts import Draft
from memfit.serving.separate_drafts import draft_problems as eagle_problems
from memfit.serving.stored import FLASHINFER, MARLIN, TRITON, Scheme, scheme_of, without_head
from memfit.serving.subject import known_model
from memfit.serving.text_encoders import is_encoder
from memfit.serving.vllm.encoders import Step
from memfit.serving.vllm.images import Images, image_problems, images, text_only
from memfit.serving.vllm.pooling import needs_v0, pools, step_tokens
from memfit.serving.vllm.rules import COMPILING, NEWEST, Rules, parse, rules_of
from memfit.serving.vllm.runners import second_runner, steps_under_way
from memfit.serving.vllm.sounds import sound_problems
from memfit.serving.vllm.speculation import (
    draft_problems,
    every_state,
    guesses_of,
    own_draft,
    separate_draft,
    state_pages,
)
from memfit.serving.weights import Rank, attention_heads, number_width, splits
from memfit.units import GIB

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
LARGE_GPU = 70 * GIB
V0_TOKENS, LONG_V0 = 2048, 32768
LARGE_BATCH, SMALL_BATCH = (8192, 1024), (2048, 256)  # tokens and requests of a step, as a server
LARGEST_GPU, LARGEST_BATCH = 160 * GIB, (16384, 1024)

# Options whose memory is not counted, in words.
UNCOUNTED = {
    "kv_transfer_config": "the buffers of the connector that moves the cache are",
    "hf_overrides": "changes of the model's config are",
}
# Ways of tokens to experts that take no buffers of their own (config/parallel.py, 0.24.0).
UNBUFFERED = ("naive", "allgather_reducescatter")
PARALLEL = ("tensor", "pipeline", "data")
MROPE, ROPE = 4, "rope_parameters"
# Qwen3-VL as transformers makes it, whose sections are no part of the config
# (modeling_qwen3_vl.py Qwen3VLTextRotaryEmbedding, 5.23: `mrope_section`, [24, 20, 20]).
SECTIONS = ("qwen3_vl", "qwen3_vl_moe")
COMPILED = "compiled"  # of published rows: their log shows kernels of an earlier start


@dataclass(frozen=True, kw_only=True)
class Setup:
    """vLLM's settings after its defaults."""

    subject: Subject
    model: Model
    rank: Rank
    rules: Rules
    version: str
    scheme: Scheme
    tensor: int
    pipeline: int
    copies: int
    gpus: int
    length: int
    fitted: bool  # as much of it as fits
    requests: int
    batched: int
    utilization: float
    width: int
    kv_dtype: str
    state_dtype: str
    block: int
    hybrid: bool = True
    eager: bool = False
    compiles: bool = False  # a start that compiles its kernels, which leaves less memory
    fresh: bool = True  # no kernels that an earlier start has compiled
    graphs: int = 0  # the largest step of a CUDA graph; 0: by the number of requests
    second_runner: bool = False
    pooling: bool = False  # embeddings, scores or labels, and no tokens
    uncached: bool = False  # an encoder, of which a request keeps nothing
    attention: str = ""  # the backend that is named, in capitals
    in_flight: int = 0  # tokens that windows keep beside themselves, of steps that are under way
    cache_bytes: int = 0
    kept_cache: int = 0  # bytes of cache in CPU memory, of one rank
    offload: int = 0  # bytes of weights that stay in CPU memory
    blocks: int = 0
    sm: tuple[int, int] | None = None
    images: Images = Images()  # in the profiling run
    draft: tuple[Layer, ...] = ()  # the model's own layers that guess tokens ahead
    separate: Draft | None = None
    guesses: int = 0  # tokens ahead
    state_pages: int = 1  # of a request's state in each layer
    every_state: bool = False  # a cached prefix keeps the state of each block
    command: str = ""
    problems: tuple[Problem, ...] = ()


def set_up(question: Question) -> Setup:
    """The settings, or all problems at once."""
    problems = list(silicon_problems(question, "vLLM"))
    options, subject = question.options, question.subject
    rules = engine_rules(question)
    model = known_model(subject, compressed=True, encoders=True, speech=True)
    pooling = pools(question, model)
    tensor, pipeline, copies = (int(options.get(f"{one}_parallel_size", 1)) for one in PARALLEL)
    gpus = tensor * pipeline * copies
    utilization = float(options.get("gpu_memory_utilization", rules.utilization))
    scheme = scheme_by_rules(question, rules, problems)
    problems += split_problems(model, tensor, utilization)
    problems += image_problems(options) + draft_problems(options)
    length = length_of(model, options, rules, problems)
    width = width_of(model, options, problems)
    problems += count_problems(question, gpus)
    raise_errors(problems)
    separate = separate_draft(question)
    raise_errors(eagle_problems(separate, "speculative_config"))
    compiles = compiles_kernels(question, rules)
    uncut = is_encoder(model) or (pooling and rules.engine == 0)
    batched, requests = step_sizes(question, rules, length, uncut=uncut)
    second = second_runner(question, model, rules, pooling=pooling)
    seen = seen_images(question, rules, width, (length, batched, requests))
    problems += notes(question, compiles, images=seen)
    problems += sound_problems(question, model, rules, batched)
    raise_errors(problems)
    return Setup(
        subject=subject,
        model=model,
        rank=replace(rank_of(question, model, scheme, width, rules, length), headed=not pooling),
        rules=rules,
        version=question.version or NEWEST,
        scheme=scheme,
        tensor=tensor,
        pipeline=pipeline,
        copies=copies,
        gpus=gpus,
        length=length,
        fitted=options.get("max_model_len") == AUTO,
        requests=requests,
        batched=batched,
        utilization=utilization,
        width=width,
        kv_dtype=cache_dtype(subject.config, options, rules),
        state_dtype=state_dtype(subject.config, options),
        block=int(options.get("block_size", 16)),
        hybrid=not options.get("disable_hybrid_kv_cache_manager"),
        eager=bool(options.get("enforce_eager")),
        compiles=compiles,
        fresh=not options.get(COMPILED),
        graphs=int(options.get("max_cudagraph_capture_size", 0)),
        second_runner=second,
        pooling=pooling,
        uncached=is_encoder(model) and rules.engine > 0,
        attention=str(options.get("attention_backend") or "").upper(),
        in_flight=batched * steps_under_way(question, rules, second),
        cache_bytes=int(options.get("kv_cache_memory_bytes", 0)),
        offload=int(float(options.get("cpu_offload_gb") or 0) * GIB),
        # config/cache.py kv_offloading_size, 0.24.0: over all ranks
        kept_cache=int(float(options.get("kv_offloading_size") or 0) * GIB) // tensor,
        blocks=int(options.get("num_gpu_blocks_override", 0)),
        sm=capability(question),
        images=seen or Images(),
        draft=own_draft(question),
        separate=separate,
        guesses=guesses_of(options),
        state_pages=state_pages(question, rules),
        every_state=every_state(question, rules),
        problems=tuple(problems),
    )


def cache_dtype(config: Mapping[str, Any], options: Mapping[str, Any], rules: Rules) -> str:
    """`kv_cache_dtype`; where it is open, what a checkpoint of ModelOpt says (torch_utils.py
    get_kv_cache_quant_algo_string)."""
    given = str(options.get("kv_cache_dtype") or "auto")
    stored = config.get("quantization_config")
    if given != "auto" or not rules.stored_caches or not isinstance(stored, Mapping):
        return given
    inner = stored.get("quantization")
    found = {**stored, **(inner if isinstance(inner, Mapping) else {})}
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    eighth = scheme == fp8 if isinstance(scheme, Mapping) else str(scheme).upper() == "FP8"
    return "fp8" if eighth and str(stored.get("quant_method")).startswith("modelopt") else given


def engine_rules(question: Question) -> Rules:
    """The rules of the version, and of the engine that it starts."""
    rules = replace(
        rules_of(question.version),
        expert_kernel=str(question.options.get("moe_backend") or "").replace("-", "_").lower(),
    )
    if not old_engine(question, rules):
        return rules
    return replace(rules, engine=0, hybrid_groups=False, compiling=False, items=1)


def scheme_by_rules(question: Question, rules: Rules, problems: list[Problem]) -> Scheme:
    """How the weights are kept, as far as the version reads it."""
    method = question.options.get("quantization")
    scheme = scheme_of(question.subject.config, problems, method=method)
    scheme = replace(scheme, nested=scheme.nested and rules.nested_scales)
    if scheme.kind == "mxfp4":
        adapted = bool(question.options.get("enable_lora"))
        scheme = replace(scheme, tiles=expert_kernels(capability(question), rules, adapted))
    return scheme if rules.stored_heads else without_head(scheme)


def expert_kernels(sm: tuple[int, int] | None, rules: Rules, adapted: bool = False) -> str:
    """Whose kernels run experts in MXFP4: Triton's on 9.0 where the wheel has them, FlashInfer's on
    10.x, else Marlin's (mxfp4.py get_mxfp4_backend, 0.11.0 to 0.14.1), and always Marlin's beside
    LoRA adapters (get_mxfp4_backend_with_lora). An image may bring Triton's kernels to an older
    version, whose weights are then smaller."""
    if adapted:
        return MARLIN
    if sm is not None and (10, 0) <= sm < (11, 0) and rules.flashinfer:
        return FLASHINFER
    return TRITON if sm == (9, 0) and rules.triton_experts else MARLIN


def seen_images(
    question: Question, rules: Rules, width: int, sizes: tuple[int, int, int]
) -> Images | None:
    """Images of the profiling run; `sizes` are tokens of a request and of a step, and requests."""
    length, batched, requests = sizes
    step = Step(
        options=question.options,
        length=length,
        batched=batched,
        requests=requests,
        ranks=int(question.options.get("tensor_parallel_size", 1)),
        width=width,
        rules=rules,
    )
    model = known_model(question.subject, compressed=True, encoders=True, speech=True)
    return images(model, question.subject.config, step)


def count_problems(question: Question, gpus: int) -> list[Problem]:
    """Fewer GPUs than the ranks need."""
    there = len(question.devices)
    if there < 2 or there >= gpus:
        return []
    message = f"{gpus} GPUs are needed, {there} are there"
    return [Problem(message=message, where="tensor_parallel_size")]


def rank_of(
    question: Question, model: Model, scheme: Scheme, width: int, rules: Rules, length: int
) -> Rank:
    """What one GPU has of the model; of a pipeline the first, which has the most layers."""
    options = question.options
    tensor, copies = (
        int(options.get(name, 1)) for name in ("tensor_parallel_size", "data_parallel_size")
    )
    pipeline = int(options.get("pipeline_parallel_size", 1))
    adapted = bool(options.get("enable_lora")) and rules.counted_adapters
    extra = model.family == "llama" and parse(question.version) < (0, 12)
    return Rank(
        tensor=tensor,
        experts=tensor * copies if options.get("enable_expert_parallel") else 1,
        sm=capability(question),
        sms=multiprocessors(question),
        width=width,
        scheme=scheme,
        positions=max(model.positions, length) * rotary_tables(question.subject.config),
        adapters=int(options.get("max_loras", 1)) if adapted else 0,
        adapter_rank=int(options.get("max_lora_rank", 16)),
        adapter_vocab=int(options.get("lora_extra_vocab_size", 256)) if extra else 0,
        layers=(0, -(-len(model.layers) // pipeline)),
        last=pipeline == 1,
        towers=not (rules.text_only and text_only(options, question.subject.config)),
    )


def rotary_tables(config: Mapping[str, Any]) -> int:
    """How many times the model's positions the rotary table has: models whose positions have
    sections for time, height and width keep four times as many, for long videos
    (rotary_embedding/mrope.py, 0.8.5 to 0.24.0)."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    found = (one.get(name) for one in (inner, config) for name in ("rope_scaling", ROPE))
    sections = any(isinstance(one, Mapping) and "mrope_section" in one for one in found)
    return MROPE if sections or config.get("model_type") in SECTIONS else 1


def capability(question: Question) -> tuple[int, int] | None:
    """The compute capability of the first GPU, where it is known."""
    gpu = question.devices[0].gpu if question.devices else None
    return None if gpu is None else gpu.sm


def multiprocessors(question: Question) -> int:
    """Those of the first GPU; 0 where they are not known."""
    gpu = question.devices[0].gpu if question.devices else None
    return (gpu.sms or 0) if gpu is not None else 0


def notes(question: Question, compiles: bool, images: Images | None) -> list[Problem]:
    """Words about what is not counted, and about kernels that are compiled."""
    found = [] if images is not None else [images_note()]
    if images is not None and images.peak and question.subject.config.get("vision_config"):
        found.append(profiled_note())
    if compiles:
        found.append(compiling_note())
    backend = str(question.options.get("all2all_backend") or UNBUFFERED[0])
    if backend not in UNBUFFERED:
        message = f"the buffers of `--all2all-backend {backend[:40]}` are not counted"
        found.append(Problem(level="warning", message=message, where="all2all_backend"))
    return found + [
        Problem(level="warning", message=f"{what} not counted", where=name)
        for name, what in UNCOUNTED.items()
        if question.options.get(name)
    ]


def profiled_note() -> Problem:
    """A word about the images and videos of the profiling run."""
    return Problem(
        level="note",
        message="the peak activation includes the largest images and videos, as vLLM profiles them",
        where="limit_mm_per_prompt",
        hint='more room for the cache: `--limit-mm-per-prompt \'{"image": 0, "video": 0}\'`',
    )


def images_note() -> Problem:
    """A word about images of models whose encoder memfit does not know."""
    return Problem(
        level="warning",
        message="the memory that vLLM sets aside for images is not counted",
        where="limit_mm_per_prompt",
        hint="serve without images: `--limit-mm-per-prompt '{\"image\": 0}'`",
    )


def compiles_kernels(question: Question, rules: Rules) -> bool:
    """Whether a start on ROCm compiles its kernels, and so leaves less memory."""
    gpu = question.devices[0].gpu if question.devices else None
    at_hand = question.options.get("enforce_eager") or question.options.get(COMPILED)
    return gpu is not None and gpu.vendor == "amd" and rules.compiling and not at_hand


def compiling_note() -> Problem:
    """A word about starts on ROCm, which leave more memory once their kernels are compiled."""
    return Problem(
        level="note",
        message="this is a start that compiles its kernels; on ROCm the next one leaves up to "
        f"{COMPILING / GIB:.1f} GiB more for the cache",
        where="gpu",
    )


def split_problems(model: Model, tensor: int, utilization: float) -> list[Problem]:
    """What vLLM refuses at its start, in its words."""
    found = []
    heads = attention_heads(model) or tensor  # a model without attention has none to divide
    if heads % tensor:
        # config/model.py verify_with_parallel_config
        found.append(
            Problem(
                message=f"Total number of attention heads ({heads}) must be divisible by tensor "
                f"parallel size ({tensor})",
                where="tensor_parallel_size",
                hint=f"use {splits(heads)}",
            )
        )
    if not 0 < utilization <= 1:
        found.append(
            Problem(
                message=f"GPU memory utilization must be greater than 0 and at most 1. "
                f"Got {utilization}",
                where="gpu_memory_utilization",
                hint="0.9 is a common value",
            )
        )
    return found


def length_of(
    model: Model, options: Mapping[str, Any], rules: Rules, problems: list[Problem]
) -> int:
    """`max_model_len`, which defaults to the model's limit and starts there where it is fitted."""
    given = options.get("max_model_len")
    if given == AUTO and not rules.fitted_length:
        message = "`--max-model-len auto` needs vLLM 0.14 or newer"
        problems.append(Problem(message=message, where="max_model_len"))
    elif given == 0:
        problems.append(
            Problem(message="`--max-model-len 0` must be at least 1", where="max_model_len")
        )
    if not given or given == AUTO:
        return model.positions or 2048
    length = int(given)
    if model.positions and length > model.positions:
        problems.append(
            Problem(
                level="warning",
                message=f"max_model_len {length} is beyond the model's limit of {model.positions}",
                where="max_model_len",
                hint="vLLM refuses it unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
            )
        )
    return length


def state_dtype(config: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Numbers of a recurrent state: as told, else as the config says (`mamba_ssm_dtype`)."""
    told = str(options.get("mamba_ssm_cache_dtype") or "auto")
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    return told if told != "auto" else str(inner.get("mamba_ssm_dtype") or "auto")


def width_of(model: Model, options: Mapping[str, Any], problems: list[Problem]) -> int:
    """Bytes of a number."""
    name = str(options.get("dtype", "auto"))
    if name not in DTYPES:
        problems.append(
            Problem(
                message=f"`--dtype {name[:20]}` must be one of {', '.join(DTYPES)}", where="dtype"
            )
        )
    return number_width(model, name)


def old_engine(question: Question, rules: Rules) -> bool:
    """Whether vLLM falls back to V0: on GPUs below 8.0, and without prefill in pieces, as long as
    it has V0 at all (arg_utils.py _is_v1_supported_oracle, 0.8.5 to 0.10.2)."""
    if rules.engine == 0 or parse(question.version) >= (0, 11):
        return False
    if needs_v0(question):
        return True
    sm = capability(question)
    return (sm is not None and sm < (8, 0)) or question.options.get(
        "enable_chunked_prefill"
    ) is False


def nvml_fails(device: Device) -> bool:
    """Whether NVML cannot say the memory, which is the host's: the defaults are then those of a
    small GPU (arg_utils.py get_batch_defaults, vllm-project/vllm#57378)."""
    gpu = device.gpu
    return gpu is not None and gpu.vendor == "nvidia" and gpu.form == "unified"


def step_sizes(
    question: Question, rules: Rules, length: int, *, uncut: bool = False
) -> tuple[int, int]:
    """`max_num_batched_tokens` and `max_num_seqs` (arg_utils.py _set_default_args). V0 takes 256
    requests, and whole prompts unless they are beyond 32k (arg_utils.py create_engine_config).
    `uncut`: prompts of a model that pools, which are one step each."""
    device = question.devices[0] if question.devices else None
    large = (
        rules.engine > 0
        and device is not None
        and device.total >= LARGE_GPU
        and not nvml_fails(device)
        and (rules.large_a100 or "a100" not in device.name.lower())
    )
    if rules.engine == 0:
        chunked = question.options.get("enable_chunked_prefill")
        pieces = length > LONG_V0 if chunked is None else bool(chunked)
        batched = int(question.options.get("max_num_batched_tokens", 0) or 0)
        whole = step_tokens(V0_TOKENS, length, rules) if uncut else max(length, V0_TOKENS)
        tokens = batched or (V0_TOKENS if pieces and not uncut else whole)
        return tokens, int(question.options.get("max_num_seqs", 0) or 256)
    tokens, requests = LARGE_BATCH if large else SMALL_BATCH
    if large and rules.largest_steps and device is not None and device.total >= LARGEST_GPU:
        tokens, requests = LARGEST_BATCH
    if uncut:
        tokens = step_tokens(tokens, length, rules)
    most = int(question.options.get("max_num_seqs", 0) or 0)
    if rules.capped_steps:
        tokens = min(tokens, (most or requests) * length)
    batched = int(question.options.get("max_num_batched_tokens", 0) or tokens)
    return batched, most or min(requests, batched)
