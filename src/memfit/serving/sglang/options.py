"""SGLang's options that change its memory, in its own words (server_args.py, 0.5.9)."""

from __future__ import annotations

from memfit.serving.base import Option, plain_options
from memfit.serving.sglang.passed_over import FLAGS, UNKNOWN, UNKNOWN_FLAGS, VALUES, WORDS

KV_DTYPES = ("auto", "bfloat16", "bf16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1")


def option(name: str, kind: str, help: str, *short: str, **more: object) -> Option:
    """An option whose flag is its name."""
    flags = (f"--{name.replace('_', '-')}", *short)
    return Option(name=name, flags=flags, kind=kind, help=help, **more)  # type: ignore[arg-type]


SILENT = (
    "host",
    "port",
    "api_key",
    "served_model_name",
    "tokenizer_path",
    "random_seed",
    "log_level",
    "reasoning_parser",
    "tool_call_parser",
    "chat_template",
    "attention_backend",
    "sampling_backend",
    "schedule_policy",
    "load_format",
    "dist_init_addr",
    "node_rank",
    "nnodes",
)
SILENT_FLAGS = ("trust_remote_code", "skip_server_warmup", "disable_overlap_schedule")

OPTIONS = (
    Option(
        name="model_path",
        flags=("--model-path", "--model"),
        help="the model; may also stand alone",
        silent=True,
        names_model=True,
    ),
    option(
        "tp_size",
        "int",
        "GPUs that share each layer",
        *("--tp", "--tensor-parallel-size"),
        low=1,
        means="tensor",
    ),
    option(
        "dp_size",
        "int",
        "copies of the model",
        *("--dp", "--data-parallel-size"),
        low=1,
        means="copies",
    ),
    option(
        "pp_size",
        "int",
        "GPUs that share the layers",
        *("--pp", "--pipeline-parallel-size"),
        low=1,
        means="stages",
    ),
    option(
        "ep_size", "int", "GPUs that share the experts", "--ep", "--expert-parallel-size", low=1
    ),
    option(
        "attn_cp_size",
        "int",
        "GPUs that share a prompt, each with the attention's weights",
        "--attention-context-parallel-size",
        low=1,
    ),
    option(
        "enable_nsa_prefill_context_parallel",
        "flag",
        "each rank has the whole attention, and computes a part of the prompt",
    ),
    option(
        "context_length",
        "size",
        "tokens of the longest request [default: the model's own]",
        means="context",
    ),
    option("mem_fraction_static", "float", "share of the free memory for weights and cache"),
    option("max_running_requests", "int", "most requests at once", low=1, means="users"),
    option("max_total_tokens", "size", "most tokens in the cache", low=1),
    option("chunked_prefill_size", "int", "tokens of a piece of a prompt; -1 for whole prompts"),
    option("max_prefill_tokens", "size", "most tokens of a prefill", default="16384"),
    option("kv_cache_dtype", "text", "numbers of the cache", choices=KV_DTYPES, default="auto"),
    option("page_size", "int", "tokens of a page", default="1", low=1),
    option("dtype", "text", "numbers of weights and activations", default="auto"),
    option("quantization", "text", "how the weights are quantized"),
    option("cuda_graph_max_bs", "int", "largest batch of a CUDA graph", low=1),
    option("cuda_graph_bs", "words", "batches that have a CUDA graph"),
    option("disable_hybrid_swa_memory", "flag", "one pool for full and sliding layers"),
    option("disable_cuda_graph", "flag", "no CUDA graphs"),
    option("disable_piecewise_cuda_graph", "flag", "no CUDA graphs of prefill"),
    option("disable_radix_cache", "flag", "no reuse of prefixes"),
    option("enable_dp_attention", "flag", "attention on each rank for its own requests"),
    option("moe_a2a_backend", "text", "how tokens travel to experts", default="none"),
    option(
        "enable_dp_lm_head",
        "flag",
        "the output head is split as attention is, with --enable-dp-attention",
    ),
    option(
        "moe_dense_tp_size",
        "int",
        "GPUs that share a feed-forward without experts, of a mixture: 1",
        low=1,
        high=1,
    ),
    option(
        "swa_full_tokens_ratio", "float", "tokens of sliding layers per full one", default="0.8"
    ),
    option("mamba_full_memory_ratio", "float", "state memory per KV memory", default="0.9"),
    option("max_mamba_cache_size", "int", "states of linear attention", low=1),
    option("mamba_ssm_dtype", "text", "numbers of a state", default="float32"),
    option("speculative_algorithm", "text", "EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM"),
    option("speculative_num_draft_tokens", "int", "tokens drafted at once", low=1),
    option("speculative_num_steps", "int", "steps of the draft model", low=1),
    option("speculative_eagle_topk", "int", "branches of each step", low=1),
    option(
        "speculative_draft_model_path",
        "text",
        "the draft model",
        "--speculative-draft-model",
    ),
    option(
        "speculative_draft_model_quantization",
        "text",
        "how the draft's weights are quantized: as they are stored",
        choices=("unquant",),
    ),
    option("enable_hierarchical_cache", "flag", "a second cache in CPU memory"),
    option("hicache_ratio", "float", "size of that cache per byte of the GPU's", low=0),
    option("hicache_size", "int", "GB of that cache per rank, instead of the ratio", low=0),
    option("cpu_offload_gb", "float", "GiB of weights in CPU memory", default="0", low=0),
    *(
        Option(name=name, flags=(f"--{name.replace('_', '-')}",), help="", silent=True)
        for name in SILENT
    ),
    *(
        Option(name=name, flags=(f"--{name.replace('_', '-')}",), help="", kind="flag", silent=True)
        for name in SILENT_FLAGS
    ),
    *plain_options(
        values=VALUES, flags=FLAGS, words=WORDS, refused=UNKNOWN, refused_flags=UNKNOWN_FLAGS
    ),
)
