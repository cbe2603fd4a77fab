"""How long a plan takes: seconds of the processor for every candidate on 8 and on 1,024 GPUs, with how many were looked at.

python bench/plan.py [MODEL]
"""

from __future__ import annotations

import sys
import time

from memfit.verb_plan import plan

CASES = (("8xh100-sxm", 64, 2.0), ("128x8xh100-sxm", 1024, 10.0))


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "meta-llama/Llama-3.1-8B"
    for gpus, sequences, wanted in CASES:
        begun = time.process_time()
        found = plan(model, gpu=gpus, seq=4096, global_batch=sequences)
        seconds, counted = time.process_time() - begun, found.counted
        print(
            f"{gpus:>16}  {counted.size:>9,} candidates  {counted.walked:>4} walks  {counted.estimated:>4} estimates  {counted.replayed:>3} replays  "
            f"{seconds:6.2f} s (wanted: {wanted:g})"
        )


if __name__ == "__main__":
    main()
