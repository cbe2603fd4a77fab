"""vLLM's options that change its memory, in its own words (`vllm serve --help`, 0.24.0)."""

from __future__ import annotations

from memfit.serving.base import Option, plain_options
from memfit.serving.vllm.passed_over import FLAGS, UNKNOWN, UNKNOWN_FLAGS, VALUES, WORDS
from memfit.serving.vllm.pooling import CONVERTS, OTHER_TASKS, RUNNERS, TASKS

KV_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4",
)


def option(name: str, kind: str, help: str, *short: str, **more: object) -> Option:
    """An option whose flag is its name."""
    flags = (f"--{name.replace('_', '-')}", *short)
    return Option(name=name, flags=flags, kind=kind, help=help, **more)  # type: ignore[arg-type]


def silent(name: str, kind: str = "text") -> Option:
    """An option that does not change the memory."""
    return Option(
        name=name, flags=(f"--{name.replace('_', '-')}",), kind=kind, help="", silent=True
    )


SILENT = (
    "host",
    "port",
    "api_key",
    "served_model_name",
    "tokenizer",
    "seed",
    "download_dir",
    "revision",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "uvicorn_log_level",
    "tokenizer_mode",
    "generation_config",
    "distributed_executor_backend",
    "max_log_len",
    "compilation_config",
    "chat_template_content_format",
    "code_revision",
    "tokenizer_revision",
    "response_role",
    "ssl_keyfile",
    "ssl_certfile",
    "stream_interval",
    "max_logprobs",
    "override_generation_config",
    "data_parallel_address",
    "data_parallel_backend",
    "otlp_traces_endpoint",
    # from here on read in 0.20.2
    "safetensors_load_strategy",
    "default_chat_template_kwargs",
    "structured_outputs_config",
    "tool_parser_plugin",
    "reasoning_parser_plugin",
    "media_io_kwargs",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "allowed_local_media_path",
    "hf_token",
    "hf_config_path",
    "model_loader_extra_config",
    "prefix_caching_hash_algo",
    "kv_cache_metrics_sample",
    "log_config_file",
    "root_path",
    "allowed_origins",
    "scheduling_policy",
    "api_server_count",
    "mamba_backend",
    "gdn_prefill_backend",
    "long_prefill_token_threshold",
    "model_impl",
)
SILENT_FLAGS = (
    "enable_auto_tool_choice",
    "disable_log_stats",
    "disable_log_requests",
    "enable_reasoning",
    "disable_custom_all_reduce",
    "enable_log_requests",
    "async_scheduling",
    "disable_uvicorn_access_log",
    "enable_server_load_tracking",
    "disable_fastapi_docs",
    "enable_prompt_tokens_details",
    "enable_flashinfer_autotune",
    "enable_force_include_usage",
    "enable_log_outputs",
    "disable_access_log_for_endpoints",
    "enable_request_id_headers",
    "disable_cascade_attn",
    "interleave_mm_strings",
    "kv_cache_metrics",
    "skip_tokenizer_init",
)

OPTIONS = (
    option("model", "text", "the model; may also stand alone", silent=True, names_model=True),
    option(
        "tensor_parallel_size",
        "int",
        "GPUs that share each layer",
        *("-tp", "--tp"),
        low=1,
        means="tensor",
    ),
    option(
        "pipeline_parallel_size",
        "int",
        "GPUs that share the layers",
        *("-pp", "--pp"),
        low=1,
        means="stages",
    ),
    option(
        "data_parallel_size",
        "int",
        "copies of the model",
        *("-dp", "--dp"),
        low=1,
        means="copies",
    ),
    option("enable_expert_parallel", "flag", "whole experts on each GPU, not a slice of every one"),
    option(
        "max_model_len",
        "size",
        "tokens of the longest request, or as many as fit [default: the model's own]",
        choices=("auto",),
        low=-1,
        means="context",
    ),
    option("max_num_seqs", "int", "most requests in one step", low=1, means="users"),
    option("max_num_batched_tokens", "size", "most tokens in one step", low=1),
    option(
        "gpu_memory_utilization",
        "float",
        "share of the GPU's total memory that vLLM may use [default: 0.9; 0.92 from 0.18 on]",
    ),
    option("kv_cache_memory_bytes", "size", "bytes for the KV cache, instead of a share", low=1),
    option("kv_cache_dtype", "text", "numbers of the KV cache", choices=KV_DTYPES, default="auto"),
    option("block_size", "int", "tokens of a cache block", low=1),
    option("num_gpu_blocks_override", "int", "cache blocks, whatever the memory", low=1),
    option("dtype", "text", "numbers of weights and activations", default="auto"),
    option("quantization", "text", "how the weights are quantized", "-q"),
    option("enforce_eager", "flag", "no CUDA graphs, no compilation"),
    option("max_cudagraph_capture_size", "int", "largest batch of a CUDA graph", low=1),
    option("enable_chunked_prefill", "flag", "prompts in pieces"),
    option("enable_prefix_caching", "flag", "reuse cached prefixes; no memory of its own"),
    option("enable_lora", "flag", "room for LoRA adapters"),
    option("max_loras", "int", "adapters in one batch", default="1", low=1),
    option("max_lora_rank", "int", "largest rank of an adapter", default="16", low=1),
    option("lora_extra_vocab_size", "int", "extra tokens of an adapter", default="256", low=0),
    option("fully_sharded_loras", "flag", "share adapters over tensor parallel ranks"),
    option("cpu_offload_gb", "float", "GiB of weights per GPU in CPU memory", default="0", low=0),
    option("swap_space", "float", "GiB of CPU memory for swapped requests (V0)", low=0),
    option("disable_hybrid_kv_cache_manager", "flag", "cache all tokens in sliding layers, too"),
    option("speculative_config", "json", "draft model and its tokens"),
    option("kv_offloading_size", "float", "GiB of cache in CPU memory, over all ranks", low=0),
    option(
        "kv_offloading_backend",
        "text",
        "what moves the cache to CPU memory",
        choices=("native", "lmcache"),
    ),
    option(
        "mamba_cache_mode",
        "text",
        "states that a cached prefix keeps",
        choices=("none", "align", "all"),
    ),
    option("attention_backend", "text", "whose kernels run attention [default: by the GPU]"),
    option("moe_backend", "text", "whose kernels run experts [default: by the GPU and weights]"),
    option("all2all_backend", "text", "how tokens travel to experts of other GPUs"),
    option("hf_overrides", "json", "changes of the model's config; not counted"),
    option("kv_transfer_config", "json", "connector that moves the cache, like LMCache or NIXL"),
    option("mamba_ssm_cache_dtype", "text", "numbers of a Mamba layer's state", default="auto"),
    option("enable_sleep_mode", "flag", "weights and cache can leave the GPU"),
    option("limit_mm_per_prompt", "json", "most images, videos and sounds of one request"),
    option("skip_mm_profiling", "flag", "no memory set aside for images"),
    option("language_model_only", "flag", "no images: neither encoder nor memory for them"),
    option("mm_processor_kwargs", "json", 'largest image, like {"max_pixels": 1003520}'),
    option("mm_encoder_tp_mode", "text", "how GPUs share the encoder", choices=("weights", "data")),
    option("load_format", "text", "how weights are read", default="auto"),
    option("runner", "text", "what the model is for [default: by its class]", choices=RUNNERS),
    option("convert", "text", "what a generating model is made into", choices=CONVERTS),
    option("task", "text", "the same, up to 0.11", choices=(*OTHER_TASKS, *TASKS)),
    option("config_format", "text", "format of the config", default="auto"),
    option("trust_remote_code", "flag", "no effect on memory; memfit never runs a model's code"),
    *(silent(name) for name in SILENT),
    *(silent(name, "flag") for name in SILENT_FLAGS),
    *plain_options(
        values=VALUES, flags=FLAGS, words=WORDS, refused=UNKNOWN, refused_flags=UNKNOWN_FLAGS
    ),
)
