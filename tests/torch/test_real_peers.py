"""Other people's tools, asked as they are: those that come with the extra `trace` are here, and so
are asked for real."""

from __future__ import annotations

import pytest

from memfit.hardware import find_gpu
from memfit.job import Job
from memfit.model.catalog import entry
from memfit.model.families import build
from memfit.truth.baselines.peers import PEERS
from memfit.truth.models import built

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.torch

BY_NAME = {one.name: one for one in PEERS}
TRAINING = Job(batch=2, seq=64, precision="bf16")
COUNT = 124_439_808  # parameters of gpt2


def test_accelerate_says_what_its_command_does() -> None:
    """The empty fp32 model without a head; mixed precision's largest part is Adam's two states in
    fp32 (commands/estimate.py)."""
    one, model, gpu = (
        BY_NAME["accelerate estimate-memory"],
        built("openai-community/gpt2"),
        find_gpu("t4"),
    )
    assert one.installed
    assert one.estimate(model, TRAINING, gpu) == 8 * COUNT
    assert one.estimate(model, Job(precision="fp32"), gpu) == 16 * COUNT
    assert one.estimate(model, Job(task="inference", precision="fp16"), gpu) == 2 * COUNT
    assert one.estimate(model, Job(task="inference", quant="nf4"), gpu) == COUNT // 2
    assert one.estimate(model, Job(method="lora"), gpu) is None


def test_torchs_tracker_sees_states_and_activations() -> None:
    """Weights, gradients and two states in bf16, and then some; more with longer sequences."""
    config = {**entry("openai-community/gpt2").config(), "n_layer": 2}
    one, model, gpu = BY_NAME["torch MemTracker"], build(config), find_gpu("t4")
    assert one.installed
    short, long = (one.estimate(model, TRAINING.replace(seq=seq), gpu) for seq in (32, 256))
    assert short is not None
    assert long is not None
    assert 8 * model.parameters < short < long < 20 * model.parameters
    assert one.estimate(model, Job(task="inference"), gpu) is None
