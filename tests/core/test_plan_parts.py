"""The parts of the planners by hand: how far an option goes along a line, the card, and which
changes are tried in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.band import spread
from memfit.errors import InputError
from memfit.hardware import Cluster, all_gpus, apple_gpus, find_gpu, parse_cluster, usable
from memfit.hardware.prices import price
from memfit.job import Job
from memfit.plan import advice, card
from memfit.plan.advice import Change, Setting
from memfit.plan.card import Asking, Row, Served, Use
from memfit.plan.furthest import (
    BACK,
    TRIES,
    End,
    Look,
    Values,
    allocator_end,
    curve_end,
    furthest,
    halved,
    live_end,
)
from memfit.strategy import FSDP, ONE, Strategy
from memfit.units import GIB


# ------------------------------------------------------------------------- how far an option goes
class Line(Look):
    """Memory by a formula: so much by the live peak, and `more` where the allocator is replayed."""

    def __init__(self, needs: Callable[[int], int], room: int, name: str, more: int = 0) -> None:
        self.needs, self.room, self.name, self.more = needs, room, name, more
        self.replayed: list[int] = []

    def never(self, job: Job) -> bool:
        return False

    def short(self, job: Job) -> int:
        return self.needs(getattr(job, self.name)) - self.room

    def over(self, job: Job) -> int:
        self.replayed.append(getattr(job, self.name))
        return self.short(job) + self.more


@pytest.mark.parametrize("more", [0, 7, 250])
@pytest.mark.parametrize("start", [1, 3, 40, 4000])
@pytest.mark.parametrize("room", [1009, 1010, 1100, 1730, 5000, 41_007, 10**6])
def test_the_largest_batch_of_a_line(room: int, start: int, more: int) -> None:
    """1000 bytes and 10 for each: the last one that fits, or nearly, and no more than is looked
    for."""
    look = Line(lambda batch: 1000 + 10 * batch, room, "batch", more)
    most = max(0, min(4096, (room - more - 1000) // 10))
    found = furthest(look, Job(batch=start), "batch", 4096, 1)
    assert most - most // BACK <= found <= most
    assert len(look.replayed) <= 4


@pytest.mark.parametrize(
    ("top", "room", "longest"),
    [
        (4096, 10**9, 4096),
        (4096, 1000 + 10 * 1024, 1024),
        (4096, 1000 + 10 * 1100, 1024),  # a multiple of 256
        (1000, 10**9, 1000),  # or all that there is, which is no multiple
        (1000, 1000 + 10 * 999, 768),
        (100, 10**9, 100),  # fewer than one multiple: token by token
        (100, 1000 + 10 * 55, 55),
        (4096, 1000 + 10 * 255, 0),
        (4096, 999, 0),
        (1, 10**9, 1),
    ],
)
def test_the_longest_sequence_is_a_round_number(top: int, room: int, longest: int) -> None:
    look = Line(lambda seq: 1000 + 10 * seq, room, "seq")
    for start in (1, 512, 2048):
        found = furthest(look, Job(seq=start), "seq", top, 0)
        assert longest - longest // BACK <= found <= longest


@pytest.mark.parametrize("room", [300, 2_000, 50_000, 3_000_000])
def test_where_memory_is_no_line_what_is_said_fits(room: int) -> None:
    look = Line(lambda batch: 100 + batch * batch // 2, room, "batch")
    found = furthest(look, Job(batch=4), "batch", 10**4, 1)
    assert look.needs(found) <= room < look.needs(found + max(2, found // 8))


def test_a_bound_that_rules_it_out_ends_the_search() -> None:
    class Never(Line):
        def never(self, job: Job) -> bool:
            return job.batch == 1

    look = Never(lambda batch: 10 * batch, 10**6, "batch")
    assert furthest(look, Job(batch=8), "batch", 100, 1) == 0
    assert look.replayed == []


def seen(memory: Callable[[int], int]) -> tuple[Values, dict[int, int]]:
    values = Values(memory)
    return values, values.seen


@pytest.mark.parametrize("more", [0, 100])
@pytest.mark.parametrize("room", [2_400, 5_000, 41_007])
@pytest.mark.parametrize(("name", "unit", "step"), [("batch", 1, 1), ("seq", 256, 0)])
def test_a_peak_that_does_not_grow_at_first_is_followed(
    name: str, unit: int, step: int, room: int, more: int
) -> None:
    """As where loading takes more than small batches do."""

    def needs(value: int) -> int:
        return max(2_000, 1_000 + 10 * value // unit)

    look = Line(needs, room, name, more)
    found = furthest(look, Job(**{name: 8 * unit}), name, 4096 * unit, step) // unit
    most = max(one for one in range(1, 4097) if needs(one * unit) + more <= room)
    assert most - most // 16 - 1 <= found <= most
    assert len(look.replayed) <= 6


def test_values_are_asked_for_once() -> None:
    asked: list[int] = []
    values = Values(lambda count: asked.append(count) or 3 * count)  # type: ignore[func-returns-value]
    assert (values.rise(1), values(4), values.rise(4), values(4), asked) == (0, 12, 0, 12, [4])
    values.seen.update({2: 10, 6: 30, 9: 99})
    assert [values.rise(count) for count in (2, 6, 9, 100)] == [1, 9, 23, 23]  # the nearest two


def test_the_end_of_a_live_peak() -> None:
    """Of batches by a line through two of them; of lengths by a search, or along a curve that
    training follows where the line leads far."""
    line, known = seen(lambda count: 160 * count - 160 * 40 - 80)
    assert live_end(line, 2, 4, 100, every=True, curved=True) == End(40, 160, 100)
    assert sorted(known) == [2, 4]
    assert live_end(line, 2, 4, 30, every=True, curved=True) == End(40, 160, 30)
    assert live_end(line, 2, 4, 100, every=False, curved=False) == End(40, 160, 40)

    def curve(count: int) -> int:
        return count * count + 10 * count - 2_000

    bent, known = seen(curve)
    assert live_end(bent, 2, 4, 100, every=False, curved=True) == End(40, 90, 100)
    assert sorted(known) == [2, 4, 8]
    assert curve(40) == 0
    assert live_end(seen(curve)[0], 2, 4, 30, every=False, curved=True) == End(40, 90, 30)
    assert live_end(seen(curve)[0], 2, 4, 7, every=False, curved=True).most == 7
    flat = seen(lambda count: -5)[0]
    assert live_end(flat, 2, 4, 100, every=False, curved=True) == End(100, 0, 100)


def test_a_line_is_a_curve_that_does_not_bend() -> None:
    points = [(1, -90), (2, -80), (4, -60)]
    assert curve_end(points, 100) == End(10, 10, 100)
    assert curve_end(points, 8) == End(10, 10, 8)
    falling = [(1, -90), (2, -80), (4, -70)]  # flatter on the way: a line through the last two
    assert curve_end(falling, 100) == End(18, 5, 100)


@pytest.mark.parametrize(
    ("held", "replays"),
    [
        (0.0, [32, 40]),  # 40 / 1.2 = 33, less a thirty-second, then by what is free there
        (0.2, [32]),  # of 33.3; one more is not worth a replay
        (1.0, [32, 20]),
        (30.0, [32, 1]),
        (50.0, [32, 1]),
    ],
)
def test_a_search_begins_where_the_allocator_usually_has_no_more_room(
    held: float, replays: list[int]
) -> None:
    tried: list[int] = []

    def over(count: int) -> int:
        tried.append(count)
        return round(100 * (count - 40) + held * 100 * count)

    found = allocator_end(over, End(40, 100, 100), 0.2)
    assert tried == replays
    assert found == (replays[-1] if held < 40 else 0)


def test_what_was_held_beyond_is_where_the_next_search_begins() -> None:
    look = Line(lambda one: 1000 + 10 * one, 5000, "batch", more=800)
    assert furthest(look, Job(batch=8), "batch", 4096, 1) == 320
    assert look.overhead == pytest.approx(0.25)
    look.replayed.clear()
    look.name = "seq"
    look.needs = lambda one: 1000 + one // 256 * 10
    assert furthest(look, Job(seq=1024), "seq", 10**6, 0) == 256 * 310  # of 320
    assert len(look.replayed) == 1


@pytest.mark.parametrize("fits", [0, 1, 2, 3, 31, 50, 99])
def test_halving_finds_one_that_fits_near_the_largest(fits: int) -> None:
    found = halved(lambda count: count - fits, 100)
    assert min(fits, 1) <= found <= fits
    assert fits - found <= 100 / 2**TRIES + 1
    assert halved(lambda count: -1, 1) == halved(lambda count: -1, 0) == 0


# ------------------------------------------------------------------------- the card
T4 = find_gpu("t4")
SEVERAL = parse_cluster("4xa100-sxm-80gb")


def shaped(layers: int = 32, positions: int | None = 8192) -> Any:
    return SimpleNamespace(layers=[None] * layers, positions=positions)


def test_contexts_and_positions() -> None:
    """4,096 tokens of each user, 128 of them generated, or half of what a small model has."""
    answering = card.USES[0]
    for positions, context, new in ((8192, 4096, 128), (4095, 4095, 128), (100, 100, 50)):
        model = shaped(positions=positions)
        assert card.context_of(model) == context
        found = card.options_of(answering, model)
        assert (found["seq"], found["new_tokens"]) == (context - new, new)
    assert card.context_of(shaped(positions=None)) == 4096
    assert card.positions(shaped(positions=None), Job()) == 2**20
    assert card.positions(shaped(positions=500), Job(new_tokens=60)) == 500
    asked = Job(task="inference", new_tokens=60)
    assert card.positions(shaped(positions=500), asked) == 440
    assert card.positions(shaped(positions=50), asked) == 1
    full = next(use for use in card.USES if use.key == "full")
    assert card.options_of(full, shaped()) == {"method": "full"}


def test_layouts_over_several_gpus() -> None:
    training = next(use for use in card.USES if use.key == "lora")
    answering, gguf = card.USES[0], next(use for use in card.USES if use.gguf)
    alone = Cluster(gpu=T4)
    assert {card.layouts(shaped(), use, alone) for use in card.USES} == {(ONE,)}
    assert card.layouts(shaped(), training, SEVERAL) == (Strategy(fsdp=FSDP(size=4)),)
    whole, copies, split = card.layouts(shaped(32), answering, SEVERAL)
    assert (whole.size("tp"), copies.size("ddp"), split.size("split")) == (4, 4, 4)
    assert len(card.layouts(shaped(4), answering, SEVERAL)) == 3
    assert len(card.layouts(shaped(3), answering, SEVERAL)) == 2  # fewer layers than GPUs
    assert len(card.layouts(shaped(32), gguf, SEVERAL)) == 2


def test_a_row_with_its_longest_sequence() -> None:
    """Of answers what is generated comes on top, and a row that fits is as long as its own job."""
    answering, training = card.USES[0], card.USES[5]
    job = Job(task="inference", seq=1000, new_tokens=24)

    def longest(use: Use, job: Job, fits: bool, most: int, other: int) -> int:
        one = Row(use=use, job=job, fits=fits, most=most)
        return card.with_longest(one, Row(use=use, longest=other)).longest

    assert longest(answering, job, True, 3, 2048) == 2072
    assert longest(answering, job, True, 3, 768) == 1024
    assert longest(answering, job, False, 0, 768) == 792
    assert longest(answering, job, False, 0, 0) == 0
    assert longest(answering, job, False, 1, 0) == 24
    assert longest(training, Job(seq=1000), True, 3, 768) == 768
    refused, found = Row(use=answering, refused="no"), Row(use=answering, longest=5)
    assert card.with_longest(refused, found) == refused
    assert card.with_longest(found, refused) == refused


def serving(base: int, each: float, room: int, part: bool = True) -> Any:
    """With an engine whose memory is a line: a constant, and bytes for each token of context."""

    def serve(
        model: Any, quant: str, cluster: Cluster, context: int, *, whole: bool = True
    ) -> Served | None:
        if not whole:
            return Served(device=7, host=9, fits=part)
        device = base + int(each * context)
        return replace(Served(device=device, host=0, fits=device <= room))

    return serve


@pytest.mark.parametrize("users", [1, 2, 7, 100])
@pytest.mark.parametrize("more", [0, 4095])
def test_a_served_row_goes_as_far_as_its_line(users: int, more: int) -> None:
    """Contexts of 4,096 tokens at 1,000 bytes a token: what is left of the GPU holds so many."""
    gguf = next(use for use in card.USES if use.gguf)
    room = usable(T4)
    base = room - 1000 * (4096 * users + more)
    found = card.served_row(
        shaped(positions=10**6), gguf, Cluster(gpu=T4), serving(base, 1000, room)
    )
    assert (found.fits, found.most) == (True, users)
    assert found.longest == (4096 * users + more) // 256 * 256
    assert found.device == base + 4096 * 1000
    short = card.served_row(
        shaped(positions=4096), gguf, Cluster(gpu=T4), serving(base, 1000, room)
    )
    assert (short.longest, short.most) == (4096, users)


def test_a_served_row_without_a_cache_or_without_room() -> None:
    gguf, room = next(use for use in card.USES if use.gguf), usable(T4)
    on = Cluster(gpu=T4)
    found = card.served_row(shaped(positions=9000), gguf, on, serving(1, 0, room))
    assert (found.longest, found.most) == (9000, 4096)  # no more users are looked for
    partly = card.served_row(shaped(), gguf, on, serving(room, 1, room))
    assert (partly.fits, partly.device, partly.in_cpu_memory) == (False, 7, 9)
    nowhere = card.served_row(shaped(), gguf, on, serving(room, 1, room, part=False))
    assert (nowhere.fits, nowhere.device, nowhere.in_cpu_memory) == (False, room + 4096, 0)
    unknown = card.served_row(shaped(), gguf, on, lambda *_, **__: None)
    assert "no graph" in unknown.refused


def test_progress_is_told_before_each_search() -> None:
    told: list[tuple[int, int, str]] = []
    asking = Asking(job_of=None, serve=None, progress=lambda *words: told.append(words))
    assert asking.all(lambda one: 2 * one, [5, 6, 7], str) == [10, 12, 14]
    assert told == [(0, 3, "5"), (1, 3, "6"), (2, 3, "7")]


def test_hardware_that_fits_is_estimated_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks bytes by a bound, or is refused, is not walked."""
    asked = Setting(Job(), ONE)
    holds: Any = SimpleNamespace(model=None)
    for short, verdict, said in (
        (None, "fits", False),
        (1, "fits", False),
        (0, "fits", True),
        (-1, "fits", True),
        (0, "tight", False),
    ):
        answer = SimpleNamespace(verdict=verdict)
        monkeypatch.setattr(advice, "quick_shortfall", lambda *_, short=short: short)
        monkeypatch.setattr(advice, "estimate", lambda *_, answer=answer: answer)
        found = advice.fitting(holds, asked, Cluster(gpu=T4))
        assert (found is answer) is said


# ------------------------------------------------------------------------- advice
def names(job: Job, **wanted: Any) -> list[str]:
    return [
        one.name
        for one in advice.changes(job)
        if all(getattr(one, key) == value for key, value in wanted.items())
    ]


def test_the_changes_of_a_job() -> None:
    job = Job(
        method="full",
        precision="autocast-bf16",
        framework="transformers",
        batch=8,
        accumulate=3,
        seq=2048,
        optimizer="adamw",
        packing=False,
    )
    assert names(job, kind="same", pain=0) == ["--alloc-conf expandable_segments:True"]
    assert names(job, kind="same", pain=1) == [
        "--loss liger",
        "--liger",
        "--optimizer adamw_fused",
        "--packing",
    ]
    assert names(job, kind="same", pain=2) == [
        "--checkpointing full",
        "--batch 4 --accumulate 6",
        "--batch 2 --accumulate 12",
        "--batch 1 --accumulate 24",
    ]
    assert names(job, kind="same", pain=3) == [
        "--optimizer adamw_8bit",
        "--precision bf16-autocast",
    ]
    assert names(job, kind="method") == ["--method lora", "--method qlora"]
    assert names(job, kind="shorter") == ["--seq 1024", "--seq 512"]
    methods = [one.changes for one in advice.changes(job) if one.kind == "method"]
    assert all(one["precision"] == "bf16-autocast" for one in methods)
    assert {one.kind for one in advice.changes(job)} <= set(advice.KINDS)


def test_changes_that_a_job_has_already_are_none() -> None:
    plain = Job(framework="transformers", method="full", precision="bf16", packing=False)
    for option, name in (
        ({"alloc_conf": "max_split_size_mb:64"}, "--alloc-conf expandable_segments:True"),
        ({"checkpointing": "full"}, "--checkpointing full"),
        ({"loss": "liger"}, "--loss liger"),
        ({"liger": True}, "--liger"),
        ({"packing": True}, "--packing"),
        ({"optimizer": "adamw_fused"}, "--optimizer adamw_fused"),
    ):
        assert name in names(plain)
        assert name not in names(plain.replace(**option))
    assert names(plain.replace(batch=6), pain=2)[-2:] != []
    assert [name for name in names(plain.replace(batch=6)) if "batch" in name] == [
        "--batch 3 --accumulate 2"
    ]
    assert not [name for name in names(plain.replace(batch=5)) if "batch" in name]
    assert names(plain.replace(method="lora"), kind="method") == ["--method qlora"]
    assert names(plain.replace(method="qlora"), kind="method") == []
    assert names(plain.replace(precision="fp32"), pain=3)[-1] == "--precision bf16"
    for seq, shorter in ((1023, []), (1024, ["--seq 512"]), (4096, ["--seq 2048", "--seq 1024"])):
        assert names(plain.replace(seq=seq), kind="shorter")[:2] == shorter


@pytest.mark.parametrize("task", ["finetune", "inference"])
@pytest.mark.parametrize("precision", ["fp32", "autocast-fp16", "bf16"])
def test_a_change_is_what_its_name_says(task: str, precision: str) -> None:
    """Its options as they are written in a command."""
    job = Job(task=task, method="full", precision=precision, batch=8, packing=False)
    for one in advice.changes(job):
        if one.strategy is not None:
            continue
        words = []
        for key, value in one.changes.items():
            if key == "precision" and one.kind == "method":
                continue  # as the method needs it
            assert value is not False
            flag = f"--{key.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {value}")
        assert " ".join(words) == one.name


def test_the_changes_of_an_answer() -> None:
    job = Job(task="inference", batch=4, seq=100, new_tokens=9, precision="fp32")
    assert names(job, kind="method") == ["--quant int8", "--quant nf4"]
    assert names(job, kind="smaller") == ["--batch 2", "--batch 1"]
    assert names(job, pain=3) == ["--precision bf16"]
    assert names(job.replace(quant="nf4"), kind="method") == []
    assert names(job.replace(precision="bf16"), pain=3) == []
    assert names(job.replace(batch=5), kind="smaller") == ["--batch 2", "--batch 1"]


def test_ladders_are_in_order_of_what_they_cost() -> None:
    pool = [
        Change(name="a", pain=3, changes={"x": 1}),
        Change(name="b", pain=0, changes={"y": 1}),
        Change(name="c", pain=1, changes={"y": 2, "z": 1}),
        Change(name="d", pain=2, changes={"batch": 2}),
        Change(name="e", pain=2, changes={"batch": 4}),
    ]

    def said(length: int) -> list[str]:
        return ["".join(one.name for one in some) for some in advice.ladders(pool, length)]

    assert said(1) == ["b", "c", "e", "d", "a"]  # the larger batch first
    assert said(2) == ["be", "bd", "ce", "cd", "ab", "ac", "ae", "ad"]  # none about y twice
    assert said(3) == ["abe", "abd", "ace", "acd"]
    job = Job(batch=8)
    climbed = advice.climbed(Setting(job, ONE), (Change(name="x", changes={"batch": 2}),))
    assert climbed == Setting(job.replace(batch=2), ONE)
    layout = Strategy(fsdp=FSDP(size=2))
    some = (Change(name="x", strategy=ONE), Change(name="y", strategy=layout))
    assert advice.climbed(Setting(job, ONE), some) == Setting(job, layout)
    assert [one.about for one in (*some, pool[2])] == [("use",), ("use",), ("y", "z")]


class Adding:
    """What each change frees, by its option."""

    def __init__(self, frees: dict[str, int], wanted: int) -> None:
        self.frees, self.wanted = frees, wanted
        self.asked = 0

    def freed(self, setting: Setting) -> int:
        return sum(size for name, size in self.frees.items() if getattr(setting.job, name) == 7)

    def answers(self, setting: Setting) -> bool:
        return True

    def fits(self, setting: Setting) -> bool:
        self.asked += 1
        return self.freed(setting) >= self.wanted


@pytest.mark.parametrize("wanted", [1, 5, 6, 8, 9, 11, 13, 14, 16, 20])
@pytest.mark.parametrize(
    "frees",
    [
        {"batch": 8, "seq": 5, "accumulate": 3, "rank": 1},
        {"batch": 4, "seq": 4, "accumulate": 4, "rank": 4},
        {"batch": 9, "seq": 6, "accumulate": -1, "rank": 5},
    ],
)
def test_the_shortest_ladder_that_fits(frees: dict[str, int], wanted: int) -> None:
    """As trying all of them finds it, up to three changes, and of those the least painful."""
    weighed = Adding(frees, wanted)
    pool = [
        Change(name=name, pain=pain, changes={name: 7})
        for name, pain in zip(frees, (2, 1, 0, 2), strict=True)
    ]
    start = Setting(Job(batch=2, seq=2, accumulate=2, rank=2), ONE)
    found = advice.shortest(weighed, start, (), pool)
    every = [
        some
        for length in (1, 2, 3)
        for some in combinations(pool, length)
        if sum(frees[one.name] for one in some) >= wanted
    ]
    assert (found is None) == (not every)
    if found is not None:
        assert sum(frees[one.name] for one in found) >= wanted
        assert len(found) == min(map(len, every))
        cost = [max(one.pain for one in some) for some in every if len(some) == len(found)]
        assert max(one.pain for one in found) == min(cost)


def test_every_bit_is_kept_where_that_may_fit() -> None:
    start = Setting(Job(batch=2, seq=2, accumulate=2), ONE)
    pool = [
        Change(name="fewer bits", pain=3, changes={"batch": 7}),
        Change(name="one", pain=2, changes={"seq": 7}),
        Change(name="two", pain=2, changes={"accumulate": 7}),
    ]
    frees = {"batch": 9, "seq": 5, "accumulate": 5}

    def found(wanted: int, head: Change | None = None) -> list[str] | None:
        some = advice.least(Adding(frees, wanted), start, head, pool)
        return None if some is None else [one.name for one in some]

    assert found(5) == ["one"]
    assert found(9) == ["one", "two"]
    assert found(11) == ["fewer bits", "one"]
    assert found(19) == ["fewer bits", "one", "two"]
    assert found(20) is None
    head = Change(name="head", kind="method", changes={"seq": 7})  # about what `one` is about
    assert found(5, head) == ["head"]
    assert found(10, head) == ["head", "two"]
    assert found(19, head) == ["head", "fewer bits", "two"]


@pytest.mark.parametrize("name", ["t4", "a100-sxm-80gb", apple_gpus()[0].id, "b200"])
def test_larger_gpus_come_by_their_price(name: str) -> None:
    gpu = find_gpu(name)
    found = advice.larger(gpu)
    assert all(usable(one) > usable(gpu) for one in found)
    macs = [one for one in found if one.vendor == "apple"]
    assert bool(macs) == (gpu.vendor == "apple")
    assert found[: len(macs)] == macs
    others = found[len(macs) :]
    costs = [None if (one := price(some)) is None else one.dollars for some in others]
    priced = [one for one in costs if one is not None]
    assert priced == sorted(priced)
    assert costs[: len(priced)] == priced  # those without a price behind
    rest = others[len(priced) :]
    assert [usable(one) for one in rest] == sorted(map(usable, rest))
    if gpu.vendor != "apple":
        assert {one.id for one in found} == {
            one.id
            for one in all_gpus()
            if one.vendor == "nvidia" and usable(one) > usable(gpu) and one in others
        }


def test_a_bound_is_what_a_job_lacks_at_the_least() -> None:
    """The room for live tensors: less the context, and less by what published runs went above."""
    on = Cluster(gpu=T4)
    room = (usable(T4) - advice.context(T4).low) / spread().high

    class Held:
        def least(self, job: Job, strategy: Strategy, shape: tuple[int, int]) -> int:
            if job.batch == 9:
                raise InputError.one("refused", where="job")
            return GIB * job.batch * job.accumulate if shape == (job.batch, job.accumulate) else 0

    assert advice.bound_shortfall(Held(), Setting(Job(batch=9), ONE), on) is None
    found = advice.bound_shortfall(Held(), Setting(Job(batch=8, accumulate=4), ONE), on)
    assert found == 32 * GIB - int(room)
    # where the bound decides nothing else is looked at
    for batch, said in ((9, None), (8, found)):
        asked = Setting(Job(batch=batch, accumulate=4), ONE)
        assert advice.quick_shortfall(Held(), asked, on) == said
