"""Lay the two producers side by side: `python tools/compare.py [CONFIG.json] --job seq=1024 batch=2
… [--set hidden_size=512 …]`.

Prints both peaks, then each section (phase, step, layer) whose peak or allocations differ;
`--section forward0` lists the events of one of them.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

from memfit.job import job_from
from memfit.lower import lower
from memfit.model.families import build
from memfit.tape import Alloc, Free, Mark, Tape, check
from memfit.trace import trace_config

SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def sections(tape: Tape) -> dict[tuple[str, int, str], list[Any]]:
    """Per (phase, step, where): its events, and the highest live sum inside it."""
    found: dict[tuple[str, int, str], list[Any]] = {}
    live: dict[int, int] = {}
    total = 0
    current = found.setdefault(("load", 0, ""), [[], 0])
    for event in tape.events:
        if isinstance(event, Mark):
            current = found.setdefault((event.phase, event.step, event.where), [[], 0])
        elif isinstance(event, Alloc):
            live[event.id] = rounded(event.size)
            total += live[event.id]
            current[0].append(event)
            current[1] = max(current[1], total)
        elif isinstance(event, Free):
            total -= live.pop(event.id)
            current[0].append(event)
    return found


def compare(config: dict[str, Any], job: Any, section: str = "", least: int = 4096) -> float:
    """Print the differences; the relative difference of the peaks is returned."""
    formulas, traced = lower(build(config), job), trace_config(config, job)
    check(formulas)
    left, right = sections(formulas), sections(traced)
    peaks = [max(one[1] for one in side.values()) for side in (left, right)]
    difference = float(peaks[0] / peaks[1] - 1)
    print(
        f"lower {peaks[0] / 2**20:.3f} MiB, trace {peaks[1] / 2**20:.3f} MiB: "
        f"{100 * difference:+.3f} %"
    )
    for key in sorted(set(left) | set(right)):
        ours, theirs = left.get(key, [[], 0]), right.get(key, [[], 0])
        counts = [
            Counter(
                event.size for event in side[0] if isinstance(event, Alloc) and event.size >= least
            )
            for side in (ours, theirs)
        ]
        extra = {
            size: counts[0][size] - counts[1][size]
            for size in counts[0] | counts[1]
            if counts[0][size] != counts[1][size]
        }
        if extra or abs(ours[1] - theirs[1]) > least:
            print(
                f"  {key[0]}{key[1]} {key[2]:24s} peaks {ours[1] / 2**20:10.3f} "
                f"{theirs[1] / 2**20:10.3f}  lower − trace, count by size: {extra}"
            )
        if section == f"{key[0]}{key[1]}{key[2]}":
            for name, side in (("lower", ours), ("trace", theirs)):
                print(f"  --- {name}")
                for event in side[0]:
                    print("     ", event)
    return difference


def values(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?")
    parser.add_argument("--job", nargs="*", default=["seq=1024", "batch=2"])
    parser.add_argument("--set", nargs="*", default=[], help="fields of the config to change")
    parser.add_argument(
        "--section", default="", help="list this section's events, e.g. `backward1model.layers.0`"
    )
    options = parser.parse_args()
    config = json.loads(Path(options.config).read_text()) if options.config else dict(SMALL)
    compare({**config, **values(options.set)}, job_from(values(options.job)), options.section)


if __name__ == "__main__":
    main()
