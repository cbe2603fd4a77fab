"""Replicas: what the buckets of DDP cost, and that one rank alone knows nothing of them."""

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.formats import BF16, FP32
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.model import Model
from memfit.parallel.ddp.engine import CAP, FIRST, MIB, Item, bucket_sizes
from memfit.simulate.memory import memory
from memfit.strategy import DDP, Strategy
from memfit.tape import Alloc, Free, Tape, check
from memfit.uses import strategy_from

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
JOB = Job(seq=64)


@pytest.fixture(scope="module")
def model() -> Model:
    return build(CONFIG)


def buckets(tape: Tape) -> list[list[int]]:
    """The sizes of the buckets alive together, each time that they change."""
    live: dict[int, int] = {}
    seen: list[list[int]] = []
    for event in tape:
        if type(event) is Alloc and event.op == "bucket":
            live[event.id] = event.size
            seen.append(list(live.values()))
        elif type(event) is Free:
            live.pop(event.id, None)
    return seen


@pytest.mark.parametrize(
    "ddp",
    [
        DDP(size=8),
        DDP(size=8, bucket_view=True),
        DDP(size=8, static_graph=True),
        DDP(size=8, find_unused="yes", bucket_mb=1),
    ],
)
def test_every_gradient_has_its_place_in_a_bucket(model: Model, ddp: DDP) -> None:
    tape = lower(model, JOB, Strategy(ddp=ddp))
    check(tape)
    assert max(sum(sizes) for sizes in buckets(tape)) == 2 * model.parameters
    assert lower(model, JOB, Strategy(ddp=ddp), compact=True).repeats
    live = memory(lower(model, JOB, Strategy(ddp=ddp), compact=True))
    assert live.allocated == memory(tape).allocated
    assert sum(live.parts.values()) == live.allocated


def test_buckets_are_built_anew_in_the_order_of_the_gradients(model: Model) -> None:
    first, *_, last = buckets(lower(model, JOB, Strategy(ddp=DDP(size=8))))
    assert first == [2 * model.parameters]
    assert last == [
        2 * 4000 * 256,
        2 * (model.parameters - 4000 * 256),
    ]  # the head is more than the first one's cap


def test_gradients_that_are_views_cost_nothing_beside_the_buckets(model: Model) -> None:
    apart, within = (
        memory(lower(model, JOB, Strategy(ddp=DDP(size=8, bucket_view=view))))
        for view in (False, True)
    )
    assert apart.parts["gradients"] == 2 * model.parameters
    assert apart.allocated - within.allocated > 1.8 * model.parameters


def test_only_what_is_trained_is_in_the_buckets(model: Model) -> None:
    job = Job(seq=64, method="lora")
    tape = lower(model, job, Strategy(ddp=DDP(size=2)))
    adapters = sum(
        event.size
        for event in tape
        if type(event) is Alloc and event.where.endswith("_proj") and event.op == "parameter"
    )
    adapters -= sum(
        2 * weight.count
        for weight in model.weights()
        if weight.role == "linear" and "_proj" in weight.name
    )
    assert max(sum(sizes) for sizes in buckets(tape)) == adapters > 0


def test_buckets_close_when_they_are_full() -> None:
    items = [
        Item(MIB // 2, BF16),
        Item(MIB, FP32),
        Item(MIB // 2, BF16),
        Item(3 * MIB, BF16),
        Item(5, FP32),
        Item(2 * MIB, BF16),
    ]
    assert bucket_sizes(items, ()) == [6 * MIB, MIB + 5]
    assert bucket_sizes(items, (MIB, 4 * MIB)) == [MIB, MIB, 5 * MIB, 5]


@pytest.mark.parametrize(
    ("ddp", "options", "said"),
    [
        (DDP(size=8, static_graph=True), {"accumulate": 2}, "a static graph's first backward"),
        (
            DDP(size=8, find_unused="yes"),
            {"checkpointing": "full", "reentrant": True},
            "ready twice",
        ),
    ],
)
def test_what_torch_stops_at_is_refused(
    model: Model, ddp: DDP, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        lower(model, Job(**options), Strategy(ddp=ddp))


@pytest.mark.parametrize(
    ("options", "looks"),
    [
        ({"framework": "trl", "checkpointing": "none"}, "yes"),
        ({"framework": "trl", "checkpointing": "full"}, "no"),
        ({"framework": "trl", "checkpointing": "full", "method": "lora"}, "yes"),
        ({"framework": "transformers"}, "no"),
    ],
)
def test_the_trainer_says_whether_ddp_looks_for_unused_parameters(
    model: Model, options: dict[str, Any], looks: str
) -> None:
    """transformers 5.23 trainer.py _build_accelerator_args; a loop by hand has torch's default."""
    job = Job(seq=64, **options)
    by_default, said, other = (
        lower(model, job, strategy_from([f"ddp=8{setting}"], None))
        for setting in ("", f",find_unused={looks}", f",find-unused={looks != 'yes'}")
    )
    assert by_default.events == said.events != other.events


def test_a_word_unlike_all_choices_gets_all_of_them() -> None:
    with pytest.raises(InputError) as bad:
        strategy_from(["ddp=8,find_unused=maybe"], None)
    assert bad.value.problems[0].hint == "one of auto, yes, no"


def test_reentrant_checkpoints_fail_where_the_trainer_looks(model: Model) -> None:
    job = Job(seq=64, framework="trl", method="lora", checkpointing="full", reentrant=True)
    with pytest.raises(InputError, match="ready twice") as bad:
        lower(model, job, Strategy(ddp=DDP(size=8)))
    assert "find_unused=no" in bad.value.problems[0].hint
    lower(model, job, strategy_from(["ddp=8,find_unused=off"], None))


def test_a_bucket_is_full_at_one_mebibyte_and_then_at_25() -> None:
    """torch 2.13 distributed.py: the first bucket is small, so that sums begin early; the others
    hold 25 MiB unless `bucket_mb` says more or less."""
    assert (FIRST, CAP) == (MIB, 25 * MIB)
    items = [Item(MIB, BF16) for _ in range(60)]
    assert bucket_sizes(items, (FIRST, CAP)) == [MIB, 25 * MIB, 25 * MIB, 9 * MIB]
    assert bucket_sizes(items, (2 * MIB,)) == [2 * MIB] * 30
