"""Activations on the host: what leaves the GPU, what it takes of the host and of time, and who has no such hooks."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.estimate import Estimate, estimate
from memfit.formats import BF16
from memfit.hardware import Cluster
from memfit.hardware.gpu import find_gpu
from memfit.job import Job
from memfit.lower.offload import STASH, OnHost, Streams
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Node
from memfit.model.catalog import entry
from memfit.model.families import build
from memfit.plan.advice import training
from memfit.strategy import FSDP, ONE, Strategy, ZeRO, strategy_from
from memfit.tape import Alloc, Comm, Free

MODEL = build(entry("Qwen/Qwen2.5-0.5B").config())
LONG: dict[str, Any] = {"method": "lora", "seq": 8192, "checkpointing": "full"}


def asked(strategy: Strategy = ONE, gpus: int = 1, **options: Any) -> Estimate:
    return estimate(MODEL, Job(**options), Cluster(gpu=find_gpu("h100-sxm"), gpus_per_node=gpus), strategy)


def test_inputs_of_layers_wait_on_the_host() -> None:
    """Every layer's input but those on their way: bf16, rounded up to a power of two."""
    plain, away = (asked(framework="trl", **LONG, batch=4, activation_offload=one) for one in ("none", "streams"))
    one, width = 4 * 8192 * 896 * 2, MODEL.layers
    assert plain.memory.allocated - away.memory.allocated == pytest.approx(one * (len(width) - STASH), rel=0.15)
    assert away.host.size >= len(width) << (one - 1).bit_length()
    assert "activations" in away.host.why


def test_copies_take_time_and_more_where_the_kernels_wait() -> None:
    none, streams, wrapper = (
        asked(framework="trl", method="lora", seq=8192, activation_offload=one).time for one in ("none", "streams", "wrapper")
    )
    assert none is not None
    assert streams is not None
    assert wrapper is not None
    assert "host" not in none.parts
    assert none.seconds < streams.seconds < wrapper.seconds
    assert wrapper.parts["host"] > streams.parts["host"] > 0


@pytest.mark.parametrize(
    ("options", "strategy", "where"),
    [
        ({"activation_offload": "streams"}, ONE, "job.activation_offload"),
        ({"activation_offload": "streams", "framework": "torchtune"}, ONE, "job.checkpointing"),
        ({"activation_offload": "wrapper", "framework": "torchtune"}, ONE, "job.activation_offload"),
        ({"activation_offload": "streams", "framework": "trl", "versions": "trl=1.5"}, ONE, "job.versions"),
        ({"activation_offload": "wrapper"}, Strategy(fsdp=FSDP(size=4)), "job.activation_offload"),
        ({"activation_offload": "wrapper"}, Strategy(zero=ZeRO(size=1, stage=2)), "job.activation_offload"),
    ],
    ids=str,
)
def test_who_has_no_such_hooks(options: dict[str, Any], strategy: Strategy, where: str) -> None:
    with pytest.raises(InputError) as bad:
        asked(strategy, strategy.ranks, **options)
    assert where in [one.where for one in bad.value.problems]


def test_deepspeeds_own_checkpoints_are_nobodys() -> None:
    with pytest.raises(InputError, match="only models that call"):
        strategy_from(["zero=2,stage=3,cpu-checkpointing"], 2)


def test_it_is_advised_where_a_framework_has_it() -> None:
    for framework, kind in (("trl", "streams"), ("torchtune", "streams"), ("transformers", "wrapper"), ("litgpt", "")):
        offered = [one.changes["activation_offload"] for one in training(Job(framework=framework)) if "activation_offload" in one.changes]
        assert offered == ([kind] if kind else [])


def node() -> Node:
    return Node(0, "any", "", lambda r, node, g: (), (), ())


def test_what_leaves_stays_for_five_more() -> None:
    """A copy on its way holds its tensor until the fifth tensor after it is saved; what is saved again meanwhile stays for good."""
    r = Recorder()
    hooks = Streams(r, frozenset(), plain=False, trims=False)
    first = r.tensor((4096,), BF16, "first")
    block = first.storage.id if first.storage else -1
    packed = [hooks.pack(first)]
    del first
    packed += [hooks.pack(r.tensor((4096,), BF16, "later")) for _ in range(STASH - 1)]
    assert Free(block) not in r.events
    packed.append(hooks.pack(r.tensor((4096,), BF16, "fifth")))
    assert Free(block) in r.events
    again = r.tensor((4096,), BF16, "again")
    twice = [hooks.pack(again), hooks.pack(again)]
    assert [one.kept is None for one in twice] == [True, False]
    back = hooks.unpack(packed[0], node())
    made = [event for event in r.events if type(event) is Alloc and event.op == "brought_back"]
    assert [(one.size, one.stream) for one in made] == [(8192, 1)]
    assert back.shape == (4096,)


def test_torchs_own_takes_weights_along() -> None:
    r = Recorder()
    hooks, weight = OnHost(r), r.leaf((64, 64), BF16, "weight", "weights", True)
    back = hooks.unpack(hooks.pack(weight), node())
    assert [event.op for event in r.events if type(event) is Comm] == ["to_host", "to_device"]
    assert back.storage is not weight.storage
