"""Questions that processes share: every answer once, whatever becomes of the processes."""

import math
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from memfit.processes import VARIABLE, answers, usual_processes


@pytest.mark.parametrize("processes", [1, 2, 9])
def test_every_item_is_answered_at_its_place(processes: int) -> None:
    found = dict(answers(math.factorial, [3, 1, 7, 5], processes))
    assert found == {0: 6, 1: 1, 2: 5040, 3: 120}
    assert [place for place, _ in answers(math.factorial, [3, 1], 1)] == [0, 1]


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    assert usual_processes() == 7
    for other in ("0", "many", ""):
        monkeypatch.setenv(VARIABLE, other)
        assert 1 <= usual_processes() <= (os.cpu_count() or 1)


def program(text: str) -> "subprocess.Popen[str]":
    """Python code in a process group of its own, where pytest has no threads. What a shell starts
    in the background ignores Ctrl-C, and so would its children."""
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return subprocess.Popen(
        [sys.executable, "-c", heeds + textwrap.dedent(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_what_a_process_cannot_answer_is_asked_here() -> None:
    """Processes that end are no loss, and an error is raised where the question was asked."""
    running = program("""
        import os
        from memfit.processes import answers
        here = os.getpid()
        def ask(number):
            if number % 2 and os.getpid() != here:
                os._exit(1)
            if number == 7:
                raise ValueError(f"asked here: {os.getpid() == here}")
            return number
        print(sorted(answers(ask, range(7), 2)) == [(one, one) for one in range(7)])
        try:
            dict(answers(ask, [7, 7, 7], 3))
        except ValueError as error:
            print(error)
    """)
    assert running.communicate(timeout=30) == ("True\nasked here: True\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_outlives_the_one_that_asks(name: str) -> None:
    """Ctrl-C reaches all of them, the others the first. The pipe ends with its last holder."""
    running = program("""
        import os, time
        from memfit.processes import answers
        from memfit.terminal import ending
        def ask(seconds):
            os.write(1, b"x")
            time.sleep(seconds)
        with ending():
            try:
                dict(answers(ask, [0.5] * 300, 2))
            except KeyboardInterrupt as end:
                print(type(end).__name__)
    """)
    assert running.stdout is not None
    assert running.stdout.read(2) == "xx"
    number = getattr(signal, name)
    (os.killpg if name == "SIGINT" else os.kill)(running.pid, number)
    said, wrong = running.communicate(timeout=15)
    ends = {"SIGINT": "KeyboardInterrupt\n", "SIGTERM": "Ended\n", "SIGKILL": ""}
    assert (said.lstrip("x"), wrong) == (ends[name], "")
