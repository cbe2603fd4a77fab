"""`memfit plan --verify`: the trace says of a row what the formulas say; what cannot be traced says
why. `--measure` runs a row as it is, on a GPU that is pretended here, and refuses without one."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.torch.pretended import pretended

from memfit.api.plan import case_of, measured, plan
from memfit.api.plan import recorded as judged
from memfit.errors import InputError
from memfit.hardware import find_gpu
from memfit.measure.run import recorded
from memfit.report.plan import text
from memfit.trace import cuda

LEAN = {
    "seq": 256,
    "global_batch": 8,
    "method": "full",
    "precision": "bf16",
    "optimizer": "adamw_fused",
    "checkpointing": "none",
    "liger": False,
    "loss": "plain",
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
ANSWERS = {
    "task": "inference",
    "seq": 128,
    "new_tokens": 5,
    "requests": "16",
    "framework": "transformers",
    "attention": "sdpa",
    "cache": "static",
}
SEGMENT = 2**21  # bytes: the least that the allocator takes of a GPU
SCRIPT = str(Path(__file__).parent / "scripts" / "measured.py")
GPU = find_gpu("a100-sxm-80gb")


def test_the_trace_agrees_with_the_row_that_it_is_asked_of():
    found = plan("gpt2", gpu="2xl4", use="ddp", verify=1, **LEAN)
    told = found.rows[0].checked[0]
    assert told.by == "trace"
    assert told.device == pytest.approx(found.rows[0].estimate.device, rel=0.02)
    assert "trace: " in text(found)


@pytest.mark.parametrize("use", ["", "tp=2"])
def test_of_answers_too(use):
    found = plan(CONFIG, gpu="2xl4", use=use, verify=2, weights="own,awq-4bit", **ANSWERS)
    rows = {row.kind.method: row for row in found.rows}
    one, told = rows["own"].estimate, rows["own"].checked[0]
    assert told.device - one.outside == pytest.approx(one.held, abs=SEGMENT)
    stored = rows["awq-4bit"].checked[0]
    held = rows["awq-4bit"].estimate
    assert stored.fits
    assert stored.device == pytest.approx(held.device, rel=0.02)  # stand-ins for AWQ's kernels


def test_what_is_not_traced_says_why_and_stays():
    found = plan(
        "gpt2", gpu="2xl4", use="zero,stage=3", verify=1, **LEAN | {"method": "qlora"}
    )  # no code cuts packed weights
    told = found.rows[0].checked[0]
    assert (told.device, told.fits) == (None, True)
    assert told.why


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("asked", "steps"),
    [({**LEAN, "attention": "sdpa"}, True), ({**ANSWERS, "weights": "own", "load": "host"}, False)],
)
def test_what_a_row_measures_stands_beside_it(asked, steps, tmp_path):
    row = plan(CONFIG, gpu=f"1x{GPU.id}", **asked).rows[0]
    device = cuda.Device(name=GPU.name, memory=GPU.memory, sms=GPU.sms, capability=GPU.sm)
    said = pretended(
        case_of(row), script=SCRIPT, arguments=(), device=device, steps=0, scratch=str(tmp_path)
    )
    told = judged(recorded(case_of(row), said, 1.0), row)
    assert (told.by, told.fits, told.why) == ("measured", True, "")
    assert told.device - row.estimate.outside == pytest.approx(row.estimate.held, abs=SEGMENT)
    assert (told.seconds is not None) == steps
    full = judged(
        recorded(case_of(row), {"result": "oom", "error": "out of memory", "by": "cuda"}, 1.0), row
    )
    assert (full.fits, full.why, full.device) == (False, "out of memory", None)


def test_stored_weights_are_not_measured_as_16_bits():
    told = measured(plan(CONFIG, gpu="1xl4", weights="awq-4bit", **ANSWERS).rows[0])
    assert (told.device, told.fits) == (None, True)
    assert "quantized by `awq` cannot be measured" in told.why


def test_nothing_is_measured_without_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for asked in (LEAN, ANSWERS):
        with pytest.raises(InputError, match="this machine has no GPU to measure on"):
            plan("gpt2", gpu="1xl4", measure=1, **asked)
