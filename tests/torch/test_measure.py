"""Real runs in fresh processes, on this machine's CPU: records that the trace must foretell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.measure.campaign import read, run
from memfit.measure.compare import predicted
from memfit.measure.record import Case, Record, records
from memfit.measure.run import measure

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
CAMPAIGN = """
[[cases]]
models = ["low"]
value = 1
jobs = [{ task = "inference", seq = 32, new_tokens = 5 }]
[[cases]]
models = ["high"]
value = 2
jobs = [{ seq = 32, batch = 2, method = "lora" }]
"""


def case(**options: Any) -> Case:
    job = {name: options.pop(name) for name in list(options) if name in Job.__dataclass_fields__}
    return Case(model="tiny", config=CONFIG, job=Job(**{"precision": "fp32", "seq": 64, **job}), **options)


@pytest.mark.parametrize(
    "options",
    [{"batch": 2}, {"checkpointing": "full", "method": "lora"}, {"task": "inference", "new_tokens": 5}],
    ids=lambda options: ",".join(options),
)
def test_a_run_holds_what_the_trace_foretells(options: dict[str, Any]) -> None:
    found = measure(case(**options), device="cpu")
    assert found.result == "ok", found.error
    expected = predicted(found)
    assert expected is not None
    assert found.allocated is not None
    assert abs(expected.allocated / found.allocated - 1) < 0.005
    assert {one.phase for one in found.phases} >= ({"forward", "backward", "step"} if found.step_seconds else {"prefill", "decode"})
    assert found.tokens_per_second
    assert found.versions["torch"]


def test_one_rank_of_several_holds_its_share() -> None:
    whole, share = (measure(case(world=world), device="cpu") for world in (1, 4))
    assert share.result == "ok", share.error
    held = {record.world: min(one.allocated for one in record.phases if one.step == 2) for record in (whole, share)}
    assert held[4] < 0.6 * held[1]


def test_a_campaign_runs_the_best_first_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CAMPAIGN.replace("seq", 'precision = "fp32", seq'))
    todo = read(tmp_path / "c.toml", lambda name: CONFIG)
    assert [one.model for one in todo] == ["high", "low"]
    told: list[tuple[str, bool]] = []

    def hear(one: Case, record: Record | None) -> None:
        told.append((one.model, record is not None))

    assert run(todo, tmp_path / "out", budget=5.0, limit=60.0, told=hear) == []  # too little for any case
    run(todo[:1], tmp_path / "out", budget=300.0, limit=120.0, told=hear)
    run(todo, tmp_path / "out", budget=300.0, limit=120.0, told=hear)
    assert told == [("high", False), ("high", True), ("low", False), ("low", True)]
    assert {one.model: one.result for one in records(tmp_path / "out")} == {"high": "ok", "low": "ok"}
    assert json.loads((tmp_path / "out" / todo[0].file).read_text())["schema"] == 1


def test_what_cannot_be_measured_is_refused_all_at_once() -> None:
    with pytest.raises(InputError) as refused:
        measure(case(liger=True, precision="bf16-master", optimizer="adamw_8bit", attention="flash-attn-2"), device="cpu")
    assert {problem.where for problem in refused.value.problems} == {"job.liger", "job.precision", "job.optimizer", "job.attention"}


def test_a_run_that_takes_too_long_is_a_result() -> None:
    found = measure(case(), device="cpu", limit=0.1)
    assert (found.result, found.allocated) == ("timeout", None)
