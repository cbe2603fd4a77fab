"""Serving engines: what their start-up logs will say, before anything is downloaded.

One folder per engine, each by the engine's own rules; `paged` holds those known in less detail. An
engine owns its options as data, reads its own command line and answers a `Question` with a
`ServingAnswer`. `ENGINES` names the folders; an engine is imported when somebody asks for it, and
these names cost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from memfit.errors import InputError
from memfit.registry import nearest

if TYPE_CHECKING:
    from memfit.serving.base import ServingEngine

# How people call an engine, and the module whose `ENGINE` it is.
ENGINES: dict[str, str] = {
    "vllm": "memfit.serving.vllm",
    "sglang": "memfit.serving.sglang",
    "llamacpp": "memfit.serving.llamacpp",
    "ollama": "memfit.serving.llamacpp.ollama",
    "tensorrt-llm": "memfit.serving.paged.tensorrt_llm",
    "tgi": "memfit.serving.paged.tgi",
    "lmdeploy": "memfit.serving.paged.lmdeploy",
    "mlx": "memfit.serving.paged.mlx",
}
ALIASES: dict[str, str] = {
    "llama.cpp": "llamacpp",
    "llama-cpp": "llamacpp",
    "llama-server": "llamacpp",
    "trtllm": "tensorrt-llm",
    "trt-llm": "tensorrt-llm",
    "tensorrt_llm": "tensorrt-llm",
    "text-generation-inference": "tgi",
    "turbomind": "lmdeploy",
    "mlx-lm": "mlx",
    "mlx_lm": "mlx",
}
# Programs, or the beginnings of modules behind `python -m`, and the engine that they start.
PROGRAMS: dict[str, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llama-server": "llamacpp",
    "llama-cli": "llamacpp",
    "llama-run": "llamacpp",
    "ollama": "ollama",
    "trtllm-serve": "tensorrt-llm",
    "text-generation-launcher": "tgi",
    "lmdeploy": "lmdeploy",
    "mlx_lm": "mlx",
}
# Images of containers, and the words before those that are given to them.
IMAGES: dict[str, tuple[str, ...]] = {
    "vllm/vllm-openai": ("vllm", "serve"),
    "lmsysorg/sglang": (),
    "huggingface/text-generation-inference": ("text-generation-launcher",),
    "ggml-org/llama.cpp": ("llama-server",),
}
BY_ENVIRONMENT = ("ollama",)  # engines whose options are environment variables
# What is meant where no engine is named: with a quantization in the model's name, with a tag as
# Ollama's library has it, and by `serve` of any other model.
GGUF_ENGINE, TAG_ENGINE, SERVER_ENGINE = "llamacpp", "ollama", "vllm"


def find_engine(name: str) -> ServingEngine:
    """The engine called `name`, or an error with the nearest names."""
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in ENGINES:
        engine: ServingEngine = import_module(ENGINES[key]).ENGINE
        return engine
    close = nearest(name, (*ENGINES, *ALIASES), 1)
    offer = f"did you mean `{close[0]}`? " if close else ""
    raise InputError.one(
        f"unknown serving engine `{name[:60]}`",
        where="engine",
        hint=f"{offer}one of {', '.join(ENGINES)}",
    )


__all__ = [
    "ALIASES",
    "BY_ENVIRONMENT",
    "ENGINES",
    "GGUF_ENGINE",
    "SERVER_ENGINE",
    "TAG_ENGINE",
    "IMAGES",
    "PROGRAMS",
    "find_engine",
]
