"""The arithmetic of a step, which MFU and HFU rest on, against torch's own counter of it (torch/utils/flop_counter.py) over transformers' real code."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.torch.real_steps import Loop, adapted, built, train  # noqa: E402
from tests.torch.small import CONFIGS, MODELS  # noqa: E402
from tests.torch.test_trace_truth import MODES  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from memfit.hardware import parse_cluster  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build, families  # noqa: E402
from memfit.strategy import Strategy  # noqa: E402
from memfit.tape import Compute, Mark, Tape  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
FAMILY = sorted(name for name, config in CONFIGS.items() if config["model_type"] in families())
MODE = ("full", "reentrant", "lora", "frozen", "selective", "accumulated")


def grouped(given: tuple[int, ...], weight: tuple[int, ...], *others: Any, **more: Any) -> int:
    """Each token with its expert's matrix: torch's counter does not know this operator."""
    return 2 * given[-2] * given[-1] * weight[-1]


def counted(name: str, mode: str) -> int:
    small, told = MODELS[name], dict(MODES[mode].loop)
    if "lora" in told:
        told["lora"] = told["lora"] | small.lora
    loop = Loop(**{"steps": 1, "attention": "eager"} | told)
    model = adapted(built(small, loop), loop)
    trained = [one for one in model.parameters() if one.requires_grad]
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        train(model, trained, torch.optim.SGD(trained, lr=0.0), small, loop)
    return counter.get_total_flops()


@cache
def tape(name: str, mode: str, versions: str = "") -> Tape:
    options = {"batch": 2, "seq": 64, "attention": "eager", "precision": "fp32", "optimizer": "sgd", "versions": versions}
    job = Job(**options | MODES[mode].job | MODELS[name].options)
    return lower(build(dict(MODELS[name].config), name=name), job, Strategy(), parse_cluster("1xa100-sxm-80gb"))


def said(events: Tape) -> int:
    total, step = 0, 0
    for event in events:
        if type(event) is Mark:
            step = event.step
        elif type(event) is Compute and step == 1:
            total += event.flops
    return total


@pytest.mark.parametrize("name", FAMILY)
def test_a_checkpointed_step_computes_what_torch_counts(name: str) -> None:
    """Forward, backward, and what is computed again, which ends before a layer's last product where nothing behind that is kept."""
    assert said(tape(name, "checkpointed")) == counted(name, "checkpointed")


@pytest.mark.parametrize("mode", MODE)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_every_way_of_training_computes_what_torch_counts(name: str, mode: str) -> None:
    assert said(tape(name, mode)) == counted(name, mode)


def test_before_torch_2_1_a_checkpoint_runs_to_its_end() -> None:
    """Two layers' last product more: 2 · 128 tokens · 128 · 64 each."""
    assert said(tape("llama", "checkpointed", "torch=2.0")) - said(tape("llama", "checkpointed")) == 2 * 2 * 128 * 128 * 64
    assert said(tape("llama", "checkpointed", "torch=2.0")) == said(tape("llama", "reentrant"))
