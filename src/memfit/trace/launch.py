"""Runs a trace in a separate process, in this interpreter or another one, with a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.errors import InputError, Problem
from memfit.hardware import GPU
from memfit.job import Job
from memfit.model.model import Model
from memfit.strategy import Strategy
from memfit.tape import Tape
from memfit.terminal import escaped, put
from memfit.trace import lines, wire

PACKAGE = Path(__file__).resolve().parents[1]
START = 120.0  # seconds until the process may have imported what it needs
GRACE = 8.0  # seconds beyond the limit in which the process may still say where it was
POLL = 0.03
PATIENCE = 1.0  # seconds for an answer to the question where the process is
KEPT, LINES, WIDEST = 2**14, 4, 160  # of what a script prints: bytes, lines, characters of a line
SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH"
    r"|_DSN$|_PAT$|^AWS_|^AZURE_|^GOOGLE_|^GCP_|^GH_|^GITHUB_|^WANDB_KEY|^KUBECONFIG$|^NETRC$"
    r"|^DOCKER_HOST$|^PGPASS|^DATABASE_URL$"
)
CACHES = {
    "HF_HUB_CACHE": "hub",
    "HF_DATASETS_CACHE": "datasets",
    "HF_MODULES_CACHE": "modules",
    "HF_ASSETS_CACHE": "assets",
    "HF_XET_CACHE": "xet",
}
# Writers, reporters and compilers that would leave something behind, or ask for a login; and
# Hydra's own words for an error, which hide where it comes from.
PLAIN = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "HYDRA_FULL_ERROR": "1",
    "MLFLOW_TRACKING_URI": "",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

Progress = Callable[[str, int, str, int], None]  # phase, step, layer, events so far


@dataclass(frozen=True, kw_only=True)
class Answer:
    tape: Tape
    notes: tuple[Problem, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def request_of(model: Model, job: Job, strategy: Strategy, gpu: GPU | None) -> dict[str, Any]:
    """What a trace of a model is asked."""
    device = (
        {}
        if gpu is None
        else {"name": gpu.name, "sm": gpu.sm, "sms": gpu.sms, "memory": gpu.memory}
    )
    parts = {
        "job": dataclasses.asdict(job),
        "strategy": dataclasses.asdict(strategy),
        "options": {},
        "gpu": device,
    }
    return {"kind": "model", "config": dict(model.config), **parts}


def launch(
    request: Mapping[str, Any],
    *,
    python: str = "",
    seconds: float = 0,
    offline: bool = False,
    show: bool = False,
    progress: Progress | None = None,
) -> Answer:
    """`request` is what `child` reads: of a model (`kind`, `config`, `job`, `gpu`, `options`) or of
    a script (`script`, `arguments`, …)."""
    interpreter = interpreter_of(python)
    with scratch_folder() as folder:
        files = {name: str(folder / name) for name in ("answer", "stack", "request")}
        whole = {
            **request,
            "package": str(PACKAGE),
            "answer": files["answer"],
            "stack": files["stack"],
            "scratch": str(folder),
            "seconds": seconds,
            "show": show,
        }
        Path(files["request"]).write_text(json.dumps(whole), encoding="utf-8")
        process = subprocess.Popen(
            # Unbuffered: lines of stdout and stderr in their order, and none lost at an end.
            [interpreter, "-u", str(PACKAGE / "trace" / "child.py"), files["request"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(folder, offline, secrets=bool(request.get("keep_env", True))),
            start_new_session=os.name == "posix",
        )
        words = Words(process, show)
        try:
            return listen(words, files, str(request.get("script", "")), seconds, progress)
        except InputError as bad:
            end(process)
            raise InputError(*said_last(bad.problems, words.last())) from None
        finally:
            end(process)
            words.done()


class Words:
    """What the script prints: read as it comes, passed on to stderr if it is to be shown (never
    among ours on stdout), and its last lines kept."""

    def __init__(self, process: subprocess.Popen[bytes], show: bool) -> None:
        self.process, self.show, self.kept = process, show, b""
        self.warned: list[str] = []  # lines that are warnings of libraries
        self.thread = threading.Thread(target=self.read, daemon=True, name="memfit-words")
        self.thread.start()

    def read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while piece := os.read(self.process.stdout.fileno(), 2**16):
                self.kept = (self.kept + piece)[-KEPT:]
                if self.show:
                    put(escaped(piece.decode(errors="replace"), colour=True, keep="\n\t\r"))

    def last(self) -> list[str]:
        """The script's last lines, without the warnings of libraries."""
        self.thread.join(PATIENCE)
        found = self.kept.decode(errors="replace").replace("\r", "\n").splitlines()
        others = {line.strip() for line in ("", *self.warned)}
        return [line.rstrip()[:WIDEST] for line in found if line.strip() not in others][-LINES:]

    def done(self) -> None:
        self.thread.join(PATIENCE)
        if self.process.stdout is not None and not self.thread.is_alive():
            self.process.stdout.close()


def said_last(problems: tuple[Problem, ...], last: list[str]) -> Iterator[Problem]:
    """The script's own last words beside what stopped it: they often say more."""
    yield from problems
    if last:
        listed = " / ".join(last)
        yield Problem(message=f"the script's last lines: {listed}", where="script", level="note")


def listen(
    words: Words,
    files: Mapping[str, str],
    script: str,
    seconds: float,
    progress: Progress | None,
) -> Answer:
    """Read what the process says until it has said the last word, has ended or has taken too long,
    imports not counted."""
    deadline, started, at, rest = time.monotonic() + seconds + START, False, 0, ""
    answer = Path(files["answer"])
    while True:
        ended = words.process.poll() is not None
        with contextlib.suppress(FileNotFoundError), answer.open(encoding="utf-8") as file:
            file.seek(at)
            rest += file.read()
            at = file.tell()
        *whole, rest = rest.split("\n")
        if whole and not started:
            deadline, started = time.monotonic() + seconds + GRACE, True
        for line in whole:
            found = heard(json.loads(line), progress, words)
            if found is not None:
                return found
        if ended:
            raise InputError(crashed(words.process.returncode, files["stack"], script))
        if seconds and time.monotonic() > deadline:
            where = asked(words.process, files["stack"])
            message = f"`{Path(script).name or 'the model'}` did not finish within {seconds:g} s"
            raise InputError.one(message, where=where, hint="raise it with `--time-limit`")
        time.sleep(POLL)


def heard(said: Mapping[str, Any], progress: Progress | None, words: Words) -> Answer | None:
    if "progress" in said:
        if progress is not None:
            progress(*said["progress"])
        return None
    if "problems" in said:
        words.warned = said.get("warned", [])
        raise InputError(*(Problem(**one) for one in said["problems"]))
    if "interrupted" in said:
        raise KeyboardInterrupt
    if "broken" in said:
        raise RuntimeError(f"the trace's process failed:\n{said['broken']}")
    return Answer(
        tape=wire.from_text(said["tape"]),
        notes=tuple(Problem(**one) for one in said["notes"]),
        facts=said["facts"],
    )


def crashed(code: int, stack: str, script: str) -> Problem:
    name = Path(script).name or "the trace"
    where = innermost(stack)
    if code < 0:
        with contextlib.suppress(ValueError):
            return Problem(
                message=f"`{name}` crashed: {signal.Signals(-code).name}",
                where=where,
                hint="its native code may need a real GPU",
            )
    return Problem(
        message=f"`{name}` exited with code {code} before its first training step",
        where=where,
    )


def asked(process: subprocess.Popen[bytes], stack: str) -> str:
    """Where the process is now, which does not speak by itself any more."""
    if hasattr(signal, "SIGUSR1"):
        process.send_signal(signal.SIGUSR1)
        for _ in range(int(PATIENCE / POLL)):
            time.sleep(POLL)
            where = innermost(stack)
            if where:
                return where
    return innermost(stack)


def innermost(stack: str) -> str:
    """The first of the user's lines in what faulthandler wrote, which lists the latest call
    first."""
    with contextlib.suppress(OSError):
        for name, number in re.findall(
            r'File "([^"]+)", line (\d+)', Path(stack).read_text(encoding="utf-8", errors="replace")
        ):
            if lines.is_users(name):
                return lines.shown(name, int(number))
    return ""


def interpreter_of(python: str) -> str:
    """This interpreter, the one named, or the one of the virtual environment named."""
    if not python:
        return sys.executable
    path = Path(python).expanduser()
    for one in (path, path / "bin" / "python", path / "Scripts" / "python.exe"):
        if one.is_file() and os.access(one, os.X_OK):
            return str(
                one.absolute()
            )  # not resolved: a virtual environment is known by the path of its link
    raise InputError.one(
        f"`{python}` is not an interpreter or a virtual environment",
        where="python",
        hint="give a path like `.venv/bin/python`",
    )


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """For the request, the answer and whatever the script writes; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="memfit-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        (folder / "tmp").mkdir()
        yield folder


def environment(folder: Path, offline: bool, *, secrets: bool = True) -> dict[str, str]:
    """The caller's, with caches that show what is there and take what is new; without what opens
    doors, unless `secrets`."""
    env = {name: value for name, value in os.environ.items() if secrets or not secret(name, value)}
    base = Path(
        env.get("HF_HOME")
        or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    for variable, name in CACHES.items():
        known, shown = Path(env.get(variable) or base / name).expanduser(), folder / "cache" / name
        shown.mkdir(parents=True)
        if name != "xet" and known.is_dir():
            for entry in known.iterdir():
                if entry.is_dir() and not entry.name.startswith("."):
                    (shown / entry.name).symlink_to(entry.resolve(), target_is_directory=True)
        env[variable] = str(shown)
    env |= {
        **PLAIN,
        **{name: str(folder / "tmp") for name in ("TMPDIR", "TEMP", "TMP")},
        "MPLCONFIGDIR": str(folder / "tmp"),
    }
    return env | OFFLINE if offline else env


def secret(name: str, value: str) -> bool:
    """By its name, or by a password in its address."""
    return bool(SECRET.search(name.upper())) or bool(re.search(r"://[^/@\s]*:[^/@\s]*@", value))


def end(process: subprocess.Popen[bytes]) -> None:
    """The process, and those that it started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


__all__ = ["Answer", "Progress", "launch", "request_of"]
