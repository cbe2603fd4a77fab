"""Experts over ranks as transformers' own plan spreads them: what each rank holds and receives, and
what there is not."""

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Comm, Mark, Tape
from memfit.uses import strategy_from

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
JOB: dict[str, Any] = {"batch": 2, "seq": 64, "optimizer": "adamw"}


def written(use: str, compact: bool = False, **options: Any) -> Tape:
    return lower(
        build(MIXTRAL), Job(**{**JOB, **options}), strategy_from(use.split(), None), compact=compact
    )


def rows(tape: Tape) -> list[int]:
    """Of 64 values in 2 bytes, of the collectives in turn."""
    return [event.size // 128 for event in tape if type(event) is Comm and event.op == "all_to_all"]


@pytest.mark.parametrize(("ep", "same"), [(2, 4), (4, 2), (8, 1)])
def test_a_rank_holds_its_experts_and_a_shard_of_all_else(ep: int, same: int) -> None:
    model = build(MIXTRAL)
    experts = sum(weight.count for weight in model.weights() if weight.role == "expert")
    tape = written(f"fsdp=8 ep={ep}")
    held = sum(event.size for event in tape if type(event) is Alloc and event.op == "shard")
    assert held == 2 * (experts // ep // same + (model.parameters - experts) // 8)
    ranks = {
        (event.op, event.ranks) for event in tape if type(event) is Comm and event.group == "efsdp"
    }
    assert ranks == ({("all_gather", same), ("reduce_scatter", same)} if same > 1 else set())


def test_groups_of_ranks_are_counted() -> None:
    """Of 16 ranks 8 hold all experts between them; two hold the same ones, eight ranks apart, and
    two more in the other replica."""
    assert strategy_from(["fsdp=16", "ep=8"], None).groups == (
        ("fsdp", 16, 1),
        ("ep", 8, 1),
        ("efsdp", 2, 8),
    )
    assert strategy_from(["fsdp=8", "ddp=2", "ep=8"], None).groups == (
        ("fsdp", 8, 1),
        ("ddp", 2, 8),
        ("ep", 8, 1),
    )


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 4.0])
def test_the_busiest_rank_gets_so_many_rows(imbalance: float) -> None:
    """128 tokens with 2 choices each: 256 rows go, and that many times `imbalance` come; there and
    back, forwards and backwards."""
    assert rows(written(f"fsdp=4 ep=4,imbalance={imbalance}"))[:4] == [int(256 * imbalance)] * 4


@pytest.mark.parametrize(
    ("phase", "options"),
    [("evaluate", {"evaluate": True}), ("forward", {"checkpointing": "full", "reentrant": True})],
)
@pytest.mark.parametrize(
    ("use", "op"),
    [
        ("fsdp=4 ep=4", "all_to_all"),
        ("tp=2 fsdp=2 ep=4,tensor=1", "all_to_all"),
        ("tp=2 fsdp=2 ep=2,tensor=1", "all_reduce"),
    ],
)
def test_without_gradients_rows_stay_where_all_ranks_have_the_same(
    use: str, op: str, phase: str, options: dict[str, Any]
) -> None:
    found, now = set(), ""
    for event in written(use, **options):
        if type(event) is Mark:
            now = event.phase
        elif type(event) is Comm and event.group == "ep" and now == phase:
            found.add(event.op)
    assert found == {op}


def test_rows_that_do_not_divide_go_to_the_first_experts() -> None:
    """Of 15 tokens' 30 choices 6 experts get 4 and 2 get 3; the first rank of four has two of the
    first."""
    use = "fsdp=4 ep=4"
    assert rows(written(use, batch=1, seq=15))[0] == max(30, 4 * 8)
    last = lower(
        build(MIXTRAL),
        Job(**{**JOB, "batch": 1, "seq": 15}),
        strategy_from(use.split(), None).__class__(
            **{**strategy_from(use.split(), None).__dict__, "rank": 3}
        ),
    )
    assert rows(last)[0] == max(30, 4 * 6)


def test_ranks_of_a_sequence_send_a_part_of_its_tokens_each() -> None:
    """128 tokens of two ranks: each sends 64 with 2 choices. What comes of them is gathered,
    weighted with Mixtral's weights in fp32; so are, on the way back, the gradients of the tokens
    and of the weights."""
    tape = written("tp=2 fsdp=2 ep=4,tensor=1")
    assert rows(tape)[:4] == [128] * 4
    gathered = {
        event.size
        for event in tape
        if type(event) is Comm
        and (event.op, event.group) == ("all_gather", "tp")
        and "experts" in event.where
    }
    assert gathered == {128 * 64 * 4, 128 * 64 * 2, 128 * 2 * 4}


@pytest.mark.parametrize(
    "options", [{}, {"checkpointing": "full"}, {"method": "lora", "targets": "q_proj"}]
)
@pytest.mark.parametrize("use", ["fsdp=4 ep=4", "fsdp=4 ep=2", "fsdp=2 ddp=2 ep=2"])
def test_compact_tapes_agree(use: str, options: dict[str, Any]) -> None:
    short, flat = (memory(written(use, compact, **options)) for compact in (True, False))
    assert (short.parts, short.reserved) == (flat.parts, flat.reserved)


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("ddp=2 ep=2", {}, "transformers runs expert parallelism on the ranks of FSDP2"),
        ("fsdp=2,version=1 ep=2", {}, "transformers runs expert parallelism on the ranks of FSDP2"),
        ("zero=2,stage=3 ep=2", {}, "transformers runs expert parallelism on the ranks of FSDP2"),
        ("fsdp=2 ddp=2 ep=4", {}, "expert parallel size 4 does not divide the 2 ranks that"),
        (
            "fsdp=2 ep=2,capacity=1.5",
            {},
            "transformers does not drop or pad tokens: this setting is",
        ),
        ("fsdp=2 pp=2 ep=2", {}, "hint: use it with `fsdp`, and `ddp` for replicas"),
        ("fsdp=2 ep=2", {"router_skew": 2.0}, "under expert parallelism the busiest rank counts"),
        ("fsdp=2 ep=2", {"versions": "transformers=5.20"}, "before transformers 5.23"),
        (
            "fsdp=2 ep=2",
            {"framework": "torchtune"},
            "not supported yet: expert parallelism of torchtune",
        ),
        ("fsdp=3 ep=3", {}, "3 ranks do not divide 8 experts"),
        ("tp=2 ep=2", {}, "2 ranks of experts times 2 that share each do not divide"),
        ("tp=2 fsdp=4 ep=4", {}, "transformers does not shard the matrices of an expert under"),
        ("tp=2 fsdp=3 ep=3,tensor=1", {}, "no multiple of `tp`"),
    ],
)
def test_what_cannot_be_is_told(use: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        written(use, **options)
