"""Programs that cannot be traced, or not to an end: each is one clear message with the line of the
user's code, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.sampling import sampled

from memfit.api.verbs import trace
from memfit.errors import InputError, Problem

ROOT = Path(__file__).parents[2]
MODEL = (
    "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\nout = model(torch.randn(2, 8).cuda())\n"
)
STEP = "out.sum().backward()\ntorch.optim.SGD(model.parameters(), lr=1.0).step()\n"
SPIN = (
    "while True:\n    try:\n        while True:\n            pass\n    except "
    "BaseException:\n        pass\n"
)
CATCHES = """\
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
while True:
    try:
        model(torch.randn(2, 8).cuda()).sum().backward()
        optimizer.step()
    except BaseException:
        pass
"""


class Case(NamedTuple):
    """A program, a part of the message, the line that is told (0: none), a part of the hint."""

    program: str
    message: str
    line: int
    hint: str


def cases() -> dict[str, Case]:
    found = {}
    for block in (
        (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8").split("\n=== ")[1:]
    ):
        head, _, program = block.partition("\n")
        name, message, line, hint = (one.strip() for one in head.split("|"))
        found[name] = Case(program, message, int(line), hint)
    return found


CASES = cases()


def refused(folder: Path, program: str, *arguments: str, **given: Any) -> Problem:
    """The one error that tracing the program ends with, beside notes; its folder is left as it
    was."""
    script = folder / "train.py"
    script.write_text(program)
    before = {one: one.stat().st_mtime_ns for one in folder.rglob("*")}
    with pytest.raises(InputError) as caught:
        trace(script, *arguments, **given)
    assert {one: one.stat().st_mtime_ns for one in folder.rglob("*")} == before
    problem, *words = caught.value.problems
    assert {one.level for one in words} <= {"note"}
    return problem


def said(problem: Problem, message: str, line: int, hint: str) -> None:
    assert message in problem.message
    assert hint in problem.hint
    assert len(problem.message) < 300
    assert "\n" not in problem.message
    if line:
        assert f"train.py:{line}" in problem.where


@pytest.mark.parametrize("name", sampled(list(CASES), 3))
def test_it_is_told_in_one_message(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    said(refused(tmp_path, case.program, offline="hub" in name), case.message, case.line, case.hint)


def test_a_hub_that_is_not_there_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    case = CASES["model of the hub"]
    said(refused(tmp_path, case.program), case.message, case.line, case.hint)


@pytest.mark.parametrize(
    "program", ["import time\ntime.sleep(1000)\n", "while True:\n    pass\n", SPIN]
)
def test_what_loops_for_ever_is_ended(program: str, tmp_path: Path) -> None:
    start = time.monotonic()
    problem = refused(tmp_path, program, time_limit=2.0)
    said(problem, "` did not finish", 0, "--time-limit")
    assert problem.where.startswith("train.py:")
    assert time.monotonic() - start < 120


def test_steps_are_limited_and_a_stop_that_is_caught_is_a_stop(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODEL + CATCHES)
    found = trace(script, steps=2)
    assert found.script is not None
    assert found.script.steps == 2


def test_files_and_commands_of_a_script_come_to_nothing(tmp_path: Path) -> None:
    """It sees what it writes; when it is through, nobody else does. Not even what it deletes is
    gone."""
    (tmp_path / "kept.txt").write_text("kept")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, shutil, subprocess\n"
        "os.chdir(os.path.dirname(os.path.abspath(__file__)))\n"
        "pathlib.Path('made/by').mkdir(parents=True)\n"
        "pathlib.Path('made/by/script.txt').write_text('x')\n"
        "assert os.listdir('made') == ['by'] and "
        "pathlib.Path('made/by/script.txt').read_text() == 'x'\n"
        "os.rename('kept.txt', 'moved.txt')\n"
        "assert not os.path.exists('kept.txt') and open('moved.txt').read() == 'kept'\n"
        "with open('moved.txt', 'a') as file:\n    file.write('!')\n"
        "shutil.rmtree('made')\n"
        "assert not os.path.exists('made')\n"
        "subprocess.run(['touch', 'by-command.txt'], check=True)\n"
        "os.system('touch by-shell.txt')\n" + MODEL + STEP
    )
    before = sorted(tmp_path.rglob("*"))
    found = trace(script, steps=1)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "kept.txt").read_text() == "kept"
    assert any(
        "commands that the script starts are not run" in one.message for one in found.problems
    )


def test_a_mask_that_nobody_knows_selects_everything_and_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        MODEL
        + "out[out > 0].sum().backward()\ntorch.optim.SGD(model.parameters(), lr=1.0).step()\n"
    )
    (note,) = [one for one in trace(script, steps=1).problems if "mask" in one.message]
    assert "train.py:4: out[out > 0]" in note.where


def command(*words: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import sys; from memfit.cli import main; sys.exit(main())",
        "trace",
        *words,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "dumb"}


def test_the_command_line_tells_it_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no such data')\n")
    done = subprocess.run(
        command("train.py"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: `train.py` failed with ValueError: no such data @ train.py:1: raise "
        "ValueError('no such data')\n"
        "  hint: `--show-output`, before the script, shows its traceback and what it printed\n"
    )


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_ends_it_cleanly(tmp_path: Path) -> None:
    """Exit code 130, no traceback, no process left, no scratch folder left."""
    (tmp_path / "train.py").write_text("import os\nprint('pid', os.getpid(), flush=True)\n" + SPIN)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        command("--show-output", "train.py"),
        cwd=tmp_path,
        env={**environment(), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a runner in the background ignores it
    )
    assert process.stderr is not None
    line = ""
    while not line.startswith("pid"):
        line = process.stderr.readline()
        assert line, "it ended before it began"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[1]), 0)
    assert list(scratch.iterdir()) == []
