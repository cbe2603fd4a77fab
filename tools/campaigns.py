"""Writes src/memfit/truth/data/repeats.json: the same published case as the same publisher's other
tables show it.

python tools/campaigns.py CLONE   (CLONE: a clone of foundation-model-stack/fms-acceleration, whose
history holds eleven tables of its benchmark)
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from memfit.truth.repeats import ALIKE, METRIC, STORED  # noqa: E402
from memfit.truth.rows import Row, read_rows  # noqa: E402

SOURCE = "foundation-model-stack/fms-acceleration"
FOLDER = "scripts/benchmarks/refs"
TABLES = ("a100_80gb.csv", "a100_80gb_liger.csv", "a100_80gb_granite.csv")
DEVICE, PEAK = (
    ("mem_nvidia_mem_reserved", "nvidia_mem_reserved"),
    ("mem_peak_torch_mem_alloc_in_bytes", "peak_torch_mem_alloc_in_bytes"),
)
Key = tuple[str, ...]
Figure = tuple[float, float]  # MiB that nvidia-smi shows, bytes allocated at the peak


def git(clone: str, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", clone, *words], capture_output=True, text=True, check=True
    ).stdout


def read(text: str) -> Iterator[tuple[Key, Figure]]:
    """The runs of a table that went through, each with what tells it from the others."""
    for row in csv.DictReader(io.StringIO(text)):
        device, peak = (
            next((float(row[name]) for name in names if row.get(name)), 0.0)
            for names in (DEVICE, PEAK)
        )
        if device and peak:
            names = (
                "num_gpus",
                "model_name_or_path",
                "framework_config",
                "peft_method",
                "per_device_train_batch_size",
            )
            yield tuple(row.get(name) or "" for name in names), (device, peak)


def tables(clone: str) -> Iterator[tuple[str, str, dict[Key, Figure]]]:
    for table in TABLES:
        for line in git(
            clone, "log", "--reverse", "--format=%h %ad", "--date=short", "--", f"{FOLDER}/{table}"
        ).splitlines():
            commit, date = line.split()
            yield commit, date, dict(read(git(clone, "show", f"{commit}:{FOLDER}/{table}")))


def same(key: Key, row: Row) -> bool:
    """The run is the row's, as far as the table's own words tell them apart (the figure does the
    rest)."""
    gpus, model, framework, _, batch = key
    plugin, named = (
        str(row.more("plugin") or "").lower(),
        str(row.model).split("/")[-1].removesuffix("-GPTQ"),
    )
    fused = "foak" in plugin or "fused" in plugin
    return (gpus, batch, "foak" in framework) == (
        str(row.gpus),
        str(row.batch),
        fused,
    ) and model.split("/")[-1].removesuffix("-GPTQ") == named


def of(row: Row, found: list[tuple[str, str, dict[Key, Figure]]]) -> list[tuple[str, str, int]]:
    """The row's own figure and those of the same run in other tables, where at the peak as much was
    allocated."""
    own = next(
        (
            (key, one)
            for *_, table in found
            for key, one in table.items()
            if one[0] == row.value and same(key, row)
        ),
        None,
    )
    if own is None:
        return []
    key, (_, peak) = own
    alike = [
        (commit, date, table[key])
        for commit, date, table in found
        if key in table and abs(table[key][1] / peak - 1) <= ALIKE
    ]
    return [
        (commit, date, round(mib))
        for commit, date, (mib, _) in sorted(alike, key=lambda one: (one[1], one[0]))
    ]


def main() -> int:
    found = list(tables(sys.argv[1]))
    rows = [
        row
        for row in read_rows()
        if isinstance(row, Row) and row.source.startswith(SOURCE) and row.metric == METRIC
    ]
    repeats = {row.id: some for row in rows if len(some := of(row, found)) > 1}
    lines = ",\n".join(f'"{name}": {json.dumps(some)}' for name, some in repeats.items())
    STORED.write_text(
        f'{{"source": "{SOURCE}:{FOLDER}", "repeats": {{\n{lines}\n}}}}\n', encoding="utf-8"
    )
    print(f"{len(repeats)} of {len(rows)} cases stand in more than one of {len(found)} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
