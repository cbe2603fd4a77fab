"""Every family that runs by captured graphs: peaks equal to the trace's on sizes that no
graph was captured with. (Parameters are held to transformers' own in `test_families.py`.)"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.graph import check, json_of
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.families._captured import (
    SETTINGS,
    Row,
    graphs_of,
    known_settings,
    rows,
    stored,
)
from memfit.simulate.memory import memory
from memfit.tape import check as legal
from memfit.techniques.captured_graphs import stands_still
from memfit.trace import trace_config
from memfit.uses import strategy_from

ROWS = {row.name: row for row in rows()}
WORST = 0.005  # of the peak that the trace has
CASES: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 200},
    {"batch": 1, "seq": 331, "checkpointing": "full"},
    {"batch": 2, "seq": 200, "method": "lora"},
    {"batch": 2, "seq": 200, "method": "qlora", "checkpointing": "full"},
)
TRL = {"framework": "trl", "clip": 1.0, "optimizer": "adamw_fused", "checkpointing": "full"}
# The defaults of TRL's trainer, of which each family takes one
USUAL: tuple[dict[str, Any], ...] = (
    {"batch": 8, "packing": False, "precision": "autocast-bf16", "method": "full"},
    {"batch": 2, "packing": False, "precision": "bf16-autocast", "method": "lora"},
    {"batch": 2, "packing": False, "precision": "bf16-autocast", "method": "qlora"},
    {"batch": 1, "packing": True, "precision": "autocast-bf16", "method": "full"},
    {"batch": 2, "packing": True, "precision": "bf16-autocast", "method": "lora"},
    {"batch": 2, "packing": False, "precision": "bf16", "method": "full"},
)


def unseen(row: Row) -> dict[str, Any]:
    """A configuration that is none of those captured: the first one with another vocabulary."""
    config = {**row.examples[0], "dtype": "bfloat16"}
    if row.text:
        text = config[row.text]
        return {**config, row.text: {**text, "vocab_size": text["vocab_size"] + 136}}
    return {**config, "vocab_size": config["vocab_size"] + 136}


def turns(*cases: Any) -> list[tuple[str, Any]]:
    """A case for each family, in turn; all with MEMFIT_WHOLE."""
    whole = os.environ.get("MEMFIT_WHOLE")
    return [
        (name, case)
        for place, name in enumerate(sorted(ROWS))
        for number, case in enumerate(cases)
        if whole or number == place % len(cases)
    ]


@pytest.mark.parametrize(("name", "case"), turns(*CASES), ids=str)
def test_peaks_are_those_of_the_trace(name: str, case: dict[str, Any]) -> None:
    config, job = unseen(ROWS[name]), Job(**{"optimizer": "sgd", **case})
    tape = lower(build(config), job)
    legal(tape)
    ours, theirs = memory(tape).allocated, memory(trace_config(config, job)).allocated
    assert abs(ours - theirs) <= WORST * theirs, f"{ours / theirs - 1:+.2%}"


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_peaks_of_usual_trainers_are_those_of_the_trace(number: int) -> None:
    row, case = ROWS[sorted(ROWS)[number]], USUAL[number % len(USUAL)]
    test_peaks_are_those_of_the_trace(row.name, {"seq": 200, **TRL, **case})


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_peaks_without_checkpoints_are_those_of_the_trace(number: int) -> None:
    """Where a cache, too, stays until the loss is made: Qwen3.5 beside its tower."""
    row, case = ROWS[sorted(ROWS)[number]], USUAL[number % len(USUAL)]
    usual = {"seq": 200, **TRL, **case, "batch": 2, "checkpointing": "none"}
    test_peaks_are_those_of_the_trace(row.name, usual)
    if row.tower:
        wide = {"batch": 2, "seq": 200, "precision": "autocast-bf16"}
        test_peaks_are_those_of_the_trace(row.name, wide)


def test_four_bits_hand_on_the_dtype_of_their_input() -> None:
    """Under autocast, too, where other layers make 16 bits of fp32: residuals become fp32."""
    case = {**TRL, "batch": 2, "packing": False, "precision": "bf16-autocast", "method": "qlora"}
    test_peaks_are_those_of_the_trace("nemotron_h", {"seq": 200, **case})


@pytest.mark.parametrize(("name", "use"), turns("ddp=4", "fsdp=4"))
def test_a_rank_of_several_has_the_peak_of_the_trace(name: str, use: str) -> None:
    config, strategy = unseen(ROWS[name]), strategy_from([use], None)
    job = Job(batch=2, seq=200, optimizer="sgd", checkpointing="full")
    if use == "ddp=4" and any(map(stands_still, graphs_of(name).values())):
        with pytest.raises(InputError, match="without a gradient"):
            estimate(build(config), job, strategy=strategy)
        return
    ours = memory(lower(build(config), job, strategy)).allocated
    theirs = memory(trace_config(config, job, strategy=strategy)).allocated
    assert abs(ours - theirs) <= WORST * theirs, f"{ours / theirs - 1:+.2%}"


@pytest.mark.parametrize("name", sorted(ROWS))
def test_graphs_are_legal(name: str) -> None:
    known = build(ROWS[name].examples[0]).graphs.whole(2, 64)
    assert known_settings(name) == set(SETTINGS)
    for setting in SETTINGS:
        data = stored(name, setting)
        for key, graph in graphs_of(name, setting).items():
            assert check(graph, known) == []
            assert json.loads(json.dumps(json_of(graph))) == data["graphs"][key]


def test_the_command_captures_what_is_shipped() -> None:
    """As the library that is installed has it: a new version shows here what changed."""
    from memfit.verb_capture import capture

    assert capture("lfm2").same
    assert capture("lfm2", "half-autocast-padded").same


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    from memfit.verb_capture import capture

    with pytest.raises(InputError, match="qwen3_nex"):
        capture("qwen3_nex")


def test_what_was_not_captured_goes_to_the_trace() -> None:
    config = unseen(ROWS["lfm2"])
    for option in ({"task": "inference"}, {"framework": "torchtune"}, {"attention": "eager"}):
        with pytest.raises(InputError, match="no captured graph"):
            estimate(build(config), Job(batch=2, seq=64, **option))
