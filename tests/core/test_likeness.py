"""`--like`: the formulas of another family with the sizes of the model's own config."""

from __future__ import annotations

import pytest

import memfit
from memfit.model.families import build
from memfit.model.likeness import build_like

OWN = {
    "model_type": "brand_new",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def test_the_formulas_are_the_named_familys() -> None:
    like, plain = build_like("llama", OWN), build({**OWN, "model_type": "llama"})
    assert like.parameters == plain.parameters
    assert "formulas of `llama`" in like.origin


def test_a_model_of_the_catalog_names_its_family() -> None:
    assert build_like("meta-llama/Llama-3.1-8B", OWN).family == "llama"


def test_the_sizes_of_a_composite_are_those_of_its_text() -> None:
    inner = {key: value for key, value in OWN.items() if key != "model_type"}
    whole = {"model_type": "brand_new", "text_config": inner}
    assert build_like("llama", whole).parameters == build_like("llama", OWN).parameters


def test_the_answer_says_whose_formulas_it_uses() -> None:
    found = memfit.estimate(OWN, like="llama", seq=64)
    assert found.source == "formula"
    assert any("by the formulas of `llama`" in one.message for one in found.problems)


def test_a_family_that_nobody_knows() -> None:
    with pytest.raises(memfit.InputError, match="unknown family `lama`"):
        memfit.estimate(OWN, like="lama")


def test_a_plan_takes_it_too() -> None:
    found = memfit.plan(OWN, like="llama", gpu="t4", seq=64)
    assert found.rows
    with pytest.raises(memfit.InputError, match="`--like NAME` takes the formulas"):
        memfit.plan(OWN, gpu="t4", seq=64)
