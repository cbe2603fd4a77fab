"""What DDP copies of outputs, phase by phase: the formulas against the trace; and ranks that there
are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.uses import strategy_from

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

PART = 0.005  # of the trace's own peak in a phase
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("use", ["ddp=2,find_unused=yes", "ddp=2,static_graph=yes"])
@pytest.mark.parametrize(
    "job",
    [
        {},
        {"method": "lora", "keep_outputs": True},
        {"evaluate": True},
        {"precision": "autocast-bf16", "keep_outputs": True},
        {"framework": "trl", "loss": "plain", "precision": "autocast-bf16"},
    ],
    ids=str,
)
def test_outputs_that_ddp_copies(use: str, job: dict[str, Any]) -> None:
    """Logits that count for most of what is held, in fp32: every phase's peak, not only the
    highest."""
    from tests.torch.watch import told

    from memfit.trace import trace_config

    config, strategy = (
        {**LLAMA, "vocab_size": 16000, "num_hidden_layers": 1},
        strategy_from([use], None),
    )
    wanted = Job(
        **{"batch": 2, "seq": 128, "precision": "fp32", "optimizer": "sgd", "clip": 0.0, **job}
    )
    real, ours = (
        told(tape)
        for tape in (
            trace_config(config, wanted, strategy=strategy),
            lower(build(config), wanted, strategy),
        )
    )
    for phase in ("forward 0", "forward 1", "backward 1"):
        assert abs(ours[phase] - real[phase]) <= PART * real[phase], phase


def test_no_rank_beyond_the_last() -> None:
    from memfit.trace import trace_config

    with pytest.raises(InputError, match="rank 4 does not exist"):
        trace_config(
            LLAMA, Job(batch=2, seq=128), strategy=replace(strategy_from(["ddp=4"], None), rank=4)
        )
