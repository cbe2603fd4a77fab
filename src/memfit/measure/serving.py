"""Measures inference by vLLM: dummy weights, prompts of random tokens, and the engine in this
process, so that the allocator's counters see it.

Read from vLLM's entrypoints/llm.py and engine/arg_utils.py; run against a stand-in with its
signatures, not yet against vLLM itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.measure.record import Case
from memfit.registry import nearest

ENGINES = ("vllm",)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def truth(text: str) -> bool:
    return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]


# Arguments of `vllm.LLM` that decide about memory, and how each is read.
SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "gpu_memory_utilization": float,
    "enforce_eager": truth,
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "kv_cache_dtype": str,
}


def engine_from(text: str) -> tuple[str, dict[str, Any]]:
    """`vllm,gpu_memory_utilization=0.85`: a name and its settings."""
    name, *rest = [one.strip() for one in text.split(",")]
    problems: list[Problem] = []
    if name not in ENGINES:
        problems.append(
            Problem(
                message=f"unknown engine `{name[:60]}`",
                where="engine",
                hint="one of " + ", ".join(ENGINES),
            )
        )
    found: dict[str, Any] = {}
    for piece in rest:
        key, _, value = piece.partition("=")
        if key not in SETTINGS:
            close = nearest(key, tuple(SETTINGS))
            hint = f"did you mean `{close[0]}`?" if close else "one of " + ", ".join(SETTINGS)
            problems.append(
                Problem(message=f"unknown setting `{key[:60]}`", where="engine", hint=hint)
            )
            continue
        try:
            found[key] = SETTINGS[key](value)
        except (ValueError, KeyError):
            problems.append(
                Problem(message=f"`{value[:60]}` is not a valid value of `{key}`", where="engine")
            )
    if not 0 < found.get("gpu_memory_utilization", 0.9) <= 1:
        problems.append(
            Problem(
                message=f"`{found['gpu_memory_utilization']}` must be between 0 and 1",
                where="engine",
                hint="vLLM's default is 0.9",
            )
        )
    raise_errors(problems)
    return name, found


def refusals(case: Case, kind: str) -> Iterator[Problem]:
    job = case.job
    try:
        engine_from(case.engine)
    except InputError as bad:
        yield from bad.problems
        return
    if job.training:
        yield Problem(
            message="`engine` applies to inference only",
            where="job.task",
            hint="use `--task inference`",
        )
    if case.use:
        yield Problem(
            message="`engine` and `use` cannot be combined",
            where="use",
            hint="remove it",
        )
    if job.precision not in DTYPES:
        yield Problem(
            message=f"vLLM does not support `{job.precision}`",
            where="job.precision",
            hint="one of " + ", ".join(DTYPES),
        )
    if job.quantization != "none" or job.beams > 1 or job.cache != "dynamic":
        yield Problem(
            message="an engine has its own cache and weight formats",
            where="job",
            hint="remove `quant`, `beams` and `cache`",
        )
    if job.new_tokens < 1:
        yield Problem(
            message="an engine generates at least 1 token",
            where="job.new_tokens",
            hint="1 or more",
        )
    if kind == "cpu":
        yield Problem(
            message="vLLM can only be measured on a GPU",
            where="engine",
            hint="remove `engine` to measure transformers' `generate`",
        )
    elif importlib.util.find_spec("vllm") is None:
        yield Problem(message="vLLM is not installed", where="engine", hint="pip install vllm")


def perform(case: Case, device: Any, meter: Any) -> dict[str, Any]:
    """Load, a first token of every prompt, then whole answers."""
    raise_errors(refusals(case, device.type))
    job, (_, settings) = case.job, engine_from(case.engine)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    meter.mark("load")
    vllm: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(case.config)), encoding="utf-8")
        given = {
            "max_model_len": job.seq + job.new_tokens,
            "enable_prefix_caching": False,
            **settings,
        }
        engine = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=DTYPES[job.precision],
            seed=0,
            **given,
        )
        chance = random.Random(0)
        words = int(case.config.get("vocab_size", 1000))
        prompts = [
            {"prompt_token_ids": [chance.randrange(words) for _ in range(job.seq)]}
            for _ in range(job.batch)
        ]
        for phase, tokens in (("prefill", 1), ("decode", job.new_tokens)):
            meter.mark(phase)
            asked = vllm.SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            engine.generate(prompts, asked, use_tqdm=False)
    return {"engine": case.engine}


__all__ = ["engine_from", "perform", "refusals"]
