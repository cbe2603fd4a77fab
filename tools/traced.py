"""Writes src/memfit/truth/data/traced.json: what the trace says of published rows, in environments
that have the rows' versions.

python tools/traced.py ENVIRONMENT … [--source TEXT] [--rows ID …]   (folders of virtual
environments with torch and transformers; each row goes to those whose transformers is next to its
own, in order, until one
of its own versions answers. Answers to rows that are not asked stay as they are.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from memfit.truth.case import Case  # noqa: E402
from memfit.truth.published import read  # noqa: E402
from memfit.truth.traced import STORED, Traced, key, refusals, stored  # noqa: E402

VERSION = "import importlib.metadata as m; print(m.version('transformers'))"


def interpreter(folder: str) -> str:
    return str(Path(folder) / "bin" / "python")


def number(text: str) -> tuple[int, int]:
    major, minor = text.strip().split(".")[:2]
    return int(major), int(minor)


def transformers(folder: str) -> tuple[int, int]:
    return number(
        subprocess.run(
            [interpreter(folder), "-c", VERSION], capture_output=True, text=True, check=True
        ).stdout
    )


def distance(case: Case, version: tuple[int, int]) -> int:
    wanted = case.job.version("transformers")
    return abs(1000 * wanted[0] + wanted[1] - 1000 * version[0] - version[1])


def shortened(words: str) -> str:
    """A reason without what is one row's alone."""
    return re.sub(r"^memfit refuses the job: ", "", words)


def ask(folder: str, rows: list[Case]) -> tuple[list[Traced], dict[str, str]]:
    """Answers, and why the others have none."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    found = subprocess.Popen(
        [interpreter(folder), "-m", "memfit.truth.traced"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    assert found.stdin is not None
    assert found.stdout is not None
    found.stdin.write("\n".join(one.id for one in rows))
    found.stdin.close()
    said, refused = [], {}
    for line in found.stdout:
        one = json.loads(line)
        if isinstance(one, dict):
            said.append(Traced(**one))
        else:
            refused[one[0]] = one[1]
        print(
            f"{folder}: {len(said)} answered, {len(refused)} not, of {len(rows)}", file=sys.stderr
        )
    found.wait()
    return said, refused


def write(known: dict[str, Traced], cases: dict[str, Case], refused: dict[str, str]) -> None:
    """Answers to what is no longer asked so are left out; what is refused is listed by its
    reason."""
    kept = [one for name, one in known.items() if name in cases and key(cases[name]) == one.key]
    order = {name: place for place, name in enumerate(cases)}
    lines = ",\n".join(json.dumps(vars(one)) for one in sorted(kept, key=lambda one: order[one.id]))
    reasons: dict[str, list[str]] = {}
    for name in sorted(
        refused.keys() & order.keys() - {one.id for one in kept}, key=order.__getitem__
    ):
        reasons.setdefault(refused[name], []).append(name)
    why = ",\n".join(
        f"{json.dumps(reason, ensure_ascii=False)}: {json.dumps(names)}"
        for reason, names in reasons.items()
    )
    head = f'"date": "{datetime.datetime.now(datetime.UTC).date()}",\n"refused": {{\n{why}\n}}'
    STORED.write_text(f'{{\n{head},\n"answers": [\n{lines}\n]\n}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="write src/memfit/truth/data/traced.json")
    parser.add_argument("environments", nargs="+")
    parser.add_argument("--source", default="", help="only rows whose source has this in its name")
    parser.add_argument("--rows", nargs="*", default=(), help="only these rows")
    given = parser.parse_args()
    cases = {row.id: row for row in read() if isinstance(row, Case)}
    wanted = [
        one
        for one in cases.values()
        if given.source.lower() in one.source.lower() and (not given.rows or one.id in given.rows)
    ]
    versions = {folder: transformers(folder) for folder in given.environments}
    known, refused = dict(stored()), dict(refusals())
    for one in wanted:
        known.pop(one.id, None)
        refused.pop(one.id, None)
    nearest = {
        one.id: min(distance(one, version) for version in versions.values()) for one in wanted
    }
    for folder, version in versions.items():
        rows = [
            one
            for one in wanted
            if distance(one, version) == nearest[one.id]
            and (one.id not in known or known[one.id].instead)
        ]
        if rows:
            said, why = ask(folder, rows)
            known |= {
                one.id: one
                for one in said
                if one.id not in known or len(one.instead) < len(known[one.id].instead)
            }
            refused |= {name: shortened(words) for name, words in why.items()}
        refused = {name: why for name, why in refused.items() if name not in known}
        write(known, cases, refused)
    return 0


if __name__ == "__main__":
    sys.exit(main())
