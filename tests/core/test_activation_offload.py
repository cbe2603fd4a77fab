"""Activations on the host: what leaves the GPU, what it takes of the host and of time, and who has
no such hooks."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.api.plan import plan
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate
from memfit.formats import BF16
from memfit.hardware import Cluster
from memfit.hardware.gpu import find_gpu
from memfit.job import Job
from memfit.lower import lower, programmed
from memfit.lower.activation_offload import STASH, OnHost, Streams
from memfit.lower.engine import Weights
from memfit.lower.host import offload
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Node
from memfit.model.catalog import entry
from memfit.model.families import build
from memfit.plan.advice import advice, changes
from memfit.plan.bounds import Bounds, Like
from memfit.plan.memory_lower_bounds import Walked, passing
from memfit.report.plan import flags
from memfit.simulate.pinned_memory import parked
from memfit.strategy import CP, FSDP, ONE, PP, TP, Gemini, Strategy
from memfit.tape import Alloc, Comm, Free, Tape
from memfit.uses import strategy_from

MODEL = build(entry("Qwen/Qwen2.5-0.5B").config())
LONG: dict[str, Any] = {"method": "lora", "seq": 8192, "checkpointing": "full"}


def asked(strategy: Strategy = ONE, gpus: int = 1, **options: Any) -> Estimate:
    return estimate(
        MODEL, Job(**options), Cluster(gpu=find_gpu("h100-sxm"), gpus_per_node=gpus), strategy
    )


def test_inputs_of_layers_wait_on_the_host() -> None:
    """Every layer's input but those on their way: bf16, rounded up to a power of two."""
    plain, away = (
        asked(framework="trl", **LONG, batch=4, activation_offload=one)
        for one in ("none", "streams")
    )
    one, width = 4 * 8192 * 896 * 2, MODEL.layers
    assert plain.memory.allocated - away.memory.allocated == pytest.approx(
        one * (len(width) - STASH), rel=0.15
    )
    assert away.host.size >= len(width) << (one - 1).bit_length()
    assert "activations" in away.host.why


def test_copies_take_time_and_more_where_the_kernels_wait() -> None:
    none, streams, wrapper = (
        asked(framework="trl", method="lora", seq=8192, activation_offload=one).time
        for one in ("none", "streams", "wrapper")
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
        (
            {"activation_offload": "wrapper", "framework": "torchtune"},
            ONE,
            "job.activation_offload",
        ),
        (
            {"activation_offload": "streams", "framework": "trl", "versions": "trl=1.5"},
            ONE,
            "job.versions",
        ),
        ({"activation_offload": "wrapper"}, Strategy(tp=TP(size=2)), "job.activation_offload"),
        (
            {"activation_offload": "all", "checkpointing": "full"},
            Strategy(tp=TP(size=2), fsdp=FSDP(size=2)),
            "job.activation_offload",
        ),
        (
            {"activation_offload": "wrapper"},
            Strategy(cp=CP(size=2), fsdp=FSDP(size=2)),
            "job.activation_offload",
        ),
        (
            {"activation_offload": "streams", "framework": "trl"},
            Strategy(pp=PP(size=2)),
            "job.activation_offload",
        ),
        (
            {"activation_offload": "wrapper"},
            Strategy(pp=PP(size=2, schedule="zbv", virtual=2)),
            "use pp.schedule",
        ),
        (
            {"activation_offload": "wrapper"},
            Strategy(gemini=Gemini(size=2)),
            "job.activation_offload",
        ),
    ],
    ids=str,
)
def test_who_has_no_such_hooks(options: dict[str, Any], strategy: Strategy, where: str) -> None:
    with pytest.raises(InputError) as bad:
        asked(strategy, strategy.ranks, **options)
    assert where in [one.where for one in bad.value.problems]


def test_a_node_holds_those_of_all_its_gpus() -> None:
    """Shards that stay on the host are pinned beside them."""
    sharded, offloaded = Strategy(fsdp=FSDP(size=8)), Strategy(fsdp=FSDP(size=8, offload=True))
    away, both, weights = (
        asked(strategy, 8, framework="trl", **LONG, batch=4, activation_offload=kind).host
        for strategy, kind in ((sharded, "streams"), (offloaded, "streams"), (offloaded, "none"))
    )
    assert away.node == 8 * away.size
    assert both.size == away.size + weights_kept(offloaded)
    assert weights.node == 8 * weights_kept(offloaded)
    assert "activations" in both.why
    assert "offload" in both.why


def weights_kept(strategy: Strategy) -> int:
    """Pinned for the shards alone."""
    return offload(programmed(MODEL, Job(framework="trl", **LONG, batch=4), None, strategy, False))


def test_micro_batches_of_a_pipeline_wait_together() -> None:
    """The first stage's forwards run ahead of its backwards: what waits is that of two
    micro-batches."""
    job = Job(batch=1, seq=512, activation_offload="wrapper")
    layouts = [
        Strategy(pp=PP(size=2, micro_batches=2, schedule=kind)) for kind in ("1f1b", "gpipe")
    ]
    one, two = (parked(lower(MODEL, job, layout), together=True) for layout in layouts)
    assert one == two == pytest.approx(parked(lower(MODEL, job)), rel=0.05)


def test_weights_that_are_gathered_travel_too() -> None:
    """Under FSDP2 their addresses are not those that TRL knew: transposes travel, and are copied
    before."""
    alone, sharded = (
        lower(MODEL, Job(framework="trl", seq=512, activation_offload="streams"), strategy)
        for strategy in (ONE, Strategy(fsdp=FSDP(size=2)))
    )
    matrices = sum(
        times * one.count
        for layer, times in MODEL.kinds
        for one in layer.weights()
        if one.role == "linear"
    )
    assert sent(sharded) - sent(alone) == 2 * 2 * matrices  # bf16, two steps


def sent(tape: Tape) -> int:
    return sum(event.size for event in tape if type(event) is Comm and event.op == "to_host")


def test_deepspeeds_own_checkpoints_are_nobodys() -> None:
    with pytest.raises(InputError, match="only models that call"):
        strategy_from(["zero=2,stage=3,cpu-checkpointing"], 2)


def test_it_is_advised_where_a_framework_has_it() -> None:
    for framework, kind in (
        ("trl", "streams"),
        ("torchtune", "streams"),
        ("transformers", "wrapper"),
        ("litgpt", ""),
    ):
        offered = [
            one.changes["activation_offload"]
            for one in changes(Job(framework=framework))
            if "activation_offload" in one.changes
        ]
        assert offered == ([kind] if kind else [])


def test_advice_on_a_long_sequence() -> None:
    """Beside shards as well; what TRL's version does not have, Liger's loss, is no rung and no
    error."""
    job = Job(framework="trl", **{**LONG, "seq": 106496}, versions="trl=1.16")
    cluster = Cluster(gpu=find_gpu("h100-sxm"), gpus_per_node=8)
    found = advice(
        build(entry("meta-llama/Llama-3.1-8B").config()), job, cluster, Strategy(fsdp=FSDP(size=8))
    )
    hosts = [one for one in found.ways if one.kind == "host"]
    assert [one.names for one in hosts] == [("--activation-offload streams",)]


def test_a_plan_that_nothing_else_makes_fit() -> None:
    """One H100, one long sequence: checkpoints wait on the host, as the row's own options say; of a
    short one they do not."""
    alone: dict[str, Any] = {
        "gpu": "1xh100-sxm",
        "framework": "trl",
        "method": "lora",
        "optimizer": "adamw_fused",
        "precision": "bf16",
    }
    alone |= {
        "attention": "sdpa",
        "liger": False,
        "checkpointing": "full",
        "packing": True,
        "clip": 0.0,
        "batch": 1,
        "global_batch": 1,
        "use": "ddp=1",
        "offline": True,
    }
    found = plan("meta-llama/Llama-3.1-8B", **alone, seq=106496)
    (row,) = found.rows
    assert row.estimate.job.activation_offload == "streams"
    assert "--activation-offload streams" in flags(row.estimate, found.work.job)
    short = plan("meta-llama/Llama-3.1-8B", **alone, seq=4096)
    assert [one.estimate.job.activation_offload for one in short.rows] == ["none"]


@pytest.mark.parametrize("kind", ["streams", "wrapper"])
def test_bounds_of_a_plan_are_bounds(kind: str) -> None:
    job = Job(framework="trl", **LONG, activation_offload=kind)
    cluster = Cluster(gpu=find_gpu("h100-sxm"), gpus_per_node=1)
    bounds, like = Bounds(MODEL, cluster), Like(job, ONE)
    quick, close = (
        bounds.walked(like, 1),
        Walked(lower(MODEL, job.replace(optimizer="sgd")), lambda tape, ideal: {}),
    )
    assert quick is not None
    assert 0 < quick.room.held <= close.room.held
    assert quick.room.between <= close.room.between
    assert (
        close.room.held
        < passing(lower(MODEL, job.replace(optimizer="sgd", activation_offload="none"))).held
    )


def node() -> Node:
    return Node(0, "any", "", lambda r, node, g: (), (), ())


def test_what_leaves_stays_for_five_more() -> None:
    """A copy on its way holds its tensor until the fifth tensor after it is saved; what is saved
    again meanwhile stays for good."""
    r = Recorder()
    hooks = Streams(r, Weights(), plain=False, trims=False)
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
