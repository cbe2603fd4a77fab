"""`by="trace"` from a config to an answer, also for a model that no family knows."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import memfit

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "dtype": "bfloat16",
}

JAPANESE: dict[str, Any] = {
    "model_type": "gpt_neox_japanese",
    "hidden_size": 64,
    "intermediate_multiple_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def test_a_model_that_no_family_knows(tmp_path: Any) -> None:
    import json

    from transformers import AutoConfig, AutoModelForCausalLM

    import torch

    (tmp_path / "config.json").write_text(json.dumps(JAPANESE))
    found = memfit.estimate(
        tmp_path / "config.json", gpu="t4", seq=64, by="trace", framework="transformers"
    )
    assert (found.source, found.verdict, found.model.family) == (
        "trace",
        "fits",
        "gpt_neox_japanese",
    )
    assert set(found.versions) >= {"torch", "transformers"}
    assert sum(found.parts.values()) == found.device
    config = AutoConfig.for_model(
        JAPANESE["model_type"],
        **{key: value for key, value in JAPANESE.items() if key not in ("model_type", "dtype")},
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert found.parameters.total == sum(one.numel() for one in model.parameters())


def test_the_longest_batch_to_come_is_traced_as_the_formulas_have_it() -> None:
    from memfit.job import Job
    from memfit.lower import lower
    from memfit.model.families import build
    from memfit.simulate.memory import memory
    from memfit.trace import trace_config

    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    for options in (
        {},
        {"checkpointing": "full"},
        {"method": "lora", "packing": False, "accumulate": 2},
    ):
        job = Job(seq=64, batch=2, longest=160, **options)  # type: ignore[arg-type]
        ours, real = memory(lower(build(config), job)), memory(trace_config(config, job))
        assert abs(ours.allocated / real.allocated - 1) < 0.001
        peaks = [
            max(
                one.allocated
                for one in memory_.timeline
                if one.moment == "longest batch" and one.phase == "backward"
            )
            for memory_ in (ours, real)
        ]
        assert peaks == [ours.allocated, real.allocated]


def test_a_configuration_that_no_family_knows_is_traced_at_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(memfit.InputError) as refused:
        memfit.estimate(JAPANESE, by="formula")
    text = str(refused.value)
    assert "the nearest supported one is `gpt_neox`" in text
    assert "--by trace" in text
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    first, again = (
        memfit.estimate(JAPANESE, seq=64, gpu="t4", framework="transformers") for _ in range(2)
    )
    assert first.source == again.source == "trace"
    assert first.memory.allocated == again.memory.allocated
    assert "the answer is from a trace of the real code" in first.problems[0].message
    assert "a cached trace" in again.problems[0].message


def test_both_refusals_are_told_where_the_trace_fails_too() -> None:
    with pytest.raises(memfit.InputError) as refused:
        memfit.estimate({**JAPANESE, "hidden_size": 63})
    assert "not supported yet: model_type" in refused.value.problems[0].message
    assert len(refused.value.problems) == 2
    with pytest.raises(memfit.InputError, match="transformers does not support it, either;"):
        memfit.estimate({**JAPANESE, "model_type": "brand_new"})


def test_a_search_by_trace_looks_at_small_batches_only() -> None:
    found = memfit.estimate(
        JAPANESE, by="trace", seq=64, memory="3GiB", largest_batch=True, framework="transformers"
    )
    assert found.answers[0].value
    assert found.answers[0].value <= 2**20 // 64


def test_what_only_formulas_cannot_do_is_no_obstacle() -> None:
    """The hint of a refusal is true: the trace takes the job, at once or by name."""
    config = {**LLAMA, "model_type": "llama"}
    job: dict[str, Any] = {"method": "lora", "targets": "embed_tokens,q_proj", "seq": 32}
    with pytest.raises(memfit.InputError, match="not supported yet: an adapter on the embedding"):
        memfit.estimate(config, by="formula", **job)
    found = memfit.estimate(config, by="trace", **job)
    assert memfit.estimate(config, **job).memory.allocated == found.memory.allocated
    adapters = 2 * (16 * (64 + 64)) + 16 * (512 + 64)
    assert found.parameters.trainable == adapters


def test_the_class_is_that_of_the_architectures() -> None:
    bert = {
        "model_type": "bert",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    published = {**bert, "architectures": ["BertForMaskedLM"]}
    whole = memfit.estimate(published, by="trace", seq=32, head="masked-lm")
    classes = memfit.estimate(
        {**bert, "architectures": ["BertForSequenceClassification"]}, by="trace", seq=32
    )
    assert classes.parameters.total < whole.parameters.total
    assert (
        memfit.estimate(bert, by="trace", seq=32, head="classification").memory.allocated
        == classes.memory.allocated
    )
    with pytest.raises(memfit.InputError, match="no `image-text` class for `bert`"):
        memfit.estimate(bert, by="trace", seq=32, head="image-text")
    with pytest.raises(memfit.InputError, match="600 tokens exceed the 512 positions"):
        memfit.estimate(bert, by="trace", seq=600)


def test_images_are_told() -> None:
    from tests.torch.small import LLAVA

    told = {
        True: "every sequence has an image of 32 x 32 pixels, 16 of its 64 tokens",
        False: "sequences are 64 text tokens without an image",
    }
    plain: dict[str, Any] = {"by": "trace", "seq": 64, "framework": "transformers"}
    found = {seen: memfit.estimate(LLAVA, images=int(seen), **plain) for seen in told}
    for seen, message in told.items():
        assert message in [problem.message for problem in found[seen].problems]
    assert found[True].memory.allocated > found[False].memory.allocated
    with pytest.raises(
        memfit.InputError, match="images take 128 tokens, more than the sequence length 64"
    ):
        memfit.estimate(LLAVA, images=8, **plain)


def test_experts_of_a_model_without_formulas_are_balanced_or_skewed() -> None:
    jamba = {
        "model_type": "jamba",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    }
    even = memfit.estimate(jamba, by="trace", seq=32, framework="transformers")
    skewed = memfit.estimate(jamba, by="trace", seq=32, framework="transformers", router_skew=1.5)
    message = "assumes equal tokens per expert"
    assert [message in [one.message for one in found.problems] for found in (even, skewed)] == [
        True,
        False,
    ]


def test_liger_is_run_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as where it is not
    with pytest.raises(
        memfit.InputError,
        match="a trace with Liger kernels needs `liger-kernel`, which is not installe",
    ):
        memfit.estimate(
            {**LLAMA, "model_type": "llama"},
            by="trace",
            seq=32,
            loss="liger",
            framework="transformers",
        )


def test_losses_that_transformers_has_not_are_refused() -> None:
    with pytest.raises(
        memfit.InputError, match="transformers has no chunked loss; torchtune and TRL have one"
    ):
        memfit.estimate(
            {**LLAMA, "model_type": "llama"},
            by="trace",
            seq=32,
            loss="chunked",
            framework="transformers",
        )


@pytest.mark.parametrize(
    ("stored", "options", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 128},
            {"task": "inference"},
            "a trace does not support weights quantized by `gptq`",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {"method": "lora"},
            "a trace does not support weights quantized by `modelopt`",
        ),
        ({}, {"unsloth": "norms,rotary"}, "a trace does not support Unsloth's kernels"),
    ],
)
def test_what_the_trace_does_not_run_is_refused_not_left_away(
    stored: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    config = (
        {**JAPANESE, "quantization_config": stored} if stored else {**LLAMA, "model_type": "llama"}
    )
    with pytest.raises(memfit.InputError, match=message):
        memfit.estimate(config, by="trace", seq=64, **options)


def test_what_is_unpacked_as_it_is_loaded_is_traced_unpacked() -> None:
    """fp8 on a GPU that has no kernels for it."""
    config = {**LLAMA, "model_type": "llama", "hidden_size": 128}
    stored = {
        **config,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    job = {"task": "inference", "seq": 64, "gpu": "a100-sxm-80gb", "by": "trace"}
    assert (
        memfit.estimate(stored, **job).memory.allocated
        == memfit.estimate(config, **job).memory.allocated
    )


def test_defaults_that_a_class_does_not_take_are_left_out() -> None:
    """Nobody asked for checkpoints or for so long a sequence."""
    found = memfit.estimate(JAPANESE, gpu="t4")
    assert found.job.checkpointing == "none"
    assert found.job.seq == 128
    assert any("no gradient checkpointing" in one.message for one in found.problems)
    with pytest.raises(memfit.InputError, match="does not support"):
        memfit.estimate(JAPANESE, gpu="t4", seq=64, checkpointing="full")
