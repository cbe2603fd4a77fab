"""What the trace says of ZeRO, and that DeepSpeed is left as it was found; the figures are in the
table of layouts."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

from tests.conformance.models import SMALL  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.model.families import find  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.tape import check  # noqa: E402
from memfit.trace import ranks, trace_config  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

THERE = find_spec("deepspeed") is not None


@pytest.mark.parametrize(
    ("use", "options", "told"),
    [
        ("zero=4,stage=3,qgz", {}, "a trace does not support quantized gradients"),
        ("zero=4,stage=3", {"method": "qlora"}, "a trace cannot shard quantized weights"),
        ("zero=4,stage=2", {"optimizer": "lomo"}, "steps during the backward pass"),
        ("zero=2,stage=2 tp=2", {}, "ZeRO with `tp`"),
    ],
)
def test_refusals(use: str, options: dict[str, Any], told: str) -> None:
    found = [
        one.message for one in ranks.refusals(Job(**options), strategy_from(use.split(), None))
    ]
    assert any(told in one for one in found), found
    assert any("which is not installed" in one for one in found) is not THERE


@pytest.mark.skipif(not THERE, reason="DeepSpeed is not installed")
def test_nothing_is_left_behind() -> None:
    """Two stages one after the other in one process, as any rank; torch, the environment and
    DeepSpeed's groups are as before."""
    job = Job(batch=1, seq=32)
    before, linear, empty = set(os.environ), torch.nn.functional.linear, torch.cuda.empty_cache
    peaks = {}
    for use in (
        "zero=4,stage=3,reduce-bucket=600000",
        "zero=4,stage=2,reduce-bucket=600000",
        "zero=2,stage=3,reduce-bucket=600000",
    ):
        tape = trace_config(
            {**SMALL["llama"], "num_hidden_layers": 1},
            job,
            strategy=replace(strategy_from([use], None), rank=1),
        )
        check(tape)
        assert tape.rank == 1
        assert tape.versions["deepspeed"]
        peaks[use] = memory(tape).allocated
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    assert len(set(peaks.values())) == 3
    assert {
        name
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "DS_ACCELERATOR")
        if name in os.environ
    } <= before
    assert torch.nn.functional.linear is linear
    assert torch.cuda.empty_cache is empty
    assert comm.cdb is None
    assert groups._WORLD_GROUP is None
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(not THERE, reason="DeepSpeed is not installed")
def test_buffers_are_on_the_gpu_when_weights_are_sharded() -> None:
    """Layers of Gemma 4 multiply by a buffer of one value, which a model made under `zero.Init` has
    on the GPU."""
    config = {**find("gemma4").examples[0], "dtype": "bfloat16"}
    job = Job(batch=1, seq=32, method="lora")
    tape = trace_config(config, job, strategy=strategy_from(["zero=2,stage=3"], None))
    names = {event.where for event in tape.events if getattr(event, "part", "") == "buffers"}
    assert "model.language_model.layers.0" in names
