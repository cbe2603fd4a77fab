"""A stand-in for vLLM with the signatures of its entrypoints/llm.py and sampling_params.py (0.9):
blocks for weights and cache as large as it is told, nothing computed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ENGINE_ARGUMENTS = (
    "load_format",
    "max_model_len",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
)
TOLD: list[Any] = []


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    detokenize: bool = True


class LLM:
    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        **kwargs: Any,
    ) -> None:
        assert set(kwargs) <= set(ENGINE_ARGUMENTS)
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert skip_tokenizer_init
        config = json.loads(Path(model, "config.json").read_text())
        self.vocabulary, self.longest = config["vocab_size"], kwargs["max_model_len"]
        total = torch.cuda.get_device_properties(0).total_memory
        self.cache = torch.empty(
            int(total * gpu_memory_utilization), dtype=torch.uint8, device="cuda"
        )

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, *, use_tqdm: bool = True
    ) -> list[Any]:
        assert sampling_params is not None
        for one in prompts:
            assert max(one["prompt_token_ids"]) < self.vocabulary
            assert len(one["prompt_token_ids"]) + (sampling_params.max_tokens or 0) <= self.longest
        assert sampling_params.ignore_eos
        assert not sampling_params.detokenize
        return [None] * len(prompts)
