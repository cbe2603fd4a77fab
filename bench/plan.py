"""How long a plan takes: seconds of the processor for every candidate on 8 and on 1,024 GPUs, with
how many were looked at how closely.

python bench/plan.py [MODEL]; with `--write` the table in docs/guides/plan.md, too
"""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from memfit.api.plan import plan

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "plan.md"
TABLE = re.compile(
    r"On \d{4}-\d\d-\d\d(?=, Llama-3\.1-8B).*?\n\n(?P<head>\|[^\n]*\n\|[^\n]*\n)(?:\|[^\n]*\n)+",
    re.DOTALL,
)
USUAL = "meta-llama/Llama-3.1-8B"
WORDS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA", "full,lora,qlora": "all three"}
CASES = (  # GPUs, sequences of a step, methods, seconds wanted
    ("8xh100-sxm", 64, "full", 2.0),
    ("8xh100-sxm", 64, "lora", 2.0),
    ("8xh100-sxm", 64, "qlora", 2.0),
    ("8xh100-sxm", 64, "full,lora,qlora", 2.0),
    ("128x8xh100-sxm", 1024, "full,lora,qlora", 10.0),
)


def main() -> None:
    named = [word for word in sys.argv[1:] if word != "--write"]
    model = named[0] if named else USUAL
    if "--write" in sys.argv[1:] and model != USUAL:
        sys.exit(f"the guide's table is of {USUAL}")
    print(f"a loop of five million additions takes this machine {additions():.2f} s")
    rows: list[str] = []
    for gpus, sequences, methods, wanted in CASES:
        begun = time.process_time()
        found = plan(model, gpu=gpus, seq=4096, global_batch=sequences, method=methods)
        seconds, counted = time.process_time() - begun, found.counted
        print(
            f"{gpus:>14} {methods:>15}  {counted.size:>9,} candidates  "
            f"{counted.walked:>4} walks  {counted.estimated:>4} estimates  "
            f"{counted.replayed:>3} replays  {seconds:6.2f} s (wanted: {wanted:g})"
        )
        rows.append(
            f"| {found.cluster.gpus:,} H100 | {WORDS[methods]} | {counted.size:,} | "
            f"{counted.walked} | {counted.estimated} | {counted.replayed} "
            f"| {seconds:.1f} |\n"
        )
    if "--write" in sys.argv[1:]:
        GUIDE.write_text(written(GUIDE.read_text(), rows))


def written(text: str, rows: list[str]) -> str:
    """The guide with these rows, of today."""
    found = TABLE.search(text)
    if found is None:
        sys.exit(f"no table of seconds in {GUIDE}")
    table = found["head"] + "".join(rows)
    before = re.sub(
        r"^On \d{4}-\d\d-\d\d",
        f"On {datetime.now(UTC).date()}",
        found[0][: found[0].index(found["head"])],
    )
    return text[: found.start()] + before + table + text[found.end() :]


def additions() -> float:
    """How quick the machine is just now."""
    begun, total = time.process_time(), 0
    for number in range(5_000_000):
        total += number
    return time.process_time() - begun


if __name__ == "__main__":
    main()
