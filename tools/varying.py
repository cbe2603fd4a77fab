"""Published runs whose lengths vary, beside a run over lengths like theirs: how much of what they
reserved a replay of many lengths explains. It changes no row and no table.

    python tools/varying.py [--steps 60] [--confidence high]

The rows (ms-swift) say of their dataset the mean length, 3234.4 tokens, and the longest text,
19548. A lognormal distribution with that mean, whose longest of some 5,000 texts is expected there,
has the median and the 99th percentile below; texts are cut at each row's length.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from memfit.estimate import estimate
from memfit.hardware import Cluster
from memfit.runs.batches import Sampling, batches
from memfit.runs.lengths import read_lengths
from memfit.runs.texts import Counting
from memfit.runs.walker import Walker
from memfit.simulate.settings import Settings
from memfit.truth.case import Case
from memfit.truth.models import built
from memfit.truth.published import read
from memfit.units import GIB

LENGTHS = "lognormal:median=2779,p99=10012,max=19548"


def varying(confidence: str) -> Iterator[Case]:
    for case in read():
        if (
            not isinstance(case, Case)
            or case.gpu is None
            or confidence not in ("", case.confidence)
        ):
            continue
        if case.lengths_vary and case.metric == "peak_reserved":
            yield case


def reserved(case: Case, steps: int) -> tuple[int, int]:
    """What memfit says of batches of one length, and at the end of so many steps of many."""
    assert case.gpu is not None
    model = built(case.model, case.stored, case.config)
    cluster = Cluster(gpu=case.gpu, gpus_per_node=case.strategy.ranks)
    found = estimate(model, case.job, cluster, case.strategy)
    lengths = read_lengths(LENGTHS, Counting())
    sampling = Sampling(batch=case.job.batch, limit=case.job.seq, accumulate=case.job.accumulate)
    walker = Walker(found, case.job, min(case.job.seq, lengths.longest))
    made = batches(lengths.tokens, sampling, steps, 0)
    settings = Settings.parse(case.job.alloc_conf, where="job.alloc_conf")
    return found.held, walker.replay(walker.course(made), settings).reserved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--confidence", default="high")
    asked = parser.parse_args()
    print(f"{'row':<12}{'model':<34}{'seq':>6}{'measured':>10}{'one':>8}{'run':>8}")
    for case in varying(asked.confidence):
        assert case.value is not None
        one, run = (each / case.value - 1 for each in reserved(case, asked.steps))
        print(
            f"{case.id:<12}{case.model:<34}{case.job.seq:>6}{case.value / GIB:>10.1f}"
            f"{100 * one:>+8.1f}{100 * run:>+8.1f}"
        )


if __name__ == "__main__":
    main()
