"""Write the bundled catalog from a collection of configs: `python tools/build_catalog.py
COLLECTED.jsonl [OUT.jsonl]`.

Each line of the collection is an object with `id`, `config`, `source`, `verbatim`, and where known
`parameters`, `built_with`, `published`, `published_source`, `agree`, `checked_against`, `notes`.
Configs are taken over as they are, key order included.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "src" / "memfit" / "model" / "catalog" / "models.jsonl"
WIDE = 2**17
# A number in somebody's search index says nothing to a reader.
_INDEX = re.compile(r" ?\(index ids? [0-9, ]+\)")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Notes that tell of changes to a copied config.
_ALTERED = ("merged under key", "keys dropped", "added", "instead of")
_KEPT = (
    "parameters",
    "built_with",
    "published",
    "published_source",
    "agree",
    "checked_against",
    "notes",
)


def main(arguments: list[str]) -> int:
    """Build, or say everything that is wrong with the collection."""
    if not 1 <= len(arguments) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    rows = [
        json.loads(line)
        for line in Path(arguments[0]).read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    flaws = [flaw for row in rows for flaw in flaws_of(row)] + repeated([row["id"] for row in rows])
    if flaws:
        print("\n".join(flaws), file=sys.stderr)
        return 1
    out = Path(arguments[1]) if len(arguments) == 2 else OUT
    lines = [written(row) for row in sorted(rows, key=lambda row: row["id"].lower())]
    out.write_bytes("".join(line + "\n" for line in lines).encode())
    wide = {row["id"]: dumped(row["config"]) for row in rows if is_wide(row)}
    (out.parent / "wide").mkdir(exist_ok=True)
    for name, text in wide.items():
        (out.parent / file_name(name)).write_text(text + "\n", encoding="utf-8")
    print(
        f"{len(lines)} models, {out.stat().st_size} bytes, in {out}; {len(wide)} configs "
        "in files of their own"
    )
    return 0


def flaws_of(row: Mapping[str, Any]) -> list[str]:
    """What keeps a row out of the catalog."""
    name = row.get("id")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return [f"`{name}` is no hub id"]
    config = row.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return [f"`{name}` has no config with a model_type"]
    if not isinstance(row.get("source"), str) or not isinstance(row.get("verbatim"), bool):
        return [f"`{name}` does not say where it comes from"]
    both = row.get("parameters"), row.get("published")
    if row.get("agree") is not None and (both[0] == both[1]) != row["agree"]:
        return [f"`{name}` says agree={row['agree']}, but counts {both[0]} and published {both[1]}"]
    return []


def repeated(names: list[str]) -> list[str]:
    """Names that stand twice, in whatever case."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name.lower()] = seen.get(name.lower(), 0) + 1
    return [f"`{name}` stands {times} times" for name, times in seen.items() if times > 1]


def written(row: Mapping[str, Any]) -> str:
    """A line: name first, config last, nothing that is unknown."""
    line: dict[str, Any] = {
        "name": row["id"],
        "model_type": row["config"]["model_type"],
        "verbatim": row["verbatim"],
    }
    if row["verbatim"] and any(mark in (row.get("notes") or "") for mark in _ALTERED):
        line["altered"] = True
    line["source"] = plain(row["source"])
    line |= {key: plain(row[key]) for key in _KEPT if row.get(key) is not None}
    line["config"] = file_name(row["id"]) if is_wide(row) else row["config"]
    return dumped(line)


def dumped(value: Any) -> str:
    """The shortest JSON that says it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def is_wide(row: Mapping[str, Any]) -> bool:
    """Whether a config is so long (a quantization entry per expert) that everyone would wait for it
    while looking up another model."""
    return len(dumped(row["config"])) > WIDE


def file_name(name: str) -> str:
    """Where such a config lies, beside the catalog."""
    return f"wide/{name.replace('/', '--')}.json"


def plain(value: Any) -> Any:
    """Texts without the numbers of a search index."""
    if isinstance(value, str):
        return _INDEX.sub("", value)
    return [plain(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
