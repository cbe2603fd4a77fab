"""Writes src/memfit/__init__.pyi: the public functions with every option typed, so that editors
complete them and type checkers judge them. The fields of `Job` and its neighbours are the source.

python tools/stubs.py [--check]
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from memfit.api.card import OPTIONS as CARD  # noqa: E402
from memfit.api.engine import COMMON  # noqa: E402
from memfit.api.serving import Answering  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.words.options import Ask, Measuring, Planning, Run, Studying  # noqa: E402

TARGET = ROOT / "src" / "memfit" / "__init__.pyi"
HEAD = '''\
# Written by tools/stubs.py (`make docs`); changes made here are lost.
"""memfit: the GPU memory of fine-tuning and serving a language model, before any GPU is touched."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from memfit.errors import InputError as InputError
from memfit.errors import MemfitError as MemfitError
from memfit.errors import MissingExtra as MissingExtra
from memfit.errors import Problem as Problem
from memfit.errors import SourceError as SourceError
from memfit.estimate import Estimate as Estimate
from memfit.hardware import GPU
from memfit.job import Job as Job
from memfit.measure.record import Record
from memfit.model.catalog import Entry
from memfit.model.model import Model
from memfit.plan.card import Card
from memfit.plan.engine_goals import EnginePlan
from memfit.plan.planning import Plan
from memfit.plan.shelf import Shelf, Smallests
from memfit.plan.study import Study
from memfit.report import write as write
from memfit.serving.result import ServingAnswer

__version__: str

Subject: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Model
'''
TYPES = {"str": "str", "int": "int", "float": "float", "bool": "bool"}


def annotation(one: dataclasses.Field[Any], *, several: bool) -> str:
    """`Literal` where the choices are known. Where `several` values may be tried, a text of them
    with commas, too."""
    rule, kind = one.metadata, TYPES[str(one.type)]
    if several and (rule["tries"] or rule["serves"] or one.name == "batch"):
        return kind if kind == "str" else f"{kind} | str"
    if kind == "str" and rule["choices"] and one.name not in ("targets",):
        return f"Literal[{', '.join(repr(choice) for choice in rule['choices'])}]"
    if one.name == "use":
        return "str | Sequence[str]"
    return f"{kind} | str" if one.name == "dataset_tokens" else kind


def arguments(*kinds: Any, without: tuple[str, ...] = (), several: bool = False) -> list[str]:
    found: dict[str, str] = {}
    for kind in kinds:
        for one in dataclasses.fields(kind):
            if one.name not in without and one.name not in found:
                found[one.name] = f"{one.name}: {annotation(one, several=several)} = ..."
    return list(found.values())


def function(name: str, first: list[str], options: list[str], result: str, doc: str) -> str:
    lines = ["def " + name + "("]
    lines += [f"    {one}," for one in (*first, *options)]
    lines += [f") -> {result}:"]
    text = textwrap.fill(doc, 92, initial_indent='    """', subsequent_indent="    ")
    return "\n".join([*lines, text + '"""', "    ..."]).replace("\n    ...", "")


PROGRESS = "progress: Callable[..., None] | None = ..."
SUBJECT = "model: Subject = ..."


def stub() -> str:
    asked = arguments(Ask, Job, without=("model",))
    parts = [
        function(
            "estimate",
            [SUBJECT, "/", "*"],
            asked,
            "Estimate",
            "Memory and time of a job on a model, and whether it fits the GPU.",
        ),
        function(
            "compare",
            [SUBJECT, "/", "variants: Sequence[Mapping[str, Any]] = ...", "*"],
            asked,
            "tuple[Estimate, ...]",
            "Several variants of one question, side by side.",
        ),
        function(
            "trace",
            ["subject: Subject = ...", "/", "*arguments: str", PROGRESS],
            arguments(Run, Ask, Job, without=("model", "by")),
            "Estimate",
            "Memory of a model or of a script, from its real code on fake tensors.",
        ),
        function(
            "plan",
            [SUBJECT, "/", "*", PROGRESS],
            arguments(Planning, Answering, Ask, Job, without=("model", "by"), several=True),
            "Plan",
            "Configurations that fit the GPUs, the best first.",
        ),
        function(
            "study",
            ["models: Subject | Sequence[Subject]", "/", "*", PROGRESS],
            arguments(Studying, Job),
            "Study",
            "Ways to fine-tune models on machines, side by side.",
        ),
        function(
            "measure",
            [SUBJECT, "*", "campaign: str = ...", "only: str = ..."],
            arguments(Measuring, Job),
            "list[Record]",
            "Run a job for a few real steps on this machine and record its memory.",
        ),
        function(
            "card",
            [SUBJECT, "/", "*", PROGRESS, "processes: int = ..."],
            [one for one in arguments(Ask) if one.partition(":")[0] in CARD],
            "Card | Shelf | Smallests",
            "What a GPU can do with a model; without a GPU, the smallest for each use.",
        ),
        function(
            "serve",
            [SUBJECT, "/", "*", "engine: str = ..."],
            [*(f"{name}: str = ..." for name in COMMON), "offline: bool = ...", "**options: Any"],
            "ServingAnswer",
            "What a serving engine will say at its start; `options` are the engine's own.",
        ),
        function(
            "plan_engine",
            ["model: Subject", "/", "*", "engine: str"],
            ["**options: Any"],
            "EnginePlan",
            "Configurations of a serving engine that hold a load.",
        ),
        'def models(pattern: str = ...) -> tuple[Entry, ...]:\n    """Models of the catalog."""',
        'def gpus(pattern: str = ...) -> tuple[GPU, ...]:\n    """GPUs on record."""',
    ]
    return formatted(HEAD + "\n" + "\n".join(parts) + "\n")


def formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def main() -> int:
    text = stub()
    if "--check" in sys.argv[1:]:
        current = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
        if current != text:
            print(f"{TARGET.name} is out of date: run `make docs`", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
