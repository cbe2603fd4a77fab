"""The front, what a way gives up, and what a study recommends, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.hardware import find_gpu, parse_cluster, usable
from memfit.job import Job
from memfit.plan import frontier, study, trade_offs
from memfit.plan.planning import Wish
from memfit.plan.study import Cell, Matrix, Panel, Way
from memfit.strategy import DDP, EP, FSDP, ONE, PP, TP, Strategy, ZeRO
from memfit.units import GIB


# ------------------------------------------------------------------------- the front
def way(seconds: float, high: int, money: float | None, hours: float = 1.0) -> Any:
    cost = SimpleNamespace(dollars=money, hours=hours)
    estimate = SimpleNamespace(
        time=SimpleNamespace(seconds=seconds), band=SimpleNamespace(high=high)
    )
    return SimpleNamespace(estimate=estimate, cost=cost)


def test_one_way_beats_another_in_all_three() -> None:
    one = way(1.0, 10, 5.0)
    for other in (way(1.1, 10, 5.0), way(1.0, 11, 5.0), way(1.0, 10, 5.1), way(2.0, 20, 9.0)):
        assert frontier.beats(one, other)
        assert not frontier.beats(other, one)
    for other in (way(1.0, 10, 5.0), way(0.9, 11, 5.0), way(1.1, 9, 5.0), way(1.1, 11, 4.0)):
        assert not frontier.beats(one, other)
    assert frontier.beats(one, way(1.0, 10, None))
    assert frontier.point(way(1.0, 10, None)) == (1.0, 10, float("inf"))


def test_budgets_of_hours_and_money() -> None:
    one = way(1.0, 10, 5.0, hours=2.0)
    for hours, budget, inside in (
        (None, None, True),
        (2.0, 5.0, True),
        (1.9, None, False),
        (None, 4.9, False),
    ):
        assert frontier.within(one, Wish(hours=hours, budget=budget)) is inside
    unpriced = way(1.0, 10, None)
    assert frontier.within(unpriced, Wish()) is True
    assert frontier.within(unpriced, Wish(budget=99.0)) is False


@pytest.mark.parametrize(
    ("gpus", "counts"),
    [
        ("8xh100-sxm", [8, 4, 2, 1]),
        ("6xh100-sxm", [6, 3]),
        ("4x8xh100-sxm", [32, 16, 8, 4]),
        ("h100-sxm", [1]),
        ("3x4xh100-sxm", [12, 3]),
    ],
)
def test_fewer_gpus_are_halves_in_whole_nodes(gpus: str, counts: list[int]) -> None:
    cluster, work = parse_cluster(gpus), SimpleNamespace(strategies=())
    found = list(frontier.smaller(work, cluster))
    assert [one.gpus for one in found] == counts
    assert all(one.gpus_per_node <= cluster.gpus_per_node for one in found)
    named = SimpleNamespace(strategies=(ONE,))
    assert list(frontier.smaller(named, cluster)) == [cluster]


# ------------------------------------------------------------------------- what a way gives up
ADAPTERS = "only adapters are trained"
SHARDED, COPIES = "sharded checkpoints, to be merged for use", "CPU memory, and copies over PCIe"
LAYERS = "checkpoints sharded by layer or matrix"


@pytest.mark.parametrize(
    ("options", "strategy", "said"),
    [
        ({"precision": "autocast-bf16"}, ONE, []),
        ({"method": "lora"}, ONE, [ADAPTERS]),
        ({"method": "qlora"}, ONE, [f"{ADAPTERS}, on 4-bit weights"]),
        ({"precision": "bf16"}, ONE, ["weights are updated in 16 bits"]),
        ({"precision": "fp16"}, ONE, ["weights are updated in 16 bits"]),
        ({"precision": "bf16"}, Strategy(zero=ZeRO(size=2)), ["needs deepspeed"]),
        ({"precision": "bf16", "framework": "megatron"}, ONE, []),
        ({"optimizer": "adamw_8bit"}, ONE, ["8-bit optimizer states"]),
        ({"checkpointing": "full"}, ONE, ["activations are recomputed"]),
        ({"loss": "liger"}, ONE, ["needs liger-kernel"]),
        ({"liger": True}, ONE, ["needs liger-kernel"]),
        ({"attention": "flash-attn-2"}, ONE, ["needs flash-attn"]),
        ({"task": "inference", "cache": "quantized"}, ONE, [trade_offs.GIVES[4][1]]),
        ({"task": "inference", "precision": "bf16"}, ONE, []),
        ({"task": "inference"}, Strategy(tp=TP(size=2)), []),
        ({}, Strategy(zero=ZeRO(size=2, stage=3)), ["needs deepspeed", SHARDED]),
        ({}, Strategy(zero=ZeRO(size=1, stage=2)), []),
        ({}, Strategy(fsdp=FSDP(size=2)), [SHARDED]),
        ({}, Strategy(fsdp=FSDP(size=1)), []),
        ({}, Strategy(fsdp=FSDP(size=2, offload=True)), [SHARDED, COPIES]),
        ({}, Strategy(tp=TP(size=2)), [LAYERS]),
        ({}, Strategy(pp=PP(size=2)), [LAYERS]),
        ({}, Strategy(ep=EP(size=2)), [LAYERS]),
        ({}, Strategy(ddp=DDP(size=8)), []),
    ],
)
def test_what_a_way_gives_up(options: dict[str, Any], strategy: Strategy, said: list[str]) -> None:
    job = Job(**{"method": "full", "precision": "autocast-bf16", **options})
    assert list(trade_offs.gives_up(job, strategy)) == said


# ------------------------------------------------------------------------- studies
def panel(
    *cells: Cell, gpus: str = "a100-sxm-80gb", parameters: int = 10**9, seq: int = 64
) -> Panel:
    return Panel(
        model="m",
        parameters=parameters,
        cluster=parse_cluster(gpus),
        seq=seq,
        batch=1,
        cells=cells,
    )


def ran(layout: str, seconds: float | None, device: int, verdict: str = "fits", **way: str) -> Cell:
    named = {"method": "full", "checkpointing": "none", "attention": "sdpa", **way}
    return Cell(
        way=Way(layout=layout, **named), verdict=verdict, device=device * GIB, seconds=seconds
    )


@pytest.mark.parametrize(
    ("title", "inside", "outside"),
    [
        ("several GPUs", {"gpus": "2xt4"}, {"gpus": "t4"}),
        ("one GPU", {"gpus": "t4"}, {"gpus": "2xt4"}),
        ("a few GPUs", {"gpus": "8xh100-sxm"}, {"gpus": "2x8xh100-sxm"}),
        ("a few GPUs", {"gpus": "2xt4"}, {"gpus": "t4"}),
        ("many GPUs", {"gpus": "2x8xh100-sxm"}, {"gpus": "8xh100-sxm"}),
        ("long context (", {"seq": 4096}, {"seq": 4095}),
        (
            "long context on GPUs without",
            {"seq": 4096, "gpus": "v100-sxm2-32gb"},
            {"seq": 4096, "gpus": "a100-sxm-80gb"},
        ),
        ("tens of billions", {"parameters": 10**10}, {"parameters": 10**10 - 1}),
        ("tens of billions", {"parameters": 10**11 - 1}, {"parameters": 10**11}),
        ("hundreds of billions", {"parameters": 10**11}, {"parameters": 10**11 - 1}),
        (
            "little memory",
            {"parameters": usable(find_gpu("t4")) // 4 + 1, "gpus": "t4"},
            {"parameters": usable(find_gpu("t4")) // 4, "gpus": "t4"},
        ),
    ],
)
def test_situations(title: str, inside: dict[str, Any], outside: dict[str, Any]) -> None:
    belongs = next(one for name, one in study.SITUATIONS.items() if name.startswith(title))
    assert belongs(panel(**inside))
    assert not belongs(panel(**outside))


def test_flash_attention_begins_with_ampere() -> None:
    assert [panel(gpus=one).flash for one in ("t4", "a100-sxm-80gb", "h100-sxm")] == [
        False,
        True,
        True,
    ]


def chosen(*cells: Cell, others: tuple[Panel, ...] = (), method: str = "") -> Any:
    return study.default("s", [panel(*cells, gpus="4xa100-sxm-80gb"), *others], method)


def test_the_quickest_of_those_that_fit_most_often() -> None:
    quick, small, large = ran("DDP", 1.0, 40), ran("ZeRO-2", 1.019, 20), ran("ZeRO-3", 1.03, 10)
    found = chosen(quick, small, large)
    assert found.way.layout == "ZeRO-2"  # the smaller of those within 2 %
    assert (found.fits, found.cases) == (1, 1)
    assert found.slower == pytest.approx(0.019)
    room = usable(find_gpu("a100-sxm-80gb"))
    assert found.memory == pytest.approx(20 * GIB / room)
    assert chosen(quick, ran("ZeRO-2", 1.021, 20)).way.layout == "DDP"
    assert chosen(ran("DDP", 1.0, 40, "tight"), large).way.layout == "ZeRO-3"
    assert chosen(ran("DDP", 1.0, 40, "no")).way is None
    assert chosen(ran("DDP", None, 40), large).way.layout == "ZeRO-3"  # whose time is known
    assert chosen(ran("DDP", None, 40), ran("ZeRO-1", None, 30)).way.layout == "ZeRO-1"
    more = panel(ran("ZeRO-3", 9.0, 10), gpus="4xa100-sxm-80gb", seq=65)
    assert chosen(quick, ran("ZeRO-3", 9.0, 10), others=(more,)).way.layout == "ZeRO-3"


def test_offload_is_for_what_fits_in_no_other_way() -> None:
    away = ran("ZeRO-3 + offload", 1.0, 5)
    assert chosen(ran("DDP", 9.0, 70), away).way.layout == "DDP"
    assert chosen(ran("DDP", 9.0, 70, "no"), away).way.layout == "ZeRO-3 + offload"


def test_slower_than_the_quickest_with_the_same_method() -> None:
    lora, full = ran("DDP", 1.0, 9, method="lora"), ran("DDP", 4.0, 9)
    assert chosen(lora, full, ran("ZeRO-2", 5.0, 9), method="full").slower == 0
    both = [
        panel(full, ran("ZeRO-2", 8.0, 9), lora, gpus="4xa100-sxm-80gb"),
        panel(full, ran("ZeRO-2", 2.0, 9), lora, gpus="4xa100-sxm-80gb", seq=65),
    ]
    way = study.fused(ran("ZeRO-2", 1.0, 9).way)
    # twice as long, and as long as the quickest: by the geometric mean
    assert study.scored(way, both, "full").slower == pytest.approx(2**0.5 - 1)
    assert study.scored(way, both, "").slower == pytest.approx((8 * 2) ** 0.5 - 1)
    assert study.scored(way, both, "full").fits == 2
    unknown = panel(ran("ZeRO-2", None, 9), gpus="4xa100-sxm-80gb", seq=66)
    for places in ([*both, unknown], [unknown, *both]):
        found = study.scored(way, places, "full")
        assert (found.fits, found.slower) == (3, None)
    eager = Way(method="full", checkpointing="none", attention="eager", layout="DDP")
    assert study.fused(eager) == eager
    assert study.fused(full.way).attention == "fused"


def test_a_way_without_offload_is_compared_with_those_without() -> None:
    away, here = ran("ZeRO-3 + offload", 1.0, 9), ran("DDP", 2.0, 9)
    places = [panel(away, here, ran("ZeRO-1", 4.0, 9), gpus="4xa100-sxm-80gb")]

    def slower(cell: Cell) -> float | None:
        return study.scored(study.fused(cell.way), places, "").slower

    assert (slower(here), slower(away)) == (0, 0)
    assert slower(places[0].cells[2]) == pytest.approx(1.0)
    late = [panel(ran("ZeRO-3 + offload", 6.0, 9), here, gpus="4xa100-sxm-80gb")]
    found = study.scored(study.fused(away.way), late, "").slower
    assert found == pytest.approx(2.0)  # beside all


def test_a_situation_with_the_same_cases_is_told_once() -> None:
    few = [panel(ran("DDP", 1.0, 9), gpus="4xa100-sxm-80gb")]
    assert [(one.situation, one.method) for one in study.defaults(few, ["full"])] == [
        ("several GPUs", "full")
    ]
    found = [(one.situation, one.method) for one in study.defaults(few, ["full", "lora"])]
    assert found == [("several GPUs", method) for method in ("", "full", "lora")]
    mixed = [*few, panel(ran("one GPU", 1.0, 9), seq=65)]
    assert [one.situation for one in study.defaults(mixed, ["full"])] == ["several GPUs", "one GPU"]
    assert list(study.defaults([], ["full"])) == []


def test_ways_of_a_matrix() -> None:
    alone, several = parse_cluster("t4"), parse_cluster("4xt4")
    every = Matrix(models=[], clusters=[], lengths=[])
    assert len(list(every.ways(alone))) == 3 * 2 * 2 * 3
    assert len(list(every.ways(several))) == 3 * 2 * 2 * 6
    named = Matrix(models=[], clusters=[], lengths=[], layouts=["DDP", "fsdp=4"], methods=["full"])
    assert {way.layout for way in named.ways(several)} == {"DDP", "fsdp=4"}
    assert {way.layout for way in named.ways(alone)} == {"fsdp=4"}
    way = next(iter(named.ways(several)))
    job = named.job(way, several, 77)
    assert (job.seq, job.method, job.precision) == (77, "full", "autocast-fp16")
    assert study.numbers("lora", parse_cluster("a100-sxm-80gb")) == "bf16-autocast"
    given = replace(named, precision="fp32", base=Job(framework="trl"))
    assert (given.job(way, several, 7).precision, given.job(way, several, 7).prepare_kbit) == (
        "fp32",
        True,
    )
    assert named.job(way, several, 7).prepare_kbit is False
    assert study.strategy(way, several) == Strategy(ddp=DDP(size=4))
