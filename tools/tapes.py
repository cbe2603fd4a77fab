"""Compares every tape of the conformance grid between a commit and the working tree.

python tools/tapes.py write FILE [--every N]       digests of the tree in the current directory
python tools/tapes.py compare COMMIT [--every N]   the same of COMMIT and of this tree, compared
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

WORKERS = 2
SHOWN = 20  # differences that are named
# Full training, adapters and inference, asked of every family in every framework.
JOBS: tuple[dict[str, Any], ...] = (
    {"checkpointing": "full"},
    {"method": "lora", "optimizer": "adamw_8bit"},
    {"method": "qlora", "precision": "bf16-autocast", "checkpointing": "full"},
    {"task": "inference", "new_tokens": 3},
)
CROSSED: tuple[dict[str, Any], ...] = (
    {},
    {"liger": True},
    {"unsloth": "norms,mlp"},
    {"activation_offload": "all"},
    {"load": "host"},
    {"evaluate": True, "merge": True},
    {"versions": "transformers=4.40.0,torch=2.3.0"},
    {"versions": "transformers=4.56.0"},
)
USES = (
    "",
    "ddp=2",
    "fsdp=2",
    "fsdp=2,version=1",
    "fsdp=4 tp=2",
    "zero=2,stage=2",
    "zero=2,stage=3",
    "gemini=2",
    "pp=2",
    "split=2",
    "tp=2",
    "ep=2",
    "cp=2 fsdp=2",
)

Question = tuple[str, dict[str, Any], dict[str, Any], str]  # key, config, options, layout


def questions() -> Iterator[Question]:
    """Every question; which of them are refused is part of the answer."""
    yield from grid_questions()
    yield from layout_questions()
    yield from crossed_questions()


def grid_questions() -> Iterator[Question]:
    from dataclasses import asdict

    from tests.conformance import grid
    from tests.conformance.test_lower_trace_inference import cases as inference_cases
    from tests.conformance.test_lower_trace_lora import JOBS as LORA_JOBS

    from memfit.model.families import families

    for name in grid.NAMES:
        for case in grid.cases(name):
            yield f"grid {case}", dict(case.config), asdict(case.job), ""
        for one in inference_cases(name):
            yield f"inference {name} {one.label}", dict(one.config), asdict(one.job), ""
    for case in grid.models():
        yield f"models {case}", dict(case.config), asdict(case.job), ""
    for number, options in enumerate(LORA_JOBS):
        for kind in grid.KINDS:
            config = grid.grown(families()[kind].examples[0])
            yield f"lora {kind} {number}", config, {"batch": 2, "seq": 64, **options}, ""


def layout_questions() -> Iterator[Question]:
    from dataclasses import asdict

    from tests.conformance.layouts import rows
    from tests.conformance.layouts_ep import SPREADABLE
    from tests.conformance.layouts_split import ANSWERS
    from tests.conformance.models import SPLIT

    known = {**SPREADABLE, **SPLIT}
    for number, row in enumerate(rows()):
        yield f"layout {number} {row}", row.config, asdict(row.job), row.use
    for name, use, options in ANSWERS:
        some = {"task": "inference", "batch": 2, "seq": 128, "new_tokens": 8, **options}
        yield f"answer {name} {use} {options}", known[name], some, use


def crossed_questions() -> Iterator[Question]:
    """Every family with every framework, and with every layout and option in turn."""
    from memfit.job import FRAMEWORKS
    from memfit.model.families import families

    for place, family in enumerate({one.name: one for one in families().values()}.values()):
        config = {**family.examples[0]}
        for framework in FRAMEWORKS:
            for number, options in enumerate(JOBS):
                some = {"batch": 2, "seq": 64, "framework": framework, **options}
                yield f"framework {family.name} {framework} {number}", config, some, ""
        for number, use in enumerate(USES):
            options = JOBS[(place + number) % len(JOBS)]
            more = CROSSED[(place + 3 * number) % len(CROSSED)]
            some = {"batch": 2, "seq": 64, **options, **more}
            yield f"crossed {family.name} {use} {some}", config, some, use


def digest(question: Question) -> tuple[str, str]:
    """The question's key and the digest of its tapes, or of the words with which it is refused."""
    from memfit.errors import InputError
    from memfit.job import Job
    from memfit.lower import lower
    from memfit.model.families import build
    from memfit.uses import strategy_from

    key, config, options, use = question
    found = hashlib.blake2b(digest_size=12)
    try:
        model, job = build(config), Job(**options)
        strategy = strategy_from(use.split(), None) if use else None
        for compact in (True, False):
            tape = lower(model, job, strategy, compact=compact)
            for event in (*tape.events, *tape.repeats):
                found.update(repr(event).encode())
    except InputError as refused:
        return key, "refused " + hashlib.blake2b(str(refused).encode(), digest_size=8).hexdigest()
    except Exception as wrong:  # noqa: BLE001 - a crash is an answer too, and must not change
        return key, f"crash {type(wrong).__name__}"
    return key, found.hexdigest()


def digests(every: int) -> dict[str, str]:
    with Pool(WORKERS) as pool:
        return dict(pool.imap_unordered(digest, list(questions())[::every], chunksize=16))


def write(target: Path, every: int) -> None:
    target.write_text(json.dumps(digests(every), indent=0, sort_keys=True))


def compare(commit: str, every: int) -> int:
    """How many questions have another answer, each named."""
    with tempfile.TemporaryDirectory() as folder:
        tree, before, after = (Path(folder) / name for name in ("tree", "before", "after"))
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], check=True)
        try:
            for where, target in ((tree, before), (Path.cwd(), after)):
                command = [sys.executable, __file__, "write", str(target), "--every", str(every)]
                subprocess.run(command, cwd=where, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)
        old, new = (json.loads(path.read_text()) for path in (before, after))
    return report(old, new)


def report(old: dict[str, str], new: dict[str, str]) -> int:
    other = [key for key in old if key in new and old[key] != new[key]]
    for key in other[:SHOWN]:
        print(f"{key}: {old[key]} -> {new[key]}")
    both = len(old.keys() & new.keys())
    tapes = sum(not one.startswith(("refused", "crash")) for one in new.values())
    print(
        f"{both} questions asked of both, {tapes} answered: {len(other)} differ; "
        f"{len(old.keys() - new.keys())} only before, {len(new.keys() - old.keys())} only now"
    )
    return len(other)


def main(arguments: list[str]) -> int:
    every = int(arguments[arguments.index("--every") + 1]) if "--every" in arguments else 1
    if len(arguments) < 2 or arguments[0] not in ("write", "compare", "report"):
        print(__doc__)
        return 2
    if arguments[0] == "write":
        write(Path(arguments[1]), every)
        return 0
    if arguments[0] == "report":
        return bool(report(*(json.loads(Path(path).read_text()) for path in arguments[1:3])))
    return bool(compare(arguments[1], every))


if __name__ == "__main__":
    sys.path[:0] = [str(Path.cwd() / "src"), str(Path.cwd())]
    raise SystemExit(main(sys.argv[1:]))
