"""`--prune`: the model that is left, equal to the one that transformers builds that way."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit.errors import InputError
from memfit.model import catalog
from memfit.model.families import build
from memfit.model.pruning import parsed, pruned

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GEMMA = {
    **LLAMA,
    "model_type": "gemma2",
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def test_half_of_the_layers_of_llama() -> None:
    """32 layers of 218,112,000 parameters each."""
    whole = build(catalog.entry("meta-llama/Llama-3.1-8B").config())
    half = memfit.estimate("meta-llama/Llama-3.1-8B", prune="layers=0.5", seq=64, batch=1)
    assert half.parameters.total == whole.parameters - 16 * 218_112_000
    assert "pruned" in half.model.origin


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LLAMA, "layers=2"),
        (LLAMA, "layers=0.5,heads=2,ffn=0.5,vocab=256"),
        (MIXTRAL, "experts=4,layers=3"),
        (GEMMA, "layers=3,heads=0.5"),
    ],
)
@pytest.mark.parametrize("job", [{"method": "lora"}, {"task": "inference"}])
def test_it_is_the_model_that_transformers_builds(
    config: dict[str, Any], text: str, job: dict[str, Any]
) -> None:
    """Parameters and peak, by the trace of transformers' own class."""
    pytest.importorskip("torch")
    given = {**job, "seq": 64, "batch": 1, "framework": "transformers"}
    ours = memfit.estimate(config, prune=text, by="formula", **given)
    real = memfit.estimate(config, prune=text, by="trace", **given)
    whole = memfit.estimate(config, by="formula", **given)
    assert ours.parameters.total == real.parameters.total < whole.parameters.total
    assert abs(ours.memory.allocated / real.memory.allocated - 1) < 0.005


def test_lists_of_layers_are_cut_with_them() -> None:
    assert pruned(GEMMA, "layers=3")["layer_types"] == GEMMA["layer_types"][:3]
    whole = {"model_type": "x", "text_config": LLAMA}
    assert pruned(whole, "ffn=0.5")["text_config"]["intermediate_size"] == 88


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=5", "more than the 4 that there are"),
        ("layers=0", "must be a count"),
        ("layers=many", "must be a count"),
        ("width=3", "must be one of"),
        ("layers=2,layers=3", "given twice"),
        ("heads=3", "no whole number of 2 key heads"),
        ("experts=2", "no count of experts"),
    ],
)
def test_what_cannot_be_cut_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pruned(LLAMA, text)


def test_experts_that_a_token_needs_stay() -> None:
    with pytest.raises(InputError, match="each token needs 2"):
        pruned(MIXTRAL, "experts=1")


def test_shares_and_counts() -> None:
    assert parsed("layers=24, ffn=0.5") == {"layers": 24, "ffn": 0.5}
    assert parsed("") == {}
