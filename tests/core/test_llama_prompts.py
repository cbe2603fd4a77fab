"""Speed of prompts of llama.cpp: operations of a graph, against arithmetic and published speeds."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from memfit.cli import main
from memfit.hardware import GPU, find_gpu, parse_cluster
from memfit.hardware.apple import all_cores
from memfit.model.source import from_catalog
from memfit.serving.llamacpp.loading import from_config
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import BACKENDS, Machine
from memfit.serving.llamacpp.prompts import (
    LIKELY_PROMPTS,
    PROMPTERS,
    Prompter,
    PromptWork,
    clocks,
    prompt_rate,
    prompt_seconds,
    prompt_work,
)
from memfit.serving.llamacpp.settings import NEWEST, Settings
from memfit.serving.llamacpp.speed import multiprocessor_clocks
from memfit.truth.llama_speed import LlamaOutcome, judge_llama, ordered, read_llama_rows
from memfit.truth.statistics import middle

BLOCK = 34 / 32  # bytes of a number in Q8_0, ggml-common.h
ATTENTION = 2 * 4096 * 4096 + 2 * 4096 * 1024  # of a layer of Llama 3.1 8B
FEED = 3 * 4096 * 14336
LAYER = ATTENTION + FEED
TABLE = 128256 * 4096
CUDA = Machine(backend=BACKENDS["cuda"], free=(2**40,))


@cache
def model(name: str, quant: str) -> GgufModel:
    return from_config(from_catalog(name).config, name, quant)


def work(name: str, quant: str, tokens: int, behind: int = 0, **options: Any) -> PromptWork:
    settings = Settings(**{"context": 65536, "parallel": 1, "flash": True, **options})
    return prompt_work(model(name, quant), settings, tokens, behind)


def rate(name: str, gpu: GPU, machine: Machine = CUDA, **options: Any) -> float | str:
    settings = Settings(**{"context": 4096, "parallel": 1, **options})
    gpus = (gpu,) * len(machine.devices)
    return prompt_rate(model(name, "Q4_K_M"), settings, machine, gpus, 512)


# ------------------------------------------------------------- what a prompt takes
def test_two_operations_for_each_weight_and_token() -> None:
    found = work("meta-llama/Llama-3.1-8B", "Q8_0", 512)
    # behind the last attention only the last token goes on
    once = 31 * LAYER + ATTENTION + (FEED + TABLE) / 512
    assert found.packed == pytest.approx(2 * once, rel=1e-9)
    assert found.half == found.experts == 0


def test_weights_are_read_once_for_each_micro_batch() -> None:
    small, large = (
        work("meta-llama/Llama-3.1-8B", "Q8_0", 2048, ubatch=size).weights for size in (512, 2048)
    )
    assert small == pytest.approx(4 * large)
    # norms are operands of other operations
    assert 512 * small == pytest.approx((32 * LAYER + TABLE) * BLOCK, rel=1e-9)


def test_attention_sees_the_tokens_before_it() -> None:
    """Two products of a head's 128 values with each cell, in 32 layers of 32 heads."""
    near, far = (work("meta-llama/Llama-3.1-8B", "Q8_0", 512, depth) for depth in (0, 32768))
    cell = 32 * 32 * 128 * 2 * 2
    assert near.attention == cell * 512
    assert far.attention == cell * (32768 + 512)
    plain = work("meta-llama/Llama-3.1-8B", "Q8_0", 512, flash=False)
    assert plain.attention == near.attention
    assert plain.moved > near.moved  # the scores are written out


def test_a_long_prompt_sees_half_of_itself_on_average() -> None:
    found = work("meta-llama/Llama-3.1-8B", "Q8_0", 8192)
    assert found.attention == 32 * 32 * 128 * 2 * 2 * (8192 + 512) / 2


def test_a_mixture_multiplies_with_the_experts_that_a_token_chooses() -> None:
    found = work("Qwen/Qwen3-30B-A3B", "Q8_0", 512)
    assert found.experts == pytest.approx(2 * (47 + 1 / 512) * 8 * 3 * 2048 * 768)
    # 512 tokens choose nearly every one of 128 experts
    experts = 48 * 128 * 3 * 2048 * 768 * BLOCK
    assert 0.99 * experts < 512 * found.weights < 1.2 * experts


def test_layers_alike_are_counted_from_two() -> None:
    found = work("google/gemma-3-4b-it", "Q8_0", 512)
    attention, feed = 2560 * (2 * 2048 + 2 * 1024), 2560 * 3 * 10240
    once = 34 * attention + 33 * feed + (feed + 262208 * 2560) / 512
    assert found.packed == pytest.approx(2 * once, rel=1e-9)


# ------------------------------------------------------------- seconds
def test_seconds_are_operations_over_the_rate_and_bytes_over_the_bandwidth() -> None:
    gpu = find_gpu("rtx-3090")
    some = PromptWork(packed=1e9, half=2e9, attention=3e9, moved=4e6, weights=5e6)
    even = Prompter(100, 100, 100, 50, 100, 2.0, 8.0, 1.0)
    found = prompt_seconds(some, gpu, even, flash=True, build=NEWEST)
    assert gpu.bandwidth is not None
    expected = 6e9 / (100 * multiprocessor_clocks(gpu)) + (4e6 / 2 + 5e6) / gpu.bandwidth
    assert found == pytest.approx(expected)
    plain = prompt_seconds(some, gpu, even, flash=False, build=NEWEST)
    assert plain - found == pytest.approx(3e9 / (100 * multiprocessor_clocks(gpu)))


def test_no_number_where_no_figure_tells() -> None:
    llama = "meta-llama/Llama-3.1-8B"
    assert isinstance(rate(llama, find_gpu("rtx-4090")), float)
    assert "H100" in str(rate(llama, find_gpu("h100-sxm")))
    assert "several" in str(
        rate(llama, find_gpu("rtx-4090"), Machine(backend=CUDA.backend, free=(2**40,) * 2))
    )
    vulkan = Machine(backend=BACKENDS["vulkan"], free=(2**40,))
    assert "Vulkan" in str(rate(llama, find_gpu("rtx-4090"), vulkan))
    assert "builds" in str(rate(llama, find_gpu("rtx-4090"), build=2800))
    metal = Machine(backend=BACKENDS["metal"], free=(2**40,))
    mac = parse_cluster("m4-max-64gb").gpu
    assert isinstance(rate(llama, mac, metal), float)
    assert "mixtures" in str(rate("Qwen/Qwen3-30B-A3B", mac, metal))
    assert (
        clocks(parse_cluster("m5-max-64gb").gpu, PROMPTERS["MTL"]) == 0
    )  # its units for products are not fitted


def test_the_smaller_variant_of_a_chip_has_fewer_cores() -> None:
    assert all_cores(parse_cluster("m3-max-64gb").gpu) == 40
    assert all_cores(parse_cluster("m3-max-36gb").gpu) == 0
    assert all_cores(parse_cluster("m2-ultra-192gb").gpu) == 76


# ------------------------------------------------------------- published speeds
@cache
def outcomes() -> tuple[LlamaOutcome, ...]:
    rows = (row for row in read_llama_rows() if not row.decoding and row.held_out)
    return tuple(found for found in map(judge_llama, rows) if not found.reason)


def test_held_out_prompts() -> None:
    found = outcomes()
    assert len(found) >= 50
    assert middle(sorted(abs(one.error) for one in found)) < 0.15
    right = list(ordered(found))
    assert sum(right) / len(right) > 0.9


@pytest.mark.parametrize(("backend", "vendor"), [("CUDA", "NVIDIA"), ("MTL", "Apple")])
def test_likely_ranges_are_those_of_held_out_figures(backend: str, vendor: str) -> None:
    found = sorted(
        one.row.measured / one.predicted for one in outcomes() if one.gpu.startswith(vendor)
    )
    low, high = LIKELY_PROMPTS[backend]
    last = len(found) - 1
    assert low == pytest.approx(found[round(0.05 * last)], abs=0.006)
    assert high == pytest.approx(found[round(0.95 * last)], abs=0.006)
    assert set(PROMPTERS) == set(LIKELY_PROMPTS)


# ------------------------------------------------------------- answers
def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(list(words))
    said = capsys.readouterr()
    return said.out + said.err


def test_an_estimate_says_how_long_a_prompt_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "llama-3.1-8b", "--engine", "llama.cpp", "--gpu", "4090", "-c", "8192")
    assert "for 2,048 tokens" in run(capsys, *words)
    found = json.loads(run(capsys, *words, "--json"))["speed"]["prompt"]
    # Q4_K_S: 12,382.64 for 512 tokens (ggml-org/llama.cpp#24127), held out
    assert found["low"] < 12382.64 < found["high"]
    assert found["seconds"] == pytest.approx(2048 / found["tokens_per_second"])
    assert found["longest"] == 8192
    assert found["seconds_longest"] > 4 * found["seconds"]


def test_an_estimate_says_why_prompts_have_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "llama-3.1-8b", "--engine", "llama.cpp", "--gpu", "h100-sxm", "-c", "4096")
    assert "prompt     speed not known" in run(capsys, *words)
    found = json.loads(run(capsys, *words, "--json"))["speed"]
    assert found["prompt"] is None
    assert "H100" in found["prompt_untimed"]
