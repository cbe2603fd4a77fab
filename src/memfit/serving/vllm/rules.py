"""What differs between versions of vLLM, a row for each change."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

from memfit.constants import fitted
from memfit.lazy_dataclass import dataclass
from memfit.units import GIB

NEWEST = "0.24.0"  # the newest whose source these rules were read from
# ROCm: what a start that compiles its kernels finds in use beyond one whose kernels are compiled.
# What holds it is not known, so the larger size counts.
COMPILING: Annotated[
    int,
    fitted(
        "bytes that a start of vLLM on ROCm finds in use once it has compiled its kernels",
        "15.33 and 12.73 GiB of cache for Llama-3.1-8B by one command with compiled kernels and "
        "without, vLLM 0.11.2 on a Radeon AI PRO R9700 (kyuz0/amd-r9700-vllm-toolboxes@18a88f1 "
        "benchmarks, uv+pl and plain); ten starts that compiled had 0 to 3.0 GiB less",
    ),
] = int(2.6 * GIB)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`tokens_by_concurrency`: the log's tokens are concurrency × length. `counted_graphs`: the
    memory of CUDA graphs is estimated before the cache is sized. `mamba_pages`: a state is one page
    whatever the length."""

    engine: int = 1
    hybrid_groups: bool = True
    group_slack: float = 0.0
    tokens_by_concurrency: bool = False
    counted_graphs: bool = False
    unified_pages: bool = False  # layers of different page sizes can share blocks
    utilization: float = 0.9
    counted_adapters: bool = True  # room for LoRA is made while the weights are measured
    compiling: bool = False  # a start on ROCm that compiles leaves less memory
    nested_scales: bool = False  # bitsandbytes' double quantization stays; else scales are in fp32
    large_a100: bool = False  # an A100 of 80 GB takes the large defaults, as an H100 does
    sorted_sampling: bool = True  # top-k and top-p sort all logits; else a Triton kernel does both
    flashinfer_sampling: bool = False  # FlashInfer's sampler comes first, from compute 8.0 on
    # FlashInfer sums what the ranks have computed, where it can (outside.py), and beside copies of
    # the model and stages, too
    fused_sums: bool = False
    fused_beside: bool = False
    copied_table: bool = False  # a start that compiles copies the embedding table (activations.py)
    aligned_states: bool = False  # a cached prefix keeps one page more of each state
    stored_caches: bool = False  # ModelOpt's checkpoints may say how the cache is kept
    stored_heads: bool = False  # ModelOpt's mix may quantize the output head
    items: int = 999  # images of one request, unless limited (config.py limit_per_prompt)
    frames: int = 14  # of a video in the profiling run (qwen2_vl.py _MAX_FRAMES_PER_VIDEO)
    marks_are_items: bool = False  # marks around an image count as its tokens
    state_for_each: bool = False  # CUDA graphs of decoding want a block of states for each request
    capped_steps: bool = False  # a step has no more tokens than all requests of full length
    expert_chunk: int = 0  # tokens that experts take at once (VLLM_FUSED_MOE_CHUNK_SIZE); 0: all
    # How experts are stored whose kernels share workspaces that stay (experts.py), whether
    # FlashInfer's come first where they can, for weights in 16 bits, too, and the kernel that is
    # named
    expert_workspaces: tuple[str, ...] = ()
    flashinfer_experts: bool = False
    flashinfer_plain: bool = False
    expert_kernel: str = ""
    triton_experts: bool = False  # the wheel brings Triton's kernels for MXFP4 experts
    fitted_length: bool = False  # `--max-model-len auto`: the longest request that fits
    text_only: bool = False  # without images, videos and sounds, towers are not loaded
    xformers: bool = False  # xFormers is among the wheel's requirements
    flashinfer: bool = False  # FlashInfer is among the wheel's requirements
    # The second model runner (runners.py): `model_type`s that start it, whether only without
    # quantization, whether all models without experts and states do, whether all do, and whether it
    # counts CUDA graphs
    second_named: tuple[str, ...] = ()
    second_unquantized: bool = False
    second_dense: bool = False
    second_all: bool = False
    second_graphs: bool = False
    second_copies: bool = False  # its sampler copies the logits in fp32
    second_samples: bool = False  # its sampler is profiled with top-k and top-p
    early_look: bool = False  # the memory is looked at before the ranks' own communicators are made
    consumed: bool = False  # all memory taken since the start counts, what a runner keeps, too
    in_flight: bool = False  # windows keep the tokens of each step that is under way
    hybrid_prefixes: bool = False  # prefixes of hybrid models are cached by default
    largest_steps: bool = False  # 16384 tokens from 160 GiB on
    eighth_by_itself: bool = False  # DeepSeek-V4's cache is in 8 bits unless the options say else
    # Of an encoder–decoder: a request's cache of the encoder's outputs has room for the tokens of a
    # step (CrossAttentionSpec), and only steps that decode have CUDA graphs, not those in pieces
    crossing_steps: bool = False
    long_pooling_steps: bool = False  # prompts that stay whole share steps of the usual size


def parse(version: str) -> tuple[int, ...]:
    """`0.11.0` as numbers; whatever follows them does not count. Empty means the newest."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version or NEWEST)
    return tuple(int(one or 0) for one in match.groups()) if match else parse(NEWEST)


MIXED = ("deepseek_v2", "granitemoe", "qwen2_moe")  # models of experts with the second runner

# From which version on what holds, each read from the source of the first version that has it and
# of the one before; later rows add to earlier ones.
CHANGES: tuple[tuple[tuple[int, ...], dict[str, object]], ...] = (
    # worker/model_runner.py load_model makes room for LoRA behind the memory profiler
    (
        (0, 0, 0),
        {
            "engine": 0,
            "hybrid_groups": False,
            "nested_scales": True,
            "counted_adapters": False,
            "items": 1,
            "frames": 16,
            "marks_are_items": True,
            "expert_chunk": 32768,
            "xformers": True,
        },
    ),
    # V1 by default; load_model makes room for LoRA inside of the memory profiler
    (
        (0, 8, 0),
        {
            "engine": 1,
            "large_a100": True,
            "counted_adapters": True,
            "compiling": True,
            "items": 999,
            "early_look": True,
        },
    ),
    # arg_utils.py _set_default_args_v1 (vllm#17885); bitsandbytes_loader.py has dequantize_dq,
    # which loader.py of 0.8 has not
    ((0, 9, 0), {"large_a100": False, "nested_scales": False}),
    ((0, 9, 2), {"hybrid_groups": True}),  # v1/core/kv_cache_utils.py
    # v1/worker/gpu_worker.py init_device: MemorySnapshot behind the communicators, not in 0.10.2
    ((0, 11, 0), {"frames": 14, "early_look": False}),
    # arg_utils.py _set_default_max_num_seqs_and_batched_tokens_args, not in 0.11.0
    ((0, 11, 1), {"group_slack": 1.25, "flashinfer": True, "long_pooling_steps": True}),
    # arg_utils.py _set_default_max_num_seqs_and_batched_tokens_args of 0.11.2, not in 0.11.0
    ((0, 11, 2), {"capped_steps": True}),
    # unify_kv_cache_spec_page_size; third_party/triton_kernels, not in 0.11.2; envs.py; the wheel
    # of 0.11.2 requires xFormers
    (
        (0, 12, 0),
        {"unified_pages": True, "triton_experts": True, "expert_chunk": 16384, "xformers": False},
    ),
    # seen in logs of 0.11.2; no log of 0.13 has it (twelve starts, two of which compiled);
    # multimodal/profiling.py counts get_num_embeds, not the length
    # config/scheduler.py max_num_encoder_input_tokens and config/vllm.py, not in 0.12.0
    (
        (0, 13, 0),
        {"compiling": False, "marks_are_items": False, "crossing_steps": True},
    ),
    # vllm-project/vllm#29431; oracle/fp8.py and nvfp4.py, not in 0.13.0
    ((0, 14, 0), {"fitted_length": True, "expert_workspaces": ("plain", "fp8", "fp4")}),
    # models/interfaces.py _mark_tower_model for all models (#32605, #32757); some models before;
    # oracle/nvfp4.py AVAILABLE_BACKENDS, not in 0.14.1
    ((0, 15, 0), {"text_only": True, "flashinfer_experts": True}),
    ((0, 16, 0), {"aligned_states": True, "stored_caches": True}),  # not in 0.13.0
    # v1/sample/ops/topk_topp_triton.py; config/vllm.py enable_allreduce_rms_fusion, not in 0.16.0;
    # the first to require torch 2.10: logs with it have the copy, those with 2.9.0 do not
    ((0, 17, 0), {"sorted_sampling": False, "fused_sums": True, "copied_table": True}),
    ((0, 18, 0), {"group_slack": 1.5}),
    ((0, 19, 0), {"expert_workspaces": ("plain", "fp8", "fp4", "mxfp4")}),  # oracle/mxfp4.py
    # fused_moe.py of 0.14.1 has chunks, that of 0.20.2 has none; oracle/unquantized.py
    # _get_priority_backends, not in 0.19.1
    (
        (0, 20, 0),
        {
            "counted_graphs": True,
            "utilization": 0.92,
            "expert_chunk": 0,
            "flashinfer_plain": True,
        },
    ),
    # kv_cache_utils.py and config/compilation.py of 0.20.2, not of 0.18; a log of 0.20.0 counts
    # blocks
    ((0, 20, 1), {"tokens_by_concurrency": True, "state_for_each": True}),
    # config/vllm.py DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES
    # VLLM_USE_FLASHINFER_SAMPLER is unset in 0.20.2 and true in 0.24.0; a log of 0.22.0 names it
    (
        (0, 22, 0),
        {
            "second_named": ("qwen3",),
            "second_unquantized": True,
            "second_copies": True,
            "flashinfer_sampling": True,
        },
    ),
    # modelopt.py get_quant_method knows ParallelLMHead in 0.24.0, not in 0.22.0; a log of 0.22.1
    # has the weights of a stored head
    ((0, 22, 1), {"stored_heads": True}),
    ((0, 23, 0), {"second_named": ("llama", "mistral", "qwen3")}),
    (
        (0, 24, 0),
        {
            "second_named": (*MIXED, "llama", "mistral", "qwen3"),
            "second_unquantized": False,
            "fused_beside": True,  # enable_allreduce_rms_fusion, not in 0.20.2
            # experts/marlin_moe.py for GPTQ and AWQ, too; awq_marlin.py of 0.20.2 calls the kernel
            "expert_workspaces": ("plain", "fp8", "fp4", "mxfp4", "packed"),
        },
    ),
    ((0, 25, 0), {"second_named": MIXED, "second_dense": True}),
    # v1/worker/gpu/sample/sampler.py; kv_cache_interface.py max_in_flight_tokens; config/model.py
    # is_prefix_caching_supported, each not so in 0.25.0
    ((0, 26, 0), {"second_copies": False, "in_flight": True, "hybrid_prefixes": True}),
    # utils/mem_utils.py total_consumed, not in 0.26.0
    ((0, 27, 0), {"consumed": True}),
    ((0, 28, 0), {"largest_steps": True}),  # arg_utils.py get_batch_defaults, not in 0.27.1
    # v1/worker/gpu/cudagraph_utils.py profile_cudagraph_memory; in 0.28 it returns 0
    ((0, 29, 0), {"second_all": True, "second_graphs": True}),
    # models/deepseek_v4/attention.py, not in 0.29.0
    ((0, 30, 0), {"eighth_by_itself": True}),
    # v1/worker/gpu/model_runner.py _dummy_sampler_run, not in 0.32.0
    ((0, 33, 0), {"second_samples": True}),
)


def rules_of(version: str) -> Rules:
    """The rules of one version."""
    number, found = parse(version), Rules()
    for since, change in CHANGES:
        if number >= since:
            found = replace(found, **change)  # type: ignore[arg-type]
    return found
