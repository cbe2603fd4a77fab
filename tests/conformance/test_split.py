"""Tensor parallelism by transformers' own plan: inference by formulas beside the trace, and what is
refused (`layouts.py` has training)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from tests.conformance.layouts_ep import SPREADABLE  # noqa: E402
from tests.conformance.layouts_split import ANSWERS as EXPERTS  # noqa: E402
from tests.conformance.models import SPLIT, SPLITTABLE  # noqa: E402

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.tape import Alloc  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

ANSWERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "tp=2", {}),
    ("llama", "tp=4", {"batch": 8, "seq": 256}),
    ("llama-tied", "tp=2", {"attention": "eager", "batch": 4}),
    ("llama", "tp=4", {"logits": "all", "new_tokens": 0, "batch": 8}),
    ("llama-biased", "tp=2", {"cache": "static"}),
    ("qwen2", "tp=2", {"precision": "fp16"}),
    ("gemma2-tied", "tp=2", {"precision": "fp32"}),
    ("qwen3", "tp=4", {"batch": 16}),
    ("granite", "tp=2", {"cache": "none", "new_tokens": 3}),
)


@pytest.mark.parametrize(("name", "use", "options"), [*ANSWERS, *EXPERTS], ids=str)
def test_a_rank_that_answers(name: str, use: str, options: dict[str, Any]) -> None:
    from memfit.trace import trace_config

    job = Job(**{"task": "inference", "batch": 2, "seq": 128, "new_tokens": 8, **options})
    strategy, config = strategy_from(use.split(), None), SPLIT.get(name) or SPREADABLE[name]
    tapes = trace_config(config, job, strategy=strategy), lower(build(config), job, strategy)
    truth, found = (memory(tape) for tape in tapes)
    first = [
        next(event.size for event in tape.events if isinstance(event, Alloc)) for tape in tapes
    ]  # what warms the allocator up
    assert abs(first[0] - first[1]) <= 1024  # buffers that no checkpoint has
    assert abs(found.allocated - truth.allocated) <= 0.001 * truth.allocated, (
        found.parts,
        truth.parts,
    )


def refused(model: str, use: str, **options: Any) -> str:
    from memfit.trace import trace_config

    strategy, job = (
        strategy_from(use.split(), None),
        Job(**{"task": "inference", "batch": 2, "seq": 128, "new_tokens": 8, **options}),
    )
    config = SPLIT.get(model) or SPREADABLE[model]
    with pytest.raises(InputError) as ours:
        lower(build(config), job, strategy)
    with pytest.raises(InputError) as real:
        trace_config(config, job, strategy=strategy)
    both = {one.message for one in ours.value.problems} & {
        one.message for one in real.value.problems
    }
    return " / ".join(sorted(both))


def test_what_experts_over_ranks_do_not_answer_both_producers_refuse() -> None:
    assert "in inference transformers needs expert parallelism on all ranks of ten" in refused(
        "mixtral", "fsdp=4 ep=4"
    )
    assert "in inference transformers needs expert parallelism on all ranks of ten" in refused(
        "mixtral", "tp=2 ddp=2 ep=4,tensor=1"
    )
    assert "in inference every rank runs all rows, whichever experts they use" in refused(
        "mixtral", "tp=2 ep=2,tensor=1,imbalance=1.5"
    )


@pytest.mark.parametrize("kind", ["stablelm", "phi3", "gpt_neox"])
def test_families_whose_plan_is_another_are_told(kind: str) -> None:
    with pytest.raises(InputError, match="not supported yet"):
        lower(
            build({**SPLITTABLE, "model_type": kind}),
            Job(batch=2, seq=128),
            strategy_from(["tp=2"], None),
        )


@pytest.mark.parametrize(
    ("model", "saved"),
    [
        ("llama", "lm_head"),
        ("llama", "mlp"),
        ("qwen3", "norm"),
        ("mixtral", "experts"),
        ("qwen2-tied", "embed_tokens"),
    ],
)
def test_a_copy_of_what_is_split_is_never_trained(model: str, saved: str) -> None:
    """The forward that transformers puts into a module is bound to it, and a deep copy takes it
    along."""
    lora: dict[str, Any] = {
        "task": "finetune",
        "new_tokens": 0,
        "method": "lora",
        "targets": "q_proj",
        "modules_to_save": saved,
    }
    assert f"PEFT's copy of `{saved}` would not be trained" in refused(model, "tp=2", **lora)
