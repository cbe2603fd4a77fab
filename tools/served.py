"""Which models of the bundled catalog memfit answers for vLLM, SGLang and llama.cpp:
`python tools/served.py` writes docs/served.md (a minute), `--check` compares it, `--time` lists the
answers that take more than 20 ms.

An engine supports a model where it lists the class that the config names, in the files and versions
of tools/engine_classes.json. Each model is asked for with the engine's defaults on one H200; for
llama.cpp in Q4_K_M. A model that does not fit is answered, too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "served.md"
CLASSES = json.loads((ROOT / "tools" / "engine_classes.json").read_text(encoding="utf-8"))
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
LIMIT = 0.02  # seconds of processor time that an answer may take


class Row(NamedTuple):
    name: str
    kind: str
    supported: bool
    why: str = ""  # there is no answer; empty where there is one
    seconds: float = 0.0  # of the second answer, by the processor


def class_of(entry: Any) -> str:
    """The class that a config names, or that of its type where its config was put together."""
    named = (entry.config().get("architectures") or [""])[0]
    if entry.verbatim and named:
        return str(named)
    return str(CLASSES["of_types"].get(entry.model_type, named))


def row(engine: str, entry: Any, timed: bool = False) -> Row:
    from memfit.api.engine import serve
    from memfit.errors import InputError

    supported = class_of(entry) in CLASSES["engines"][engine]["classes"]
    name = f"{entry.name}:Q4_K_M" if engine == "llamacpp" else entry.name
    start = time.process_time()
    try:
        for _ in range(1 + timed):
            start = time.process_time()
            serve(name, engine=engine, gpu="h200", offline=True)
    except InputError as bad:
        return Row(entry.name, entry.model_type, supported, bad.problems[0].message)
    return Row(entry.name, entry.model_type, supported, "", time.process_time() - start)


def rows(engine: str, timed: bool = False) -> Iterator[Row]:
    from memfit.model import catalog

    for entry in catalog.entries():
        yield row(engine, entry, timed)


def unanswered(found: Iterable[Row]) -> list[str]:
    """A line for each type of supported model and reason."""
    counts = Counter((one.kind, one.why) for one in found if one.why and one.supported)
    return [
        f"- `{kind}` ({count} model{'s' if count > 1 else ''}): {why}"
        for (kind, why), count in sorted(counts.items())
    ]


def summary(engine: str, found: list[Row]) -> str:
    listed = [one for one in found if one.supported]
    known = CLASSES["engines"][engine]
    answered = sum(not one.why for one in listed)
    others = sum(not one.why for one in found if not one.supported)
    return (
        f"| {NAMES[engine]} | `{known['source']}`, {known['version']} | {len(listed)} | {answered} "
        f"| {len(found) - len(listed)} | {others} |"
    )


def page(found: dict[str, list[Row]]) -> str:
    total = len(next(iter(found.values())))
    lines = [
        "# Models that engines serve",
        "",
        (
            f"Which of the {total} models of the catalog memfit answers for three serving engines, "
            "with their defaults on one H200."
        ),
        (
            "An engine supports a model where it lists the class that its config names. vLLM also "
            "runs many others through transformers, and engines load some classes by other names."
        ),
        "Written by `tools/served.py`.",
        "",
        "| engine | list of classes | supported | answered | other models | answered |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [summary(engine, some) for engine, some in found.items()]
    for engine, some in found.items():
        others = sorted({one.kind for one in some if one.why and not one.supported})
        lines += ["", f"## {NAMES[engine]}: not answered", ""]
        lines += unanswered(some) or ["Every supported model is answered."]
        lines += ["", "Not in its list either: " + ", ".join(f"`{kind}`" for kind in others) + "."]
    return "\n".join(lines) + "\n"


def times(found: dict[str, list[Row]]) -> Iterator[str]:
    """The slow answers of each engine, the slowest first."""
    for engine, some in found.items():
        known = sorted((one for one in some if not one.why), key=lambda one: -one.seconds)
        middle = statistics.median(one.seconds for one in known)
        slow = [one for one in known if one.seconds > LIMIT]
        yield (
            f"{NAMES[engine]}: {len(known)} answers, {1e3 * middle:.1f} ms in the median, "
            f"{len(slow)} above {1e3 * LIMIT:.0f} ms"
        )
        yield from (f"  {1e3 * one.seconds:6.0f} ms  {one.name}" for one in slow)


def main(arguments: list[str]) -> int:
    if set(arguments) - {"--check", "--time"}:
        print(__doc__, file=sys.stderr)
        return 2
    timed = "--time" in arguments
    found = {engine: list(rows(engine, timed)) for engine in NAMES}
    if timed:
        print("\n".join(times(found)))
        return 0
    now = page(found)
    if "--check" in arguments:
        before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        if now != before:
            print("docs/served.md has drifted: `python tools/served.py`", file=sys.stderr)
        return int(now != before)
    PAGE.write_text(now, encoding="utf-8")
    print("\n".join(summary(engine, some) for engine, some in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
