"""What an answer assumes, doubts or refuses about stored checkpoints and paged states, and that
every way of writing it shows that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memfit.api.verbs import estimate
from memfit.cli import main
from memfit.errors import InputError, Problem
from memfit.estimate import Estimate
from memfit.report import write

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
PRODUCTS = 2 * (4 * 1024**2 + 3 * 1024 * 2048)  # values of the linear layers of both layers
REST = 2 * 1024**2 + 5 * 1024  # of embedding, head and norms
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
UNNAMED = {"producer": {"name": "modelopt"}, "quant_algo": "FP8"}
TRAINING = {"seq": 64, "gpu": "h100-sxm", "framework": "transformers"}
INFERENCE = {"task": "inference", "seq": 64, "new_tokens": 2}


def asked(settings: dict[str, Any] | None, **options: Any) -> Estimate:
    return estimate(
        SMALL if settings is None else {**SMALL, "quantization_config": settings}, **options
    )


def found(answer: Estimate, level: str) -> list[str]:
    return [problem.message for problem in answer.problems if problem.level == level]


def refused(settings: dict[str, Any], **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(InputError) as caught:
        asked(settings, **options)
    assert all(problem.hint for problem in caught.value.problems)
    return caught.value.problems


# ---------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("settings", [GPTQ, AWQ])
@pytest.mark.parametrize(
    "more", [{}, {"method": "freeze", "trainable": "mlp"}, {"task": "pretrain"}]
)
def test_packed_weights_are_not_trained(settings: dict[str, Any], more: dict[str, Any]) -> None:
    """Before, full fine-tuning of them was answered, at a quarter of the weights."""
    (problem,) = refused(settings, **TRAINING, **more)
    assert problem.where == "job.method"
    assert "cannot be trained" in problem.message
    assert asked(settings, **TRAINING, method="lora").fits


def test_what_modelopt_stores_is_for_other_engines() -> None:
    for settings in (NVFP4, UNNAMED):
        for method in ("full", "lora"):
            assert "modelopt" in refused(settings, **TRAINING, method=method)[0].message
        (warning,) = found(asked(settings, **INFERENCE, gpu="b200"), "warning")
        assert "modelopt" in warning


@pytest.mark.parametrize("settings", [FP8, GPTQ, AWQ, NVFP4])
def test_nothing_is_packed_twice(settings: dict[str, Any]) -> None:
    for options in ({**TRAINING, "method": "qlora"}, {**INFERENCE, "quant": "int8"}):
        problems = refused(settings, **options)
        assert any(
            "already quantized" in problem.message and problem.where == "job.quant"
            for problem in problems
        )


def test_fp8_is_trained_in_16_bits_and_says_so() -> None:
    answer, plain = asked(FP8, **TRAINING), asked(None, **TRAINING)
    assert answer.memory.allocated == plain.memory.allocated
    assert answer.parameters == plain.parameters
    (note,) = found(answer, "note")
    assert "fp8 cannot be trained, so they are dequantized to 16 bits" in note


def test_adapters_stand_beside_fp8_from_the_version_on_that_trains_them() -> None:
    new, old = (
        asked(FP8, **TRAINING, method="lora", versions=f"transformers={version}")
        for version in ("5.22", "5.21")
    )
    assert new.memory.parts["weights"] < old.memory.parts["weights"]
    assert found(new, "note") == []
    assert "cannot be trained over" in found(old, "note")[0]
    assert (
        "before 5.0"
        in refused(FP8, **TRAINING, method="lora", versions="transformers=4.57")[0].message
    )


# --------------------------------------------------------------------------------------- inference
def test_fp8_without_its_kernels_is_16_bits() -> None:
    """An A100 has compute capability 8.0; the kernels ask for 8.9."""
    old, new, unnamed = (
        asked(FP8, **INFERENCE, **where) for where in ({"gpu": "a100-sxm-80gb"}, {"gpu": "l4"}, {})
    )
    assert old.memory.end == asked(None, **INFERENCE, gpu="a100-sxm-80gb").memory.end
    assert (
        new.memory.parts["weights"]
        == unnamed.memory.parts["weights"]
        == PRODUCTS + PRODUCTS // 4096 + 2 * REST
    )
    assert "no kernels for fp8 weights" in found(old, "warning")[0]
    assert found(new, "warning") == []
    assert (
        "before 5.0"
        in refused(FP8, **INFERENCE, gpu="a100-sxm-80gb", versions="transformers=4.56")[0].message
    )


def test_a_matrix_passes_through_fp32_on_its_way_from_fp8() -> None:
    load = {
        one.phase: one.allocated
        for one in asked(FP8, **INFERENCE, gpu="a100-sxm-80gb").memory.timeline
    }["load"]
    assert load - 2 * (PRODUCTS + REST) < 11 * 1024 * 2048
    assert load > 2 * (PRODUCTS + REST - 3 * 1024 * 2048) + 11 * 1024 * 2048 - 2**21


def test_mxfp4_needs_its_packages() -> None:
    notes = found(
        estimate("openai/gpt-oss-20b", task="inference", seq=64, gpu="h100-sxm", offline=True),
        "note",
    )
    assert any("`kernels` and Triton 3.4" in note for note in notes)
    trained = found(
        estimate("openai/gpt-oss-20b", method="lora", seq=64, gpu="h100-sxm", offline=True), "note"
    )
    assert any("MXFP4 cannot be trained over" in note for note in trained)


# ------------------------------------------------------------------------------------ paged states
def test_paged_states_are_the_host_s() -> None:
    """bitsandbytes keeps states of 100,000 values and more in managed memory: one byte a value,
    four for embeddings."""
    norms, table, head = 5 * 1024, 1024**2, 1024**2
    assert PRODUCTS + table + head + norms == asked(None, **TRAINING).parameters.trainable
    wide = asked(None, **TRAINING, optimizer="paged_adamw")
    assert wide.host.size == 8 * (PRODUCTS + table + head)
    assert "paged optimizer states" in wide.host.why
    small = asked(None, **TRAINING, optimizer="paged_adamw_8bit", load="device_map")
    assert small.host.size == 2 * (PRODUCTS + head) + 8 * table
    assert any(
        "paged optimizer states count as CPU memory; the GPU also keeps them wh" in note
        for note in found(small, "note")
    )
    plain = asked(None, **TRAINING, optimizer="adamw_8bit", load="device_map")
    assert plain.host.size == 2 * 1024 * 2048
    assert plain.memory.allocated - small.memory.allocated > 0
    assert found(plain, "note") == []


def test_paged_states_of_adapters_are_small_tensors() -> None:
    tiny = asked(None, **TRAINING, method="lora", rank=16, optimizer="paged_adamw")
    assert (found(tiny, "note"), "paged" in tiny.host.why) == ([], False)
    large = asked(None, **TRAINING, method="lora", rank=128, optimizer="paged_adamw")
    assert found(large, "note")


# ----------------------------------------------------------------------------------- every way out
def test_text_markdown_and_json_show_them() -> None:
    answer = asked(NVFP4, **INFERENCE, gpu="b200")
    assert "\nwarning: transformers has no code for weights stored by modelopt" in write(answer)
    assert "\n> warning: transformers has no code for weights stored by modelopt" in write(
        answer, "markdown"
    )
    (problem,) = json.loads(write(answer, "json"))["problems"]
    assert (problem["level"], problem["where"]) == ("warning", "config.quantization_config")
    named = write(asked(None, **TRAINING, method="lora", targets="q_proj,nonesuch"))
    assert "\nwarning: no linear layer is named `nonesuch`, so PEFT skips it @ job.targets" in named


def test_the_command_refuses_with_a_reason(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "quantization_config": GPTQ}))
    assert main(["estimate", str(path), "--gpu", "h100-sxm", "--batch", "none"]) == 2
    err = capsys.readouterr().err
    assert "error: `none` must be an integer @ job.batch" in err
    assert "error: weights quantized by gptq cannot be trained @ job.method" in err
