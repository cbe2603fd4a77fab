"""What makes a job fit: the shortest ladder, and what is said of each rung."""

from itertools import combinations

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate, surplus
from memfit.hardware import parse_cluster
from memfit.job import Job
from memfit.plan.advice import advice, changes, climbed
from memfit.truth.models import built
from memfit.verbs import estimate as ask

MODEL = "meta-llama/Llama-3.2-1B"


def test_what_fits_needs_no_advice():
    found = advice(built(MODEL), Job(), parse_cluster("h100-sxm"))
    assert found.helps
    assert found.rungs == ()


@pytest.mark.parametrize("options", [{"batch": 4}, {"batch": 2, "seq": 8192}, {"method": "lora", "batch": 16}])
def test_the_ladder_fits_and_none_is_shorter(options):
    model, job, cluster = built(MODEL), Job(**options), parse_cluster("rtx-4090")
    found = advice(model, job, cluster)
    assert surplus(model, job, cluster) > 0
    assert found.rungs[-1].verdict == "fits"
    assert all(rung.verdict != "fits" for rung in found.rungs[:-1])
    names = {rung.name for rung in found.rungs}
    ladder = tuple(change for change in changes(job) if change.name in names)
    known = estimate(model, climbed(job, ladder), cluster)
    assert (known.device, known.verdict) == (found.rungs[-1].device, "fits")
    for shorter in combinations(changes(job), len(ladder) - 1):
        try:
            assert surplus(model, climbed(job, shorter), cluster) > 0
        except InputError:
            continue


def test_rungs_free_what_they_say():
    model, job, cluster = built(MODEL), Job(batch=8, seq=4096), parse_cluster("rtx-4090")
    found = advice(model, job, cluster)
    before = estimate(model, job, cluster).device
    assert before - sum(rung.freed for rung in found.rungs) == found.rungs[-1].device
    assert found.rungs[-1].slower is not None


def test_what_no_change_helps():
    found = advice(built("meta-llama/Llama-3.1-70B"), Job(), parse_cluster("t4"))
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
