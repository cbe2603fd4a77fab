"""The front over all candidates is what trying them all finds, and what is written of it."""

import json

import pytest

from memfit.api.plan import plan as ask
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.hardware import parse_cluster
from memfit.job import Job
from memfit.plan.frontier import STEP, frontier, smaller
from memfit.plan.planning import Wish, plan
from memfit.plan.space import Space, Work
from memfit.report.plan import data, markdown, text
from memfit.truth.models import built
from memfit.uses import strategy_from

AXES = {
    "method": ("full", "lora"),
    "precision": ("bf16",),
    "optimizer": ("adamw_fused", "sgd"),
    "checkpointing": ("none", "full"),
    "loss": ("plain",),
    "liger": (False,),
    "attention": ("sdpa",),
    "framework": ("transformers",),
}


def asked(uses=("ddp", "fsdp"), gpus="2xrtx-3060-12gb"):
    cluster = parse_cluster(gpus)
    named = tuple(strategy_from(use.split(), cluster.gpus) for use in uses)
    return Work(
        model=built("openai-community/gpt2"),
        job=Job(seq=256),
        axes=AXES,
        sequences=16,
        strategies=named,
    ), cluster


@pytest.fixture(scope="module")
def answered():
    work, cluster = asked()
    return frontier(plan(work, cluster, Wish()), Wish())


def everything(work, cluster):
    """Seconds and the band's end of every candidate that fits."""
    for job, strategy in Space(work, cluster).candidates():
        try:
            one = estimate(work.model, job, cluster, strategy)
        except InputError:
            continue
        if one.verdict == "fits" and one.time is not None:
            yield one.time.seconds, one.band.high


def test_the_front_is_that_of_trying_all(answered):
    known = list(everything(answered.work, answered.cluster))
    limit, found = None, []
    while rest := [one for one in known if limit is None or one[1] <= limit]:
        best = min(rest)
        found.append(best)
        limit = int((1 - STEP) * best[1])
    left = [
        one
        for one in found
        if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in found)
    ]
    assert len(left) > 2
    told = [(row.estimate.time.seconds, row.estimate.band.high) for row in answered.frontier]
    assert [seconds for seconds, _ in told] == pytest.approx(sorted(seconds for seconds, _ in left))
    assert len(told) < len(known)


def test_none_of_it_beats_another(answered):
    times = [row.estimate.time.seconds for row in answered.frontier]
    sizes = [row.estimate.band.high for row in answered.frontier]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert answered.rows[0].estimate.time.seconds == times[0]


def test_fewer_gpus_are_looked_at_unless_layouts_are_named():
    work, cluster = asked(uses=())
    assert [one.gpus for one in smaller(work, parse_cluster("2x8xh100-sxm"))] == [16, 8, 4, 2]
    assert [one.gpus for one in smaller(work, parse_cluster("3xl4"))] == [3]
    shapes = [(one.nodes, one.gpus_per_node) for one in smaller(work, parse_cluster("3x4xl4"))]
    assert shapes == [(3, 4), (1, 3)]  # six are no whole nodes of four
    assert [one.gpus for one in smaller(asked()[0], cluster)] == [2]


def test_money_brings_fewer_gpus_in():
    """A small step is done sooner by all of them, and cheaper by one, which waits for nobody."""
    found = ask(
        "openai-community/gpt2",
        gpu="4xrtx-4090",
        seq=512,
        global_batch=16,
        method="full",
        precision="bf16",
        optimizer="adamw_fused",
        checkpointing="none",
        loss="plain",
        liger=False,
        attention="sdpa",
        framework="transformers",
        front=True,
        offline=True,
    )
    counts = [row.estimate.cluster.gpus for row in found.frontier]
    assert 4 in counts
    assert min(counts) < 4
    cheapest = min(found.frontier, key=lambda row: row.cost.dollars)
    assert cheapest.estimate.cluster.gpus < 4


def test_it_is_written_in_every_form(answered):
    lines = text(answered).splitlines()
    start = next(
        at
        for at, line in enumerate(lines)
        if line.startswith("best trade-offs of time, memory and cost among all candidates")
    )
    letters = [line[0] for line in lines[start:] if line[1:3] == "  " and line[0].isalpha()]
    assert letters[: len(answered.frontier)] == list("abcdefghijklm"[: len(answered.frontier)])
    assert max(len(line) for line in lines if "memfit estimate" not in line) <= 80
    assert len(json.loads(json.dumps(data(answered)))["frontier"]) == len(answered.frontier)
    assert "- a: `--" in markdown(answered)


def test_budgets_hold_for_the_front_too():
    work, cluster = asked(gpus="2xrtx-4090")
    free = frontier(plan(work, cluster, Wish()), Wish())
    middle = sorted(row.cost.hours for row in free.frontier)[len(free.frontier) // 2]
    tight = frontier(plan(work, cluster, Wish()), Wish(hours=middle))
    assert [row.cost.hours for row in tight.frontier] == [
        row.cost.hours for row in free.frontier if row.cost.hours <= middle
    ]


def test_an_interrupt_leaves_what_was_found():
    work, cluster = asked()
    first = plan(work, cluster, Wish())

    def stop(counted):
        if counted.best is not None:
            raise KeyboardInterrupt

    found = frontier(first, Wish(progress=stop))
    assert found.interrupted
    assert found.rows == first.rows
