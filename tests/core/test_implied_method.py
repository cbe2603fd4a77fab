"""An option that only one method has means that method."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit.cli import main


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"rank": 8}, "lora"),
        ({"lora_alpha": 16}, "lora"),
        ({"load_in_4bit": True}, "qlora"),
        ({"quant": "int8", "framework": "transformers", "batch": 1}, "qlora"),
        ({"quant": "nf4", "method": "lora"}, "lora"),
        ({"rank": 8, "method": "full"}, "full"),
        ({}, "full"),
    ],
)
def test_the_method_that_an_option_means(given: dict[str, Any], method: str) -> None:
    found = memfit.estimate("llama-3.2-1b", gpu="rtx-4090", **given)
    assert found.job.method == method
    assert ("method" in found.assumed) == ("method" not in given)
    assert found.assumed.get("framework") == (None if "framework" in given else "trl")


def test_the_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", "--lora-r", "8", "--gpu", "rtx-4090"]) == 0
    out, _ = capsys.readouterr()
    assert "`--method lora` is assumed, because `--rank` is an option of LoRA" in " ".join(
        out.split()
    )


def test_the_trainers_own_method_is_among_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-3.2-1b", "--gpu", "h100"]) == 0
    assert "defaults: --framework trl --method full --batch 8" in capsys.readouterr().out
    assert main(["estimate", "llama-3.2-1b", "--gpu", "h100", "--method", "full"]) == 0
    assert "--method full --batch" not in capsys.readouterr().out


def test_serving_quantized_weights_has_no_method() -> None:
    found = memfit.estimate("llama-3.2-1b", task="inference", quant="nf4", gpu="rtx-4090")
    assert found.job.task == "inference"
    assert not found.assumed
