"""Plans: the search answers as trying every candidate would, its bounds are bounds, and what cannot be is said with what can."""

import random
from dataclasses import replace
from datetime import date

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.hardware import find_gpu, parse_cluster
from memfit.hardware.prices import price, priced
from memfit.job import Job
from memfit.plan.bounds import Bounds, alike
from memfit.plan.planning import Wish, plan
from memfit.plan.search import Kind, Search
from memfit.plan.space import AXES, Space, Work, label, turned
from memfit.strategy import ONE, strategy_from
from memfit.truth.models import built

SMALL = {
    "method": ("full", "lora"), "precision": ("bf16", "autocast-bf16"), "optimizer": ("adamw_fused", "adamw_8bit"),
    "checkpointing": ("none", "full"), "loss": ("plain", "liger"), "liger": (False,), "attention": ("sdpa",), "framework": ("transformers",),
}  # fmt: skip
MODEL = "meta-llama/Llama-3.2-1B"


def work(sequences=8, axes=SMALL, model=MODEL, seq=512, **more):
    return Work(model=built(model), job=Job(seq=seq), axes=axes, sequences=sequences, **more)


def exhaustive(space):
    """The least seconds of each kind among all candidates that fit."""
    best = {}
    for job, strategy in space.candidates():
        try:
            quick = estimate(space.work.model, job, space.cluster, strategy, precise=False)
            if quick.time is None:
                continue
            kind = Kind(job.method, label(strategy), job.framework)
            if quick.time.seconds >= best.get(kind, float("inf")):
                continue
            if estimate(space.work.model, job, space.cluster, strategy).verdict == "fits":
                best[kind] = quick.time.seconds
        except InputError:
            continue
    return best


LEAN = {"loss": ("plain",), "optimizer": ("adamw_fused",), "precision": ("bf16",)}


@pytest.mark.parametrize(
    ("gpus", "axes", "uses"),
    [
        ("1xrtx-3060-12gb", {"method": ("full",)}, [""]),
        ("2xrtx-3060-12gb", LEAN, ["ddp", "ddp,bucket-view", "fsdp", "fsdp,reshard=no", "fsdp,version=1"]),
    ],
)
def test_the_search_finds_what_trying_all_finds(gpus, axes, uses):
    cluster = parse_cluster(gpus)
    named = tuple(strategy_from(use.split(), cluster.gpus) for use in uses)
    space = Space(work(16, {**SMALL, **axes}, "openai-community/gpt2", strategies=named), cluster)
    known = exhaustive(space)
    found = Search(space=space, bounds=Bounds(space.work.model, space.cluster), each=100)
    found.run()
    assert {one.kind: one.seconds for one in found.taken} == pytest.approx(known)
    assert [one.seconds for one in found.taken] == sorted(known.values())
    assert found.counted.estimated < space.size
    assert known


@pytest.mark.parametrize(
    ("model", "gpus", "seed"), [(MODEL, "8xh100-sxm", 1), ("openai-community/gpt2", "2x2xl40s", 2), (MODEL, "2x8xh100-sxm", 3)]
)
def test_bounds_are_bounds(model, gpus, seed):
    """Neither bytes nor seconds of any candidate are below what was said that they are not."""
    asked = work(32, AXES, model)
    if seed == 3:
        own = {**AXES, "framework": ("megatron",), "method": ("full",), "optimizer": ("adam_fused", "adam")}
        asked = work(32, own, model, seq=1024)
        asked = replace(asked, job=asked.job.replace(task="pretrain"))
    space = Space(asked, parse_cluster(gpus))
    bounds, chosen, seen = Bounds(space.work.model, space.cluster), random.Random(seed), 0
    search = Search(space=space, bounds=bounds)
    while seen < 20:
        kernels, place = chosen.choice(space.kernels), chosen.randrange(len(space.strategies))
        strategy, optimizer = space.strategies[place], chosen.choice(space.optimizers)
        batch, times = chosen.choice(space.batches(strategy))
        job = space.work.job_of(kernels, optimizer, batch, times)
        try:
            found = estimate(space.work.model, job, space.cluster, turned(strategy, times), precise=False)
        except InputError:
            continue
        seen += 1
        assert bounds.least(job, strategy, batch) <= found.memory.allocated
        like = alike(kernels, strategy)
        walked = None if like is None else bounds.walked(like, batch)
        if walked is not None:
            assert bounds.kept(job, strategy)[0] + walked.held <= found.memory.allocated
        if found.time is None:
            continue
        assert found.time.tokens == space.work.tokens
        passes = 0.0 if walked is None else times * walked.seconds
        known = search.likes(kernels).get(like) if like is not None else None
        floor = search.floor(kernels, like) if known else 0.0
        passes += 0.0 if like is None else times * batch * bounds.splitting(like)
        least = max(floor, passes) + bounds.stepping(job, strategy)
        assert max(least, bounds.calling(kernels, strategy, times)) <= found.time.seconds * (1 + 1e-9)


def test_a_plan_tells_what_it_costs_and_why_others_are_not_there():
    few = {**SMALL, "method": ("lora",), "optimizer": ("adamw_fused",), "precision": ("bf16",)}
    found = plan(work(8, few, strategies=(ONE,)), parse_cluster("1xl4"), Wish(tokens=1e9, dollars=0.8, each=1))
    assert found.fits
    assert found.counted.size > found.counted.estimated > 0
    first = found.rows[0]
    assert first.cost.dollars == pytest.approx(0.8 * first.cost.hours)
    assert first.cost.kilowatt_hours == pytest.approx(72 * first.cost.hours / 1000)


def test_prices_are_of_gpus_on_record_and_say_when_and_who():
    for name in priced():
        known = price(find_gpu(name))
        assert 0.05 < known.dollars < 50
        assert date.fromisoformat(known.date) < date(2027, 1, 1)
        assert known.cite
