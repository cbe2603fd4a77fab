"""Pipelines: our schedules beside torch's own, and real ranks on the CPU that run them, joined by
gloo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.gloo import Rank, changes, measured, ranks, settled  # noqa: E402
from tests.torch.real_steps import Loop, built, traced, uncollected  # noqa: E402
from tests.torch.small import Small  # noqa: E402
from tests.torch.watch import Watch, told  # noqa: E402
from torch.profiler import record_function  # noqa: E402

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.lower.schedules import turns  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.parallel.pipeline.check import micro_batches, placed_at  # noqa: E402
from memfit.strategy import PP  # noqa: E402
from memfit.trace import trace_config  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE = 0.001  # of the real peak
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LETTERS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
    "whole": "B",
    "input": "I",
    "weight": "W",
}
JOB = Job(
    batch=2, seq=32, precision="fp32", optimizer="adamw_loop", clip=0.0, attention="eager"
)  # whose tensors are the same on either device


# ---------------------------------------------------------------------------------- order of turns
def torchs(pp: PP, rank: int, micro: int) -> list[tuple[str, int, int]]:
    """What torch's own code has a rank do: (kind, stage, micro-batch)."""
    from torch.distributed.pipelining import schedules

    from memfit.trace.stages import SCHEDULES

    kind = schedules.get_schedule_class(SCHEDULES[pp.schedule])
    rounds = max(1, micro // pp.size)
    own = object.__new__(kind)
    vars(own).update(
        pp_group_size=pp.size,
        n_local_stages=pp.virtual,
        _stages=[None] * pp.virtual,
        _n_microbatches=micro,
        number_of_rounds=rounds,
        microbatches_per_round=micro // rounds,
        num_stages=pp.size * pp.virtual,
    )
    return [
        (LETTERS[one[1].name], one[0], one[2])
        for one in own._calculate_single_rank_operations(rank)
        if one is not None
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["bfs", "interleaved", "zero-bubble", "zbv"])
def test_turns_are_torchs(schedule: str, virtual: int, size: int) -> None:
    if schedule == "interleaved" and virtual == 1:
        return  # refused: nothing is interleaved
    pp = PP(size=size, schedule=schedule, virtual=2 if schedule == "zbv" else virtual)
    for micro in (size, 3 * size):
        for rank in range(size):
            ours = [
                (
                    LETTERS["FORWARD" if turn.forward else turn.part],
                    placed_at(pp, rank)[turn.chunk],
                    turn.micro,
                )
                for turn in turns(pp, rank, micro, whole=True)
            ]
            assert ours == torchs(pp, rank, micro), rank


# -------------------------------------------------------------------------------------- real ranks
@dataclass(frozen=True)
class Pipelined:
    """One rank of a pipeline, alone or beside DDP or FSDP2: the model is made whole and cut, its
    stages run as torch's schedule has it."""

    use: str

    def __call__(self) -> Rank:
        import torch.distributed as dist

        from memfit.trace import stages
        from memfit.trace.ranks import mesh_of
        from memfit.trace.spread import Spread

        settled()
        small, loop = (
            Small(config=LLAMA),
            Loop(batch=JOB.batch, seq=JOB.seq, attention=JOB.attention),
        )
        strategy = replace(strategy_from(self.use.split(), None), rank=dist.get_rank())
        assert strategy.pp is not None
        spread = Spread(strategy, mesh_of(strategy, "cpu"))
        options = SimpleNamespace(strategy=strategy, device="cpu", spread=spread)
        with torch.backends.mkldnn.flags(enabled=False), measured() as profiler, Watch() as watch:
            torch.manual_seed(0)
            model = spread.cut(spread.split(built(small, loop)))
            optimizer = torch.optim.AdamW(model.parameters())
            # Replicas are equal already. What DDP would send, gloo's thread may be the last to let
            # go of, which no profiler of this thread sees.
            with mock.patch.object(dist, "_broadcast_coalesced"):
                schedule = stages.scheduled(model, JOB, options)
            first, last = (
                any(getattr(one, name) for one in model.parts) for name in ("begins", "ends")
            )
            watch.phase = "steps"
            with uncollected(), record_function("first step"):
                for _ in range(2):
                    ids, labels = (
                        torch.randint(
                            0, 2048, (JOB.batch * micro_batches(strategy.pp, JOB), JOB.seq)
                        )
                        for _ in range(2)
                    )
                    schedule.step(
                        *([ids] if first else []),
                        target=labels if last else None,
                        losses=[],
                        return_outputs=False,
                    )
                    optimizer.step()
                    optimizer.zero_grad()
        return Rank(changes=changes(profiler), peaks=watch.peaks)


REAL = (
    "pp=2",
    "pp=4",
    "pp=2,schedule=gpipe,micro-batches=4",
    "pp=4,schedule=gpipe,stages=2/2/1/1",
    "pp=2,schedule=interleaved,virtual=2,micro-batches=4",
    "pp=2,schedule=zero-bubble,virtual=2",
    "pp=2,schedule=zbv,virtual=2",
    "pp=2,schedule=bfs,virtual=3",
    "pp=2 fsdp=2,wrap=layers",
    "pp=2 ddp=2",
)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(use, marks=[] if place in (0, 2) else [pytest.mark.slow])
        for place, use in enumerate(REAL)
    ],
)
def test_every_stage_holds_what_is_said(use: str) -> None:
    strategy = strategy_from(use.split(), None)
    for rank, truth in enumerate(ranks(strategy.ranks, Pipelined(use))):
        own = replace(strategy, rank=rank)
        found = traced(trace_config(LLAMA, JOB, device="cpu", strategy=own))
        assert abs(found.before - truth.changes.before) <= 4096, (
            rank
        )  # step counters, and what reading the ranks' addresses left
        assert abs(found.peak - truth.changes.peak) <= CLOSE * truth.changes.peak, rank
        said = max(
            size
            for phase, size in told(lower(build(LLAMA), JOB, own)).items()
            if not phase.startswith("load")
        )
        assert abs(said - truth.peaks["steps"]) <= CLOSE * truth.peaks["steps"], rank


# --------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("use", "fields", "said"),
    [
        ("pp=2 cp=2", {}, "a pipeline with `cp`"),
        ("pp=2 fsdp=2,version=1", {}, "not FSDP1"),
        ("pp=2,schedule=zbv,virtual=2 ddp=2", {}, "` accumulates, so replicas would diverge"),
        ("pp=2 tp=2,sequence", {}, "stages with sequence parallelism"),
        ("pp=2", {"loss": "liger"}, "cannot be used"),
        ("pp=2", {"zero_grad": "keep"}, "other than training on packed sequences in a plain loop"),
        ("pp=2,schedule=zbv,virtual=2", {"checkpointing": "selective"}, "selective checkpointing"),
        ("pp=2,schedule=zbv", {}, "a V schedule needs two stages per rank"),
        ("pp=2,schedule=interleaved", {}, "that interleaves a single stage per rank"),
        ("pp=8", {}, "8 stages are more than 6 layers"),
    ],
)
def test_pipelines_that_have_no_formula_are_told_by_both(
    use: str, fields: dict[str, Any], said: str
) -> None:
    job, strategy = JOB.replace(**fields), strategy_from(use.split(), None)
    for run in (
        lambda: lower(build(LLAMA), job, strategy),
        lambda: trace_config(LLAMA, job, strategy=strategy),
    ):
        with pytest.raises(InputError, match=said):
            run()


def test_families_without_stages_are_told_by_both() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 1000,
        "n_positions": 256,
    }
    for run in (
        lambda: lower(build(config), JOB, strategy_from(["pp=2"], None)),
        lambda: trace_config(config, JOB, strategy=strategy_from(["pp=2"], None)),
    ):
        with pytest.raises(InputError, match="gpt2"):
            run()
