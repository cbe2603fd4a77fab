"""Plans: the search answers as trying every candidate would, its bounds are bounds, and what cannot
be is said with what can."""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date

import pytest

from memfit.api.plan import gpus_of
from memfit.api.plan import plan as ask
from memfit.api.verbs import estimate as again_of
from memfit.cli import main
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.hardware import find_gpu, find_link, parse_cluster
from memfit.hardware.prices import price, priced
from memfit.job import Job
from memfit.plan.bounds import Bounds, alike, closest, under_way
from memfit.plan.ledger import Kind, Node
from memfit.plan.market import machines
from memfit.plan.memory_lower_bounds import Walked
from memfit.plan.planning import Checked, Wish, first, judged, once, plan, until
from memfit.plan.search import Search
from memfit.plan.space import AXES, Space, Work, label, least, turned
from memfit.report.figures import gib
from memfit.report.plan import data, job_file, markdown, text
from memfit.strategy import ONE
from memfit.truth.models import built
from memfit.uses import strategy_from

SMALL = {
    "method": ("full", "lora"),
    "precision": ("bf16", "autocast-bf16"),
    "optimizer": ("adamw_fused", "adamw_8bit"),
    "checkpointing": ("none", "full"),
    "loss": ("plain", "liger"),
    "liger": (False,),
    "attention": ("sdpa",),
    "framework": ("transformers",),
}
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
        (
            "2xrtx-3060-12gb",
            LEAN,
            ["ddp", "ddp,bucket-view", "fsdp", "fsdp,reshard=no", "fsdp,version=1"],
        ),
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
    # the last bits of a sum are those of the order in which layers are walked
    assert [one.seconds for one in found.taken] == pytest.approx(sorted(known.values()), rel=1e-12)
    assert found.counted.estimated < space.size
    assert known


def test_a_plan_leaves_no_walk_to_the_cycle_collector():
    """It took a fifth of a plan's time to find that they can go."""

    def walks():
        return sum(type(one) is Walked for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = walks()
        found = once(
            work(8, SMALL, "openai-community/gpt2", strategies=(ONE,)),
            parse_cluster("1xl4"),
            Wish(each=1),
        )
        assert found.counted.walked
        assert walks() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("framework", ["transformers", "torchtitan", "megatron"])
def test_what_a_layout_lacks_it_lacks_with_fewer_replicas_and_shards(framework):
    """So a space asks the techniques once for all of those sizes."""
    own = (
        {"framework": (framework,)}
        if framework == "transformers"
        else {"framework": (framework,), "method": ("full",)}
    )
    space = Space(work(16, {**AXES, **own}), parse_cluster("2x8xh100-sxm"))
    layouts = [one for one in dict.fromkeys(space.layouts()) if least(one) != one]
    some = random.Random(11).sample(layouts, min(80, len(layouts)))
    assert some
    lacking = [space.lacking(one) for one in some]
    assert lacking == [space.lacking(least(one)) for one in some]
    assert None in lacking
    assert any(lacking) or framework == "megatron"  # whose every setting goes with every other


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_the_search_finds_what_trying_all_finds_in_spaces_made_by_chance(seed):
    """Some values of each option, some of the layouts, on a GPU that is too small for a part of
    them."""
    chosen = random.Random(seed)
    axes = {
        name: tuple(sorted(chosen.sample(tried, min(len(tried), chosen.choice((1, 1, 2))))))
        for name, tried in SMALL.items()
    }
    cluster = parse_cluster(chosen.choice(("2xrtx-3060-12gb", "4xl4", "2xa100-sxm-40gb")))
    asked = work(
        8, axes, chosen.choice(("openai-community/gpt2", MODEL)), chosen.choice((256, 512, 1000))
    )
    one = chosen.sample(Space(asked, cluster).strategies, 6)
    space = Space(replace(asked, strategies=tuple(one)), cluster)
    known = exhaustive(space)
    found = Search(space=space, bounds=Bounds(space.work.model, space.cluster), each=100)
    found.run()
    assert {one.kind: one.seconds for one in found.taken} == pytest.approx(known)


@pytest.mark.parametrize(
    ("model", "gpus", "seed"),
    [
        (MODEL, "8xh100-sxm", 1),
        ("openai-community/gpt2", "2x2xl40s", 2),
        (MODEL, "2x8xh100-sxm", 3),
    ],
)
def test_bounds_are_bounds(model, gpus, seed):
    """Neither bytes nor seconds of any candidate are below what was said that they are not."""
    asked = work(32, AXES, model)
    if seed == 3:
        own = {
            **AXES,
            "framework": ("megatron",),
            "method": ("full",),
            "optimizer": ("adam_fused", "adam"),
        }
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
            found = estimate(
                space.work.model, job, space.cluster, turned(strategy, times), precise=False
            )
        except InputError:
            continue
        seen += 1
        like = alike(kernels, strategy)
        walked = None if like is None else bounds.walked(like, batch)
        assert (
            bounds.holds.least(
                job, strategy, (batch, times), None if walked is None else walked.room
            )
            <= found.memory.allocated
        )
        if like is not None and walked is not None and strategy.size("pp") > 1:
            staying = bounds.staying(like, strategy, (batch, times), walked)
            again = times * strategy.pp.virtual > under_way(strategy.pp, times)
            assert (
                bounds.holds.ends(job, strategy, (batch, times), staying, again=again)
                <= found.memory.allocated
            )
        if found.time is None:
            continue
        assert found.time.tokens == space.work.tokens
        passes = 0.0 if walked is None else times * walked.seconds
        known = search.likes(kernels).get(like) if like is not None else None
        floor = search.floor(kernels, like) if known else 0.0
        passes += 0.0 if like is None else times * batch * bounds.splitting(like, batch)
        calling = bounds.calling(kernels, strategy, times)
        share = 1.0 if walked is None else bounds.staged(like, strategy, (batch, times), walked)
        least = max(
            max(floor, share * passes) + search.ledger.taken_share * calling, calling
        ) + bounds.stepping(job, strategy)
        assert least <= found.time.seconds * (1 + 1e-9)


def test_what_is_kept_on_the_gpu_counts_and_what_is_on_the_host_does_not():
    """ZeRO-3 with only its weights on the host keeps copies and states on the GPU."""
    holds, job = (
        Bounds(built(MODEL), parse_cluster("4xh100-sxm")).holds,
        Job(method="full", precision="bf16", optimizer="adamw_fused"),
    )
    values = built(MODEL).parameters

    def kept(use):
        return holds.kept(job, strategy_from(use.split(), 4))

    assert (
        kept("zero=4,stage=3,offload-param=cpu").always
        == kept("zero=4,stage=3,offload-param=cpu").states
        == 12 * values // 4
    )
    assert kept("zero=4,stage=3,offload-param=cpu,offload-optimizer=cpu").always == 0
    assert kept("gemini=4").always == 0
    assert kept("fsdp=2 pp=2").waiting == 2 * kept("fsdp=2 pp=2").gradients


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        ("full", "bf16"),
        ("full", "autocast-bf16"),
        ("lora", "autocast-bf16"),
        ("qlora", "autocast-bf16"),
    ],
)
def test_what_is_known_of_one_layout_and_optimizer_bounds_others(method, precision):
    asked = work(16, {**AXES, "method": (method,), "precision": (precision,)}, MODEL)
    space, chosen = Space(asked, parse_cluster("4xh100-sxm")), random.Random(5)
    search = Search(space=space, bounds=Bounds(space.work.model, space.cluster))
    near = [
        place for place, one in enumerate(space.strategies) if search.ledger.closest[place] != place
    ]
    assert near
    assert all(
        space.strategies[search.ledger.closest[place]] == closest(space.strategies[place])
        for place in near
    )
    for _ in range(5):
        place, kernels, optimizer = (
            chosen.choice(near),
            chosen.choice(space.kernels),
            chosen.choice(space.optimizers),
        )
        (batch, times), strategy = (
            chosen.choice(space.batches(space.strategies[place])),
            space.strategies[place],
        )
        node = Node(0.0, 2, (), kernels, None, batch, (), times, place, optimizer)
        known = search.asking.asked(
            node._replace(
                strategy=search.ledger.closest[place], optimizer=chosen.choice(space.optimizers)
            )
        )
        if known is None:
            continue
        room, search.ledger.usable = search.ledger.usable, 2**60
        seconds = search.asking.sooner(node)
        found = estimate(
            space.work.model, search.ledger.job(node), space.cluster, strategy, precise=False
        )
        assert 0.4 * found.time.seconds < seconds <= found.time.seconds * (1 + 1e-9)
        if not strategy.offloads:
            kept = search.ledger.static(kernels, place, optimizer)[1]
            assert (
                search.asking.passed[
                    search.asking.passes_of(node._replace(strategy=search.ledger.closest[place]))
                ].held
                + kept.states
                <= found.memory.allocated
            )
        search.ledger.usable = room


@pytest.mark.parametrize(
    ("axes", "gpus", "tried"),
    [
        (
            {"method": ("full",), "precision": ("bf16",), "loss": ("plain", "liger")},
            "4xh100-sxm",
            None,
        ),
        ({"method": ("lora", "qlora"), "precision": ("autocast-bf16", "bf16")}, "2x2xl40s", None),
        (
            {
                "method": ("full",),
                "precision": ("bf16",),
                "checkpointing": ("none",),
                "loss": ("plain",),
            },
            "8xh100-sxm",
            "pp",
        ),
        (
            {
                "method": ("full",),
                "precision": ("bf16",),
                "framework": ("megatron",),
                "optimizer": ("adam",),
            },
            "8xh100-sxm",
            "pp",
        ),
    ],
)
def test_what_a_layout_adds_is_no_more_for_other_kernels_and_micro_batches(axes, gpus, tried):
    asked = work(16, {**AXES, "framework": ("transformers",), **axes}, MODEL)
    space, chosen = Space(asked, parse_cluster(gpus)), random.Random(7)
    search, seen, tight = (
        Search(space=space, bounds=Bounds(space.work.model, space.cluster)),
        0,
        0.0,
    )
    places = [
        place for place, one in enumerate(space.strategies) if tried is None or one.size(tried) > 1
    ]

    def node_of(kernels, place):
        (batch, times), optimizer = (
            chosen.choice(space.batches(space.strategies[place])),
            chosen.choice(space.optimizers),
        )
        return Node(
            0.0,
            2,
            (),
            kernels,
            alike(kernels, space.strategies[place]),
            batch,
            (),
            times,
            place,
            optimizer,
        )

    while seen < 8:
        place, first = chosen.choice(places), chosen.choice(space.kernels)
        like = [
            one
            for one in space.kernels
            if (one.method, one.precision, one.quant)
            == (first.method, first.precision, first.quant)
        ]
        search.asking.asked(node_of(first, place))
        other = node_of(chosen.choice(like), place)
        found, least = search.asking.ask(other, precise=False), search.asking.later(other)
        if found is None or found.time is None or not least:
            continue
        seen, tight = seen + 1, max(tight, least / found.time.seconds)
        assert least <= found.time.seconds * (1 + 1e-9)
    assert tight > 0.7  # and it says something


def test_a_plan_tells_what_it_costs_and_why_others_are_not_there():
    few = {**SMALL, "method": ("lora",), "optimizer": ("adamw_fused",), "precision": ("bf16",)}
    found = plan(
        work(8, few, strategies=(ONE,)),
        parse_cluster("1xl4"),
        Wish(tokens=1e9, dollars=0.8, each=1),
    )
    assert found.fits
    assert found.counted.size > found.counted.estimated > 0
    first = found.rows[0]
    assert first.cost.dollars == pytest.approx(0.8 * first.cost.hours)
    assert first.cost.kilowatt_hours == pytest.approx(72 * first.cost.hours / 1000)


def test_the_front_is_what_none_beats_in_time_and_memory_both():
    found = plan(work(8), parse_cluster("2xa100-sxm-40gb"), Wish(each=4))
    figures = [
        (row.kind.method, row.estimate.time.seconds, row.estimate.device) for row in found.rows
    ]
    assert len(figures) > 2
    best = [
        at
        for at, (method, time, size) in enumerate(figures)
        if not any(
            name == method and a <= time and b <= size and (a, b) != (time, size)
            for name, a, b in figures
        )
    ]
    assert [
        at for at, row in enumerate(found.rows) if any(row is one for one in found.front)
    ] == best
    told = data(found)["rows"]
    assert [at for at, row in enumerate(told) if row["front"]] == best
    assert sum("*" in line[:3] for line in text(found).splitlines()) == len(best)


def test_prices_are_of_gpus_on_record_and_say_when_and_who():
    for name in priced():
        known = price(find_gpu(name))
        assert 0.05 < known.dollars < 50
        assert date.fromisoformat(known.date) < date(2027, 1, 1)
        assert known.cite


QUICK = {
    "method": "full",
    "precision": "bf16",
    "loss": "plain",
    "liger": False,
    "optimizer": "adamw_fused",
    "checkpointing": "none",
    "seq": 512,
    "global_batch": 16,
    "offload": False,
    "framework": "transformers",
}


def test_a_plan_has_the_defaults_of_trl_and_names_them(capsys):
    """As for a single job; the command in the first lines gives the same figure, and a framework
    that is named changes what is tried."""
    words = ["qwen3-0.6b", "--gpu", "rtx-3060-12gb", "--method", "full,lora", "--offline"]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    first, command = said.splitlines()[:2]
    size = first.partition(": ")[2].split()[0]
    assert " is fastest on one GPU: " in first
    assert "8 sequences of 1024 tokens per step" in " ".join(said.split())
    assert "assumed: TRL 1.16 defaults: --framework trl --seq 1024" in " ".join(said.split())
    assert "--precision bf16-autocast (lora), autocast-bf16 (full)" in " ".join(said.split())
    assert "offload" not in said.partition("not chosen")[0]  # nothing needs it
    assert main(command.split()[1:]) == 0
    assert f"fits: {size} GiB" in capsys.readouterr().out
    own = ask("qwen3-0.6b", gpu="rtx-3060-12gb", method="lora", framework="transformers")
    assert own.work.sequences == 64
    assert not own.work.assumed


def test_use_liger_kernel_is_what_trl_makes_of_it():
    """Liger's kernels and TRL's own fused head; older versions take Liger's loss."""
    for versions, loss in (("", "plain"), ("trl=1.3", "liger")):
        words = {"use_liger_kernel": True, "method": "lora", "versions": versions}
        alone = again_of("qwen3-0.6b", gpu="rtx-4090", **words)
        row = ask("qwen3-0.6b", gpu="rtx-4090", **words).rows[0].estimate
        assert (alone.job.liger, alone.job.loss) == (True, loss)
        assert (row.job.liger, row.job.loss) == (True, loss)


def test_rows_that_are_no_choice_are_left_out():
    """As fast as another, and not smaller; the one that gives up least stays."""
    found = ask("gpt2", gpu="2xl4", **{**QUICK, "method": "full", "top": 3})
    assert [row.kind.layout for row in found.rows] == ["ddp"]
    reasons = {one.refused for one in found.dropped}
    assert "no faster than ddp, and not much smaller" in reasons
    assert "no faster than ddp, and not much smaller" in " ".join(text(found).split())


def test_offload_is_for_methods_that_fit_in_no_other_way():
    lean = {"loss": "plain", "liger": False, "checkpointing": "full", "seq": 512}
    found = ask("llama-3.2-1b", gpu="rtx-3060-12gb", method="full,lora", **lean)
    offloads = {row.kind.method: row.estimate.strategy.offloads for row in found.rows}
    assert offloads["lora"] is False
    eight_bit = {row.kind.method: row.estimate.job.optimizer for row in found.rows}
    assert eight_bit["lora"] == "adamw_fused"
    assert offloads["full"] or eight_bit["full"] == "adamw_8bit"


def test_zero_gpus_run_nothing_and_one_would():
    found = ask("gpt2", gpu="0xl4", **QUICK)
    assert not found.fits
    assert found.reason == "the number of GPUs must be at least 1"
    assert found.nearest.fits
    assert found.nearest.cluster.gpus == 1


def test_ranks_that_do_not_divide_the_heads():
    found = ask("meta-llama/Llama-3.2-1B", gpu="7xl4", use="tp", **{**QUICK, "global_batch": 28})
    assert not found.fits
    assert found.reason == "7 ranks do not divide 32 query heads"
    assert found.nearest.fits
    several = ask(
        "meta-llama/Llama-3.2-1B",
        gpu="7xl4",
        use="tp",
        **{**QUICK, "global_batch": 28, "method": "full,qlora"},
    )
    assert several.reason == found.reason  # of the first method, not of the last


def test_sequences_that_ranks_do_not_divide():
    found = ask("gpt2", gpu="3xl4", use="ddp", **QUICK)
    assert found.reason == "3 ranks do not divide 16 sequences"
    assert found.nearest.fits


def test_demands_that_contradict_each_other_get_more_gpus():
    lean = {"loss": "liger", "liger": True, "checkpointing": "full"}
    found = ask("meta-llama/Llama-3.1-70B", gpu="1xh100-sxm", **{**QUICK, **lean})
    assert not found.fits
    assert found.nearest.fits
    assert found.nearest.cluster.gpus > 1
    assert min(one.needs for one in found.dropped if one.needs) > 80 * 2**30


@pytest.mark.slow
def test_a_model_that_one_gpu_is_much_too_small_for():
    """The nearest is told soon: where it first fits, by the leanest ways, which are few."""
    begun = time.process_time()
    found = ask("meta-llama/Meta-Llama-3.1-405B", gpu="1xh100-sxm", offload=False)
    assert time.process_time() - begun < 60  # minutes, before
    assert not found.fits
    assert found.nearest.cluster.gpus == 8
    assert found.nearest.rows[0].estimate.verdict == "fits"


def test_a_budget_that_nobody_can_meet():
    found = ask("gpt2", gpu="1xl4", price=1.0, budget_money=0.5, dataset_tokens=1e9, **QUICK)
    assert not found.fits
    assert "the budget is $0.50" in found.reason
    assert found.nearest.rows[0].cost.dollars > 0.5
    assert ask("gpt2", gpu="1xl4", price=1.0, budget_money=500, dataset_tokens=1e9, **QUICK).fits


def test_the_cheapest_machine_of_all_does_for_a_small_model():
    found = ask("gpt2", gpu="cheapest", **QUICK)
    assert found.fits
    assert found.cluster == next(machines())[1]
    with pytest.raises(InputError, match="` chooses the machine and its layout by public prices"):
        ask("gpt2", gpu="cheapest", price=2.0, **QUICK)


@pytest.mark.slow
def test_the_cheapest_machine_that_works():
    """On every machine that costs less an hour nothing fits; a budget of hours asks for a dearer
    one."""
    lean = {**QUICK, "loss": "liger", "liger": True, "checkpointing": "full"}
    found = ask("meta-llama/Llama-3.1-8B", gpu="cheapest", **lean)
    assert found.fits
    hourly = {(one.gpu.id, one.gpus): dollars for dollars, one in machines()}
    own = hourly[found.cluster.gpu.id, found.cluster.gpus]
    cheaper = [one for dollars, one in machines() if dollars < own]
    assert len(cheaper) > 2
    assert all(not once(found.work, one, Wish(each=1)).fits for one in cheaper)
    assert [one.layout for one in found.dropped[: len(cheaper)]] == [one.name for one in cheaper]
    hours = found.rows[0].cost.hours
    quicker = ask("meta-llama/Llama-3.1-8B", gpu="cheapest", budget_hours=hours / 2, **lean)
    assert hourly[quicker.cluster.gpu.id, quicker.cluster.gpus] > own
    assert quicker.rows[0].cost.hours <= hours / 2


def test_hours_that_nobody_can_meet():
    found = ask("gpt2", gpu="1xl4", budget_hours=0.01, dataset_tokens=1e9, **QUICK)
    assert not found.fits
    assert "the budget is 0.01" in found.reason
    hours = found.nearest.rows[0].cost.hours
    assert hours > 0.01
    assert ask("gpt2", gpu="1xl4", budget_hours=hours, dataset_tokens=1e9, **QUICK).fits
    assert not ask("gpt2", gpu="1xl4", budget_hours=0.99 * hours, dataset_tokens=1e9, **QUICK).fits


def test_machines_as_people_write_them():
    for words, network, gpu, nodes, each in (
        ("8xH100", "", "h100-sxm", 1, 8),
        ("2x8xA100-80GB", "ib", "a100-sxm-80gb", 2, 8),
        ("1xRTX4090", "", "rtx-4090", 1, 1),
        ("4x8xh100-sxm", "roce-100", "h100-sxm", 4, 8),
    ):
        found = gpus_of(words, network)
        assert (found.gpu.id, found.nodes, found.gpus_per_node) == (gpu, nodes, each)
    assert gpus_of("4x8xh100-sxm", "roce-100").network == find_link("roce-100")
    with pytest.raises(InputError, match="unknown link"):
        gpus_of("2x8xh100-sxm", "pigeon")


START = (  # a runner in the background ignores the signal
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.argv[0] = 'memfit'; from memfit.cli import main; sys.exit(main())"
)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_real_ctrl_c_ends_a_long_search_with_what_was_found():
    """A space that takes half a minute: the signal comes as soon as the first sign of life is
    there, which is at once on a terminal."""
    words = ["plan", "meta-llama/Llama-3.1-70B", "--gpus", "128x8xh100-sxm", "--seq", "4096"]
    terminal, its_end = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", START, *words],
        stdout=subprocess.PIPE,
        stderr=its_end,
        text=True,
        env=environment,
    ) as run:
        os.close(its_end)
        first = os.read(terminal, 4)
        run.send_signal(signal.SIGINT)
        said, _ = run.communicate(timeout=60)
    complaint = b""
    with contextlib.suppress(OSError):  # nothing more was said
        complaint = os.read(terminal, 65536)
    os.close(terminal)
    assert first
    assert b"Traceback" not in complaint
    assert "interrupted" in said
    assert run.returncode == 130


def test_options_that_leave_nothing_to_choose_from():
    found = ask("gpt2", gpu="1xl4", **{**QUICK, "loss": "liger,plain", "quant": "nf4"})
    assert not found.fits
    assert found.nearest is None
    assert found.reason == "a quantized weight cannot be trained"
    with pytest.raises(InputError, match="needs Megatron"):
        ask("gpt2", gpu="1xl4", **{**QUICK, "loss": "te"})
    with pytest.raises(InputError, match="unknown option"):
        ask("gpt2", gpu="1xl4", layuot="x")
    with pytest.raises(InputError, match="unknown method"):
        ask("gpt2", gpu="1xl4", method="full,lara")
    with pytest.raises(InputError, match="` does not apply to a plan"):
        ask("gpt2", gpu="1xl4", largest_batch=True)


def test_a_hundred_thousand_gpus():
    found = ask("gpt2", gpu="12500x8xl4", use="ddp", **{**QUICK, "global_batch": 100_000})
    assert found.rows[0].estimate.strategy.ranks == 100_000


def test_the_first_row_as_a_job_file_is_answered_the_same(tmp_path):
    found = ask("gpt2", gpu="2xl4", use="fsdp,reshard=no", **QUICK)
    path = tmp_path / "job.yaml"
    path.write_text(job_file(found, found.rows[0]))
    again, first = again_of(path), found.rows[0].estimate
    assert (again.device, again.job, again.strategy) == (first.device, first.job, first.strategy)


def test_a_search_that_has_seen_enough_is_not_interrupted():
    words = []
    cluster = parse_cluster("1xl4")
    found = once(
        work(8, SMALL, "openai-community/gpt2", strategies=(ONE,)),
        cluster,
        Wish(each=3, progress=until(first, words.append)),
    )
    assert len(found.rows) == 1
    assert not found.interrupted
    assert words


LARGE = "Qwen/Qwen3-14B"


def test_progress_says_which_search_it_is_of():
    seen = []
    open_axes = {**QUICK, "offload": True}
    ask(LARGE, gpu="1xl4", progress=lambda one: seen.append(one.among), **open_axes)
    assert list(dict.fromkeys(seen)) == ["usual settings", "CPU offload"]


def test_an_interrupt_returns_what_was_found():
    def stop(counted):
        if counted.replayed:
            raise KeyboardInterrupt

    found = ask("gpt2", gpu="1xl4", progress=stop, **{**QUICK, "method": "full,lora"})
    assert found.interrupted
    assert len(found.rows) == 1
    assert "interrupted" in text(found)


@pytest.mark.parametrize(
    ("words", "meant"),
    [("--liger --seq 64", True), ("--seq 64 --liger", True), ("--liger no --seq 64", False)],
)
def test_a_flag_alone_means_yes(words, meant, capsys):
    """As rows are written, to be asked again."""
    lean = (
        "--method lora --precision bf16 --optimizer sgd --checkpointing none --loss plain "
        "--attention sdpa --use ddp --json --offline"
    )
    assert (
        main(
            [
                "plan",
                "meta-llama/Llama-3.2-1B",
                "--gpus",
                "1xrtx-4090",
                *lean.split(),
                *words.split(),
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["rows"][0]["estimate"]["job"]["liger"] is meant


def test_what_a_kind_needs_is_told_where_all_of_it_was_looked_at():
    """One step at a time would fit everywhere; where a row for each method is enough, nobody
    asked."""
    lean = {**QUICK, "method": "lora", "loss": "plain", "seq": 1024, "global_batch": 64, "use": ""}
    found = ask("meta-llama/Llama-3.2-1B", gpu="4xl4", top=1, **lean)
    assert found.rows
    told = [one for one in found.dropped if not one.refused and one.seconds is None]
    assert told
    assert all(one.needs is None for one in told)
    assert "slower than the rows shown" in " ".join(text(found).split())


def test_an_interrupt_of_the_second_search_is_the_end():
    """Where nothing fits, ways that leave checkpoints on the host are looked through, and then more
    GPUs."""
    searches = []

    def stop(counted):
        if not any(counted is one for one in searches):
            searches.append(counted)
        if len(searches) > 1:
            raise KeyboardInterrupt

    more = {
        "method": "lora",
        "checkpointing": "full",
        "seq": 131072,
        "global_batch": 1,
        "offload": True,
    }
    found = ask(
        "meta-llama/Llama-3.2-1B",
        gpu="1xrtx-3060-12gb",
        use="zero",
        progress=stop,
        **{**QUICK, **more},
    )
    assert found.interrupted
    assert not found.fits
    assert found.nearest is None
    assert len(searches) == 2


def test_what_is_written_is_narrow_and_the_same_each_time():
    first, again = (ask("gpt2", gpu="2xl4", use="ddp", **QUICK) for _ in range(2))
    assert text(first) == text(again)
    lines = [line for line in text(first).splitlines() if "memfit estimate" not in line]
    assert max(map(len, lines)) <= 80  # commands are not broken
    known = data(first)
    assert known["schema"] == 1
    assert known["rows"][0]["estimate"]["verdict"] == "fits"
    assert json.loads(json.dumps(known)) == known
    assert markdown(first).count("|") > 10


def test_a_row_without_a_time_says_why():
    """Nobody knows how fast a disk is."""
    told = {**QUICK, "offload": True}
    quick, unknown = (
        text(ask("gpt2", gpu="1xl4", use=f"zero,stage=3,offload-optimizer={where}", **told))
        for where in ("cpu", "nvme")
    )
    assert "zero 3" in quick
    assert "no time" not in quick
    assert "speed of the NVMe disk is unknown" in " ".join(unknown.split())


def test_what_another_judge_does_not_let_pass_is_no_row():
    found = ask("gpt2", gpu="2xl4", **{**QUICK, "method": "full,lora"})
    assert len(found.rows) > 1
    first = found.rows[0]

    def judge(row):
        return Checked(
            by="judge", device=row.estimate.device, fits=row is not first, why="out of memory"
        )

    left = judged(found, 2, judge)
    assert [row.kind for row in left.rows] == [row.kind for row in found.rows[1:]]
    assert [len(row.checked) for row in left.rows][:2] == [1, 0]
    assert "judge: does not fit, out of memory" in text(left)
    assert f"judge: {gib(left.rows[0].estimate.device)} GiB (formulas differ by +0.00 %)" in text(
        left
    )
    assert data(left)["rows"][0]["checked"][0]["device"] == left.rows[0].estimate.device
    none = judged(replace(found, rows=found.rows[:1]), 1, judge)
    assert not none.fits
    assert none.reason.startswith("none of the chosen plans fits when checked:")


@pytest.mark.parametrize(
    ("method", "schedule", "use"),
    [
        ("lora", "1f1b", "fsdp=4"),
        ("lora", "interleaved", "ddp=2 fsdp=2"),
        ("qlora", "1f1b", "ddp=2 fsdp=2"),
        ("qlora", "interleaved", "fsdp=4,reshard=no"),
    ],
)
def test_a_stage_whose_weights_are_sharded_bounds_its_pipeline(method, schedule, use):
    """The bound is no more than the answer, and more than what leaves its casts out."""
    bounds = Bounds(built(MODEL), parse_cluster("8xh100-sxm"))
    job = Job(method=method, precision="autocast-bf16", seq=1024, framework="transformers")
    pipeline = f"pp=2,schedule={schedule}" + ",virtual=2" * (schedule == "interleaved")
    strategy = turned(strategy_from([*use.split(), pipeline], 8), 8)
    found = estimate(
        bounds.model, job.replace(batch=1, accumulate=8), bounds.cluster, strategy, precise=False
    )
    like = alike(job, strategy)
    walked = bounds.walked(like, 1)
    assert like.job != job
    least = bounds.sharded_stage(job, strategy, (1, 8))
    assert 8 * bounds.staged(like, strategy, (1, 8), walked) * walked.seconds < least
    assert least <= found.time.seconds
