"""Where neither formulas nor a trace know a model: exact weights, a range for the rest."""

from __future__ import annotations

import pytest

import memfit
from memfit.model import catalog
from memfit.report import write

NAME = "baichuan-inc/Baichuan2-13B-Base"


def test_weights_are_exact_and_the_rest_is_a_range() -> None:
    found = memfit.estimate(NAME, task="inference", seq=1024, gpu="a100-sxm-80gb")
    parameters = catalog.entry(NAME).parameters
    assert parameters
    assert found.source == "bound"
    assert found.parameters.total == parameters
    assert abs(found.memory.parts["weights"] / (2 * parameters) - 1) < 0.001
    assert found.band.low < found.device < found.band.high
    assert "weights are exact, the rest is a range" in found.problems[0].message
    for form in ("text", "markdown", "json"):
        assert write(found, form, width=100, colour=False)


def test_the_range_holds_a_family_that_is_known() -> None:
    """Llama's own answer lies in the range that is given without its formulas."""
    from memfit.job import Job
    from memfit.model.families import build
    from memfit.rough_bound import bound
    from memfit.strategy import ONE

    model = build(catalog.entry("meta-llama/Llama-3.1-8B").config())
    job = Job(method="lora", seq=1024, checkpointing="full")
    own = memfit.estimate(
        model, method="lora", seq=1024, checkpointing="full", framework="transformers"
    )
    found = bound(model, job, None, ONE, model.parameters)
    assert found.band.low <= own.device <= found.band.high


def test_a_model_whose_weights_nobody_counted_is_refused_with_a_way_on() -> None:
    config = {"model_type": "brand_new", "hidden_size": 64, "num_hidden_layers": 2}
    with pytest.raises(memfit.InputError, match="--like NAME"):
        memfit.estimate(config)
