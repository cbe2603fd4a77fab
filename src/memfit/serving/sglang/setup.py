"""SGLang's settings after its defaults by GPU, and what it refuses.

Source: `srt/server_args.py` (0.5.9); defaults by version are in `defaults.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Layer
from memfit.serving.base import Question, Subject, silicon_problems
from memfit.serving.drafts import draft_layers
from memfit.serving.separate_drafts import (
    DFLASH,
    EAGLE,
    EAGLE3,
    MODEL,
    Draft,
    draft_name,
    draft_of,
    draft_problems,
)
from memfit.serving.sglang.defaults import Defaults, Launch, defaults_of
from memfit.serving.sglang.encoders import of_sglang
from memfit.serving.stored import ONLINE, Scheme, scheme_of
from memfit.serving.text_encoders import is_encoder
from memfit.serving.weights import Rank, attention_heads, number_width, splits
from memfit.units import MIB

NEWEST = "0.5.18"  # the newest whose defaults these are
# `modelslim` is Ascend's int8
SGLANG_ONLINE = {
    **ONLINE,
    "w8a8_int8": Scheme(name="w8a8_int8", kind="int8", bits=8),
    "modelslim": Scheme(name="modelslim", kind="int8", bits=8),
}
SEPARATED = str.maketrans("[],", "   ")
MOST_BATCH = 65536  # of a CUDA graph that memfit reads
HOST_RATIO = 2.0  # server_args.py hicache_ratio
# What ModelSlim leaves in 16 bits (msmodelslim example/DeepSeek/quant_deepseek_w8a8.py,
# lab_practice/deepseek_v3_2/deepseek_w8a8.yaml)
MODELSLIM_KEEPS = ("kv_b_proj", "indexer")
FUSED = "ascend_fuseep"  # a value of --moe-a2a-backend
MODELSLIM_KINDS = {"int8": "modelslim", "int48": "modelslim4"}  # as Ascend's kernels store them


@dataclass(frozen=True, kw_only=True)
class Setup:
    """SGLang's settings after its defaults."""

    subject: Subject
    model: Model
    rank: Rank
    version: str
    tensor: int
    gpus: int
    length: int
    fraction: float
    width: int
    kv_dtype: str
    page: int
    chunk: int
    graphs: int
    swa_ratio: float
    state_ratio: float
    states: int = 0
    state_dtype: str = "float32"
    running: int = 0
    tokens: int = 0
    host: int = 0  # bytes of the second cache in CPU memory, where they are given
    host_ratio: float = 0.0  # else a multiple of the GPU's cache
    draft: tuple[Layer, ...] = ()  # the model's own layers that guess tokens ahead
    separate: Draft | None = None
    draft_in_pool: bool = False  # they count in the static share
    guesses: int = 0  # tokens ahead
    joint_states: bool = True  # states of guesses are part of the states' own share
    radix: bool = True
    windows: bool = True  # sliding layers have a pool of their own
    fused: bool = False  # Ascend's fused dispatch of experts
    problems: tuple[Problem, ...] = ()


def set_up(question: Question) -> Setup:
    """The settings, or all problems at once."""
    question = with_contexts(question)
    options, subject = question.options, question.subject
    problems = list(silicon_problems(question, "SGLang"))
    model = of_sglang(subject)
    tensor = int(options.get("tp_size") or 1)
    copies = int(options.get("dp_size") or 1)
    shared = bool(options.get("enable_dp_attention")) and copies > 1
    scheme = scheme_of(
        subject.config, problems, method=options.get("quantization"), online=SGLANG_ONLINE
    )
    if options.get("quantization") == "modelslim":
        kind = MODELSLIM_KINDS.get(scheme.kind, scheme.kind)
        scheme = replace(scheme, kind=kind, skip=scheme.skip + MODELSLIM_KEEPS)
    problems += missing_attention(model)
    contexts = int(options.get("attn_cp_size") or 1)
    problems += rank_problems(options, tensor, copies if shared else 1, contexts)
    raise_errors(problems)
    problems += split_problems(model, attention_ranks(options))
    problems += batch_problems(options)
    raise_errors(problems)
    chunk, graphs = sizes_of(question, tensor)
    fraction = fraction_of(question, tensor, copies, chunk, graphs)
    problems += fraction_problems(options, fraction)
    raise_errors(problems)
    graphs = 0 if is_encoder(model) else graphs  # cuda_graph_setup.py: steps that decode alone
    problems += uncounted(question, graphs)
    separate = separate_draft(question)
    raise_errors(draft_problems(separate, "speculative_algorithm"))
    length = int(options.get("context_length") or 0) or model.positions or 2048
    width = number_width(model, options.get("dtype"))
    return Setup(
        subject=subject,
        model=model,
        rank=rank_of(question, model, scheme, width, length),
        version=question.version or NEWEST,
        tensor=tensor,
        gpus=tensor * (1 if shared else copies) * int(options.get("pp_size") or 1),
        length=length,
        fraction=fraction,
        width=width,
        kv_dtype=str(options.get("kv_cache_dtype") or "auto"),
        page=int(options.get("page_size") or 1),
        chunk=chunk,
        graphs=0 if options.get("disable_cuda_graph") else graphs,
        swa_ratio=float(options.get("swa_full_tokens_ratio") or 0.8),
        state_ratio=float(options.get("mamba_full_memory_ratio") or 0.9),
        states=int(options.get("max_mamba_cache_size") or 0),
        state_dtype=str(options.get("mamba_ssm_dtype") or "float32"),
        running=running_of(options) // (copies if shared else 1),
        tokens=int(options.get("max_total_tokens") or 0),
        **host_cache(options),
        draft=own_draft(question),
        separate=separate,
        draft_in_pool=defaults_of(question.version).draft_in_pool,
        guesses=guesses_of(options),
        joint_states=defaults_of(question.version).draft_in_pool,
        radix=not options.get("disable_radix_cache"),
        windows=defaults_of(question.version).windows
        and not options.get("disable_hybrid_swa_memory"),
        fused=options.get("moe_a2a_backend") == FUSED,
        problems=tuple(problems),
    )


def host_cache(options: Mapping[str, Any]) -> dict[str, Any]:
    """The second cache of a rank, in CPU memory (mem_cache/memory_pool_host.py HostKVCache, 0.5.9):
    GB as given, else a multiple of the GPU's."""
    if not options.get("enable_hierarchical_cache"):
        return {}
    if options.get("hicache_size"):
        return {"host": int(options["hicache_size"]) * 10**9}
    return {"host_ratio": float(options.get("hicache_ratio") or HOST_RATIO)}


CONTEXTS = "enable_nsa_prefill_context_parallel"
CONTEXT_RANKS = 8  # that GPUs must have with it


def with_contexts(question: Question) -> Question:
    """What sparse attention's contexts imply on GPUs, in their default mode (server_args.py
    _handle_model_specific_adjustments, 0.5.7 and 0.5.9)."""
    options = question.options
    if not options.get(CONTEXTS):
        return question
    tensor, problems = int(options.get("tp_size") or 1), list[Problem]()
    if "index_head_dim" not in question.subject.config:
        message = "only models with DeepSeek's sparse attention have this option"
        problems.append(Problem(message=message, where=CONTEXTS))
    if options.get("quantization") != "modelslim" and tensor != CONTEXT_RANKS:
        message, hint = f"`--tp {tensor}` must be {CONTEXT_RANKS} with it", "use `--tp 8`"
        problems.append(Problem(message=message, where=CONTEXTS, hint=hint))
    raise_errors(problems)
    if options.get("quantization") == "modelslim":
        return question
    implied = {
        "enable_dp_attention": True,
        "moe_dense_tp_size": 1,
        "moe_a2a_backend": "deepep",
        "ep_size": tensor,
        "kv_cache_dtype": "bfloat16",
    }
    return replace(question, options={**options, **implied})


def attention_ranks(options: Mapping[str, Any]) -> int:
    """Ranks that share the heads of attention. Those of a context have the same ones
    (layers/dp_attention.py initialize_dp_attention, 0.5.13), and those of sparse attention's
    contexts all of them (models/deepseek_v2.py DeepseekV2AttentionMLA, 0.5.7)."""
    if options.get(CONTEXTS):
        return 1
    copies = int(options.get("dp_size") or 1) if options.get("enable_dp_attention") else 1
    return int(options.get("tp_size") or 1) // copies // int(options.get("attn_cp_size") or 1)


def rank_of(question: Question, model: Model, scheme: Scheme, width: int, length: int) -> Rank:
    """What one GPU has of the model; of a pipeline the last, which has the most layers
    (distributed/utils.py get_pp_indices, 0.5.9) and the output head."""
    options = question.options
    pipeline, layers = int(options.get("pp_size") or 1), len(model.layers)
    tensor, copies = int(options.get("tp_size") or 1), int(options.get("dp_size") or 1)
    shared = bool(options.get("enable_dp_attention")) and copies > 1
    whole = str(options.get("moe_a2a_backend") or "none") != "none"
    # of fewer owners than ranks several ranks split each expert: as many bytes for each rank
    spread = whole or int(options.get("ep_size") or 1) > 1
    gpu = question.devices[0].gpu if question.devices else None
    return Rank(
        tensor=tensor,
        attention=attention_ranks(options),
        experts=tensor if spread else 1,
        sm=None if gpu is None else gpu.sm,
        width=width,
        scheme=scheme,
        positions=max(model.positions, length),
        layers=(layers - -(-layers // pipeline), layers),
        first=pipeline == 1,
        shared_whole=whole,
        table=1 if shared else 0,
        # logits_processor.py and ParallelLMHead(use_attn_tp_group=enable_dp_lm_head);
        # layers/dp_attention.py, server_args.py moe_dense_tp_size: None or 1 (0.5.9)
        head=tensor // copies if shared and options.get("enable_dp_lm_head") else 0,
        dense_whole=options.get("moe_dense_tp_size") == 1,
    )


# server_args.py of 0.5.9 and arg_groups/speculative_hook.py of 0.5.18: requests at once beside a
# draft model, unless limited, and tokens that a step checks, unless given (auto_choose_speculative_
# params; only Llama and Grok check more, which keep no states)
SPECULATING = 48
GUESSES = 4
TEXT_ALONE, TEXT_GUESSES = "NGRAM", 12  # guesses from the text itself


def running_of(options: Mapping[str, Any]) -> int:
    """Most requests at once as far as the options say; 0 where the cache decides."""
    alone = SPECULATING if options.get("speculative_algorithm") else 0
    return int(options.get("max_running_requests") or alone)


def guesses_of(options: Mapping[str, Any]) -> int:
    """Tokens that a step checks; 0 without a draft. Of one branch as many as the draft has steps,
    and one, whatever is given."""
    method = str(options.get("speculative_algorithm") or "").upper()
    if not method:
        return 0
    given = options.get("speculative_num_draft_tokens")
    if method == TEXT_ALONE:
        return int(given or TEXT_GUESSES)
    steps = options.get("speculative_num_steps")
    one_branch = options.get("speculative_eagle_topk") == 1
    return int(steps) + 1 if steps and one_branch else int(given or GUESSES)


def own_draft(question: Question) -> tuple[Layer, ...]:
    """Draft layers that come with a model, for EAGLE and NEXTN: of the target itself, or of the
    model at the draft's path, often a copy of the target. A draft worker loads no other layers of
    it (configs/model_config.py `is_draft_model`: DeepseekV3ForCausalLM becomes
    DeepseekV3ForCausalLMNextN)."""
    options, subject = question.options, question.subject
    method = str(options.get("speculative_algorithm") or "").upper()
    path = options.get("speculative_draft_model_path")
    if method not in ("EAGLE", "NEXTN"):
        return ()
    if path and path != subject.name:
        if question.draft is None:
            return ()
        subject = question.draft
    return () if subject.model is None else draft_layers(subject.model, subject.config)


def separate_draft(question: Question) -> Draft | None:
    """The separate draft model that `--speculative-draft-model-path` names; an error where nothing
    is known of it, or where the model has no layers that could guess."""
    options = question.options
    method = str(options.get("speculative_algorithm") or "").upper()
    name, where = draft_name(options), "speculative_algorithm"
    if not method or method == TEXT_ALONE or question.draft_left_out:
        return None
    if method not in METHODS:
        raise InputError.one(
            f"`--speculative-algorithm {method[:40]}` is not supported yet",
            where=where,
            hint=f"supported: {', '.join((*METHODS, TEXT_ALONE))}",
        )
    if own_draft(question):
        return None
    if name:
        # server_args.py _handle_speculative_decoding: quantized as the target is, or `unquant`
        shared = not options.get("speculative_draft_model_quantization")
        quantization = options.get("quantization") if shared else None
        if quantization not in SGLANG_ONLINE:
            quantization = None
        return draft_of(METHODS[method], name, question.draft, where, quantization, SGLANG_ONLINE)
    raise InputError.one(
        f"`--speculative-algorithm {method}`: `{question.subject.name[:80]}` has no layers that "
        "guess tokens",
        where=where,
        hint="name a draft: `--speculative-draft-model-path MODEL`",
    )


# speculative/spec_info.py SpeculativeAlgorithm, 0.5.18, and the kind of draft that each one loads
METHODS = {
    "EAGLE": EAGLE,
    "NEXTN": EAGLE,
    "EAGLE3": EAGLE3,
    "STANDALONE": MODEL,
    "DFLASH": DFLASH,
}


def uncounted(question: Question, graphs: int) -> list[Problem]:
    """Words about what is not counted."""
    options, found = question.options, list[Problem]()
    if graphs and not options.get("disable_cuda_graph"):
        found.append(
            Problem(
                level="warning",
                message="SGLang's CUDA graphs are not counted",
                where="cuda_graph_max_bs",
                hint="they take what `--mem-fraction-static` leaves free",
            )
        )
    backend = str(options.get("moe_a2a_backend") or "none")
    if backend != "none":
        message = f"the buffers of `--moe-a2a-backend {backend[:40]}` are not counted"
        found.append(Problem(level="warning", message=message, where="moe_a2a_backend"))
    return found


def missing_attention(model: Model) -> list[Problem]:
    """SGLang 0.5.9 has no class for models without attention (`srt/models/`)."""
    if any(
        isinstance(block.mixer, (Attention, Latent))
        for layer in model.layers
        for block in layer.blocks
    ):
        return []
    return [
        Problem(
            message=f"SGLang has no class for `{model.family}` models",
            where="model",
            hint="vLLM has: `--engine vllm`",
        )
    ]


def rank_problems(
    options: Mapping[str, Any], tensor: int, copies: int, contexts: int
) -> list[Problem]:
    """Ranks that do not divide evenly: server_args.py asserts it of copies of attention and parts
    of a context, and parallel_state.py initialize_model_parallel splits ranks by owners of experts
    (0.5.9)."""
    owners, stages = int(options.get("ep_size") or 1), int(options.get("pp_size") or 1)
    beside = f" times `--dp {copies}`" if copies > 1 else ""
    found = [
        Problem(message=f"`--tp {tensor}` must be divisible by {words}", where=name)
        for name, words, ranks in (
            ("dp_size", f"`--dp {copies}` with `--enable-dp-attention`", copies),
            ("ep_size", f"`--ep {owners}`", owners),
            ("attn_cp_size", f"`--attn-cp-size {contexts}`{beside}", contexts * copies),
        )
        if tensor % ranks
    ]
    if stages > 1 and options.get("speculative_algorithm"):
        # server_args.py check_server_args
        message = f"`--pp {stages}`: SGLang has no speculative decoding with pipeline parallelism"
        hint = "omit `--speculative-algorithm`, or use `--tp`"
        found.append(Problem(message=message, where="pp_size", hint=hint))
    return found


def split_problems(model: Model, ranks: int) -> list[Problem]:
    heads = attention_heads(model)
    if ranks > 0 and (heads is None or heads % ranks == 0):
        return []
    # an assertion in the layer of each family, with these two numbers
    return [
        Problem(
            message=f"{heads} attention heads are not divisible by {ranks} tensor parallel ranks",
            where="tp_size",
            hint=f"use {splits(heads or 0)}",
        )
    ]


def sizes_of(question: Question, tensor: int) -> tuple[int, int]:
    """Tokens of a prefill piece, and the largest batch of a CUDA graph."""
    memory = shown_memory(question)
    sizes = defaults_of(question.version).sizes
    chunk, few, many = next(row[1:] for row in sizes if memory < row[0])
    given = question.options.get("chunked_prefill_size")
    return (
        chunk if given is None else int(given),
        int(
            question.options.get("cuda_graph_max_bs")
            or max(batches(question.options), default=few if tensor < 4 else many)
        ),
    )


def batch_words(options: Mapping[str, Any]) -> list[str]:
    """What `--cuda-graph-bs` lists, as words or as a list."""
    return str(options.get("cuda_graph_bs") or "").translate(SEPARATED).split()


def batches(options: Mapping[str, Any]) -> list[int]:
    """Batches that `--cuda-graph-bs` lists."""
    return [int(word) for word in batch_words(options)]


def batch_problems(options: Mapping[str, Any]) -> list[Problem]:
    return [
        Problem(
            message=f"`--cuda-graph-bs {word[:40]}` must be integers from 1 to {MOST_BATCH}",
            where="cuda_graph_bs",
            hint="like `--cuda-graph-bs 1 2 4 8`",
        )
        for word in batch_words(options)
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= MOST_BATCH)
    ]


def fraction_problems(options: Mapping[str, Any], fraction: float) -> list[Problem]:
    """A share that is none, as given or as what the reserves leave."""
    if 0 < fraction < 1:
        return []
    if options.get("mem_fraction_static") is None:
        message = "what SGLang sets aside for activations and CUDA graphs is more than the GPU has"
        hint = "set `--mem-fraction-static`, or lower `--cuda-graph-max-bs`"
    else:
        message, hint = f"`--mem-fraction-static {fraction}` must be between 0 and 1", ""
    return [Problem(message=message, where="mem_fraction_static", hint=hint)]


def latent(model: Model | None) -> bool:
    """Whether attention is MLA."""
    return model is not None and any(
        isinstance(block.mixer, Latent) for layer in model.layers for block in layer.blocks
    )


def shown_memory(question: Question) -> float:
    """MiB of a GPU as nvidia-smi shows them, which is more than CUDA's total (utils/common.py
    get_nvgpu_memory_capacity)."""
    if not question.devices:
        return 80 * 1024
    device = question.devices[0]
    smi = None if device.gpu is None else device.gpu.smi
    return (smi or device.total) / MIB


# Options beside which 0.5.10 to 0.5.13 have no CUDA graphs of prefill, but for their own defaults
# (server_args.py _handle_piecewise_cuda_graph).
WITHOUT_PIECES = (
    "speculative_algorithm",
    "enable_dp_attention",
    "cpu_offload_gb",
    "enable_lora",
    "enable_hierarchical_cache",
)


def graphs_of_prefill(question: Question, defaults: Defaults) -> bool:
    """Whether prefill has CUDA graphs."""
    options, gpu = question.options, question.devices[0].gpu if question.devices else None
    if options.get("disable_piecewise_cuda_graph") or options.get("disable_cuda_graph"):
        return False
    if gpu is not None and gpu.vendor != "nvidia":
        return False
    if not defaults.pieces_alone:
        return True
    spread = int(options.get("pp_size") or 1) > 1 or (options.get("moe_a2a_backend") or "none")
    return (
        spread in (False, "none")
        and not any(options.get(name) for name in WITHOUT_PIECES)
        and not question.subject.config.get("vision_config")
    )


def fraction_of(question: Question, tensor: int, copies: int, chunk: int, graphs: int) -> float:
    """`mem_fraction_static`: what is left after a reserve for activations and CUDA graphs."""
    options, defaults = question.options, defaults_of(question.version)
    vision = question.subject.config.get("vision_config")
    seen = defaults.vision(vision) if isinstance(vision, Mapping) else 1.0
    if options.get("mem_fraction_static") is not None:
        return float(options["mem_fraction_static"]) * (seen if defaults.vision_always else 1.0)
    launch = Launch(
        memory=shown_memory(question),
        ranks=tensor * int(options.get("pp_size") or 1),
        copies=copies,
        chunk=chunk if chunk > 0 else int(options.get("max_prefill_tokens") or 16384),
        graphs=graphs,
        dp_attention=bool(options.get("enable_dp_attention")),
        draft=str(options.get("speculative_algorithm") or ""),
        latent=latent(question.subject.model),
        pieces=graphs_of_prefill(question, defaults),
    )
    return defaults.fraction(launch) * seen
