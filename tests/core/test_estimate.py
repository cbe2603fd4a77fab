"""Verdicts over hand-written tapes, through the producer's seam; reverse questions; what a Python
caller sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memfit
from memfit.band import spread
from memfit.errors import InputError
from memfit.estimate import Estimate, estimate, shortfall, surplus
from memfit.hardware import Cluster, all_gpus, custom_gpu, find_gpu, usable
from memfit.hardware.prices import price
from memfit.job import Job
from memfit.job_checks import COUNTS, NEWEST
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.model import Model
from memfit.plan.reverse import (
    cheapest_gpu,
    cheapest_precision,
    largest_batch,
    last,
    longest_seq,
    smallest_gpu,
)
from memfit.program_facts import trainable
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Event, Free, Mark, Tape
from memfit.units import GIB, MIB
from memfit.words.models import model_of
from memfit.words.options import Ask

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODEL = build(SMALL, name="small")
ATTENTION, MLP, NORMS = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 176, 2 * 64
TOTAL = 2 * 512 * 64 + 64 + 8 * (ATTENTION + MLP + NORMS)


def written(*events: Event) -> Callable[..., Tape]:
    return lambda model, job, strategy, cluster: Tape(
        events=events, source="handwritten", versions={"torch": "9.9"}
    )


def load(size: int) -> tuple[Event, ...]:
    return (Mark("load"), Alloc(0, size, "weights", "embed", "parameter"))


def on(gpu: str) -> Cluster:
    return Cluster(gpu=find_gpu(gpu))


def held(size: int) -> Estimate:
    """An estimate for 10 GiB on a T4-like card of `size` bytes, whose context is on record."""
    import dataclasses

    gpu = dataclasses.replace(find_gpu("t4"), memory=size, memory_range=(size, size + 100 * MIB))
    return estimate(MODEL, Job(), Cluster(gpu=gpu), producer=written(*load(10 * GIB)))


# ----------------------------------------------------------------------------------------- verdict
def test_the_four_numbers_and_their_parts() -> None:
    found = held(12 * GIB)
    low, high = found.context.low, found.context.high
    assert (found.memory.allocated, found.memory.reserved) == (10 * GIB, 10 * GIB)
    assert found.outside == (low + high) // 2
    assert found.device == 10 * GIB + found.outside
    assert found.parts == {
        "weights": 10 * GIB,
        "rounding": 0,
        "fragmentation": 0,
        "context": found.outside,
    }
    assert sum(found.parts.values()) == found.device
    assert found.usable == (12 * GIB, 12 * GIB + 100 * MIB)
    said = spread()
    assert (found.band.low, found.band.high) == (
        max(10 * GIB + low, round(said.low * found.device)),
        round(said.high * 10 * GIB) + high,
    )
    assert f" % of {said.cases} published peaks ({said.sources} sources" in found.band.origin
    assert (found.source, found.versions) == ("handwritten", {"torch": "9.9"})


def test_verdicts_by_where_the_band_lies() -> None:
    whole = held(12 * GIB)
    assert held(whole.band.high).verdict == "fits"
    assert held(whole.band.high - 1).verdict == "tight"
    needed = (
        10 * GIB + whole.context.low
    )  # with less than this the run ends, whatever the allocator gives back
    assert held(needed - 100 * MIB).verdict == "tight"
    assert held(needed - 100 * MIB - 1).verdict == "no"
    assert [held(size).fits for size in (12 * GIB, whole.band.high - 1, 10 * GIB - 500 * MIB)] == [
        True,
        True,
        False,
    ]


def test_running_out_says_where_and_for_how_much() -> None:
    events = (
        *load(6 * GIB),
        Mark("forward", "layers.3", 1),
        Alloc(1, 6 * GIB, "activations", "layers.3.mlp", "silu"),
    )
    found = estimate(MODEL, Job(), Cluster(gpu=custom_gpu(8 * GIB)), producer=written(*events))
    assert found.verdict == "no"
    assert found.failure is not None
    assert (
        found.failure.at.phase,
        found.failure.at.step,
        found.failure.at.where,
        found.failure.at.op,
    ) == (
        "forward",
        1,
        "layers.3.mlp",
        "silu",
    )
    assert found.failure.asked == 6 * GIB
    assert found.failure.left == 2 * GIB - found.context.low
    assert found.memory.allocated == 12 * GIB, "the answer still says what would be needed"


def test_giving_cached_blocks_back_is_tight_and_counted() -> None:
    """3 GiB are freed and cached, 4 GiB do not fit into them: the allocator gives them back and
    goes on."""
    events = (
        *load(GIB),
        Mark("forward"),
        Alloc(1, 3 * GIB, "activations"),
        Free(1),
        Alloc(2, 4 * GIB, "activations"),
    )
    found = estimate(MODEL, Job(), Cluster(gpu=custom_gpu(7 * GIB)), producer=written(*events))
    assert (found.memory.allocated, found.memory.reserved) == (5 * GIB, 8 * GIB)
    assert (found.verdict, found.retries, found.failure) == ("tight", 1, None)


def test_the_longest_batch_to_come_is_a_moment_of_its_own() -> None:
    """Its live peak is that of a run of such batches; what the shorter ones left cached does not
    fit it."""
    alike, mixed = (
        estimate(MODEL, Job(**options), on("rtx-4090"))
        for options in ({"seq": 512}, {"seq": 128, "longest": 512})
    )
    moments = {
        stretch.moment: stretch for stretch in mixed.memory.timeline if stretch.phase == "backward"
    }
    assert (
        moments["longest batch"].allocated
        == mixed.memory.allocated
        == alike.memory.allocated
        > moments["steady step"].allocated
    )
    assert mixed.memory.reserved is not None
    assert alike.memory.reserved is not None
    assert mixed.memory.reserved >= alike.memory.reserved
    with pytest.raises(
        InputError, match="`longest` is 512 tokens, but must be more than `seq`, which"
    ):
        Job(seq=512, longest=512)


def test_without_a_gpu_there_is_no_verdict() -> None:
    found = estimate(MODEL, Job(), producer=written(*load(GIB)))
    assert (found.verdict, found.usable, found.gpu, found.fits) == (None, None, None, True)
    assert ("note", "gpu") in [(problem.level, problem.where) for problem in found.problems]


def test_the_live_peak_alone_is_quick_and_says_so() -> None:
    precise = estimate(MODEL, Job(seq=128), on("t4"))
    quick = estimate(MODEL, Job(seq=128), on("t4"), precise=False)
    assert quick.memory.reserved is None
    assert quick.memory.fragmentation is None
    assert "fragmentation" not in quick.parts
    assert quick.memory.allocated == memory(precise.memory.tape).allocated
    assert sum(quick.parts.values()) == quick.device
    assert "% of 220 published peaks" in quick.band.origin


def test_options_of_the_allocator_count() -> None:
    events = (*load(30 * MIB), Mark("forward"), Alloc(1, 3 * MIB, "activations"))
    tape = written(*events)
    plain = estimate(MODEL, Job(), on("t4"), producer=tape)
    other = estimate(MODEL, Job(alloc_conf="expandable_segments:True"), on("t4"), producer=tape)
    assert (plain.memory.reserved, other.memory.reserved) == (50 * MIB, 40 * MIB)


def test_a_memory_fraction_is_one_of_a_gpu() -> None:
    half = Job(alloc_conf="per_process_memory_fraction:0.5")
    assert (
        estimate(
            MODEL, half, Cluster(gpu=custom_gpu(8 * GIB)), producer=written(*load(GIB))
        ).memory.reserved
        == GIB
    )
    with pytest.raises(InputError, match="needs a GPU"):
        estimate(MODEL, half, producer=written(*load(GIB)))


def test_several_gpus_are_refused_so_far() -> None:
    with pytest.raises(InputError, match="8 GPUs"):
        estimate(
            MODEL,
            Job(),
            Cluster(gpu=find_gpu("h100-sxm"), gpus_per_node=8),
            producer=written(*load(GIB)),
        )


# ----------------------------------------------------------------------------- what is said beside
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, TOTAL),
        ({"task": "inference"}, 0),
        ({"method": "lora", "rank": 4}, 8 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 176))),
        ({"method": "lora", "rank": 4, "targets": "q_proj,v_proj"}, 8 * 4 * (64 + 64 + 64 + 32)),
        (
            {"method": "lora", "rank": 4, "targets": "q_proj", "modules_to_save": "lm_head"},
            8 * 4 * 128 + 512 * 64,
        ),
        ({"method": "freeze", "trainable": "layers.3.mlp,model.norm"}, MLP + 64),
    ],
)
def test_trainable_parameters(options: dict[str, Any], count: int) -> None:
    assert MODEL.parameters == TOTAL
    assert trainable(MODEL, Job(**options)) == count


def test_the_host_holds_a_copy_unless_tensors_go_straight_to_the_gpu() -> None:
    def host(**options: Any) -> int:
        return estimate(MODEL, Job(**options), producer=written(*load(GIB))).host.size

    largest = 512 * 64
    assert (host(), host(precision="fp32")) == (2 * TOTAL, 4 * TOTAL)
    assert (host(method="qlora"), host(task="inference"), host(load="device_map")) == (
        2 * largest,
    ) * 3
    assert host(task="inference", load="host") == 2 * TOTAL


def remarks(model: Model, job: Job, cluster: Cluster | None) -> list[tuple[str, str]]:
    found = estimate(model, job, cluster, producer=written(*load(GIB)))
    return [(problem.level, problem.where) for problem in found.problems]


def test_what_is_assumed_is_said() -> None:
    from memfit.hardware import all_gpus

    assert remarks(MODEL, Job(seq=128), on("t4")) == []
    assert remarks(MODEL, Job(seq=257), on("t4")) == [("warning", "job.seq")]
    assert remarks(MODEL, Job(task="inference", seq=200, new_tokens=57), on("t4")) == [
        ("warning", "job.seq")
    ]
    assert ("warning", "gpu") in remarks(MODEL, Job(seq=128), on("mi300x"))
    unproven = next(
        gpu for gpu in all_gpus() if "memory" in gpu.unchecked and gpu.vendor == "nvidia"
    )
    assert remarks(MODEL, Job(seq=128), Cluster(gpu=unproven)) == [("warning", "gpu")]
    experts = build(
        {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    assert remarks(experts, Job(seq=128), on("t4")) == [("note", "job.router_skew")]
    assert remarks(experts, Job(seq=128, router_skew=2.0), on("t4")) == [
        ("note", "job.router_skew")
    ]


# ------------------------------------------------------------------------------- reverse questions
@given(st.integers(0, 3000), st.integers(1, 3000), st.data())
def test_the_last_that_holds_is_found_from_anywhere(
    limit: int, top: int, data: st.DataObject
) -> None:
    start = data.draw(st.sampled_from((1, top)) | st.integers(1, top))
    asked: list[int] = []

    steep, step = data.draw(st.integers(1, 10**9)), data.draw(st.sampled_from((1, 10**6, 10**10)))

    def over(value: int) -> int:
        """A line, or stairs of any height."""
        asked.append(value)
        return (value - limit) * steep // step * step + (value > limit)

    assert last(over, top, start) == min(limit, top)
    assert all(1 <= value <= top for value in asked)
    assert len(asked) == len(set(asked)) <= 40


@given(st.integers(1, 10**9), st.integers(1, 2**40), st.integers(0, 2**40))
def test_along_a_line_few_are_asked(limit: int, steep: int, flat: int) -> None:
    asked: list[int] = []

    def over(value: int) -> int:
        asked.append(value)
        return flat + value * steep - (flat + limit * steep)

    assert last(over, 2**30, 2048) == limit
    assert len(asked) <= 16  # thirty would halve it


def verdict(job: Job, cluster: Cluster) -> str | None:
    return estimate(MODEL, job, cluster).verdict


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    cluster = Cluster(gpu=custom_gpu(2 * GIB))
    answer = largest_batch(MODEL, Job(seq=128), cluster)
    assert isinstance(answer.value, int)
    assert answer.value > 100
    assert verdict(Job(seq=128, batch=answer.value), cluster) == "fits"
    assert verdict(Job(seq=128, batch=answer.value + 1), cluster) != "fits"
    assert answer.device == estimate(MODEL, Job(seq=128, batch=answer.value), cluster).device


def test_the_longest_sequence_ends_with_the_positions_or_the_memory() -> None:
    roomy = longest_seq(MODEL, Job(), Cluster(gpu=custom_gpu(8 * GIB)))
    assert (roomy.value, roomy.limit) == (256, "the model's maximum length")
    tight = longest_seq(MODEL, Job(batch=1000), Cluster(gpu=custom_gpu(2 * GIB)))
    assert isinstance(tight.value, int)
    assert 0 < tight.value < 256
    assert tight.limit == ""
    assert verdict(Job(batch=1000, seq=tight.value + 1), Cluster(gpu=custom_gpu(2 * GIB))) != "fits"


@pytest.mark.parametrize(("field", "step"), [("batch", 1), ("seq", 64)])
def test_the_end_is_exact_and_found_with_few_replays(field: str, step: int) -> None:
    """A replay of a real model takes a tenth of a second: the longest sequence once took half a
    minute."""
    replays = 0

    def counted(*given: Any) -> Tape:
        nonlocal replays
        replays += 1
        return lower(*given)

    model, cluster = (
        model_of("meta-llama/Llama-3.2-1B", Ask(offline=True))[1],
        Cluster(gpu=find_gpu("rtx-4090")),
    )
    job = Job(method="lora", checkpointing="full", seq=512)
    answer = {"batch": largest_batch, "seq": longest_seq}[field](model, job, cluster, counted)
    assert isinstance(answer.value, int)
    assert answer.value % step == 0
    assert replays <= 12
    assert estimate(model, job.replace(**{field: answer.value}), cluster).verdict == "fits"
    assert estimate(model, job.replace(**{field: answer.value + step}), cluster).verdict != "fits"


@given(st.integers(64 * MIB, 4 * GIB), st.integers(1, 64))
@settings(max_examples=8, deadline=None)
def test_the_surplus_decides_as_the_estimate_does(memory: int, batch: int) -> None:
    cluster, job = Cluster(gpu=custom_gpu(memory)), Job(seq=128, batch=batch)
    assert (surplus(MODEL, job, cluster) <= 0) == (verdict(job, cluster) == "fits")
    if surplus(MODEL, job, cluster, precise=False) > 0:
        assert verdict(job, cluster) == "no"
    if shortfall(MODEL, job, cluster) > 0:
        assert verdict(job, cluster) != "fits"


def test_gaps_that_are_uneven_are_looked_beyond_and_told() -> None:
    """Between 34 and 60 sequences a gap of 4 GiB opens that is gone again at 61."""

    def gappy(model: Model, job: Job, strategy: Any, cluster: Any) -> Tape:
        size = job.batch * 80 * MIB
        waste = (
            (Alloc(1, 4 * GIB, "temporaries"), Free(1), Alloc(2, 4 * GIB + 1, "temporaries"))
            if 34 <= job.batch < 61
            else ()
        )
        return Tape(
            events=(*load(20 * MIB), Mark("forward"), Alloc(9, size, "inputs"), *waste),
            source="handwritten",
        )

    answer = largest_batch(MODEL, Job(), Cluster(gpu=custom_gpu(8 * GIB)), gappy)
    assert isinstance(answer.value, int)
    assert answer.value > 60
    assert "some smaller ones do not fit" in answer.limit


def test_a_gpu_without_the_kernels_is_passed_over() -> None:
    """The smallest card is newer than flash-attention 3, which knows 8.0 to 9.0."""
    answer = smallest_gpu(MODEL, Job(seq=128, attention="flash-attn-3"), None)
    assert isinstance(answer.value, str)
    assert (find_gpu(answer.value).sm or (99, 0)) <= (9, 0)
    plain = smallest_gpu(MODEL, Job(seq=128), None)
    assert isinstance(plain.value, str)
    assert usable(find_gpu(plain.value)) < usable(find_gpu(answer.value))


def test_where_nothing_fits_the_answer_is_none() -> None:
    small = Cluster(gpu=custom_gpu(64 * MIB))
    assert largest_batch(MODEL, Job(), small).value is None
    assert longest_seq(MODEL, Job(), small).value is None
    assert cheapest_precision(MODEL, Job(), small).value is None
    assert smallest_gpu(MODEL, Job(batch=2**22), None).value is None


def test_the_cheapest_gpu_costs_least_of_those_that_fit() -> None:
    model = model_of("meta-llama/Llama-3.2-1B", Ask(offline=True))[1]
    answer = cheapest_gpu(model, Job(batch=8), None)
    known = {gpu.id: (gpu, one.dollars) for gpu in all_gpus() if (one := price(gpu))}
    chosen, dollars = known[str(answer.value)]
    assert surplus(model, Job(batch=8), Cluster(gpu=chosen)) <= 0
    for gpu, less in known.values():
        if less < dollars:
            assert surplus(model, Job(batch=8), Cluster(gpu=gpu)) > 0
    assert f"${dollars:.2f} per hour" in answer.limit
    assert cheapest_gpu(model, Job(batch=2**22), None).value is None


def test_the_smallest_gpu_is_the_first_by_memory_that_fits() -> None:
    def seven(model: Model, job: Job, strategy: Any, cluster: Any) -> Tape:
        return Tape(events=load(23 * GIB + GIB // 2), source="handwritten")

    answer = smallest_gpu(MODEL, Job(), None, seven)
    assert isinstance(answer.value, str)
    assert usable(find_gpu(answer.value)) > 23 * GIB + GIB // 2
    assert usable(find_gpu(answer.value)) < 33 * GIB


def test_precisions_are_tried_from_the_best_down() -> None:
    whole = cheapest_precision(MODEL, Job(seq=128), Cluster(gpu=custom_gpu(4 * GIB)))
    assert whole.value == "fp32"
    assert [name for name, _, _ in whole.tried] == ["fp32", "autocast-bf16", "bf16-master", "bf16"]
    adapters = cheapest_precision(
        MODEL, Job(seq=128, method="lora", precision="fp16"), Cluster(gpu=custom_gpu(4 * GIB))
    )
    assert [name for name, _, _ in adapters.tried] == [
        "fp32",
        "autocast-fp16",
        "fp16",
        "int8 weights, fp16",
        "nf4 weights, fp16",
    ]


# --------------------------------------------------------------------------------- the public name
def test_the_verb_stays_in_front_of_the_module_of_its_name() -> None:
    code = (
        "import memfit.estimate, memfit; print(callable(memfit.estimate), "
        "memfit.Estimate.__module__, memfit.InputError.__name__)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root / "src")},
    )
    assert done.stdout.split() == ["True", "memfit.estimate", "InputError"]
    assert set(memfit.__all__) <= set(dir(memfit))
    with pytest.raises(AttributeError, match="nonesuch"):
        memfit.nonesuch  # noqa: B018


def test_python_takes_what_the_command_line_takes() -> None:
    found = memfit.estimate(
        SMALL,
        gpu="RTX 4090",
        method="lora",
        batch=2,
        seq=128,
        targets=["q_proj", "v_proj"],
        longest_seq=True,
    )
    assert found.verdict == "fits"
    usual = {"packing": False, "clip": 1.0, "checkpointing": "full", "optimizer": "adamw_fused"}
    usual |= {"framework": "trl", "precision": "bf16-autocast"}
    assert found.assumed == usual
    assert found.job == Job(method="lora", batch=2, seq=128, targets="q_proj,v_proj", **usual)
    assert found.gpu is not None
    assert found.gpu.id == "rtx-4090"
    assert [(answer.question, answer.value) for answer in found.answers] == [("longest_seq", 256)]
    same = memfit.estimate(
        MODEL, gpu="rtx-4090", method="lora", batch=2, seq=128, targets="q_proj,v_proj"
    )
    assert same.memory == found.memory


def test_memory_overrides_what_is_on_record() -> None:
    found = memfit.estimate(SMALL, gpu="rtx-4090", memory="10GiB", seq=128)
    assert found.usable == (10 * GIB, 10 * GIB)
    assert found.gpu is not None
    assert found.gpu.sm == (8, 9)
    assert memfit.estimate(SMALL, memory=3 * GIB, seq=128).usable == (3 * GIB, 3 * GIB)


def test_everything_wrong_is_raised_at_once() -> None:
    with pytest.raises(InputError) as caught:
        memfit.estimate(
            {**SMALL, "hidden_size": -1},
            gpu="rtx-4091",
            memory="3 parsecs",
            bach=1,
            seq="long",
            optimizer="adam_w",
            alloc_conf="x:1",
            by="magic",
        )
    where = [problem.where for problem in caught.value.problems]
    assert {
        "bach",
        "by",
        "job.seq",
        "job.optimizer",
        "gpu",
        "memory",
        "config.hidden_size",
        "job.alloc_conf",
    } <= set(where)
    hints = {problem.where: problem.hint for problem in caught.value.problems}
    assert "`batch`" in hints["bach"]
    assert "rtx-4090" in hints["gpu"]


def test_techniques_speak_up_together_with_the_rest() -> None:
    with pytest.raises(InputError) as caught:
        memfit.estimate(SMALL, gpu="nonesuch", method="full", quant="nf4", seq=0)
    assert [problem.where for problem in caught.value.problems] == ["job.seq", "gpu", "job.quant"]


def test_a_question_that_needs_a_gpu_says_so() -> None:
    with pytest.raises(InputError, match="`largest_batch` needs a GPU"):
        memfit.estimate(SMALL, largest_batch=True)


def test_lists_can_be_searched() -> None:
    assert {gpu.id for gpu in memfit.gpus("a100 80gb")} == {"a100-pcie-80gb", "a100-sxm-80gb"}
    assert "meta-llama/Llama-3.1-8B" in {entry.name for entry in memfit.models("llama*3.1 8b")}
    assert len(memfit.gpus()) >= 70
    for verb in (memfit.gpus, memfit.models):
        with pytest.raises(InputError, match="matches"):
            verb("no such thing")


def test_expandable_segments_are_offered_where_they_turn_the_verdict() -> None:
    """3 GiB come and go in front of 4 GiB: in a segment of their own they stay cached, in an
    expandable one their pages serve again."""
    events = (
        *load(GIB),
        Mark("forward"),
        Alloc(1, 3 * GIB, "activations"),
        Free(1),
        Alloc(2, 4 * GIB, "activations"),
    )
    cluster = Cluster(gpu=custom_gpu(7 * GIB))
    found = estimate(MODEL, Job(seq=128), cluster, producer=written(*events))
    assert [(problem.level, problem.message) for problem in found.problems] == [
        ("note", "with expandable segments it fits")
    ]
    other = estimate(
        MODEL,
        Job(seq=128, alloc_conf="expandable_segments:True"),
        cluster,
        producer=written(*events),
    )
    assert (other.verdict, other.problems) == ("fits", ())


def test_parameters_of_a_model_without_a_family_are_counted_on_the_tape() -> None:
    from memfit.words.models import unbuilt

    model = unbuilt({"model_type": "brand_new", "dtype": "bfloat16"}, "acme/new", "a test")
    events = (
        *load(2_000_000),
        Alloc(1, 512, "buffers"),
        Mark("forward"),
        Alloc(2, 64, "weights", op="a cast"),
    )
    found = estimate(model, Job(), producer=written(*events))
    assert found.parameters.total == found.parameters.trainable == 1_000_000
    assert found.host.size == 2_000_000
    assert (
        estimate(model, Job(task="inference"), producer=written(*events), total=7).parameters.total
        == 7
    )


def test_a_trace_is_not_begun_where_it_would_not_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "brand_new", "num_hidden_layers": 1000000, "hidden_size": 64}'
    )
    with pytest.raises(InputError, match="num_hidden_layers"):
        memfit.estimate(tmp_path, by="trace")
    with pytest.raises(InputError, match="1099511627776 tokens are too many for a trace"):
        memfit.estimate(SMALL, by="trace", batch=2**20, seq=2**20)


# ---------------------------------------------------------------------------- what changes nothing
def test_options_that_change_nothing_here_are_named() -> None:
    found = memfit.estimate(
        SMALL, method="full", seq=16, rank=8, cache="static", eval_batch=4, checkpoint_every=2
    ).problems
    assert {problem.where for problem in found if "has no effect" in problem.message} == {
        "job.rank",
        "job.cache",
        "job.eval_batch",
        "job.checkpoint_every",
    }
    assert {problem.level for problem in found} == {"note"}
    busy = memfit.estimate(
        SMALL,
        seq=16,
        method="lora",
        rank=8,
        evaluate=True,
        eval_batch=4,
        checkpointing="every",
        checkpoint_every=2,
    )
    assert not any("has no effect" in problem.message for problem in busy.problems)


def test_every_conditional_option_exists_and_is_named_once() -> None:
    names = [name for group, _, _ in COUNTS for name in group]
    assert len(names) == len(set(names))
    assert set(names) <= set(Job.__dataclass_fields__)


def test_versions_newer_than_those_read_are_a_warning_and_two_of_one_library_an_error() -> None:
    found = memfit.estimate(SMALL, seq=16, versions="transformers=99.1,torch=2.6").problems
    assert [problem.message for problem in found if problem.level == "warning"] == [
        (
            f"transformers 99.1 is newer than {'.'.join(map(str, NEWEST['transformers']))}, "
            "the latest version memfit knows; the answer is for "
            f"{'.'.join(map(str, NEWEST['transformers']))}"
        )
    ]
    with pytest.raises(memfit.InputError, match="` is given twice"):
        memfit.estimate(SMALL, versions="torch=2.6,torch=2.7")


def test_a_block_that_no_device_has_is_refused() -> None:
    with pytest.raises(memfit.InputError, match="device has"):
        memfit.estimate(SMALL, seq=2**28, batch=2**24, attention="eager")


@pytest.mark.parametrize(("memory", "gib"), [("24", 24), (24, 24), ("80.5", 80.5), ("1000", 1000)])
def test_memory_without_a_unit_is_gib(memory: str | int, gib: float) -> None:
    size = int(gib * 2**30)
    assert memfit.estimate(SMALL, seq=16, memory=memory).usable == (size, size)
    assert memfit.estimate(SMALL, seq=16, memory=24 * 2**30).usable == (24 * 2**30, 24 * 2**30)


@pytest.mark.parametrize(
    ("words", "layout", "said"),
    [
        ({"gpu": "2xrtx-4090"}, (2, "tp"), "`--use tp=2` is assumed"),
        ({"gpu": "2x8xrtx-4090"}, (8, "tp"), "per group of 8, one of 2"),
        ({"gpu": "3xrtx-4090"}, (3, "split"), "3 ranks do not divide 32 query heads"),
        ({"gpu": "2xrtx-4090", "quant": "nf4"}, (2, "split"), "`--use split=2,layers=16/16` is"),
        ({"gpu": "2xrtx-4090", "quant": "int8"}, (2, "split"), "each GPU holds some layers"),
        ({"gpu": "2xrtx-4090", "use": "ddp"}, (2, "ddp"), ""),
    ],
)
def test_gpus_that_answer_share_the_model(
    words: dict[str, str], layout: tuple[int, str], said: str
) -> None:
    """A copy on each helps nobody whose model is too large; the note says what was assumed."""
    found = memfit.estimate("meta-llama/Llama-3.1-8B", task="inference", offline=True, **words)
    ranks, name = layout
    assert found.strategy.ranks == ranks
    assert not name or found.strategy.size(name) == ranks
    notes = [one for one in found.problems if one.where == "use"]
    assert [said in one.message for one in notes] == ([True] if said else [])
    if said.startswith("`--use"):
        assert notes[0].hint == "`--use ddp` puts a copy on each GPU"
        alone = {**words, "gpu": "rtx-4090"}
        one = memfit.estimate("meta-llama/Llama-3.1-8B", task="inference", offline=True, **alone)
        assert found.device < 0.65 * one.device
