"""`by="trace"` from a config to an answer, also for a model that no family knows."""

from __future__ import annotations

from typing import Any

import memfit

JAPANESE: dict[str, Any] = {
    "model_type": "gpt_neox_japanese", "hidden_size": 64, "intermediate_multiple_size": 4, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 128, "dtype": "bfloat16",
}  # fmt: skip


def test_a_model_that_no_family_knows(tmp_path: Any) -> None:
    import json

    from transformers import AutoConfig, AutoModelForCausalLM

    import torch

    (tmp_path / "config.json").write_text(json.dumps(JAPANESE))
    found = memfit.estimate(tmp_path / "config.json", gpu="t4", seq=64, by="trace")
    assert (found.source, found.verdict, found.model.family) == ("trace", "fits", "gpt_neox_japanese")
    assert set(found.versions) >= {"torch", "transformers"}
    assert sum(found.parts.values()) == found.device
    config = AutoConfig.for_model(
        JAPANESE["model_type"], **{key: value for key, value in JAPANESE.items() if key not in ("model_type", "dtype")}
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
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    for options in ({}, {"checkpointing": "full"}, {"method": "lora", "packing": False, "accumulate": 2}):
        job = Job(seq=64, batch=2, longest=160, **options)  # type: ignore[arg-type]
        ours, real = memory(lower(build(config), job)), memory(trace_config(config, job))
        assert abs(ours.allocated / real.allocated - 1) < 0.001
        peaks = [
            max(one.allocated for one in memory_.timeline if one.moment == "longest batch" and one.phase == "backward")
            for memory_ in (ours, real)
        ]
        assert peaks == [ours.allocated, real.allocated]
