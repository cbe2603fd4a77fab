"""What vLLM takes beside its model from 0.17 on, and what an answer says that it assumes."""

from __future__ import annotations

from memfit.hardware import find_gpu
from memfit.serving.base import Device, Question
from memfit.serving.vllm.graphs import FLASHINFER_BUFFER, first_graph, scales_in_graphs
from memfit.serving.vllm.setup import Setup, set_up
from memfit.truth.served import subject_of

LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-14B"
EXPERTS, GEMMA = "nvidia/Qwen3.6-35B-A3B-NVFP4", "nvidia/Gemma-4-26B-A4B-NVFP4"


def device(gpu: str) -> Device:
    found = find_gpu(gpu)
    return Device(name=found.name, total=found.memory, gpu=found)


def question(model: str, version: str, gpu: str, **options: object) -> Question:
    ranks = [int(str(options.get(f"{one}_parallel_size", 1))) for one in ("tensor", "pipeline")]
    count = ranks[0] * ranks[1] * int(str(options.get("data_parallel_size", 1)))
    return Question(
        subject=subject_of(model),
        devices=(device(gpu),) * count,
        options=options,
        version=version,
    )


def settings(model: str, version: str, gpu: str, **options: object) -> Setup:
    return set_up(question(model, version, gpu, **options))


def test_a_first_graph_is_as_large_as_the_larger_kind() -> None:
    setup = settings(EXPERTS, "0.20.2", "rtx-5090", kv_cache_dtype="fp8", moe_backend="cutlass")
    scales = scales_in_graphs(setup)
    assert 0 < scales < FLASHINFER_BUFFER == first_graph(setup)
    other = settings(EXPERTS, "0.20.2", "rtx-5090", moe_backend="cutlass")
    assert first_graph(other) == scales
