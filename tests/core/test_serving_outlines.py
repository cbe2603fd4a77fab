"""Outlines whose parts differ in size: MiMo-V2's keys and values, ERNIE 4.5 VL's two mixtures."""

from __future__ import annotations

import pytest

from memfit.model import catalog
from memfit.model.source import from_catalog
from memfit.serving.base import Question
from memfit.serving.subject import subject_from
from memfit.serving.vllm.setup import set_up
from memfit.serving.vllm.specs import layer_specs
from memfit.serving.weights import rank_sizes

MIMO = "XiaomiMiMo/MiMo-V2-Flash"


@pytest.mark.parametrize("name", [MIMO, "baidu/ERNIE-4.5-VL-28B-A3B-PT"])
def test_the_outline_has_all_parameters(name: str) -> None:
    subject = subject_from(from_catalog(catalog.find(name)))
    assert subject.model is not None
    assert subject.model.parameters == subject.parameters
    towers = sum(one.count for one in subject.model.towers)
    assert towers == (0 if name == MIMO else 774_662_016)


def test_values_smaller_than_keys() -> None:
    """Nine full layers with 4 heads, 39 windows with 8, keys of 192 and values of 128."""
    subject = subject_from(from_catalog(catalog.find(MIMO)))
    setup = set_up(Question(subject=subject, options={"tensor_parallel_size": 4}))
    specs = layer_specs(setup)
    assert [one.page for one in specs if one.kind == "full"] == [16 * (192 + 128) * 2] * 9
    near = [one for one in specs if one.kind == "sliding"]
    assert [(one.page, one.window) for one in near] == [(16 * 2 * (192 + 128) * 2, 128)] * 39
    assert 4096 * (16 * 192 + 192 + 128) in rank_sizes(setup.model, setup.rank)
