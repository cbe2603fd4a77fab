"""What the formulas write compactly is what they write in full: same peak, same parts, same blocks,
same moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

import memfit.lower
from memfit.estimate import estimate, surplus
from memfit.hardware import parse_cluster, usable
from memfit.job import Job
from memfit.lower import LIVE_PASSES, allocator_requests, lower, walked, whole
from memfit.lower.expand import Unclear, expanded
from memfit.lower.requests import FREED, Request
from memfit.model.families import Family, build, families
from memfit.model.model import Model
from memfit.program import BOTH, Ends
from memfit.simulate.memory import Memory, memory
from memfit.simulate.peaks import peaks
from memfit.tape import Alloc, Event, Free, Mark, Tape, check

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 3, "seq": 77},
    {"checkpointing": "full"},
    {"method": "lora"},
    {"method": "lora", "checkpointing": "full", "reentrant": True},
    {"method": "qlora"},
    {"precision": "autocast-bf16"},
    {"precision": "fp32", "optimizer": "sgd"},
    {"accumulate": 3},
    {"optimizer": "adamw_fused"},
    {"optimizer": "adafactor"},
    {"evaluate": True},
    {"packing": False, "batch": 2},
    {"task": "inference"},
    {"task": "inference", "cache": "static", "batch": 4},
)


def test_an_estimate_walks_its_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of the walk which the tape was written out from."""
    walks, walk = [], memfit.lower.walk
    monkeypatch.setattr(memfit.lower, "walk", lambda *given: walks.append(1) or walk(*given))
    found = estimate(build(LLAMA), Job(method="lora"), parse_cluster("a100-pcie-40gb"))
    assert found.time is not None
    assert len(walks) == 1
    short = lower(found.model, found.job, cluster=found.cluster, compact=True)
    again = dataclasses.replace(found, memory=dataclasses.replace(found.memory, tape=short)).time
    assert again is not None
    assert found.time.seconds == pytest.approx(again.seconds, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    JOBS,
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
def test_compact_is_flat_in_fewer_events(options: dict[str, Any]) -> None:
    model, job = build(LLAMA), Job(**{"seq": 128, **options})
    compact, flat = lower(model, job, compact=True), lower(model, job)
    check(compact)
    check(flat)
    assert compact.repeats
    assert len(compact) < len(flat)
    same(memory(compact), memory(flat))


def test_the_time_of_a_generation_is_told_by_a_few_passes() -> None:
    """It is no line where a token's time goes over from the host's to the GPU's."""
    cluster = parse_cluster("rtx-4090")
    for batch in (1, 16, 64):
        job = Job(task="inference", seq=512, new_tokens=256, batch=batch)
        many, few = (
            estimate(build(LLAMA), job, cluster, precise=precise).generation
            for precise in (True, False)
        )
        assert many is not None
        assert few is not None
        assert few.seconds == pytest.approx(many.seconds, rel=0.02)


def test_a_later_step_is_the_same_blocks_once_more() -> None:
    """But for the workspaces of cuBLAS and the batch, which stay."""
    events = lower(build(LLAMA), Job(seq=128), compact=True).events
    passes = [
        place
        for place, event in enumerate(events)
        if isinstance(event, Mark) and (event.phase, event.where) == ("forward", "")
    ]
    steps = [
        place
        for place, event in enumerate(events)
        if isinstance(event, Mark) and event.phase == "step"
    ]
    begin, again = (
        passes[0],
        next(place for place in passes if events[place] == Mark("forward", "", 1)),
    )
    first = {
        id(event): event for event in events[begin : steps[0]] if isinstance(event, (Alloc, Free))
    }
    second = {id(event) for event in events[again:] if isinstance(event, (Alloc, Free))}
    assert {
        event.op for key, event in first.items() if key not in second and isinstance(event, Alloc)
    } == {"inputs", "cublas"}
    assert len(first.keys() & second) > 0.9 * len(first)


def same(one: Memory, other: Memory) -> None:
    assert one.allocated == other.allocated
    assert one.parts == other.parts
    assert one.groups == other.groups
    # A compact tape has fewer decoding passes, and what was held before one may be older.
    known = {(part.phase, part.step): part.allocated for part in other.timeline}
    assert (one.timeline[0], one.timeline[-1].step) == (other.timeline[0], other.timeline[-1].step)
    for part in one.timeline:
        near = 1e-3 if part.phase == "decode" else 0
        assert part.allocated == pytest.approx(known[part.phase, part.step], rel=near, abs=0)
    assert {key for key in known if key[0] != "decode"} <= {
        (part.phase, part.step) for part in one.timeline
    }
    assert one.end == other.end
    assert one.at is not None
    assert other.at is not None
    assert one.at.phase == other.at.phase


WINDOW = {"sliding_window": 32, "use_sliding_window": True}
SLIDING = ["sliding_attention", "full_attention"]
FIRST, LAST, NONE = Ends(last=False), Ends(first=False), Ends(first=False, last=False)
# Walks that tell nothing less than all layers do, though fewer ends are walked; and those that are
# found not to tell all.
TOLD: tuple[tuple[dict[str, Any], dict[str, Any], Ends], ...] = (
    *(
        ({}, options, ends)
        for options in JOBS
        if "method" not in options
        for ends in (NONE, FIRST, LAST)
    ),
    *(({}, options, FIRST) for options in JOBS if "method" in options),
    ({}, {"precision": "bf16-master"}, NONE),
    ({}, {"optimizer": "adamw_8bit", "clip": 1.0, "zero_grad": "keep"}, NONE),
    ({}, {"optimizer": "adagrad", "precision": "autocast-fp16"}, NONE),
    ({}, {"optimizer": "lion", "accumulate": 2}, NONE),
    (
        {},
        {"checkpointing": "full", "reentrant": True, "precision": "autocast-bf16", "longest": 200},
        NONE,
    ),
    ({"num_hidden_layers": 10}, {"checkpointing": "every", "checkpoint_every": 2}, FIRST),
    ({}, {"liger": True}, LAST),
    ({"num_hidden_layers": 24, "model_type": "gemma2", "head_dim": 16}, {}, NONE),
    (
        {"num_hidden_layers": 24, "model_type": "gemma2", "head_dim": 16},
        {"task": "inference", "beams": 3},
        NONE,
    ),
    (
        {"num_hidden_layers": 12, "model_type": "qwen2", "layer_types": SLIDING * 6, **WINDOW},
        {"task": "inference"},
        NONE,
    ),
    (
        {"num_hidden_layers": 12, "model_type": "qwen2", "layer_types": SLIDING * 6, **WINDOW},
        {"task": "inference"},
        BOTH,
    ),
)
NOT_TOLD: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"method": "lora"}),  # the first layer's input needs no gradient
    ({}, {"method": "freeze", "trainable": "mlp"}),
    ({}, {"method": "lora", "checkpointing": "full"}),  # it is a leaf that collects one
    ({}, {"liger": True}),  # the last layer's output gets a gradient that shares its block
    (
        {"model_type": "gptj", "n_embd": 64, "n_layer": 9, "n_head": 4, "rotary_dim": 8},
        {"checkpointing": "full"},
    ),  # scores are returned
)


def case(changes: dict[str, Any], options: dict[str, Any]) -> tuple[Model, Job]:
    return build({**LLAMA, **changes}), Job(**{"seq": 128, "new_tokens": 6, **options})


@pytest.mark.parametrize(("changes", "options", "ends"), TOLD, ids=str)
def test_fewer_layers_tell_as_much(
    changes: dict[str, Any], options: dict[str, Any], ends: Ends
) -> None:
    model, job = case(changes, options)
    walk = walked(model, job, ends=ends)
    assert walk is not None
    assert sum(entry.times for entry in walk.program.entries) == len(model.layers)
    assert len(walk.program.entries) == (1 + sum(ends)) * walk.program.entries[0].period
    tape = Tape(events=walk.events, source="formula", repeats=walk.repeats)
    check(tape)
    same(memory(tape), memory(lower(model, job)))


@pytest.mark.parametrize(("changes", "options"), NOT_TOLD, ids=str)
def test_a_walk_that_does_not_tell_all_is_noticed(
    changes: dict[str, Any], options: dict[str, Any]
) -> None:
    model, job = case(changes, options)
    assert walked(model, job, ends=NONE) is None
    same(memory(lower(model, job, compact=True)), memory(lower(model, job)))


def numbered(events: tuple[Event, ...]) -> list[Event]:
    """Blocks by the order in which they come: numbers have no other meaning."""
    ids: dict[int, int] = {}
    out: list[Event] = []
    fresh = count()
    for event in events:
        if isinstance(event, Alloc):
            ids[event.id] = next(fresh)
        out.append(event._replace(id=ids[event.id]) if isinstance(event, (Alloc, Free)) else event)
    return out


def written_out(model: Model, job: Job) -> tuple[Event, ...] | None:
    events, spans, program, _ = whole(walked(model, job))
    assert spans
    return expanded(events, spans, program.entries, model.path)


def asked(model: Model, job: Job) -> list[Request]:
    found = allocator_requests(model, job, None)
    assert found is not None
    return list(found)


def requested(flat: Sequence[Event]) -> list[Request]:
    """What a flat tape asks of the allocator."""
    return [
        (event.id, event.size, event.stream) if isinstance(event, Alloc) else (event.id, FREED, 0)
        for event in flat
        if isinstance(event, (Alloc, Free))
    ]


def test_layers_that_stand_for_no_others_are_asked_for_without_their_tape_written_out() -> None:
    model, job = build(families()["gemma4"].examples[0]), Job(seq=64, method="lora")
    walk = whole(walked(model, job))
    assert not walk.repeats
    assert asked(model, job) == requested(lower(model, job).events)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"cache": "static"}),
        ("llama", {"cache": "quantized"}),
        ("gemma4", {}),
        ("qwen3_5_text", {}),
    ],
    ids=str,
)
def test_two_passes_of_a_generation_have_its_live_peak(kind: str, options: dict[str, Any]) -> None:
    model = build(families()[kind].examples[0])
    job = Job(task="inference", batch=2, seq=48, new_tokens=90, **options)
    few = lower(model, job, compact=True, passes=LIVE_PASSES)
    assert peaks(few).allocated == memory(lower(model, job)).allocated
    assert len(few.events) < len(lower(model, job, compact=True).events)


@pytest.mark.parametrize("options", [{"method": "qlora"}, {"alloc_conf": "max_split_size_mb:20"}])
def test_what_does_not_fit_is_told_without_the_tape_written_out(options: dict[str, Any]) -> None:
    model, job, cluster = build(LLAMA), Job(seq=128, **options), parse_cluster("rtx-4090")
    found = estimate(model, job, cluster)
    assert surplus(model, job, cluster) == found.band.high - usable(cluster.gpu)


@pytest.mark.parametrize(
    "options",
    JOBS,
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
def test_a_compact_tape_written_out_is_the_walk_through_every_layer(
    options: dict[str, Any],
) -> None:
    model, job = build(LLAMA), Job(**{"seq": 128, **options})
    flat = written_out(model, job)
    assert flat is not None
    assert asked(model, job) == requested(flat)
    assert numbered(flat) == numbered(whole(walked(model, job, ends=None)).events)


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
FAMILIES = sorted(
    {family.name: family for family in families().values() if not family.graphs}.items()
)
ALTERNATE = {
    "cohere2",
    "exaone4",
    "olmo3",
    "smollm3",
    "gpt_neo",
    "nemotron_nas",  # a list with an entry for each layer
}  # more layers than these tests have before they repeat


@pytest.mark.parametrize(
    "family", [pytest.param(family, id=name) for name, family in FAMILIES if name not in ALTERNATE]
)
@pytest.mark.parametrize("task", ["finetune", "inference"])
def test_every_family_is_written_out_as_it_is_walked(family: Family, task: str) -> None:
    config = {key: value for key, value in family.examples[0].items() if key != "layer_types"}
    inner = dict(config.get("text_config", config))
    inner.update({key: 8 for key in LAYERS if key in inner})
    config = {**config, "text_config": inner} if "text_config" in config else inner
    model, job = (
        build(config),
        Job(task=task, seq=16, new_tokens=16) if task == "inference" else Job(seq=16),
    )
    flat = written_out(model, job)
    if flat is None:
        assert (family.name, task) == (
            "gpt_oss",
            "inference",
        )  # its cache's windows are not alike in neighbours: layers are walked
        with pytest.raises(Unclear):
            asked(model, job)
        return
    assert asked(model, job) == requested(flat)
    assert numbered(flat) == numbered(whole(walked(model, job, ends=None)).events)
