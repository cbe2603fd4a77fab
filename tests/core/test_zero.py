"""DeepSpeed's ZeRO by formulas: what a rank holds between steps, what its buckets cost, and what is
refused. Real DeepSpeed is in tests/torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.job import Job
from memfit.lower import distinct, lower, programmed
from memfit.lower.host import offload
from memfit.lower.walk_cache import remembering
from memfit.model.families import build
from memfit.model.model import Model
from memfit.parallel.zero.partitions import heaviest, shares
from memfit.parallel.zero.zeropp import groups
from memfit.simulate.memory import memory
from memfit.strategy import FSDP, Strategy, ZeRO
from memfit.tape import Alloc, Comm, Event, Free, Mark, Tape, check
from memfit.uses import strategy_from
from memfit.words.gpus import cluster_of

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 4000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
W = 8
STEPS = 3  # of stage 3's tape


@pytest.fixture(scope="module")
def model() -> Model:
    return build(CONFIG)


def run(model: Model, zero: ZeRO, rank: int = 0, **options: Any) -> Tape:
    tape = lower(model, Job(**{"seq": 32, **options}), Strategy(zero=zero, rank=rank))
    check(tape)
    return tape


def held(tape: Tape, *parts: str) -> dict[str, int]:
    """The most that blocks of these parts hold in each phase of the last step."""
    live, phase = 0, ""
    sizes: dict[int, int] = {}
    most: dict[str, int] = {}
    for event in tape:
        if isinstance(event, Alloc) and event.part in parts:
            sizes[event.id] = event.size
            live += event.size
        elif isinstance(event, Free):
            live -= sizes.get(event.id, 0)
        elif isinstance(event, Mark):
            phase = f"{event.phase} {event.step}"
            most.setdefault(phase, live)
        most[phase] = max(most.get(phase, 0), live)
    return most


@pytest.mark.parametrize("stage", [1, 2])
def test_between_steps_a_rank_holds_the_weights_and_its_part_of_the_rest(
    model: Model, stage: int
) -> None:
    found = memory(run(model, ZeRO(size=W, stage=stage, reduce_bucket=10**6)))
    part = model.parameters / W
    assert found.parts["weights"] == pytest.approx(2 * model.parameters, rel=1e-4)
    assert found.parts["master"] == pytest.approx(4 * part, rel=1e-4)
    assert found.parts["optimizer"] == pytest.approx(8 * part, rel=1e-4)


def test_the_second_stage_keeps_no_gradient_but_its_own(model: Model) -> None:
    first, second = (
        held(run(model, ZeRO(size=W, stage=stage, reduce_bucket=10**5)), "gradients")["backward 1"]
        for stage in (1, 2)
    )
    assert first >= 2 * model.parameters
    assert second < model.parameters


@pytest.mark.parametrize(
    ("settings", "buffers"), [({}, 1), ({"overlap": True}, 2), ({"contiguous": False}, 0)]
)
def test_buckets(model: Model, settings: dict[str, Any], buffers: int) -> None:
    tape = run(model, ZeRO(size=W, reduce_bucket=3 * 10**6, **settings))
    made = [event.size for event in tape if isinstance(event, Alloc) and event.op == "bucket"]
    assert made == [2 * 3 * 10**6] * buffers * 2  # steps


def test_a_bucket_of_the_library_itself_is_a_gigabyte(model: Model) -> None:
    assert held(run(model, ZeRO(size=W)), "communication")["backward 1"] >= 10**9
    assert held(run(model, ZeRO(size=W, auto=True)), "communication")["backward 1"] < 10**6


def test_partitions_cover_the_model_once(model: Model) -> None:
    """Every rank's own gradients are whole parameters, so that together they are more than the
    model; each value is some rank's."""
    own = [
        max(
            event.size
            for event in run(model, ZeRO(size=W, reduce_bucket=10**6), rank=rank)
            if isinstance(event, Alloc) and event.op == "partition"
        )
        for rank in range(W)
    ]
    assert sum(own) >= 2 * model.parameters
    assert all(one >= 2 * model.parameters // W - 256 * W for one in own)


def test_a_second_micro_batch_has_a_buffer_of_its_own(model: Model) -> None:
    zero = ZeRO(size=W, reduce_bucket=10**5)
    once, twice = (
        held(run(model, zero, accumulate=times), "gradients")["backward 1"] for times in (1, 2)
    )
    own = next(
        event.size
        for event in run(model, zero)
        if isinstance(event, Alloc) and event.op == "partition"
    )
    assert twice - once == pytest.approx(own, rel=0.25)


def test_sixteen_bit_training_is_the_same_however_it_is_said(model: Model) -> None:
    said = ("bf16", "bf16-master", "autocast-bf16", "bf16-autocast")
    sizes = {
        memory(run(model, ZeRO(size=W, reduce_bucket=10**6), precision=one)).allocated
        for one in said
    }
    assert len(sizes) == 1


def test_adapters_take_the_numbers_of_the_training(model: Model) -> None:
    tape = run(model, ZeRO(size=W, reduce_bucket=10**5), method="lora")
    flat = [event.size for event in tape if isinstance(event, Alloc) and event.op == "flat"]
    count = 8 * 16 * (4 * 2 * 256 + 3 * (256 + 512))
    assert flat == [2 * count]


def test_the_trainer_makes_two_groups(model: Model) -> None:
    flat = [
        event.size
        for event in run(model, ZeRO(size=W, reduce_bucket=10**6))
        if isinstance(event, Alloc) and event.op == "flat"
    ]
    assert flat[1] == 2 * 256 * (2 * 8 + 1)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        (f"zero={W}", {"framework": "torchtune"}, "not supported yet: ZeRO under torchtune"),
        (
            f"zero={W}",
            {"optimizer": "lomo"},
            "`lomo` steps during the backward pass, but ZeRO steps after",
        ),
        (f"zero={W}", {"task": "inference"}, "inference with ZeRO"),
        (f"zero={W} tp=2", {}, "beside `tp`"),
        (f"zero={W},stage=2,hpz=2", {}, "that stage 3 gathers"),
        (f"zero={W},stage=3,hpz=3", {}, "groups of 3 do not divide"),
        (f"zero={W},stage=3,qwz,offload-param=cpu", {}, "beside offloaded weights"),
        (f"zero={W},stage=3,qgz", {}, "not supported: 4-bit gradients, whose kernels"),
    ],
)
def test_what_has_no_formula_is_said(
    model: Model, use: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        lower(model, Job(**{"seq": 32, **options}), strategy_from(use.split(), None))
    assert message in str(refused.value)


def test_more_ranks_hold_less(model: Model) -> None:
    sizes = [
        memory(run(model, ZeRO(size=ranks, reduce_bucket=10**5))).allocated for ranks in (2, 8, 64)
    ]
    assert all(few > many for few, many in itertools.pairwise(sizes))


FEW = {"stage": 3, "reduce_bucket": 10**5, "persistence": 0}


def test_the_third_stage_holds_a_part_of_everything(model: Model) -> None:
    found = held(
        run(model, ZeRO(size=W, prefetch_bucket=0, max_reuse=0, **FEW)),
        "weights",
        "master",
        "optimizer",
    )
    assert found["step 2"] == pytest.approx((2 + 4 + 8) * model.parameters / W, rel=1e-2)


def test_modules_are_gathered_one_by_one_where_nothing_is_asked_for_ahead(model: Model) -> None:
    """The most that is gathered is the largest matrix; the bucket is small."""
    tape = run(model, ZeRO(size=W, prefetch_bucket=0, max_reuse=0, **FEW))
    assert held(tape, "communication")["forward 2"] <= 2 * (4000 * 256 + 10**5) + 2 * W


def test_later_passes_gather_ahead(model: Model) -> None:
    """By default all that a small model has stays from the second pass on; `max_live` bounds it."""
    first, later = (
        held(run(model, ZeRO(size=W, **FEW)), "communication")[f"forward {step}"] for step in (0, 2)
    )
    assert later > first + model.parameters
    few = held(
        run(model, ZeRO(size=W, max_live=10**6, prefetch_bucket=10**5, max_reuse=0, **FEW)),
        "communication",
    )["forward 2"]
    assert first < few < later


def test_small_parameters_stay_gathered(model: Model) -> None:
    kept, given = (
        held(
            run(
                model, ZeRO(size=W, prefetch_bucket=0, max_reuse=0, **{**FEW, "persistence": size})
            ),
            "communication",
        )
        for size in (256, 0)
    )
    assert kept["step 2"] - given["step 2"] == 2 * 256 * (2 * 8 + 1)


def test_pieces_of_a_step(model: Model) -> None:
    whole, pieces = (
        held(run(model, ZeRO(size=W, sub_group=size, **FEW)), "gradients", "temporaries")["step 2"]
        for size in (10**9, 10**5)
    )
    assert pieces < 0.5 * whole


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_on_the_host_are_not_on_the_gpu(model: Model, stage: int) -> None:
    found = memory(
        run(model, ZeRO(size=W, stage=stage, reduce_bucket=10**5, offload_optimizer="cpu"))
    )
    assert not {"master", "optimizer"} & set(found.parts)


def test_the_host_of_an_offload(model: Model) -> None:
    """Eight ranks of a node share what two of four GPUs would have each."""
    few, many = (
        estimate(
            model, Job(seq=32), None, Strategy(zero=ZeRO(size=size, offload_optimizer="cpu"))
        ).host
        for size in (2, 8)
    )
    assert few.size > 18 * model.parameters // 2
    assert 2 * many.size < few.size
    assert "offload" in many.why
    sharded = estimate(
        model, Job(seq=32, precision="fp32"), None, Strategy(fsdp=FSDP(size=2, offload=True))
    ).host
    assert sharded.size >= 16 * model.parameters // 2


def test_offloaded_weights_are_gathered_from_the_host(model: Model) -> None:
    settings = {"prefetch_bucket": 0, "max_reuse": 0, "offload_optimizer": "cpu", **FEW}
    here, away = (
        held(run(model, ZeRO(size=W, offload_param=where, **settings)), "weights")["step 2"]
        for where in ("none", "cpu")
    )
    assert here == pytest.approx(2 * model.parameters / W, rel=1e-2)
    assert away == 0


def test_on_one_gpu(model: Model) -> None:
    """The engine is DeepSpeed's there, too: states may leave, and fp32 copies are kept."""
    job = Job(seq=32)
    plain = memory(lower(model, job, strategy_from((), 1))).parts
    zero = memory(lower(model, job, strategy_from(("zero",), 1))).parts
    away = memory(lower(model, job, strategy_from(("zero,offload-optimizer=cpu",), 1))).parts
    assert "master" in zero
    assert "master" not in plain
    assert not away.get("master")
    assert not away.get("optimizer")
    with pytest.raises(InputError, match="FSDP's offload on one GPU"):
        lower(model, job, strategy_from(("fsdp,offload",), 1))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_written_short_it_is_the_same_tape(model: Model, stage: int) -> None:
    """So that the time is told from the tape that memory was."""
    job, strategy = Job(seq=32), Strategy(zero=ZeRO(size=W, stage=stage, reduce_bucket=10**6))
    assert lower(model, job, strategy, compact=True) == lower(model, job, strategy)


TABLE = {**CONFIG, "vocab_size": 40_000}  # of which several ranks' parts lie within the embedding


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    ("config", "accumulate"), [(CONFIG, 1), (TABLE, 2)], ids=["narrow", "wide"]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stage": 1},
        {"contiguous": False},
        {"offload_optimizer": "cpu"},
        {"round_robin": True},
        {"overlap": True},
    ],
    ids=["2", "1", "scattered", "away", "round robin", "overlapping"],
)
def test_the_worst_rank_is_among_those_told(
    config: dict[str, Any], settings: dict[str, Any], accumulate: int, method: str
) -> None:
    """Each rank's memory by itself, against those that are looked at."""
    ranks = W if method == "full" else 5 * W
    model, job = build(config), Job(seq=16, accumulate=accumulate, method=method)
    zero = ZeRO(size=ranks, reduce_bucket=10**6, **settings)
    with remembering():
        each = [
            memory(
                run(model, zero, rank=rank, seq=16, accumulate=accumulate, method=method)
            ).allocated
            for rank in range(ranks)
        ]
    told = {first for first, _ in distinct(model, job, None, Strategy(zero=zero))}
    assert max(each) == max(each[rank] for rank in told)
    assert len(told) < ranks
    heavy = {first for first, _ in distinct(model, job, None, Strategy(zero=zero), lightest=False)}
    assert heavy <= told
    assert max(each) == max(each[rank] for rank in heavy)


def test_ranks_differ_where_parts_cut_a_table(model: Model) -> None:
    found = estimate(
        build(TABLE), Job(seq=16), strategy=Strategy(zero=ZeRO(size=W, reduce_bucket=10**6))
    )
    worst = max(found.ranks, key=lambda one: one.device)
    assert max(one.allocated for one in found.ranks) > 1.02 * min(
        one.allocated for one in found.ranks
    )
    assert found.strategy.rank == worst.rank


def test_shares_cover_the_ranks_and_the_model() -> None:
    found = shares([[1000, 30, 30, 30], [5, 5]], 4)
    assert [(one.first, one.alike) for one in found] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [one[2:] for one in found] == [(1005, 274), (1010, 274), (1005, 274), (1090, 178)]
    assert [(one.first, one.alike) for one in shares([[1000, 30, 30, 30]], 8)] == [(0, 7), (7, 1)]
    assert {one.first for one in heaviest(found)} == {0, 1, 2, 3}


def test_a_node_holds_the_weights_once_more(model: Model) -> None:
    """hpZ: from the forward on, until the step is over."""
    plain, plus = (
        held(run(model, ZeRO(size=W, stage=3, persistence=0, hpz=hpz)), "weights") for hpz in (1, 4)
    )
    once_more = plus["backward 1"] - plain["backward 1"]
    assert once_more == pytest.approx(2 * model.parameters / 4, rel=1e-3)
    gathers = {
        (event.group, event.ranks)
        for event in run(model, ZeRO(size=W, stage=3, hpz=4))
        if isinstance(event, Comm) and event.op == "all_gather"
    }
    assert gathers == {("zero", W), ("hpz", 4)}
    assert ("hpz", 4, 1) in Strategy(zero=ZeRO(size=W, stage=3, hpz=4)).groups


def running(tape: Tape) -> Iterator[Event]:
    """What happens from the first forward on: before it, weights are gathered whole once, for their
    hooks."""
    return itertools.dropwhile(
        lambda one: not (isinstance(one, Mark) and one.phase == "forward"), tape.events
    )


def test_weights_travel_as_bytes(model: Model) -> None:
    """qwZ: half of what bf16 is, and a scale for each group of values."""
    tapes = [run(model, ZeRO(size=W, stage=3, persistence=0, qwz=qwz)) for qwz in (False, True)]
    plain, bytewise = (
        sum(one.size for one in running(tape) if isinstance(one, Comm) and one.op == "all_gather")
        for tape in tapes
    )
    assert 0.5 * plain < bytewise < 0.51 * plain
    assert not [
        one for one in tapes[0] if isinstance(one, Alloc) and one.op in ("quantize", "dequantize")
    ]


def test_groups_of_values_share_a_scale() -> None:
    assert groups(16_000) == 2
    assert groups(8 * 8000) == 8
    assert (
        groups(4096 * 4096) == 4096
    )  # 2,098 do not divide it: the next that does, of 4,096 values
    with pytest.raises(
        InputError, match="DeepSpeed cannot quantize a shard of 12 values in groups of"
    ):
        groups(12)


def on_host(model: Model, zero: ZeRO) -> int:
    return offload(programmed(model, Job(seq=16), None, Strategy(zero=zero), True))


def test_on_nvme_the_host_holds_buffers_and_the_device_a_bucket_of_wide_gradients() -> None:
    model = build({**CONFIG, "vocab_size": 400_000})
    cpu, nvme = (
        ZeRO(size=2, stage=3, offload_optimizer=where, optimizer_buffers=5)
        for where in ("cpu", "nvme")
    )
    part = model.parameters // 2
    assert on_host(model, nvme) == 2 ** (2 * part - 1).bit_length() + 5 * 4 * (
        -(-part // 256) * 256
    )
    assert on_host(model, cpu) > 12 * part + 2 * part
    few, many = (held(run(model, zero, seq=16), "gradients")["backward 2"] for zero in (cpu, nvme))
    table = 4 * 400_000 * 256 // 2  # one of two: each goes as it comes to the host
    assert table < many - few < 4 * part
    assert (
        estimate(
            model, Job(seq=16), cluster_of("2xh100-sxm", ""), Strategy(zero=nvme), precise=False
        ).time
        is None
    )


def test_weights_on_nvme_leave_so_many_on_the_host(model: Model) -> None:
    cpu = ZeRO(size=2, stage=3, offload_optimizer="cpu", offload_param="cpu")
    nvme = replace(cpu, offload_param="nvme", max_in_cpu=1000, param_buffers=3, param_buffer=1000)
    part = model.parameters // 2
    assert (
        on_host(model, cpu) - on_host(model, nvme)
        == 2 ** (2 * part - 1).bit_length() - 2048 - 3 * 2 * 1024
    )


@pytest.mark.parametrize(("away", "times"), [("none", 0), ("cpu", 2)])
def test_weights_of_one_gpu_come_from_the_host_for_every_pass(
    model: Model, away: str, times: int
) -> None:
    """Nobody gathers them, but they are copied (partition_parameters.py NoGatherCoalescedHandle);
    here nothing waits for its second use."""
    zero = ZeRO(
        size=1,
        stage=3,
        persistence=0,
        max_reuse=0,
        max_live=0,
        prefetch_bucket=0,
        offload_optimizer="cpu",
        offload_param=away,
    )
    copies = [
        one.size
        for one in running(run(model, zero))
        if isinstance(one, Comm) and one.group == "host"
    ]
    assert sum(copies) == pytest.approx(STEPS * times * 2 * model.parameters, rel=0.02)
