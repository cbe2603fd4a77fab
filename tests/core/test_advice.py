"""What makes a job fit: the shortest ladder, and what is said of each rung."""

from itertools import combinations

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate, surplus
from memfit.hardware import parse_cluster
from memfit.job import Job
from memfit.plan.advice import Asked, Weighed, advice, changes, climbed
from memfit.plan.relayouts import relayouts
from memfit.strategy import ONE, Strategy
from memfit.truth.models import built
from memfit.uses import strategy_from
from memfit.verbs import estimate as ask

MODEL = "meta-llama/Llama-3.2-1B"


def test_what_fits_needs_no_advice():
    found = advice(built(MODEL), Job(), parse_cluster("h100-sxm"))
    assert found.helps
    assert found.rungs == ()


@pytest.mark.parametrize(
    "options", [{"batch": 4}, {"batch": 2, "seq": 8192}, {"method": "lora", "batch": 16}]
)
def test_the_ladder_fits_and_none_is_shorter(options):
    model, job, cluster = built(MODEL), Job(**options), parse_cluster("rtx-4090")
    found = advice(model, job, cluster)
    assert surplus(model, job, cluster) > 0
    assert found.rungs[-1].verdict == "fits"
    assert all(rung.verdict != "fits" for rung in found.rungs[:-1])
    names = {rung.name for rung in found.rungs}
    asked = Asked(job, ONE)
    ladder = tuple(change for change in changes(job) if change.name in names)
    known = estimate(model, climbed(asked, ladder).job, cluster, climbed(asked, ladder).strategy)
    assert (known.device, known.verdict) == (found.rungs[-1].device, "fits")
    for shorter in combinations(changes(job), len(ladder) - 1):
        try:
            less = climbed(asked, shorter)
            assert surplus(model, less.job, cluster, strategy=less.strategy) > 0
        except InputError:
            continue


def test_rungs_free_what_they_say():
    model, job, cluster = built(MODEL), Job(batch=8, seq=4096), parse_cluster("rtx-4090")
    found = advice(model, job, cluster)
    before = estimate(model, job, cluster).device
    assert before - sum(rung.freed for rung in found.rungs) == found.rungs[-1].device
    assert found.rungs[-1].slower is not None


def test_what_no_change_helps():
    found = advice(built(MODEL), Job(seq=131072), parse_cluster("t4"))
    assert not found.helps
    assert found.rungs == ()


def test_inference_is_advised_too():
    found = advice(built("meta-llama/Llama-3.1-8B"), Job(task="inference"), parse_cluster("t4"))
    assert [rung.name for rung in found.rungs][-1] in ("--quant int8", "--quant nf4")
    assert found.rungs[-1].slower is None


def test_by_the_verb():
    found = ask(MODEL, gpu="rtx-4090", batch=4, advise=True, offline=True)
    assert found.advice is not None
    with pytest.raises(InputError, match="depends on the GPU"):
        ask(MODEL, advise=True, offline=True)


@pytest.mark.parametrize(
    ("gpus", "use", "others"),
    [
        (
            1,
            (),
            [
                "zero=1,offload-optimizer=cpu",
                "zero=1,stage=3,offload-optimizer=cpu,offload-param=cpu",
            ],
        ),
        (
            4,
            ("ddp=4",),
            [
                "zero=4,stage=1",
                "zero=4",
                "fsdp=4",
                "zero=4,stage=3",
                "fsdp=4,offload",
                "zero=4,offload-optimizer=cpu",
                "zero=4,stage=3,offload-optimizer=cpu,offload-param=cpu",
            ],
        ),
        (8, ("fsdp=4,reshard=no", "ddp=2"), ["fsdp=4", "fsdp=8", "fsdp=4,reshard=no,offload"]),
        (8, ("fsdp=4", "tp=2"), ["fsdp=4,offload"]),
        (
            8,
            ("zero=8,stage=2,overlap",),
            [
                "zero=8,stage=3,overlap",
                "zero=8,overlap,offload-optimizer=cpu",
                "zero=8,stage=3,overlap,offload-optimizer=cpu,offload-param=cpu",
            ],
        ),
        (
            8,
            ("zero=8,stage=3,offload-optimizer=nvme",),
            ["zero=8,stage=3,offload-optimizer=nvme,offload-param=cpu"],
        ),
    ],
)
def test_layouts_that_hold_less(gpus, use, others):
    """Each as the flag that it is, over all the GPUs, holding less than before wherever the engine
    takes it."""
    strategy = strategy_from(use, gpus)
    found = list(relayouts(strategy))
    assert [one.name for one in found] == [f"--use {other}" for other in others]
    assert all(
        one.strategy.ranks == gpus and one.strategy.size("tp") == strategy.size("tp")
        for one in found
    )
    model, job, cluster = (
        built(MODEL),
        Job(seq=512, precision="bf16"),
        parse_cluster(f"{gpus}xh100-sxm"),
    )
    before = estimate(model, job, cluster, strategy).memory.allocated
    assert all(
        estimate(model, job, cluster, one.strategy).memory.allocated < before
        for one in found
        if one.host or use
    )


def test_a_layout_is_a_rung():
    """No change to the job alone is enough for 70B."""
    model, job, cluster, strategy = (
        built("meta-llama/Llama-3.1-70B"),
        Job(seq=1024),
        parse_cluster("8xa100-sxm-80gb"),
        strategy_from(["ddp=8"], 8),
    )
    found = advice(model, job, cluster, strategy)
    assert found.rungs[-1].verdict == "fits"
    assert sum(rung.name.startswith("--use ") for rung in found.rungs) == 1


@pytest.mark.parametrize(
    "use", [(), ("ddp=4",), ("fsdp=4",), ("zero=4,stage=1",), ("fsdp=2", "tp=2")]
)
def test_what_is_ruled_out_early_does_not_fit(use):
    """The bound that spares a walk never lies above the live peak that it spares."""
    model, cluster = built(MODEL), parse_cluster(f"{4 if use else 1}xrtx-4090")
    asked, weighed = (
        Asked(Job(batch=2, seq=1024), strategy_from(use, 4) if use else Strategy()),
        Weighed(model, cluster),
    )
    for change in changes(*asked):
        job, strategy = climbed(asked, (change,))
        try:
            live = estimate(model, job, cluster, strategy, precise=False).memory.allocated
        except InputError:
            continue
        assert weighed.holds.least(job, strategy, (job.batch, job.accumulate)) <= live, change.name
