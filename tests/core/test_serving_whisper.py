"""Whisper in vLLM: two caches of each layer, one of which is as long as the encoder's output."""

from __future__ import annotations

import pytest

import memfit
from memfit.api.engine_plan import plan_engine
from memfit.errors import InputError
from memfit.hardware import find_gpu
from memfit.model import catalog
from memfit.model.source import from_catalog
from memfit.serving.base import Device, Question
from memfit.serving.subject import subject_from
from memfit.serving.vllm.graphs import captured
from memfit.serving.vllm.setup import Setup, set_up
from memfit.serving.vllm.specs import layer_specs
from memfit.serving.weights import rank_bytes
from memfit.units import GIB

LARGE = "openai/whisper-large-v3"
SIZES = ("tiny", "base", "small", "medium", "large-v2", "large-v3", "large-v3-turbo")
# A public log of 0.15.1 (WSL, a card of 16 GB, `--gpu-memory-utilization 0.85`): "Model loading
# took 2.88 GiB", "Available KV cache memory: 10.14 GiB", "GPU KV cache size: 33,216 tokens",
# "Maximum concurrency for 448 tokens per request: 26.62x", 35 graphs of decoding, 0.22 GiB
LOGGED, TOKENS, CONCURRENCY, GRAPHS = 2.88, 33_216, 26.62, 35
BLOCKS = 4152  # 10.14 GiB of 32 layers, 16 tokens, keys and values of 1,280 numbers


def settings(version: str, gpu: str = "rtx-4080", model: str = LARGE, **options: object) -> Setup:
    known = find_gpu(gpu)
    device = Device(name=known.name, total=known.memory, gpu=known)
    subject = subject_from(from_catalog(catalog.find(model)))
    return set_up(Question(subject=subject, devices=(device,), options=options, version=version))


def test_a_log_of_large_v3() -> None:
    room = BLOCKS * 32 * 16 * 2 * 1280 * 2
    found = memfit.serve(
        LARGE,
        engine="vllm",
        gpu="rtx-4080",
        engine_version="0.15.1",
        kv_cache_memory_bytes=room,
    )
    assert found.figures["weights_gib"] == pytest.approx(LOGGED, abs=0.005)
    assert found.figures["kv_gib"] == pytest.approx(10.14, abs=0.005)
    assert found.figures["kv_tokens"] == TOKENS
    assert found.figures["max_concurrency"] == pytest.approx(CONCURRENCY, abs=0.005)
    setup = settings("0.15.1")
    assert captured(setup) == GRAPHS
    graphs = next(one.bytes for one in found.pools if one.name == "CUDA graphs")
    assert graphs / GIB == pytest.approx(0.22, abs=0.03)


def test_the_memory_around_that_cache() -> None:
    """16 GB are 15.92 to 15.99 GiB; the log names no card."""
    for total in ("15.92GiB", "15.99GiB"):
        found = memfit.serve(
            LARGE,
            engine="vllm",
            memory=total,
            engine_version="0.15.1",
            gpu_memory_utilization=0.85,
        )
        assert found.figures["kv_tokens"] == pytest.approx(TOKENS, rel=0.015)


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_the_checkpoint_and_biases_of_keys(size: str) -> None:
    setup = settings("0.24.0", model=f"openai/whisper-{size}")
    published, config = setup.subject.parameters, setup.subject.config
    assert published is not None
    biases = config["encoder_layers"] + 2 * config["decoder_layers"]
    assert setup.model.parameters == published + biases * config["d_model"]
    # blocks of the allocator are larger than small matrices
    assert 1 <= rank_bytes(setup.model, setup.rank) / (2 * setup.model.parameters) < 1.05


@pytest.mark.parametrize(
    ("version", "gpu", "outputs", "graphs"),
    [
        ("0.12.0", "rtx-4080", 1500, 51),  # the sound's length; graphs in pieces
        ("0.13.0", "rtx-4080", 2048, 35),  # a step's; graphs of steps that decode
        ("0.13.0", "h100-sxm", 8192, 51),
    ],
)
def test_outputs_that_a_request_keeps(version: str, gpu: str, outputs: int, graphs: int) -> None:
    setup = settings(version, gpu)
    specs = layer_specs(setup)
    assert [sum(one.kind == kind for one in specs) for kind in ("full", "crossing")] == [32, 32]
    crossing = next(one for one in specs if one.kind == "crossing")
    assert crossing.pages(448, setup.batched) == -(-outputs // 16)
    assert crossing.pages(1, 1) == -(-outputs // 16)
    assert captured(setup) == graphs
    said = [one for one in setup.problems if "outputs of the encoder" in one.message]
    assert bool(said) is (outputs > 1500)


def test_items_of_the_profiling_run() -> None:
    """As many sounds as a step has room for."""
    one, five = settings("0.24.0"), settings("0.24.0", "h100-sxm")
    assert five.images.kept == 5 * one.images.kept
    assert one.images.kept == 2 * (1500 * 1280 + 128 * 3000)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match=r"in vLLM before 0\.11 is not supported yet"):
        memfit.serve(LARGE, engine="vllm", gpu="l4", engine_version="0.10.0")
    with pytest.raises(InputError, match="has an encoder, not supported with this engine yet"):
        memfit.serve(LARGE, engine="sglang", gpu="l4")
    with pytest.raises(InputError, match="models with an encoder"):
        plan_engine(LARGE, engine="vllm", gpu="l4")
