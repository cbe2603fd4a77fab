"""What "works" offers starts when it is asked: on the GPUs of the question first."""

from __future__ import annotations

import re
import shlex

import pytest

from memfit import serve
from memfit.cli import main
from memfit.errors import InputError

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
    code = main(["estimate", *words] + ([] if "--" in words else ["--offline"]))
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
    command = ("--", "vllm", "serve", "meta-llama/Llama-3.3-70B-Instruct")
    _, offers = works(capsys, "--offline", "--gpu", "2xh100-sxm", *command)
    assert len(offers) == 1
    assert re.fullmatch(r"--tensor-parallel-size 2 --max-model-len \d+", offers[0])


@pytest.mark.parametrize(
    ("engine", "shared", "given"),
    [
        ("vllm", "tensor_parallel_size", "pipeline_parallel_size"),
        ("sglang", "tp_size", "dp_size"),
        ("tensorrt-llm", "tp_size", "pp_size"),
        ("tgi", "num_shard", ""),
        ("lmdeploy", "tp", ""),
    ],
)
def test_all_gpus_of_a_question_share_the_layers_where_nothing_else_is_said(
    engine: str, shared: str, given: str
) -> None:
    model = "Qwen/Qwen3-8B"
    alone, told, assumed = (
        serve(model, engine=engine, offline=True, gpu=gpu, **more)
        for gpu, more in (
            ("rtx-4090", {}),
            ("4xrtx-4090", {shared: 4}),
            ("4xrtx-4090", {}),
        )
    )
    assert assumed.figures == told.figures != alone.figures
    assert any("4, so all 4 GPUs share" in one.message for one in assumed.problems)
    assert not any("assumed" in one.message for one in (*told.problems, *alone.problems))
    if given:
        own = serve(model, engine=engine, offline=True, gpu="4xrtx-4090", **{given: 2})
        assert not any("assumed" in one.message for one in own.problems)


@pytest.mark.parametrize(("given", "used"), [("3x", 2), ("6x", 4), ("128x8x", 32)])
def test_as_many_gpus_as_the_heads_allow(given: str, used: int) -> None:
    answer = serve("Qwen/Qwen3-8B", engine="vllm", offline=True, gpu=f"{given}rtx-4090")
    assert answer.gpus == used
    assert any(f"so {used} of " in one.message for one in answer.problems)


def test_what_is_wrong_on_any_number_of_gpus_is_said() -> None:
    with pytest.raises(InputError, match="max_model_len"):
        serve("Qwen/Qwen3-8B", engine="vllm", offline=True, gpu="2xrtx-4090", max_model_len=-5)
    with pytest.raises(InputError, match="quantization"):
        serve("Qwen/Qwen3-8B", engine="vllm", offline=True, gpu="2xrtx-4090", quantization="awq")


def test_older_versions_are_not_offered_weights_that_they_make_too_late(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("Qwen/Qwen3-32B", "--gpu", "2xrtx-4090", "--engine", "vllm")
    assert any("fp8" in one for one in works(capsys, *words)[1])
    assert not any("fp8" in one for one in works(capsys, *words, "--engine-version", "0.11.0")[1])
