"""FSDP1 by formulas: flat parameters, what a frozen unit keeps, layers that stand for many, and
what waits for other streams."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from memfit import estimate
from memfit.errors import InputError
from memfit.hardware import find_gpu
from memfit.job import Job
from memfit.lower import lower, walked
from memfit.lower.recorder import Recorder
from memfit.model.families import build
from memfit.parallel.fsdp1.wrap import LAUNCHES, Host
from memfit.simulate.allocator import Allocator
from memfit.simulate.memory import memory
from memfit.strategy import DDP, FSDP, Strategy
from memfit.tape import Alloc, Comm, Free, Sync, Tape
from memfit.truth.answers import MEAN, Outcome, asker, outcome
from memfit.truth.case import Case

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 700,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODEL = build(CONFIG)
OLD = "transformers=4.48.1,accelerate=1.0.1,peft=0.13.2,torch=2.4.1"
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full", "reentrant": True, "versions": OLD},
    {"method": "lora", "checkpointing": "full", "reentrant": True, "versions": OLD},
    {"precision": "bf16-autocast", "accumulate": 2},
    {"method": "lora", "precision": "bf16-autocast"},
    {"method": "qlora", "prepare_kbit": False},
)


def tape(options: dict[str, Any], **layout: Any) -> Tape:
    return lower(
        MODEL,
        Job(**{"batch": 2, "seq": 64, **options}),
        Strategy(fsdp=FSDP(**{"size": 4, "version": 1, **layout})),
    )


@pytest.mark.parametrize(
    "layout",
    [{}, {"backward_prefetch": "pre", "forward_prefetch": True}, {"reshard": False, "sync": False}],
)
@pytest.mark.parametrize("options", JOBS)
def test_one_layer_stands_for_many(options: dict[str, Any], layout: dict[str, Any]) -> None:
    strategy = Strategy(fsdp=FSDP(**{"size": 4, "version": 1, **layout}))
    job = Job(**{"batch": 2, "seq": 64, **options})
    one_by_one = walked(MODEL, job, None, strategy, None)
    assert one_by_one is not None
    told, folded = (
        memory(Tape(events=one_by_one.events, source="formula")),
        memory(lower(MODEL, job, strategy, compact=True)),
    )
    assert (folded.allocated, folded.parts) == (told.allocated, told.parts)


def test_a_shard_is_a_part_of_the_flat_parameter() -> None:
    """16-bit parameters begin at multiples of 8 values; the whole is filled up to a multiple of the
    ranks."""
    shards = [event.size for event in tape({}) if isinstance(event, Alloc) and event.op == "shard"]
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 320 + 2 * 128
    assert sorted(shards) == sorted([2 * (2 * 700 * 128 + 128) // 4, *[2 * layer // 4] * 9])


@pytest.mark.parametrize("layout", [{}, {"shard": False}, {"offload": True}])
def test_units_come_whole_before_they_are_cut(layout: dict[str, Any]) -> None:
    """Layer by layer, adapters first, the root last: matrices, what is broadcast, the flat
    parameter, and then this rank's part of it; nothing but that part stays."""
    job = {"method": "lora", "versions": OLD}
    events = itertools.takewhile(
        lambda event: getattr(event, "phase", "load") == "load",
        tape(job, adapters="units", **layout),
    )
    made: dict[int, Alloc] = {}
    order, live = [], set[int]()
    for event in events:
        if isinstance(event, Alloc) and event.op in ("to", "broadcast", "cat", "shard"):
            made[event.id] = event
            order.append((event.where, event.op, event.size))
            live.add(event.id)
        elif isinstance(event, Free):
            live.discard(event.id)
    layer = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 320 + 2 * 128)
    whole = layout.get("shard", True)
    flat = [("cat", layer)] if whole else []
    last = [(op, size) for where, op, size in order if where == "model.layers.8"]
    place = last.index(("broadcast", layer))
    assert last[place:] == [
        ("broadcast", layer),
        *flat,
        ("shard", layer // 4 if whole else layer),
    ]
    assert sum(size for op, size in last[place - 9 : place]) == layer
    assert order[0][2] < 2 * 128 * 64  # an adapter's matrix
    assert order[-1][0] == ""
    stays = {made[id].op for id in live}
    assert stays == (set() if layout.get("offload") else {"shard"})


def test_the_allocator_keeps_what_units_came_in() -> None:
    """LoRA of Llama-2-7B on two GPUs reserves more than its shards before the first step: a layer
    in matrices, in broadcasts and flat, and the root flat."""
    found = tape({"method": "lora", "versions": OLD}, size=2)
    allocator = Allocator()
    for event in itertools.takewhile(
        lambda event: getattr(event, "phase", "load") == "load", found
    ):
        if isinstance(event, Alloc):
            allocator.malloc(event.id, event.size, event.stream)
        elif isinstance(event, Free):
            for stream in event.streams:
                allocator.record_stream(event.id, stream)
            allocator.free(event.id)
        elif isinstance(event, Sync):
            allocator.sync(event.waits_for, event.behind)
    layer = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 320 + 2 * 128)
    assert allocator.reserved >= allocator.allocated + 3 * layer


@pytest.mark.parametrize(
    ("peft", "packed", "bytes"), [("0.9.0", True, 2), ("0.9.0", False, 4), ("0.19.0", False, 2)]
)
def test_adapters_follow_the_dtype_that_sharded_4_bit_weights_are_stored_in(
    peft: str, packed: bool, bytes: int
) -> None:
    """FSDP shards 4-bit weights whose storage is a float; bytes are no dtype for an adapter."""
    versions = OLD.replace("peft=0.13.2", f"peft={peft}")
    job = {"method": "qlora", "prepare_kbit": False, "adapter_dtype": "base", "versions": versions}
    matrices = [
        event.size
        for event in tape({**job, "rank": 8}, packed=packed, adapters="units")
        if isinstance(event, Alloc) and event.op == "to" and event.size > 2 * 128  # no norms
    ]
    assert matrices[0] == 8 * 128 * bytes
    assert min(matrices) == 8 * 64 * bytes


def test_a_frozen_layer_keeps_its_recomputed_input_and_the_gradient_of_it() -> None:
    """`register_multi_grad_hook` holds the leaf that checkpointing made of the input, until the
    backward is over (torch 2.4 autograd/graph.py)."""
    options, hidden = {**JOBS[2], "seq": 192}, 2 * 2 * 192 * 128
    alone = lower(MODEL, Job(**{"batch": 2, **options}))
    assert at_once(tape(options), hidden) >= at_once(alone, hidden) + 6


def at_once(tape: Tape, size: int) -> int:
    """The most blocks of this size that are alive together."""
    alive: set[int] = set()
    most = 0
    for event in tape.events:
        if isinstance(event, Alloc) and event.size == size:
            alive.add(event.id)
        elif isinstance(event, Free):
            alive.discard(event.id)
        most = max(most, len(alive))
    return most


@pytest.mark.parametrize(
    ("options", "layout", "part"),
    [
        ({"method": "qlora", "prepare_kbit": True}, {}, "uniform dtype"),
        (
            {"method": "lora"},
            {"adapters": "layer", "orig_params": False},
            "adapters and frozen weights cannot share a flat parameter",
        ),
    ],
)
def test_what_torch_does_not_flatten_is_refused(
    options: dict[str, Any], layout: dict[str, Any], part: str
) -> None:
    with pytest.raises(InputError, match=part):
        tape(options, **layout)


def test_replicas_add_up_what_shards_reduce() -> None:
    strategy = Strategy(fsdp=FSDP(size=4, version=1), ddp=DDP(size=2))
    events = lower(MODEL, Job(batch=2, seq=64), strategy).events
    ops = [event.op for event in events if isinstance(event, Comm)]
    assert ops.count("all_reduce") == ops.count("reduce_scatter") > 0


def test_what_was_freed_after_an_event_still_waits() -> None:
    allocator = Allocator()
    for id in (1, 2):
        allocator.malloc(id, 32 * 2**20)
        allocator.record_stream(id, 5)
        allocator.free(id)
    before = allocator.reserved
    allocator.sync(5, behind=1)
    allocator.malloc(3, 32 * 2**20)
    assert allocator.reserved == before
    allocator.malloc(4, 32 * 2**20)
    assert allocator.reserved == before + 32 * 2**20


@pytest.mark.parametrize("options", JOBS[:2])
def test_every_gather_from_the_third_on_waits(options: dict[str, Any]) -> None:
    """`limit_all_gathers`: at most two freed units wait for the GPU, in deep models as well, where
    one layer stands for many elsewhere."""
    strategy = Strategy(fsdp=FSDP(size=4, version=1))
    events = lower(MODEL, Job(**{"batch": 2, "seq": 64, **options}), strategy).events
    gathers = [
        at
        for at, event in enumerate(events)
        if isinstance(event, Alloc)
        and event.op == "unshard"
        and event.where.startswith("model.layers")
    ]
    assert len(gathers) >= 2 * 9
    for before, at in itertools.pairwise(gathers[:9]):
        waits = [
            event
            for event in events[before:at]
            if isinstance(event, Sync) and (event.stream, event.waits_for) == (1, 0)
        ]
        assert waits or at in gathers[:2], f"gather {gathers.index(at)} waits for nothing"


PACKED: dict[str, Any] = {"method": "qlora", "prepare_kbit": False, "framework": "trl"}


def waits(options: dict[str, Any], rank: int, **layout: Any) -> int:
    """How often broadcast blocks come back while units are wrapped."""
    strategy = Strategy(fsdp=FSDP(**{"size": 2, "version": 1, **layout}), rank=rank)
    events = lower(MODEL, Job(**{"batch": 2, "seq": 64, **PACKED, **options}), strategy)
    begun = itertools.takewhile(lambda event: getattr(event, "phase", "load") == "load", events)
    return sum(isinstance(event, Sync) for event in begun)


def test_ranks_that_load_no_packed_weights_keep_every_broadcast() -> None:
    """Nothing makes their host wait, so that no layer finds the broadcast block of the one
    before."""
    larger = {**CONFIG, "hidden_size": 1024, "intermediate_size": 4096}
    layers = CONFIG["num_hidden_layers"]
    found = [
        estimate(
            larger,
            versions=OLD,
            batch=1,
            seq=8,
            gpus="2xa100-80gb",
            use=f"fsdp=2,version=1{more}",
            **PACKED,
        )
        for more in ("", ",offload")
    ]
    ranks = {one.rank: one for one in found[0].ranks}
    assert [(one.rank, one.alike) for one in found[0].ranks] == [(0, 1), (1, 1)]
    assert found[0].strategy.rank == 1
    assert ranks[0].allocated == pytest.approx(ranks[1].allocated, rel=0.01)
    packed = (2 * 1024 * 1024 + 2 * 512 * 1024 + 3 * 1024 * 4096) // 2  # bytes of a layer
    more = ranks[1].device - ranks[0].device
    assert (layers - 3) * packed <= more <= (layers + 2) * packed
    assert len(found[1].ranks) <= 1  # what is offloaded waits


def test_a_published_mean_over_gpus_is_compared_with_the_mean_of_the_ranks() -> None:
    """Any other figure is compared with the worst rank."""
    case = Case(
        id="mean",
        source="a/b",
        model="tiny",
        config=json.dumps({**CONFIG, "hidden_size": 1024, "intermediate_size": 4096}),
        job=Job(versions=OLD, batch=1, seq=8, **PACKED),
        gpu=find_gpu("a100-sxm-80gb"),
        strategy=Strategy(fsdp=FSDP(size=3, version=1)),
        metric="nvidia-smi",
        value=2**30,
    )
    worst, mean, *ranks = (
        outcome(one, asker(None))
        for one in (case, replace(case, scope=MEAN), *(replace(case, rank=n) for n in range(3)))
    )
    found = [one.predicted for one in ranks if isinstance(one, Outcome)]
    assert isinstance(worst, Outcome)
    assert isinstance(mean, Outcome)
    assert found[0] < found[1] == found[2] == worst.predicted
    assert mean.predicted == sum(found) // 3


@pytest.mark.parametrize(
    ("options", "layout", "ahead"),
    [
        ({}, {}, True),
        ({"versions": OLD.replace("4.48.1", "4.57.3")}, {}, True),
        ({"versions": OLD.replace("4.48.1", "4.44.2")}, {}, False),
        ({"versions": "transformers=5.0.0"}, {}, False),
        ({"method": "lora"}, {}, False),
        ({}, {"packed": False}, False),
        ({}, {"offload": True}, False),
    ],
)
def test_who_wraps_empty_weights(
    options: dict[str, Any], layout: dict[str, Any], ahead: bool
) -> None:
    options = {"versions": OLD, **options}
    first, other = (waits(options, rank, **layout) for rank in (0, 1))
    assert (first, other) == (first, 1 if ahead else first)
    assert first > CONFIG["num_hidden_layers"]


def test_a_full_queue_holds_the_host_up() -> None:
    recorder = Recorder()
    host = Host(recorder, ahead=True)
    for _ in range(4):
        host.wrapped(LAUNCHES // 2, broadcasts=1)
    host.wait()
    syncs = [event for event in recorder.events if isinstance(event, Sync)]
    assert [one.behind for one in syncs] == [2, 2, 0]
