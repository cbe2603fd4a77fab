"""Stages of a pipeline: they share the model, run their micro-batches in the order of their
schedule, and hold what is in flight."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.lower.schedules import Turn, in_flight, turns
from memfit.model.families import build
from memfit.model.model import Model
from memfit.program import Program, placed
from memfit.simulate.memory import Memory, memory
from memfit.strategy import CP, DDP, PP, TP, Strategy
from memfit.tape import Alloc, Comm
from memfit.techniques import apply

SHAPE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MODEL = build(SHAPE, name="llama")
JOB = Job(framework="megatron", batch=1, seq=256, loss="te")


def program(strategy: Strategy, model: Model = MODEL, job: Job = JOB) -> Program:
    return apply(
        Program(
            model=model,
            job=job,
            entries=placed(model.layers, False),
            weights=model.dtype,
            strategy=strategy,
        )
    )


def stages(pp: PP, *, model: Model = MODEL, job: Job = JOB, compact: bool = True) -> list[Memory]:
    return [
        memory(lower(model, job, Strategy(pp=pp, rank=rank), compact=compact))
        for rank in range(pp.size)
    ]


def most(order: Sequence[Turn]) -> int:
    """Micro-batches in flight at the worst moment; every backward must come after its forward."""
    alive: set[tuple[int, int]] = set()
    found = 0
    for turn in order:
        key = turn.chunk, turn.micro
        if turn.forward:
            assert key not in alive
            alive.add(key)
        else:
            alive.remove(key)
        found = max(found, len(alive))
    assert not alive
    return found


@pytest.mark.parametrize(
    ("pp", "micro", "held"),
    [
        (PP(size=4), 8, [4, 3, 2, 1]),
        (PP(size=4), 2, [2, 2, 2, 1]),
        (PP(size=4, schedule="gpipe"), 8, [8, 8, 8, 8]),
        # 2·(stages behind) + (turns - 1)·stages forwards before the first backward, and the one
        # right before it
        (PP(size=4, schedule="interleaved", virtual=2), 16, [11, 9, 7, 5]),
        (PP(size=4, schedule="interleaved", virtual=2), 4, [8, 8, 7, 5]),
    ],
)
def test_micro_batches_in_flight(pp: PP, micro: int, held: list[int]) -> None:
    for stage, count in enumerate(held):
        assert most(turns(pp, stage, micro)) == in_flight(pp, stage, micro) == count


def test_a_long_step_is_written_down_in_short() -> None:
    """As many turns for a million micro-batches as for a hundred."""
    for pp in (PP(size=8), PP(size=8, schedule="interleaved", virtual=4)):
        assert turns(pp, 0, 1_000_000) == turns(pp, 0, 800)


def test_interleaved_turns_are_those_of_the_papers_figure() -> None:
    """Four ranks, two chunks each, the last rank: micro-batches 0 to 3 through its first chunk,
    then one of its second and back by turns."""
    order = turns(PP(size=4, schedule="interleaved", virtual=2), 3, 8)
    assert order[:6] == (
        Turn(True, 0, 0),
        Turn(True, 0, 1),
        Turn(True, 0, 2),
        Turn(True, 0, 3),
        Turn(True, 1, 0),
        Turn(False, 1, 0),
    )


def together(orders: Sequence[Sequence[Turn]], chunks: int) -> list[int]:
    """All ranks at once, each doing its next turn as soon as what it needs has come: the
    micro-batch from the stage before, the gradient from the one behind. Returns how many each held
    at most; a schedule that waits for itself never ends."""
    size, done, held, found = (
        len(orders),
        set[tuple[bool, int, int]](),
        [0] * len(orders),
        [0] * len(orders),
    )
    left = [list(order) for order in orders]
    while any(left):
        before = sum(map(len, left))
        for rank, order in enumerate(left):
            if not order:
                continue
            turn = order[0]
            stage = turn.chunk * size + rank
            last = stage == size * chunks - 1
            behind = (True, stage, turn.micro) if last else (False, stage + 1, turn.micro)
            needs = (True, stage - 1, turn.micro) if turn.forward else behind
            if (turn.forward and stage == 0) or needs in done:
                done.add((turn.forward, stage, order.pop(0).micro))
                held[rank] += 1 if turn.forward else -1
                found[rank] = max(found[rank], held[rank])
        assert sum(map(len, left)) < before, "every rank waits for another"
    return found


@given(
    size=st.integers(2, 8),
    virtual=st.integers(2, 4),
    groups=st.integers(1, 3),
    schedule=st.sampled_from(("1f1b", "gpipe", "interleaved")),
)
@settings(max_examples=60, deadline=None)
def test_schedules_of_all_ranks_fit_together(
    size: int, virtual: int, groups: int, schedule: str
) -> None:
    """Nobody waits for ever, every micro-batch goes through every stage and back, in the order of
    Megatron's table, and as many are in flight as is said."""
    virtual, micro = (virtual, groups * size) if schedule == "interleaved" else (1, groups)
    pp = PP(size=size, schedule=schedule, virtual=virtual, micro_batches=micro)
    orders = [turns(pp, rank, micro) for rank in range(size)]
    assert together(orders, virtual) == [in_flight(pp, rank, micro) for rank in range(size)]
    table = [
        (chunk, one)
        for group in range(0, micro, size)
        for chunk in range(virtual)
        for one in range(group, min(group + size, micro))
    ]
    for order in orders:
        assert [(turn.chunk, turn.micro) for turn in order if turn.forward] == table
        assert [
            (virtual - 1 - turn.chunk, turn.micro) for turn in order if not turn.forward
        ] == table


@pytest.mark.parametrize(
    "pp", [PP(size=4), PP(size=4, stages="5/5/4/2"), PP(size=2, schedule="interleaved", virtual=4)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_share_the_model(pp: PP, tied: bool) -> None:
    """Every parameter once; a tied table stands at both ends."""
    model = build({**SHAPE, "tie_word_embeddings": tied}, name="llama")
    parts = [program(Strategy(pp=pp, rank=rank), model) for rank in range(pp.size)]
    whole = model.parameters + (4096 * 512 if tied else 0)
    assert sum(part.model.parameters for part in parts) == whole
    numbers = [entry.number for part in parts for entry in part.entries]
    assert sorted(numbers) == list(range(16))
    weights = sum(found.parts["weights"] for found in stages(pp, model=model))
    assert weights == 2 * whole


@given(
    size=st.integers(2, 6),
    virtual=st.integers(1, 3),
    groups=st.integers(1, 3),
    schedule=st.sampled_from(("bfs", "zero-bubble", "zbv")),
)
@settings(max_examples=40, deadline=None)
def test_every_weight_gets_its_gradient_once(
    size: int, virtual: int, groups: int, schedule: str
) -> None:
    """Forward, then the gradient of what came in, then those of the weights, of every micro-batch
    in every chunk."""
    pp = PP(
        size=size,
        schedule=schedule,
        virtual=2 if schedule == "zbv" else virtual,
        micro_batches=groups * size,
    )
    for rank in range(size):
        order = turns(pp, rank, groups * size)
        for chunk in range(pp.virtual):
            for micro in range(groups * size):
                own = [
                    ("forward" if turn.forward else turn.part)
                    for turn in order
                    if (turn.chunk, turn.micro) == (chunk, micro)
                ]
                assert own == (
                    ["forward", "whole"] if schedule == "bfs" else ["forward", "input", "weight"]
                )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "bfs", "interleaved", "zero-bubble", "zbv"])
def test_short_tapes_of_torchs_stages_say_the_same(schedule: str) -> None:
    pp = PP(
        size=2,
        schedule=schedule,
        virtual=1 if schedule in ("1f1b", "gpipe") else 2,
        micro_batches=4,
    )
    job = Job(batch=1, seq=128, optimizer="sgd")
    for rank in range(2):
        short, flat = (
            memory(lower(MODEL, job, Strategy(pp=pp, rank=rank), compact=compact))
            for compact in (True, False)
        )
        assert short.parts == flat.parts


def test_deferred_gradients_hold_more() -> None:
    """`zero-bubble` keeps a micro-batch's activations until its weights have their gradients."""
    held = [
        memory(
            lower(
                MODEL,
                Job(batch=1, seq=128, optimizer="sgd"),
                Strategy(pp=PP(size=4, schedule=one, virtual=2, micro_batches=8), rank=2),
            )
        ).allocated
        for one in ("interleaved", "zero-bubble", "bfs")
    ]
    assert held[0] < held[2]
    assert held[1] < held[2]


def test_earlier_stages_hold_more() -> None:
    found = stages(PP(size=4, micro_batches=8))
    assert found[1].allocated > found[2].allocated  # the ends have tables beside their layers
    assert (
        found[0].parts["activations"]
        > found[1].parts["activations"]
        > found[2].parts["activations"]
    )


def test_a_micro_batch_in_flight_costs_what_a_stage_keeps() -> None:
    """A stage in the middle with one, two and three micro-batches in flight: each step adds as
    much."""
    found = [stages(PP(size=4, micro_batches=count))[1].parts["activations"] for count in (1, 2, 3)]
    assert found[1] - found[0] == found[2] - found[1] > 0
    more = [stages(PP(size=4, micro_batches=count))[1].allocated for count in (4, 5, 100)]
    assert more[0] == more[1] == more[2]


@pytest.mark.parametrize(
    "pp",
    [
        PP(size=2, micro_batches=6),
        PP(size=2, schedule="gpipe", micro_batches=3),
        PP(size=2, schedule="interleaved", virtual=2, micro_batches=4),
    ],
)
def test_short_tapes_say_the_same(pp: PP) -> None:
    for short, flat in zip(stages(pp), stages(pp, compact=False), strict=True):
        assert short.parts == flat.parts


def test_stages_pass_hidden_states_on() -> None:
    """A received and a sent state for each micro-batch and direction, in buffers of their own; with
    sequence parallelism a part of each."""
    for tp in (None, TP(size=2, sequence=True)):
        tape = lower(
            MODEL, JOB, Strategy(pp=PP(size=4, micro_batches=4), tp=tp, rank=4 if tp else 2)
        )
        size = 256 * 512 * 2 // (1 if tp is None else 2)
        passed = [event for event in tape if type(event) is Comm and event.group == "pp"]
        assert {event.size for event in passed} == {size}
        count = 2 * 2 * 4  # steps, directions, micro-batches
        assert [sum(event.op == op for event in passed) for op in ("recv", "send")] == [
            count,
            count,
        ]
        assert [event.size for event in tape if type(event) is Alloc and event.op == "recv"] == [
            size
        ] * count


@pytest.mark.parametrize("style", ["ulysses", "ring", "allgather"])
def test_ranks_of_context_parallelism_share_the_tokens(style: str) -> None:
    """Activations shrink with the ranks; weights do not."""
    found = [
        memory(lower(MODEL, JOB, Strategy(cp=CP(size=size, style=style)), compact=True)).parts
        for size in (1, 2, 4)
    ]
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]
    for wide, half in itertools.pairwise(found):
        assert half["activations"] == pytest.approx(wide["activations"] / 2, rel=0.1)


def test_all_to_all_buffers() -> None:
    """Queries, keys and values go out and in, and the result back; the gradients the other way
    round: eight exchanges a layer and step."""
    tape = lower(MODEL, JOB, Strategy(cp=CP(size=4, style="ulysses")))
    layer = [
        event
        for event in tape
        if type(event) is Comm and event.op == "all_to_all" and ".7" in event.where
    ]
    query, key = 64 * 8 * 64 * 2, 64 * 4 * 64 * 2  # tokens, heads, size, bytes
    assert sorted(event.size for event in layer) == sorted(
        2 * [query, key, key, query, query, query, key, key]
    )


def test_a_hundred_thousand_gpus_are_no_more_work() -> None:
    """The events are those of the rank, whose share of the optimizer has fewer tensors the more
    ranks there are."""
    few = lower(
        MODEL,
        JOB,
        Strategy(pp=PP(size=4, micro_batches=8), tp=TP(size=2), ddp=DDP(size=2, distributed=True)),
        compact=True,
    )
    many = lower(
        MODEL,
        JOB,
        Strategy(
            pp=PP(size=4, micro_batches=8), tp=TP(size=2), ddp=DDP(size=2**14, distributed=True)
        ),
        compact=True,
    )
    assert len(few) >= len(many) > len(few) * 0.9


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Strategy(pp=PP(size=32)), "32 stages are more than 16 layers"),
        (
            Strategy(pp=PP(size=4, stages="4/4/4")),
            "`stages` lists 3 stages and 12 layers, but there are 4",
        ),
        (Strategy(pp=PP(size=4, stages="4/4/8/0")), "a stage has no layers"),
        (Strategy(pp=PP(size=4, stages="4/4/x/4")), "`4/4/x/4` is not a list of layers"),
        (Strategy(pp=PP(size=4, virtual=2)), "2 stages per rank need an interleaved schedule"),
        (
            Strategy(pp=PP(size=4, virtual=2, schedule="interleaved", micro_batches=6)),
            "4 stages do not divide 6 micro-batches",
        ),
        (Strategy(pp=PP(size=4, schedule="zero-bubble")), "not supported yet: the schedule"),
        (Strategy(pp=PP(size=4, schedule="bfs")), "not supported yet: the schedule"),
        (Strategy(pp=PP(size=4, schedule="gpipe", micro_batches=2**20)), "in flight"),
        (Strategy(cp=CP(size=8, style="ulysses")), "8 ranks do not divide the 4 heads of a rank"),
        (Strategy(cp=CP(size=3)), "256 tokens are not a multiple of 6"),
    ],
)
def test_pipelines_that_cannot_be_are_told(strategy: Strategy, said: str) -> None:
    with pytest.raises(InputError, match=said):
        program(strategy)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"checkpointing": "selective"},
            "hint: use `1f1b`, `interleaved` or `--checkpointing full`",
        ),
        ({"reentrant": True}, "13 utils/checkpoint"),
    ],
)
def test_checkpoints_that_a_backward_in_two_parts_does_not_go_with(
    changes: dict[str, object], said: str
) -> None:
    job, strategy = (
        Job(**{"batch": 1, "seq": 256, "checkpointing": "full"} | changes),  # type: ignore[arg-type]
        Strategy(pp=PP(size=2, virtual=2, schedule="zero-bubble")),
    )
    with pytest.raises(InputError, match=said):
        lower(MODEL, job, strategy)


def test_what_each_weight_has_a_checkpoint_make_again_stays() -> None:
    """A backward in two parts holds more with checkpoints than without: each weight runs its layer
    again, and what others saved there stays."""

    def held(schedule: str, checkpointing: str) -> int:
        job = Job(batch=1, seq=2048, checkpointing=checkpointing, optimizer="sgd")
        return memory(
            lower(MODEL, job, Strategy(pp=PP(size=2, virtual=2, schedule=schedule), rank=1))
        ).allocated

    assert held("interleaved", "full") < held("interleaved", "none")
    assert held("zero-bubble", "full") > held("interleaved", "full") + (
        held("zero-bubble", "none") - held("interleaved", "none")
    )


def test_an_evaluation_holds_what_each_micro_batch_gave() -> None:
    """No backward takes them away: the last stage has the logits of all, and other stages nothing
    of that size."""

    def held(micro_batches: int, rank: int) -> tuple[str, int]:
        job = Job(batch=1, seq=256, evaluate=True, eval_batch=4, optimizer="sgd")
        found = memory(
            lower(MODEL, job, Strategy(pp=PP(size=2, micro_batches=micro_batches), rank=rank))
        )
        return next(
            (one.moment, one.allocated) for one in found.timeline if one.phase == "evaluate"
        )

    logits, states = 4 * 256 * MODEL.vocab * 2, 4 * 256 * MODEL.width * 2
    (moment, four), (_, eight) = held(4, 1), held(8, 1)
    assert moment == "evaluate"
    assert 4 * logits <= eight - four <= 4 * (logits + 2 * states)
    assert held(8, 0)[1] - held(4, 0)[1] <= 4 * 2 * states
    with pytest.raises(InputError, match="s stages exchange gradients without a backward"):
        lower(
            MODEL,
            Job(batch=1, seq=256, evaluate=True),
            Strategy(pp=PP(size=2, virtual=2, schedule="zbv")),
        )


def test_a_stage_that_trains_nothing_is_told() -> None:
    job = Job(batch=1, seq=32, method="freeze", trainable="layers.1.")
    assert len(lower(MODEL, job, Strategy(pp=PP(size=2))))
    with pytest.raises(InputError, match="a stage has no parameters in `layers"):
        lower(MODEL, job, Strategy(pp=PP(size=2), rank=1))
