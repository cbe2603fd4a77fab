"""Optimizers' rows: every word is known, every row cited, and the steps of some hold what their
code does, counted by hand."""

from __future__ import annotations

import pytest

from memfit.api.verbs import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.lower.optimize import FORMS, OF, SHAPES, STATES, pieces
from memfit.model.families import build
from memfit.optimizers import OPTIMIZERS
from memfit.tape import Alloc, Free, Mark, Tape, check

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 64,
}
WEIGHTS = build(CONFIG).parameters
EMBEDDING = 2000 * 256


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_word_is_known(name: str) -> None:
    row = OPTIMIZERS[name]
    assert row.cite
    for rule in row.rules:
        assert rule.of in OF
        assert set(rule.states) <= set(STATES)
        made: set[str] = {"grad", ""}
        for word in (word for _, words in pieces(rule.step) for word in words):
            text, _, shape = word.removeprefix("-").partition("@")
            new, _, format = text.partition(":")
            assert shape in SHAPES
            assert format in FORMS
            if "=" in word:
                new, _, old = word.partition("=")
                assert old in made
            made.add(new)


def tape(name: str, **more: object) -> Tape:
    found = lower(build(CONFIG), Job(optimizer=name, batch=1, seq=16, **more))  # type: ignore[arg-type]
    check(found)
    return found


def kept(found: Tape) -> int:
    """Bytes that the optimizer keeps."""
    return sum(
        one.size for one in found.events if isinstance(one, Alloc) and one.part == "optimizer"
    )


def rise(found: Tape) -> int:
    """By how much the second step lifts what is held above its beginning."""
    sizes: dict[int, int] = {}
    held = most = 0
    inside = False
    for event in found.events:
        if isinstance(event, Mark):
            inside = (event.phase, event.step) == ("step", 1)
        elif isinstance(event, Alloc):
            sizes[event.id] = event.size
            held += event.size if inside else 0
        elif isinstance(event, Free):
            held -= sizes[event.id] if inside else 0
        most = max(most, held)
    return most


def test_lists_hold_every_parameter_and_loops_hold_two() -> None:
    assert rise(tape("adamw")) == 2 * WEIGHTS
    assert rise(tape("adadelta")) == 2 * 2 * WEIGHTS
    assert rise(tape("adamw_loop")) == 2 * 2 * EMBEDDING + 2 * 256  # beside a norm's denominator
    assert rise(tape("sgd_momentum")) == 0
    assert rise(tape("adamw_torch_8bit")) == 2 * 4 * EMBEDDING
    assert rise(tape("adamw_torch_4bit")) == 2 * (4 + 8) * EMBEDDING


def test_what_is_assumed_of_a_compiled_step_is_said() -> None:
    said = {
        name: [one.message for one in estimate(CONFIG, optimizer=name).problems]
        for name in ("adamw_torch_8bit", "adamw_8bit")
    }
    assert any("inductor" in one for one in said["adamw_torch_8bit"])
    assert not any("inductor" in one for one in said["adamw_8bit"])


def test_states_are_counted() -> None:
    assert kept(tape("schedule_free_sgd")) == 2 * WEIGHTS
    assert kept(tape("ademamix")) == 3 * 4 * WEIGHTS
    assert kept(tape("grokadamw")) == 0  # on the host
    small = 9 * 256  # norms, too small for codes
    assert kept(tape("adamw_torch_4bit")) == 2 * (
        (WEIGHTS - small) // 2 + (WEIGHTS - small) // 256 * 4 + 30 * 16 * 4 + 2 * small
    )


def test_lomo_keeps_no_gradients() -> None:
    gradients = {
        one.id: one.size
        for one in tape("lomo").events
        if isinstance(one, Alloc) and one.part == "gradients"
    }
    held = most = 0
    for event in tape("lomo").events:
        if isinstance(event, Alloc):
            held += gradients.get(event.id, 0)
        elif isinstance(event, Free):
            held -= gradients.get(event.id, 0)
        most = max(most, held)
    assert most <= 2 * (EMBEDDING + 512 * 256)
    assert sum(gradients.values()) == 2 * 2 * WEIGHTS


def test_galore_passes_a_whole_gradient_through_an_svd() -> None:
    side, rank = 256, 128
    svd = 4 * (2 * EMBEDDING + side * side + 2000 * rank) + 2 * rank * side
    assert (
        0 <= rise(tape("galore_adamw")) - svd <= 2 * (512 * 256 + 512 * 128 + 2 * 256 * 256)
    )  # and what is left of a layer
