"""How long a plan takes: seconds of the processor for every candidate on 8 and on 1,024 GPUs, with how many were looked at how closely.

python bench/plan.py [MODEL]
"""

from __future__ import annotations

import sys
import time

from memfit.verb_plan import plan

CASES = (  # GPUs, sequences of a step, methods, seconds wanted
    ("8xh100-sxm", 64, "full", 2.0),
    ("8xh100-sxm", 64, "lora", 2.0),
    ("8xh100-sxm", 64, "qlora", 2.0),
    ("8xh100-sxm", 64, "full,lora,qlora", 0.0),
    ("128x8xh100-sxm", 1024, "full,lora,qlora", 10.0),
)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "meta-llama/Llama-3.1-8B"
    print(f"a loop of five million additions takes this machine {additions():.2f} s")
    for gpus, sequences, methods, wanted in CASES:
        begun = time.process_time()
        found = plan(model, gpu=gpus, seq=4096, global_batch=sequences, method=methods)
        seconds, counted = time.process_time() - begun, found.counted
        print(
            f"{gpus:>14} {methods:>15}  {counted.size:>9,} candidates  {counted.walked:>4} walks  {counted.estimated:>4} estimates  "
            f"{counted.replayed:>3} replays  {seconds:6.2f} s" + (f" (wanted: {wanted:g})" if wanted else "")
        )


def additions() -> float:
    """How quick the machine is just now."""
    begun, total = time.process_time(), 0
    for number in range(5_000_000):
        total += number
    return time.process_time() - begun


if __name__ == "__main__":
    main()
