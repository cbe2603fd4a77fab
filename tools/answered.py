"""Which models of the bundled catalog memfit answers, and how: `python tools/answered.py` writes
docs/catalog.md (minutes), `--check` compares its counts quickly.

Each is asked for inference, 128 tokens and 4 new ones on an H200: what it needs, not whether it
fits. Of models without a formula one of each type and kind of stored weights is traced, the
smallest, and stands for the others.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "catalog.md"
JOB = {"task": "inference", "seq": 128, "new_tokens": 4, "gpu": "h200", "offline": True}


class Row(NamedTuple):
    name: str
    kind: str
    how: str  # formula, trace, bound, refused
    why: str = ""


def rows() -> list[Row]:
    import memfit
    from memfit.errors import InputError
    from memfit.model import catalog
    from memfit.model.families import build
    from memfit.model.quantized import method

    found: list[Row] = []
    known: dict[tuple[str, str], tuple[str, str]] = {}  # how, and why not
    entries = sorted(catalog.entries(), key=lambda entry: entry.parameters or 0)
    for entry in entries:
        config = entry.config()
        with contextlib.suppress(InputError):
            build(config, name=entry.name)
            found.append(Row(entry.name, entry.model_type, "formula"))
            continue
        like = (entry.model_type, method(config))
        if like not in known:
            try:
                one = memfit.estimate(entry.name, **JOB)  # type: ignore[arg-type]
                known[like] = one.source, ""
            except InputError as bad:
                known[like] = "refused", bad.problems[0].message
            print(*like, *known[like], file=sys.stderr, flush=True)
        found.append(Row(entry.name, entry.model_type, *known[like]))
    return found


def formulas() -> int:
    """How many models of the catalog some family builds, which takes a second."""
    from memfit.errors import InputError
    from memfit.model import catalog
    from memfit.model.families import build

    count = 0
    for entry in catalog.entries():
        try:
            build(entry.config(), name=entry.name)
        except InputError:
            continue
        count += 1
    return count


def page(found: list[Row]) -> str:
    counts = Counter(one.how for one in found)
    answered = len(found) - counts["refused"]
    date = datetime.date.today().isoformat()
    lines = [
        "# The bundled catalog",
        "",
        (
            f"How memfit answers each of its {len(found)} models (inference), on "
            f"{date}. Written by `tools/answered.py`, which traces one model of each type and kind "
            "of stored weights. A bound has exact weights and a range for the rest."
        ),
        "",
        "| models | formula | trace | bound | refused | answered |",
        "|---:|---:|---:|---:|---:|---:|",
        (
            f"| {len(found)} | {counts['formula']} | {counts['trace']} | {counts['bound']} | "
            f"{counts['refused']} | {100 * answered / len(found):.1f} % |"
        ),
        "",
        "## Refused, and why",
        "",
        *(f"- `{one.name}`: {one.why}" for one in found if one.how == "refused"),
        "",
        "## By trace",
        "",
        *(
            f"- `{kind}`: {number}"
            for kind, number in sorted(Counter(r.kind for r in found if r.how == "trace").items())
        ),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        text = PAGE.read_text(encoding="utf-8")
        said = re.search(r"^\| (\d+) \| (\d+) \|", text, re.MULTILINE)
        from memfit.model import catalog

        now = (len(catalog.names()), formulas())
        if said is None or (int(said[1]), int(said[2])) != now:
            message = f"docs/catalog.md has drifted: {now}; `python tools/answered.py`"
            print(message, file=sys.stderr)
            return 1
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    text = page(rows())
    PAGE.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
