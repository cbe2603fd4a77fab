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
