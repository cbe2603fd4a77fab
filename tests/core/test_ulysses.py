"""DeepSpeed's Ulysses attention beside ZeRO: what a rank has and sends, and what there is not."""

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Comm, Tape
from memfit.uses import strategy_from

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def written(
    use: str, config: dict[str, Any] = LLAMA, compact: bool = False, **options: Any
) -> Tape:
    return lower(
        build(config),
        Job(**{"batch": 2, "seq": 64, **options}),
        strategy_from(use.split(), None),
        compact=compact,
    )


def sent(tape: Tape) -> list[int]:
    """Bytes of an attention's exchanges in turn: queries, keys, values, result."""
    return [event.size for event in tape if type(event) is Comm and event.op == "all_to_all"][:4]


@pytest.mark.parametrize(("ranks", "keys"), [(2, 1), (4, 2), (8, 4)])
def test_keys_of_fewer_heads_than_ranks_are_copied_before_they_go(ranks: int, keys: int) -> None:
    """Of 2 sequences of 64 tokens a rank has 64 / `ranks`, in 64 values of queries and 16 of keys,
    in 2 bytes."""
    whole = 2 * 64 // ranks * 2
    assert sent(written(f"cp={ranks},style=ulysses zero=1,stage=3")) == [
        64 * whole,
        16 * max(1, ranks // 2) * whole,
        16 * keys * whole,
        64 * whole,
    ]


@pytest.mark.parametrize(
    "use",
    [
        "cp=2,style=ulysses zero=4,stage=3",
        "cp=4,style=ulysses zero=2,stage=3",
        "cp=8,style=ulysses zero=1,stage=3",
    ],
)
def test_partitions_go_over_the_ranks_of_a_sequence_too(use: str) -> None:
    parts, alone = memory(written(use)).parts, memory(written("zero=8,stage=3")).parts
    assert [parts[name] for name in ("weights", "optimizer", "master")] == [
        alone[name] for name in ("weights", "optimizer", "master")
    ]
    ranks = {event.ranks for event in written(use) if type(event) is Comm and event.group == "zero"}
    assert ranks == {8}


def test_gradients_travel_in_fp32() -> None:
    def bucket(use: str) -> int:
        return max(
            event.size for event in written(use) if type(event) is Alloc and event.op == "bucket"
        )

    assert bucket("cp=2,style=ulysses zero=2,stage=3") == 2 * bucket("zero=4,stage=3")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("options", [{}, {"checkpointing": "full"}])
def test_compact_tapes_agree(stage: int, options: dict[str, Any]) -> None:
    use, deep = f"cp=2,style=ulysses zero=2,stage={stage}", {**LLAMA, "num_hidden_layers": 6}
    short, flat = (memory(written(use, deep, compact, **options)) for compact in (True, False))
    assert (short.parts, short.reserved) == (flat.parts, flat.reserved)


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("cp=2,style=ulysses fsdp=2", {}, "s and needs ZeRO"),
        (
            "cp=2,style=ulysses zero=2,stage=3",
            {"attention": "eager"},
            "hint: use `--attention sdpa` or `flash-attn-2`",
        ),
        (
            "cp=2,style=ulysses zero=2,stage=3",
            {"attention": "math"},
            "Ulysses attention supports SDPA and flash-attn only",
        ),
        (
            "cp=2,style=ulysses zero=2,stage=3",
            {"task": "inference"},
            "Ulysses attention supports training only",
        ),
        (
            "cp=8,style=ulysses zero=1,stage=3",
            {"evaluate": True},
            "evaluation fails: 8 ranks leave one query head per group,",
        ),
        ("cp=2,style=ulysses zero=2,stage=3", {"seq": 63}, "2 ranks do not divide 63 tokens"),
        (
            "cp=3,style=ulysses zero=2,stage=3",
            {"seq": 63},
            "3 ranks do not divide 8 query and 2 key/value heads",
        ),
        (
            "cp=2,style=ulysses zero=2,stage=3",
            {"framework": "torchtitan"},
            "not supported yet: Ulysses attention of torchtitan",
        ),
        ("cp=2 zero=2,stage=3", {}, "beside `cp`"),
    ],
)
def test_what_cannot_be_is_told(use: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        written(use, **options)
