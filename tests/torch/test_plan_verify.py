"""`memfit plan --verify`: the trace says of a row what the formulas say; what cannot be traced says why; `--measure` refuses without a GPU."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memfit.errors import InputError
from memfit.report.plan import text
from memfit.verb_plan import plan

LEAN = {
    "seq": 256, "global_batch": 8, "method": "full", "precision": "bf16", "optimizer": "adamw_fused", "checkpointing": "none", "liger": False,
    "loss": "plain",
}  # fmt: skip


def test_the_trace_agrees_with_the_row_that_it_is_asked_of():
    found = plan("gpt2", gpu="2xl4", use="ddp", verify=1, **LEAN)
    told = found.rows[0].checked[0]
    assert told.by == "trace"
    assert told.device == pytest.approx(found.rows[0].estimate.device, rel=0.02)
    assert "trace: " in text(found)


def test_what_is_not_traced_says_why_and_stays():
    found = plan("gpt2", gpu="2xl4", use="zero,stage=3", verify=1, **LEAN | {"method": "qlora"})  # no code cuts packed weights
    told = found.rows[0].checked[0]
    assert (told.device, told.fits) == (None, True)
    assert told.why


def test_nothing_is_measured_without_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InputError, match="no GPU here to measure on"):
        plan("gpt2", gpu="1xl4", measure=1, **LEAN)
