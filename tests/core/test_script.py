"""Passes that are walked once and played: event for event what a walk of every layer in every
micro-batch writes."""

from __future__ import annotations

from typing import Any

import pytest

from memfit import kernels
from memfit.job import Job
from memfit.lower import lower, run
from memfit.lower.recorder import Recorder
from memfit.lower.walk_cache import remembering
from memfit.model.families import build
from memfit.model.model import Model
from memfit.program import Program, placed
from memfit.strategy import Strategy, ZeRO
from memfit.tape import Alloc, Event, Free
from memfit.techniques import apply

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
GEMMA = {
    **CONFIG,
    "model_type": "gemma2",
    "head_dim": 64,
    "num_key_value_heads": 2,
    "num_hidden_layers": 10,
    "tie_word_embeddings": True,
}
MIXTRAL = {
    **CONFIG,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
}


def every_layer(model: Model, job: Job, strategy: Strategy) -> list[Event]:
    entries = placed(model.layers, False)
    program = apply(
        Program(model=model, job=job, entries=entries, weights=model.dtype, strategy=strategy)
    )
    r = Recorder()
    r.cublas = kernels.cublas_workspace(program.capability, job.version("torch"))
    held = run(r, program, None)
    events = list(r.events)
    del held
    return events


def told(events: list[Event]) -> list[Any]:
    """With blocks numbered as they come. Blocks that go one right after the other may go in any
    order: how deep a graph is decides it, in Python."""
    numbers: dict[int, int] = {}
    out: list[Any] = []
    for place, event in enumerate(events):
        if isinstance(event, Alloc):
            numbers[event.id] = place
            out.append(event._replace(id=numbers[event.id]))
        elif isinstance(event, Free):
            if not out or not isinstance(out[-1], set):
                out.append(set())
            out[-1].add((numbers[event.id], event.streams))
        else:
            out.append(event)
    return out


SETTINGS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "1-overlap": {"stage": 1, "overlap": True, "contiguous": False},
    "2": {},
    "2-apart": {"contiguous": False},
    "2-round": {"round_robin": True, "overlap": True},
    "2-offload": {"offload_optimizer": "cpu"},
    "3": {"stage": 3},
    "3-auto": {"stage": 3, "auto": True},
    "3-offload": {
        "stage": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "max_live": 300_000,
    },
}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "checkpointed": {"checkpointing": "every"},
    "lora": {"method": "lora", "accumulate": 2, "checkpointing": "every", "reentrant": True},
    "longest": {"longest": 64, "evaluate": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("job", JOBS)
def test_what_is_played_is_what_would_be_walked(settings: str, job: str) -> None:
    strategy = Strategy(zero=ZeRO(size=4, reduce_bucket=10**6, **SETTINGS[settings]), rank=1)
    model, work = build(CONFIG), Job(**{"seq": 32, **JOBS[job]})
    assert told(list(lower(model, work, strategy))) == told(every_layer(model, work, strategy))


@pytest.mark.parametrize("config", [GEMMA, MIXTRAL], ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize("stage", [2, 3])
def test_layers_that_alternate_and_experts(config: dict[str, Any], stage: int) -> None:
    strategy = Strategy(zero=ZeRO(size=4, stage=stage, auto=True))
    model, work = build(config), Job(seq=32, checkpointing="every", method="lora")
    assert told(list(lower(model, work, strategy))) == told(every_layer(model, work, strategy))


def test_it_is_played() -> None:
    """A model of many layers takes little more than one of few: the walk is of three."""
    few, many = (build({**CONFIG, "num_hidden_layers": layers}) for layers in (4, 64))
    strategy = Strategy(zero=ZeRO(size=4, reduce_bucket=10**6))
    assert work_of(many, strategy) < 3 * work_of(few, strategy)


def work_of(model: Model, strategy: Strategy) -> int:
    """How many tensors come to be that have a place in a graph or a size."""
    before = Counted.made
    program = apply(
        Program(
            model=model,
            job=Job(seq=32),
            entries=placed(model.layers, False),
            weights=model.dtype,
            strategy=strategy,
        )
    )
    folded = apply(
        Program(
            model=model,
            job=Job(seq=32),
            entries=placed(model.layers, True),
            weights=model.dtype,
            strategy=strategy,
        )
    )
    run(Counted(), program, (folded, lambda name, make: make()))
    return Counted.made - before


class Counted(Recorder):
    """Counts the nodes of every graph, also of recorders beside it."""

    made = 0

    def beside(self) -> Recorder:
        return Counted()

    def node(self, *given: Any, **more: Any) -> Any:
        Counted.made += 1
        return super().node(*given, **more)


@pytest.mark.parametrize("options", [{}, {"method": "lora"}, {"checkpointing": "full"}])
def test_stages_share_their_scripts(options: dict[str, Any]) -> None:
    """What a rank keeps for itself or on the host changes nothing that the model does."""
    model, job = build(CONFIG), Job(batch=2, seq=32, accumulate=2, **options)
    ways = [
        Strategy(zero=ZeRO(size=2, stage=stage, offload_optimizer=there, offload_param=weights))
        for stage, there, weights in (
            (1, "none", "none"),
            (2, "none", "none"),
            (2, "cpu", "none"),
            (3, "none", "none"),
            (3, "cpu", "none"),
            (3, "cpu", "cpu"),
        )
    ]
    alone = [lower(model, job, way) for way in ways]
    with remembering():
        assert [lower(model, job, way) for way in ways] == alone
