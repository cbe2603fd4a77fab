"""Kept answers of the trace, given anew."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memfit.truth.traced import Traced, answers, stored


def test_a_kept_answer_comes_again() -> None:
    """Where the installed versions may stand for the row's: small, quick rows of PEFT's own
    benchmark."""
    asked = frozenset({"peft-0131", "peft-0136"})
    for one in answers(ids=asked):
        assert isinstance(one, Traced), one
        assert one.predicted == pytest.approx(stored()[one.id].predicted, rel=0.001)
