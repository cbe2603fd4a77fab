"""What "works" offers starts when it is asked: on the GPUs of the question first."""

from __future__ import annotations

import re
import shlex

import pytest

from memfit.cli import main

ASKED = (
    ("Qwen/Qwen3-32B", "2xrtx-4090", "vllm"),
    ("Qwen/Qwen3-32B", "rtx-4090", "vllm"),
    ("meta-llama/Llama-3.3-70B-Instruct", "2xh100-sxm", "vllm"),
    ("meta-llama/Llama-3.1-8B", "rtx-3090", "vllm"),
    ("Qwen/Qwen3-32B", "2xrtx-4090", "sglang"),
    ("Qwen/Qwen3-32B", "2xrtx-4090", "tensorrt-llm"),
    ("deepseek-ai/DeepSeek-V3", "8xh100-sxm", "vllm"),
)


def works(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    """The exit code, and the alternatives that the answer offers."""
    code = main(["estimate", *words, "--offline"])
    text = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    _, _, offered = text.partition("works: ")
    return code, [one for one in offered.split(" or ") if one]


@pytest.mark.parametrize(("model", "gpu", "engine"), ASKED)
def test_every_offer_starts(
    model: str, gpu: str, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, offers = works(capsys, model, "--gpu", gpu, "--engine", engine)
    assert code == 1
    assert offers
    for offer in offers:
        flags = shlex.split(offer)
        own = [] if "--gpu" in flags else ["--gpu", gpu]
        assert works(capsys, model, *own, "--engine", engine, *flags)[0] == 0, offer


def test_gpus_that_stand_idle_are_used_before_others(capsys: pytest.CaptureFixture[str]) -> None:
    _, offers = works(
        capsys, "meta-llama/Llama-3.3-70B-Instruct", "--gpu", "2xh100-sxm", "--engine", "vllm"
    )
    assert len(offers) == 1
    assert re.fullmatch(r"--tensor-parallel-size 2 --max-model-len \d+", offers[0])


def test_older_versions_are_not_offered_weights_that_they_make_too_late(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("Qwen/Qwen3-32B", "--gpu", "2xrtx-4090", "--engine", "vllm")
    assert any("fp8" in one for one in works(capsys, *words)[1])
    assert not any("fp8" in one for one in works(capsys, *words, "--engine-version", "0.11.0")[1])
