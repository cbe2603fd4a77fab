"""vLLM's two model runners and its CUDA graphs, as each version has them."""

from __future__ import annotations

import pytest

from memfit.hardware import find_gpu
from memfit.serving import find_engine
from memfit.serving.base import Device, Question
from memfit.serving.links import communicator_bytes
from memfit.serving.vllm.graphs import captured, sizes
from memfit.serving.vllm.outside import kept_by_runner, loaded
from memfit.serving.vllm.setup import Setup, set_up
from memfit.truth.served import UNSEEN, judge, read_served, subject_of

DRAFT = {"method": "mtp", "num_speculative_tokens": 2}


def question(model: str, version: str, gpu: str = "rtx-4090", **options: object) -> Question:
    found = find_gpu(gpu)
    device = Device(name=found.name, total=found.memory, gpu=found)
    return Question(subject=subject_of(model), devices=(device,), options=options, version=version)


def settings(model: str, version: str, gpu: str = "rtx-4090", **options: object) -> Setup:
    return set_up(question(model, version, gpu, **options))


@pytest.mark.parametrize(
    ("model", "version", "second"),
    [
        ("Qwen/Qwen3-8B", "0.21.0", False),
        ("Qwen/Qwen3-8B", "0.22.0", True),
        ("Qwen/Qwen3-8B-FP8", "0.23.0", False),  # quantized
        ("Qwen/Qwen3-8B-FP8", "0.24.0", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "0.22.0", False),
        ("meta-llama/Llama-3.1-8B-Instruct", "0.23.0", True),
        ("Qwen/Qwen2.5-7B-Instruct", "0.24.0", False),
        ("Qwen/Qwen2.5-7B-Instruct", "0.25.0", True),
        ("openai/gpt-oss-20b", "0.28.0", False),  # experts
        ("Qwen/Qwen3.6-27B", "0.28.0", False),  # states
        ("openai/gpt-oss-20b", "0.29.0", True),
        ("Qwen/Qwen3.6-27B", "0.29.0", True),
    ],
)
def test_the_second_runner_starts_for_the_models_of_its_version(
    model: str, version: str, second: bool
) -> None:
    assert settings(model, version).second_runner is second


def test_drafts_that_the_second_runner_does_not_know_start_the_first() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    assert settings("Qwen/Qwen3.6-27B", "0.29.0", speculative_config=DRAFT).second_runner
    assert not settings("Qwen/Qwen3.6-27B", "0.29.0", speculative_config=ngram).second_runner


@pytest.mark.parametrize(
    ("options", "pieces", "whole", "largest"),
    [
        # the logs of unseen-0107, 0109, 0117 and 0053 and of a start of 16 requests
        ({"max_num_seqs": 20, "max_num_batched_tokens": 8192}, 8, 5, 40),
        ({"max_num_seqs": 128}, 35, 19, 256),
        ({"max_num_seqs": 256}, 51, 35, 512),
        ({"max_num_seqs": 8, "speculative_config": DRAFT}, 9, None, 48),
        ({"max_num_seqs": 16}, 7, 5, 32),
        ({"max_num_seqs": 16, "max_cudagraph_capture_size": 8}, 4, 4, 8),
    ],
)
def test_graphs_are_captured_for_the_sizes_of_the_log(
    options: dict[str, object], pieces: int, whole: int | None, largest: int
) -> None:
    setup = settings("Qwen/Qwen3.6-27B", "0.23.0", "h200", **options)
    assert (len(sizes(setup)), max(sizes(setup))) == (pieces, largest)
    if whole is not None:
        assert captured(setup) == pieces + whole


def sizes_of(model: str, version: str, **options: object) -> tuple[float, float]:
    """GiB of graphs, and what the budget has beside weights, activation, kernels and cache."""
    asked = question(model, version, "h200", **options)
    answer = find_engine("vllm").answer(asked)
    figures, device = answer.figures, asked.devices[0]
    graphs = next((pool.bytes for pool in answer.pools if pool.name == "CUDA graphs"), 0)
    named = ("weights_gib", "activation_gib", "non_torch_gib", "available_kv_gib")
    rest = figures["budget_gib"] - sum(figures[name] for name in named)
    assert answer.device <= device.total
    return graphs / 2**30, rest


@pytest.mark.parametrize(
    ("model", "version", "counted"),
    [
        ("Qwen/Qwen3-8B", "0.19.0", False),
        ("Qwen/Qwen3-8B", "0.24.0", False),  # the second runner
        ("Qwen/Qwen2.5-7B-Instruct", "0.23.0", True),
        ("Qwen/Qwen3-8B", "0.29.0", True),
    ],
)
def test_only_a_runner_that_counts_its_graphs_takes_them_from_the_cache(
    model: str, version: str, counted: bool
) -> None:
    graphs, rest = sizes_of(model, version)
    assert graphs > 0.3
    assert rest == pytest.approx(graphs if counted else 0, abs=1e-6)


def test_graphs_take_by_their_number() -> None:
    few, many = (sizes_of("Qwen/Qwen3-8B", "0.29.0", max_num_seqs=most)[0] for most in (4, 256))
    assert 0 < 10 * few < many
    assert sizes_of("Qwen/Qwen3-8B", "0.29.0", enforce_eager=True) == (
        0,
        pytest.approx(0, abs=1e-6),
    )


@pytest.mark.parametrize(
    ("version", "bytes_", "kept"),
    [("0.16.0", 38, 0), ("0.21.0", 14, 128), ("0.24.0", 6, 0), ("0.26.0", 2, 0), ("0.33.0", 14, 0)],
)
def test_the_second_sampler_is_profiled_without_sorting(
    version: str, bytes_: int, kept: int
) -> None:
    """Bytes for each logit of 256 requests, beside two hidden states of a step of one token, and
    rows that the first runner's kernel keeps: one for each of an RTX 4090's 128 multiprocessors."""
    model = "Qwen/Qwen3-8B"
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 256, "enforce_eager": True}
    answer = find_engine("vllm").answer(question(model, version, **options))
    rest = 2 * 256 * 4096 * 2
    assert answer.figures["activation_gib"] * 2**30 == pytest.approx(
        (256 * bytes_ + 4 * kept) * 151936 + rest, rel=1e-6
    )


def test_what_the_second_runner_keeps_counts_once_all_that_is_taken_counts() -> None:
    model = "Qwen/Qwen3-8B"
    assert kept_by_runner(settings(model, "0.26.0")) == 0
    assert kept_by_runner(settings(model, "0.27.1")) == 256 * (4 * 151936 + 4 * 4748)


def test_a_window_keeps_the_tokens_of_both_steps_that_are_under_way() -> None:
    """kv_cache_interface.py SlidingWindowSpec: the window, the tokens of steps, a page more."""
    engine, model = find_engine("vllm"), "google/gemma-3-27b-it"
    options = {"max_model_len": 32768, "max_num_batched_tokens": 8192, "max_num_seqs": 64}
    one, two = (
        engine.answer(question(model, version, "h200", **options)).figures
        for version in ("0.24.0", "0.26.0")
    )
    assert one["available_kv_gib"] == pytest.approx(two["available_kv_gib"], rel=0.01)
    assert two["kv_tokens"] < 0.8 * one["kv_tokens"]
    assert settings(model, "0.26.0", "h200", pipeline_parallel_size=2, **options).in_flight == 24576


@pytest.mark.parametrize(("version", "tokens"), [("0.27.1", 8192), ("0.28.0", 16384)])
def test_the_largest_gpus_take_the_largest_steps(version: str, tokens: int) -> None:
    assert settings("Qwen/Qwen3-8B", version, "b200").batched == tokens
    assert settings("Qwen/Qwen3-8B", version, "h200").batched == 8192


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("unseen-0024", 0.01),  # few requests, so few graphs: 2.3 % too few tokens before
        ("unseen-0057", 0.06),  # the second runner's sampler: 25 % too few before
        ("unseen-0110", 0.005),  # the second runner counts no graphs: 3.2 % too few before
    ],
)
def test_caches_of_logs(log: str, error: float) -> None:
    row = next(one for one in read_served(UNSEEN) if one.id == log)
    off = judge(row).error("kv_tokens")
    assert off is not None
    assert abs(off) < error


@pytest.mark.parametrize(
    ("version", "given", "pages"),
    [
        ("0.24.0", {}, 1),
        ("0.26.0", {}, 2),
        ("0.26.0", {"enable_prefix_caching": False}, 1),
        ("0.24.0", {"enable_prefix_caching": True}, 2),
    ],
)
def test_prefixes_of_hybrids_are_cached_by_default_from_0_26(
    version: str, given: dict[str, object], pages: int
) -> None:
    assert settings("Qwen/Qwen3.6-27B", version, **given).state_pages == pages
    assert settings("state-spaces/mamba-2.8b-hf", version).state_pages == 1


def test_early_versions_count_the_communicators_of_their_ranks() -> None:
    """0.10 looks at the memory before its ranks are joined, 0.11 behind it."""
    early, late = (
        question("Qwen/Qwen3-32B", version, "h100-sxm-80gb", tensor_parallel_size=4)
        for version in ("0.10.2", "0.11.0")
    )
    one = communicator_bytes(early.devices[0], 4, (2, 8))
    assert one > 500 * 2**20
    assert loaded(set_up(early), early.devices[0]) - loaded(set_up(late), late.devices[0]) == one
    alone = question("Qwen/Qwen3-32B", "0.10.2", "h100-sxm-80gb")
    assert loaded(set_up(alone), alone.devices[0]) < 200 * 2**20
