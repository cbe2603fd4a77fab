"""Models whose code ships with their checkpoints: answered from their description, parameters
exact."""

from __future__ import annotations

import pytest

import memfit
from memfit.model import catalog
from memfit.model.classes import is_bare
from memfit.model.equivalents import EQUIVALENTS, converted
from memfit.model.families import build, families
from memfit.model.families._headless import NONE
from memfit.model.heads import with_head

SHIPPED = [
    pytest.param(entry, id=entry.name)
    for entry in catalog.entries()
    if entry.model_type in EQUIVALENTS
]


@pytest.mark.parametrize("entry", SHIPPED)
def test_parameters_are_the_published_ones(entry: catalog.Entry) -> None:
    """Those of the checkpoint, or of a class with the same matrices, built by transformers."""
    kind = converted(entry.config())["model_type"]
    if kind not in families():
        pytest.skip(f"{kind} has no formulas")
    model = build(entry.config())
    if model.encodes and is_bare(entry.config()):
        model = with_head(model, NONE, 0)
    counted = {entry.parameters, entry.published} - {None}
    assert model.parameters in counted or not counted


def test_an_answer_says_that_the_code_was_not_run() -> None:
    found = memfit.estimate("LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", seq=64)
    said = [one for one in found.problems if "ships with its checkpoints" in one.message]
    assert said
    assert "estimated as `llama`" in said[0].message


def test_layers_of_a_searched_model_differ() -> None:
    config = catalog.entry("nvidia/Llama-3_3-Nemotron-Super-49B-v1").config()
    model = build(config)
    assert len(set(model.layers)) > 4
    assert {len(layer.blocks) for layer in model.layers} == {1, 2}
    plan = memfit.estimate(config, seq=64, method="lora")
    assert plan.memory.allocated > 2 * model.parameters
