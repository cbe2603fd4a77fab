"""Asks vLLM's own cache planner on a CPU; `tests/core/test_serving.py` compares what it says.

python tools/vllm_cache.py FOLDER [--extra FOLDER] [--write tests/core/vllm_cache.json]

FOLDER holds the Python files of a vLLM wheel (`pip download --no-deps vllm==0.11.0`, unzipped and
never installed, for it brings CUDA). EXTRA holds packages that it imports (cachetools, msgspec,
cloudpickle …); what is missing beyond them is stood in for by empty modules, because the planner
needs torch alone. Layers are read from the configs here, not by memfit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

MEMORY = 20 * 2**30
LENGTH, BATCHED = 8192, 2048
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-14B",
    "Qwen/Qwen2.5-72B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-13b-hf",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-v0.3",
    "mistralai/Mixtral-8x7B-v0.1",
    "google/gemma-2-2b",
    "google/gemma-2-9b",
    "google/gemma-2-27b",
    "google/gemma-3-1b-it",
    "google/gemma-3-4b-it",
    "google/gemma-3-12b-it",
    "google/gemma-3-27b-it",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-R1",
    "microsoft/phi-4",
    "microsoft/Phi-3-mini-4k-instruct",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-4.7-Flash",
    "allenai/OLMo-2-1124-7B",
    "CohereLabs/c4ai-command-r7b-12-2024",
    "HuggingFaceTB/SmolLM2-1.7B",
    "HuggingFaceTB/SmolLM3-3B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "EleutherAI/pythia-6.9b",
    "01-ai/Yi-1.5-34B",
    "bigcode/starcoder2-15b",
    "google/gemma-4-26B-A4B",
)


def layers(config: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """What each layer caches, by the keys that vLLM reads."""
    text = {**config, **(config.get("text_config") or {})}
    count = int(text["num_hidden_layers"])
    if text.get("kv_lora_rank"):
        width = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
        return [{"kind": "mla", "heads": 1, "head": width, "window": 0}] * count
    heads = int(text["num_attention_heads"])
    pairs = int(text.get("num_key_value_heads") or heads)
    if text.get("multi_query"):
        pairs = 1
    head = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    unsaid = 4096 if text["model_type"] == "mistral" else None  # MistralConfig's own default
    window = text.get("sliding_window", unsaid) if text.get("use_sliding_window", True) else None
    kinds = text.get("layer_types")
    every = text.get("sliding_window_pattern") or {"gemma3_text": 6, "gemma2": 2}.get(
        text["model_type"], 1
    )
    if not kinds:
        kinds = [
            "sliding_attention" if window and (every == 1 or (index + 1) % every) else "full"
            for index in range(count)
        ]
    found = []
    for kind in kinds:
        slides = bool(window) and kind == "sliding_attention"
        own, size = pairs, head
        if not slides and text.get("global_head_dim"):
            size = int(text["global_head_dim"])
            own = int(text.get("num_global_key_value_heads") or pairs)
        found.append(
            {
                "kind": "sliding" if slides else "full",
                "heads": max(1, own // ranks),
                "head": size,
                "window": int(window) if slides and window else 0,
            }
        )
    return found


CHILD = r"""
import importlib.abc, importlib.machinery, json, sys, types, typing
import copy, torch
try:
    import transformers
except ImportError:
    pass
folder, given = sys.argv[1], json.load(sys.stdin)

class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return made(name)
    __getitem__ = __or__ = __ror__ = lambda cls, other: cls

def made(name):
    return Meta(name, (), {"__init__": lambda self, *a, **k: None,
                           "__class_getitem__": classmethod(lambda cls, key: cls),
                           "__init_subclass__": classmethod(lambda cls, **k: None)})

class Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return made(name)

ABSENT = {"libtpu", "torch_xla", "tpu_inference", "amdsmi", "pynvml", "habana_frameworks"}

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        frame = sys._getframe(1)
        while frame and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        who = frame.f_globals.get("__name__", "") if frame else ""
        if top in ABSENT or top == "vllm" or not who.startswith("vllm"):
            return None
        if "." in name and not isinstance(sys.modules.get(top), Empty):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Empty(spec.name)
    def exec_module(self, module):
        module.__path__ = []

sys.path.insert(0, folder)
sys.meta_path.append(Finder())
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core import kv_cache_utils as planner

def spec(one, dtype):
    common = dict(block_size=16, num_kv_heads=one["heads"], head_size=one["head"], dtype=dtype)
    if one["kind"] == "mla":
        return kinds.MLAAttentionSpec(**common)
    if one["kind"] == "sliding":
        return kinds.SlidingWindowSpec(**common, sliding_window=one["window"])
    return kinds.FullAttentionSpec(**common)

def config(length, batched):
    space = types.SimpleNamespace
    return space(
        model_config=space(max_model_len=length, original_max_model_len=length),
        scheduler_config=space(max_num_batched_tokens=batched,
                               disable_hybrid_kv_cache_manager=False,
                               max_num_encoder_input_tokens=batched),
        parallel_config=space(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                              pipeline_parallel_size=1, world_size=1),
        cache_config=space(num_gpu_blocks_override=None, block_size=16, cache_dtype="auto",
                           mamba_cache_mode="none", enable_prefix_caching=True),
        speculative_config=None, kv_transfer_config=None, attention_config=space(backend=None),
    )

def answer(case):
    dtype = torch.float8_e4m3fn if case["fp8"] else torch.bfloat16
    settings = config(case["length"], case["batched"])
    specs = {str(n): spec(one, dtype) for n, one in enumerate(case["layers"])}
    groups = planner.get_kv_cache_groups(settings, specs)
    arguments = [settings, groups, specs, case["memory"]]
    if "kv_cache_specs" not in planner.get_kv_cache_config_from_groups.__code__.co_varnames:
        del arguments[2]
    made = planner.get_kv_cache_config_from_groups(*arguments)
    return {
        "groups": len(groups),
        "layers": [len(group.layer_names) for group in groups],
        "pages": [group.kv_cache_spec.page_size_bytes for group in groups],
        "block_sizes": [group.kv_cache_spec.block_size for group in groups],
        "blocks": made.num_blocks,
        "concurrency": round(planner.get_max_concurrency_for_kv_cache_config(settings, made), 6),
    }

found = []
for case in given:
    try:
        found.append(answer(case))
    except (NotImplementedError, AssertionError, ValueError) as error:
        found.append({"refused": type(error).__name__})
print("RESULT" + json.dumps(found))
"""


def cases() -> list[dict[str, Any]]:
    from memfit.model import catalog

    found = []
    for name in MODELS:
        key = catalog.find(name)
        if key is None:
            print(f"not in the catalog: {name}")
            continue
        config = catalog.entry(key).config()
        for ranks, fp8 in ((1, False), (2, True)):
            found.append(
                {
                    "model": key,
                    "ranks": ranks,
                    "fp8": fp8,
                    "length": LENGTH,
                    "batched": BATCHED,
                    "memory": MEMORY,
                    "layers": layers(config, ranks),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--extra", default="")
    parser.add_argument("--version", default="0.11.0")
    parser.add_argument("--write", default="")
    given = parser.parse_args()
    asked = cases()
    environment = {**os.environ, "PYTHONPATH": given.extra}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, given.folder],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    line = next((one for one in done.stdout.splitlines() if one.startswith("RESULT")), "")
    if not line:
        raise SystemExit(done.stderr[-3000:])
    said = json.loads(line.removeprefix("RESULT"))
    rows = [
        {**{key: case[key] for key in ("model", "ranks", "fp8")}, **answer}
        for case, answer in zip(asked, said, strict=True)
    ]
    if not given.write:
        for row in rows:
            print(json.dumps(row))
        return
    path = Path(given.write)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before |= {"length": LENGTH, "batched": BATCHED, "memory": MEMORY, given.version: rows}
    lines = [f" {json.dumps(key)}: {compact(value)}" for key, value in before.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(rows)} cases of vLLM {given.version}: {path}")


def compact(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"


if __name__ == "__main__":
    main()
