"""LLMem's Algorithm 1 as a policy: its scores by hand, and its published choices from memfit's own
memory."""

from __future__ import annotations

import pytest
from tests.core.test_gemini import JOB, METHODS, asked, built
from tests.sampling import sampled

from memfit.hardware import parse_cluster
from memfit.plan import llmem
from memfit.plan.llmem import OFFLOAD, Way, chosen, method_of, ranked, ways
from memfit.plan.planning import Wish, plan
from memfit.plan.space import Work
from memfit.uses import strategy_from

CLUSTER = parse_cluster("4xv100-sxm2-16gb")


def test_scores_by_hand() -> None:
    """Four GPUs: plain data parallelism counts half as much again as a sharded one, tensor
    parallelism counts its batch once."""
    four = [Way("DP", 2, 4), Way("ZeRO-3", 3, 4), Way("TP", 11, 1), Way("DP+TP", 6, 2)]
    assert [way.score for way in four] == [12.0, 12.0, 11.0, 12.0]
    assert [way.method for way in ranked(four)] == [
        "DP",
        "ZeRO-3",
        "DP+TP",
        "TP",
    ]  # ties in the order of the paper
    assert chosen(four) == "DP"


def test_what_does_not_fit_is_not_chosen() -> None:
    assert chosen([Way("DP", 0, 4), Way("ZeRO-3", 0, 4), Way("TP", 1, 1)]) == "TP"
    assert chosen([Way("DP", 0, 4), Way("TP", 0, 1)]) == OFFLOAD
    assert ranked([]) == []


def test_a_batch_beyond_one_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT-2.7B with data and tensor parallelism: 8 sequences fit, 9 do not, 11 do again."""

    def batch(*fits: int) -> int:
        monkeypatch.setattr(llmem, "gets_through", lambda *given: given[-1] in fits)
        return llmem.largest(built("openai-community/gpt2"), JOB, CLUSTER, strategy_from([], 1))

    assert batch(1, 2, 3, 4, 5, 6, 7, 8, 11, 12) == 8
    assert batch(*range(1, 22)) == 21
    assert batch(1) == 1
    assert batch() == 0
    assert batch(*range(1, 5000)) == 1024


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["ddp=4"], "DP"),
        (["fsdp=4"], "ZeRO-3"),
        (["zero=4,stage=3"], "ZeRO-3"),
        (["gemini=4"], "ZeRO-3"),
        (["gemini=1", "tp=4"], "TP"),
        (["tp=4"], "TP"),
        (["gemini=2", "tp=2"], "DP+TP"),
        (["fsdp=2", "tp=2"], "DP+TP"),
        (["zero=4,stage=2"], None),
        (["pp=4"], None),
        (["fsdp=4,reshard=no"], None),
        (["ddp=2", "tp=2"], None),
    ],
)
def test_methods_of_strategies(words: list[str], method: str | None) -> None:
    assert method_of(strategy_from(words, 4)) == method


PUBLISHED = (
    ("facebook/opt-2.7b", "TP"),
    ("bigscience/bloom-3b", "TP"),
    ("bigcode/gpt_bigcode-santacoder", "ZeRO-3"),
    ("huggyllama/llama-7b", OFFLOAD),
    ("facebook/opt-1.3b", "ZeRO-3"),
    ("bigscience/bloom-1b1", "ZeRO-3"),
    ("microsoft/BioGPT-Large", "ZeRO-3"),
    ("Salesforce/codegen-2B-nl", "TP"),
    ("EleutherAI/gpt-neo-1.3B", "ZeRO-3"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "taken"), sampled(PUBLISHED, 2, 1))
def test_choices_as_published(name: str, taken: str) -> None:
    """All nine of the paper's Table 3 with MEMFIT_WHOLE, among them the two that LLMem's formulas
    miss without its measured base (test_accuracy)."""
    found = ways(
        built(name),
        JOB,
        CLUSTER,
        [strategy_from(words, 4) for words in METHODS.values()],
    )
    assert chosen(found) == taken


def test_a_plan_may_be_made_by_it() -> None:
    """Each layout of the algorithm's methods with its largest micro-batch, most sequences first;
    others are not looked at."""
    cluster = parse_cluster("4xrtx-3060-12gb")
    named = tuple(
        strategy_from(words, 4)
        for words in (
            ["ddp=4"],
            ["ddp=4,bucket-view"],
            ["fsdp=4"],
            ["fsdp=4,reshard=no"],
            ["zero=4,stage=2"],
        )
    )
    axes = {"method": ("full",), "checkpointing": ("none", "full"), "optimizer": ("adamw_fused",)}
    work = Work(
        model=built("openai-community/gpt2"),
        job=JOB.replace(reentrant=False, versions=""),
        axes=axes,
        sequences=64,
        strategies=named,
    )
    found = plan(work, cluster, Wish(policy="llmem"))
    assert [row.kind.layout for row in found.rows] == ["ddp", "fsdp"]
    assert {row.estimate.job.checkpointing for row in found.rows} == {"full"}
    scores = [
        row.estimate.job.batch * 4 * factor
        for row, factor in zip(found.rows, (1.5, 1.0), strict=True)
    ]
    assert scores == sorted(scores, reverse=True)


# Seconds that Table 3 gives for 4DP, 2DP+2TP and 4TP, each with its largest batch; beside them
# batches that memfit found (`ways`) before the loss had two slices.
MEASURED = {
    "facebook/opt-1.3b": ((688, 1616, 2186), (25, 31, 35)),
    "bigscience/bloom-1b1": ((680, 1724, 2631), (10, 11, 13)),
    "microsoft/BioGPT-Large": ((1022, 3315, 4773), (24, 28, 31)),
    "bigcode/gpt_bigcode-santacoder": ((651, 1292, 1652), (27, 33, 41)),
    "EleutherAI/gpt-neo-1.3B": ((768, 1686, 2372), (17, 21, 23)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_where_all_three_ran_the_quickest_is_told_and_the_slowest(name: str) -> None:
    """Not so where 4DP does not fit: 4TP was the quicker for OPT-2.7b (by a quarter) and CodeGen-2B
    (by 1 %), and by kernels and links alone 2DP+2TP is. With the batches found then (7 x 2 and 19
    sequences, 5 x 2 and 10) both steps of each model took as long, 2.2 s and 1.2 s: they waited for
    the host, 2.3 to 3.8 ms for each linear layer and pass in the six models of which it is known;
    no tape has Python's time. bloom-3b's third way is 2DP+2TP, measured out of memory
    (test_gemini). Of the five here both ways with tensor parallelism took 0.94 to 1.5 times as long
    beside 4DP as is said."""
    measured, batches = MEASURED[name]
    seconds = []
    for method, batch in zip(METHODS, batches, strict=True):
        said = asked(built(name), method, batch=batch)
        assert said.time is not None
        seconds.append(said.time.seconds / (batch * said.strategy.data))
    assert sorted(range(3), key=lambda one: seconds[one]) == sorted(
        range(3), key=lambda one: measured[one]
    )
    for way in (1, 2):
        assert seconds[way] / seconds[0] > 0.65 * measured[way] / measured[0]
