"""vLLM inside a trainer's process, where the package is not installed: memory as large as its share
of the GPU, and completions of the longest length."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher

TOKEN = 1  # of which completions consist
LIKELIHOOD = -1.0


def share(fraction: float) -> Any:
    """A block as large as vLLM's weights, cache and buffers together: it takes this fraction of
    the whole GPU for itself (vllm/worker/gpu_worker.py `determine_available_memory`, 0.11)."""
    torch: Any = importlib.import_module("torch")
    total = torch.cuda.get_device_properties(0).total_memory
    return torch.empty(int(total * fraction), dtype=torch.uint8, device="cuda")


def changes(recorder: Watcher) -> dict[str, Change]:
    """For TRL's trainers that generate (trl/generation/vllm_generation.py, 1.16)."""

    def changed(module: ModuleType) -> list[Patch]:
        if module.is_vllm_available():
            return []
        kind = module.VLLMGeneration

        def start(self: Any) -> None:
            message = "vLLM is not installed: completions of the longest length are made up"
            if self.mode == "colocate":
                part = f"{self.gpu_memory_utilization:.0%} of the GPU"
                when = " while it generates" if self.enable_sleep_mode else ""
                message += f", and a block of {part} takes the place of its memory{when}"
                if not self.enable_sleep_mode:
                    self.llm = share(self.gpu_memory_utilization)
            recorder.note("vllm", message)

        def generate(self: Any, prompts: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any, Any]:
            if self.mode == "colocate" and self.enable_sleep_mode:
                block = share(self.gpu_memory_utilization)
                del block
                module.empty_cache()
            count = self.max_completion_length
            rows = range(len(prompts))
            return (
                prompts,
                [[TOKEN] * count for _ in rows],
                [[[LIKELIHOOD]] * count for _ in rows],
                [[[TOKEN]] * count for _ in rows],
            )

        return [
            (kind, "_init_vllm", start),
            (kind, "sync_weights", lambda self: None),
            (kind, "generate", generate),
        ]

    return {"trl.generation.vllm_generation": changed}


__all__ = ["changes"]
