"""What reaches the terminal: escaped text; streams that are closed or full; signals; errors in
JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.core.test_cli import SMALL, SRC, environment

from memfit.api.verbs import VERBS
from memfit.cli import main
from memfit.cli.errors import wants_json
from memfit.cli.progress import Life
from memfit.processes import VARIABLE
from memfit.terminal import escaped

START = "import sys; sys.argv[0] = 'memfit'; from memfit.__main__ import main; sys.exit(main())"
HOSTILE = "llama\x1b]0;title\x07\x1b[2J\u202etxet\u2028\x9b31m"


def memfit(*words: str, **streams: object) -> subprocess.CompletedProcess[str]:
    shown = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(
        [sys.executable, "-c", START, *words],
        text=True,
        env={**environment(), "PYTHONPATH": str(SRC)},
        timeout=60,
        check=False,
        **shown,  # type: ignore[call-overload]
    )


def test_what_a_terminal_would_act_on_is_written_out() -> None:
    assert escaped("plain × 2 – ok\n\tand more") == "plain × 2 – ok\n\tand more"
    assert escaped(HOSTILE) == (r"llama\u001b]0;title\u0007\u001b[2J\u202etxet\u2028\u009b31m")
    assert escaped("\x1b[31merror\x1b[0m\x1b[8m", colour=True) == "\x1b[31merror\x1b[0m\\u001b[8m"
    assert json.loads(f'"{escaped(HOSTILE, keep="")}"') == HOSTILE


def test_no_config_or_job_file_writes_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an answer, in a complaint, and in JSON."""
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    (folder / "bad.json").write_text(json.dumps({**SMALL, "model_type": HOSTILE}))
    job = folder / "job.yaml"
    job.write_text(json.dumps({"model": "./config.json", HOSTILE: 1, "optimizer": HOSTILE}))
    for words in (
        ["estimate", str(folder)],
        ["estimate", str(folder), "--json"],
        ["estimate", str(folder / "bad.json")],
        ["estimate", str(job), "--json"],
        ["models", HOSTILE],
    ):
        main(words)
        out, err = capsys.readouterr()
        assert out or err
        assert not {*"\x1b\x07\u202e\u2028\x9b"} & {*out, *err}, words
        if "--json" in words:
            json.loads(out)


@pytest.mark.parametrize("command", VERBS)
def test_an_error_is_json_where_json_is_asked_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["no/such/model/here"], ["--no-such-flag"]):
        assert main([command, *words, "--json"]) == 2
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert found["schema"]
        assert [one["level"] for one in found["problems"]] == ["error"] * len(found["problems"])
        assert found["problems"][0]["message"].splitlines()[0] in err


def test_the_words_behind_a_script_ask_for_nothing() -> None:
    assert wants_json(["estimate", "gpt2", "--format", "json"])
    assert not wants_json(["trace", "train.py", "--json"])
    assert wants_json(["trace", "--json", "train.py"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_streams_that_take_nothing_change_no_exit_code() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        assert memfit("estimate", "gpt2", "--seq", "0", stderr=full).returncode == 2
        done = memfit("estimate", "gpt2", stdout=full)
        assert (done.returncode, done.stderr.count("\n")) == (74, 2)
        assert "no space left on device" in done.stderr
        assert memfit("--help", stdout=full).returncode == 74
    for closed, code in ((1, 74), (2, 0)):
        done = memfit("estimate", "gpt2", preexec_fn=lambda number=closed: os.close(number))
        assert done.returncode == code
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.3])
def test_ctrl_c_is_never_a_traceback(delay: float) -> None:
    """While Python imports, too. Before the first line of memfit only Python itself can be."""
    begun = "import sys; print('.', flush=True); " + START
    with subprocess.Popen(
        [sys.executable, "-c", begun, "plan", "meta-llama/Llama-3.1-70B", "--gpus", "64x8xh100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment(), "PYTHONPATH": str(SRC)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as run:
        assert run.stdout is not None
        run.stdout.read(1)
        time.sleep(0.01 + delay)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert b"Traceback" not in said
    assert run.returncode in (130, -signal.SIGINT)


ENDED = """
import os, signal, sys
from memfit.cli import main
signal.signal(getattr(signal, sys.argv[1]), signal.SIG_DFL)  # `nohup` has SIGHUP ignored
signal.signal(signal.SIGVTALRM, lambda *_: os.kill(os.getpid(), getattr(signal, sys.argv[1])))
signal.setitimer(signal.ITIMER_VIRTUAL, 0.5)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_the_exit_code_names_the_signal(name: str) -> None:
    """Half a second of the processor after the start, whatever else the machine does."""
    done = subprocess.run(
        [sys.executable, "-c", ENDED, name, "google/gemma-4-E2B", "--gpu", "rtx-4090"],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": str(SRC), VARIABLE: "1"},
        check=False,
    )
    assert done.returncode == 128 + getattr(signal, name)
    assert "Traceback" not in done.stderr


INTERRUPTED = """
import sys
from memfit.__main__ import interrupt_again
from memfit.lower.tensors import Bundle, Elastic, Storage

class Interrupted:
    def __del__(self):
        raise KeyboardInterrupt

sys.unraisablehook = interrupt_again
for kind in (Storage, Bundle, Elastic):
    kind.__new__(kind)
try:
    Interrupted()
    for _ in range(10**8):
        pass
    print("lost")
except KeyboardInterrupt:
    print("came again")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_while_a_block_is_made_or_let_go_is_neither_printed_nor_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": str(SRC)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        check=False,
    )
    assert (done.stdout, done.stderr) == ("came again\n", "")


def test_a_bar_tells_how_much_is_done_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Towards the end, not of so many candidates; a second search begins anew."""
    life = Life()
    life.terminal, life.last, life.begun = True, 0.0, time.monotonic() - 10
    life.progress(0.5, "planning, best 3 s per step")
    said = capsys.readouterr().err
    assert "[██████████░░░░░░░░░░]  50% planning, best 3 s per step, about 10 s left" in said
    life.last = 0.0
    life.progress(0.4, "planning")  # never back
    assert " 50% planning" in capsys.readouterr().err
    life.last = 0.0
    life.progress(0.1, "planning")
    assert " 10% planning" in capsys.readouterr().err


def test_a_failure_in_the_preparation_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-3.2-1b", "--gpus", "2xrtx-4090", "--memory", "8GiB", "--use", "ddp")
    assert main(["estimate", *words, "--method", "full", "--offline"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "runs out of memory while the model is prepared (bucket): requests" in out
