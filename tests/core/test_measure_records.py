"""Records that somebody else wrote, however broken; and records beside what is predicted of them,
event by event."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import main
from memfit.errors import InputError
from memfit.job import Job
from memfit.measure import checks, events, history
from memfit.measure.compare import Beside, Predicted, of_folder
from memfit.measure.history import Began
from memfit.measure.record import RECORD_FIELDS, Case, Peak, Record, read, record_of, records, write
from memfit.measure.run import recorded
from memfit.report.measured import comparison, comparison_data
from memfit.report.snapshot import snapshot
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Free, Mark, Tape

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    2**70,
    -(2**70),
    1.5,
    1e300,
    "x",
    "x" * 20_000,
    [],
    [1],
    [[]],
    {},
    {"a": {}},
    [None] * 5,
    {"": None},
    "../../etc/passwd",
    "\0",
]


def good(**change: Any) -> dict[str, Any]:
    peak = Peak(phase="forward", step=0, allocated=5, reserved=8, seconds=1.0)
    answer = {
        "result": "ok",
        "by": "cuda",
        "gpu": "NVIDIA A100-SXM4-80GB",
        "allocated": 7,
        "reserved": 8,
        "phases": [vars(peak)],
    }
    made = recorded(Case(model="m", config=CONFIG, job=Job(seq=64)), answer, 2.0)
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(made)))
    return {**values, **change}


def test_every_field_has_a_rule() -> None:
    assert set(checks.RULES) == {one.name for one in dataclasses.fields(Record)}
    assert set(checks.PEAK) == {one.name for one in dataclasses.fields(Peak)}


@pytest.mark.parametrize("field", sorted(RECORD_FIELDS))
def test_whatever_stands_in_a_field_is_read_or_refused(field: str) -> None:
    for value in HOSTILE:
        problems: tuple[Any, ...] = ()
        try:
            record_of(good(**{field: value}), "r.json")
        except InputError as bad:
            problems = bad.problems
        assert all(one.where.startswith("r.json") and one.message for one in problems)


def test_all_problems_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = good(
        allocated="many",
        seconds=-1,
        by="guess",
        what=1,
        job={"bach": 1},
        use=["tpp=2"],
        events="../x",
    )
    del broken["model"]
    broken["phases"] = [
        {"phase": "lunch", "step": 0, "allocated": 2**99, "reserved": None, "seconds": 1.0}
    ]
    (tmp_path / "a.json").write_text(json.dumps(broken))
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "c.json").write_text(json.dumps(good()).replace("2.0", "NaN"))
    (tmp_path / "d.json").write_bytes(b"\xff\xfe")
    (tmp_path / "e.json").write_text("[" * 100_000)
    assert main(["accuracy", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for part in (
        "`many` is not an integer",
        "`-1` is not a number",
        "`guess` is not one of cuda, profiler",
        "unknown field `what`",
        "unknown option `bach`",
        "unknown layout `tpp`",
        "`../x` is not the name of a file",
        "`model` is missing",
        "`lunch` is not one of load",
        "phases[0].allocated",
        "b.json",
        "`NaN` is not a number",
        "d.json",
        "e.json",
    ):
        assert part in said.err, part
    assert "Traceback" not in said.err


def test_a_cut_off_record_is_one_message(tmp_path: Path) -> None:
    whole = json.dumps(good())
    chance = random.Random(7)
    for _ in range(60):
        text = whole[: chance.randrange(len(whole))]
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(InputError):
            read(tmp_path / "r.json")


def test_a_rank_that_is_none_is_refused() -> None:
    assert record_of(good(use=["tp=2"], rank=1, world=2), "r").world == 2
    for change in ({"rank": 2, "world": 2}, {"rank": 0, "world": 4}):
        with pytest.raises(InputError, match="is not a rank of 2"):
            record_of(good(use=["tp=2"], **change), "r")


def test_no_folder_and_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", str(tmp_path)]) == 2
    assert "` has no records" in capsys.readouterr().err
    assert main(["accuracy", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


# -- events
# --------------------------------------------------------------------------------------------------


def test_flags_that_mean_nothing_about_records_are_all_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(record_of(good(), "r"), tmp_path / "r.json")
    given = (
        "--speed",
        "--regret",
        "--peers",
        "--processes",
        "2",
        "--plot",
        "x.svg",
        "--source",
        "x",
        "--confidence",
        "high",
    )
    assert main(["accuracy", str(tmp_path), *given, "--by", "feeling"]) == 2
    said = capsys.readouterr().err
    assert [line.rpartition("@ ")[2] for line in said.splitlines() if line.startswith("error")] == [
        "speed",
        "regret",
        "confidence",
        "source",
        "peers",
        "processes",
        "plot",
        "by",
    ]
    assert (
        main(
            [
                "accuracy",
                "--regret",
                "--worst",
                "3",
                "--limit",
                "2",
                "--by",
                "trace",
                "--confidence",
                "none",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert [line.rpartition("@ ")[2] for line in said.splitlines() if line.startswith("error")] == [
        "worst",
        "limit",
        "by",
        "confidence",
    ]


def test_some_of_the_records_as_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        write(record_of(good(case=name), "r"), tmp_path / f"{name}.json")
    assert main(["accuracy", str(tmp_path), "--limit", "2", "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 records: 2 ok.")
    assert "| formulas | NVIDIA A100-SXM4-80GB | allocated | 2 |" in said


def tape(*sizes: int, op: str = "", step: int = 0, phase: Any = "forward") -> Tape:
    made = [Alloc(number, size, "temporaries", "", op) for number, size in enumerate(sizes)]
    return Tape(events=(Mark(phase, "", step), *made), source="measured")


def test_what_one_side_lacks_is_named() -> None:
    found = events.compare(tape(1024, 4096, 2048, 8192, op="mm"), tape(1024, 2048, 4096, 512))
    assert (found.events, found.same, found.bytes, found.same_bytes) == (
        4,
        3,
        15360,
        7168,
    )  # the order of two differs
    assert found.missed == (events.Kind("forward", "mm", 8192, 1),)
    assert found.extra == (events.Kind("forward", "", 512, 1),)
    assert events.compare(tape(1024), tape(1024, step=1)).same == 0
    assert events.compare(tape(1024, phase="load"), tape(2048, phase="load")).events == 0


def test_a_snapshot_and_its_tape() -> None:
    """memfit's own snapshot of a tape has the blocks of the tape; phases begin when they did."""
    first = (
        Alloc(0, 1000, "weights", "m", "empty"),
        Alloc(1, 3000, "activations", "m", "mm"),
        Free(0),
        Alloc(2, 5000, "logits", "m", "mm"),
        Free(1),
    )
    made = snapshot(Tape(events=first, source="handwritten"), Settings.parse("", where=""))
    entries = made["device_traces"][0]
    begun = [
        Began("load", 0, 0),
        Began("forward", 0, 1000 * next(one["time_us"] for one in entries if one["size"] == 5000)),
    ]
    found = history.of_snapshot(entries, begun)
    assert [one.size for one in found if isinstance(one, Alloc)] == [1000, 3000, 5000]
    assert [type(one) for one in found] == [Mark, Alloc, Alloc, Free, Mark, Alloc, Free]


def test_what_was_there_before_and_what_was_overwritten() -> None:
    """A ring of events may have lost a free: an address that comes twice was given back between."""
    entries = [
        {"action": "free_requested", "addr": 9, "size": 10, "time_us": 1},
        {"action": "alloc", "addr": 1, "size": 600, "time_us": 2},
        {"action": "segment_free", "addr": 1, "size": 600, "time_us": 3},
        {"action": "alloc", "addr": 1, "size": 700, "time_us": 4},
    ]
    found = history.of_snapshot(entries, [])
    assert [(type(one), one.id) for one in found if isinstance(one, (Alloc, Free))] == [
        (Alloc, 0),
        (Free, 0),
        (Alloc, 1),
    ]


def test_events_are_read_as_they_were_written_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.json.gz"
    history.write(tape(1024, 2048), path)
    assert history.read(path) == tape(1024, 2048)
    whole = path.read_bytes()
    for broken in (
        b"",
        b"x",
        whole[:-9],
        whole[:20],
        gzip.compress(b"{"),
        gzip.compress(b"[1]"),
        gzip.compress(b'{"events": [[9]], "words": []}'),
        gzip.compress(gzip.decompress(whole).replace(b"1024", b"-5")),
        gzip.compress(gzip.decompress(whole).replace(b"1024", b'"x"')),
    ):
        path.write_bytes(broken)
        with pytest.raises(InputError):
            history.read(path)


# -- the table
# --------------------------------------------------------------------------------------------------


def test_records_beside_what_is_predicted(tmp_path: Path) -> None:
    write(record_of(good(), "r"), tmp_path / "one.json")
    write(
        record_of(good(result="oom", total=2**20, allocated=3, error="out of memory"), "r"),
        tmp_path / "two.json",
    )
    write(record_of(good(result="timeout"), "r"), tmp_path / "three.json")
    write(record_of(good(gpu="NVIDIA Nothing"), "r"), tmp_path / "four.json")
    assert len(records(tmp_path)) == 4
    found = of_folder(tmp_path, "formula", lambda *_: None)
    said = comparison(found, 1)
    assert "4 records: 2 ok, 1 oom, 1 timeout" in said
    assert "fits or not: 1 of 1" in said
    assert "not predicted, 1: it ended with timeout" in said
    assert "Nothing" in said
    assert json.loads(json.dumps(comparison_data(found)))["figures"][0]["cases"] == 1


def test_figures_and_what_is_missed() -> None:
    record = record_of(good(allocated=1000, reserved=2000), "r")
    compared = events.compare(tape(1024, 4096, op="aten::mm"), tape(1024))
    one = Beside(record=record, predicted=Predicted("trace", 980, 2100), compared=compared)
    assert one.error("allocated") == pytest.approx(-0.02)
    said = comparison([one, one], 1)
    assert "-2.000%" in said
    assert "100.0%" in said  # both under-estimated by more than 1 %
    assert "2 of 4 allocations" in said
    assert "2 x aten::mm" in said
