"""Older transformers: every family is answered or refused in words, whatever the version."""

import pytest

from memfit import estimate
from memfit.errors import InputError
from memfit.model.families import families


@pytest.mark.parametrize("version", ["4.36", "4.40", "4.44", "4.47", "4.52", "5.0"])
def test_every_family_is_answered_or_refused(version: str) -> None:
    refused = set()
    for name, family in sorted(families().items()):
        for task in ("finetune", "inference"):
            try:
                found = estimate(dict(family.examples[0]), versions=f"transformers={version}", seq=16, new_tokens=2, task=task)
            except InputError as bad:
                refused.add((name, bad.problems[0].message.partition(" for ")[0]))
            else:
                assert found.memory.allocated > 0
    assert refused == ({(name, "no formula") for name in ("falcon", "gpt_neox", "persimmon")} if float(version) < 4.45 else set())


@pytest.mark.parametrize("family", ["phi", "stablelm"])
def test_layers_pick_from_tables_of_their_own_before_4_45(family: str) -> None:
    """Peaks of transformers 4.40.2 with torch 2.4.1 under the trace: 25,981,440 and 24,303,104 bytes."""
    config = dict(families()[family].examples[0])
    found = estimate(config, versions="transformers=4.40,torch=2.4", seq=256, batch=2)
    assert found.memory.allocated == pytest.approx({"phi": 25_981_440, "stablelm": 24_303_104}[family], rel=2e-3)
