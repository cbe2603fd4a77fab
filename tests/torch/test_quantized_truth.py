"""QLoRA on a CPU by bitsandbytes' own kernels against a trace told to act as one: what is packed, what is unpacked for a product, and when."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes", minversion="0.48", exc_type=ImportError)  # its first version with kernels for CPUs

from tests.torch.test_trace_truth import ADAPTERS, KINDS, LARGE, LORA, WITHIN, Mode, both  # noqa: E402

pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]  # fmt: skip
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
QLORA = {**ADAPTERS, "method": "qlora"}
MODES = {
    "nf4": Mode(job=QLORA, loop={"lora": LORA, "quant": NF4}),
    "once": Mode(job={**QLORA, "double_quant": False}, loop={"lora": LORA, "quant": {**NF4, "bnb_4bit_use_double_quant": False}}),
    "fp4": Mode(job={**QLORA, "quant": "fp4"}, loop={"lora": LORA, "quant": {**NF4, "bnb_4bit_quant_type": "fp4"}}),
    "checkpointed": Mode(job={**QLORA, "checkpointing": "full"}, loop={"lora": LORA, "quant": NF4, "checkpoint": {"use_reentrant": False}}),
}
# Mamba multiplies by a packed weight itself, which stops the real program, too.
CASES = [(name, "nf4") for name in KINDS if name != "mamba"] + [("llama", mode) for mode in MODES if mode != "nf4"]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_step(name: str, mode: str) -> None:
    found, truth = both(name, MODES[mode])
    assert abs(found.before - truth.before) <= 256
    assert abs(found.peak - truth.peak) <= WITHIN * truth.peak
    assert found.allocations(LARGE) == truth.allocations(LARGE)


INT8 = {"load_in_8bit": True}
EIGHT_BITS = {
    "int8": Mode(job={**QLORA, "quant": "int8"}, loop={"lora": LORA, "quant": INT8}),
    "checkpointed": Mode(job={**QLORA, "quant": "int8", "checkpointing": "full"}, loop={"lora": LORA, "quant": INT8, "checkpoint": {"use_reentrant": False}}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "int8") for name in ("llama", "gpt2", "qwen2_moe", "phi3", "bloom")), ("llama", "checkpointed")]
)
def test_a_step_with_eight_bits(name: str, mode: str) -> None:
    """Weights and peak. On a CPU the products go through fp32 copies that CUDA's kernel has no use for (bitsandbytes backends/default/ops.py
    `_int8_linear_matmul_impl`), so that the order cannot be compared; what is kept for backward stands in the peak."""
    found, truth = both(name, EIGHT_BITS[mode])
    assert abs(found.before - truth.before) <= 256
    assert abs(found.peak - truth.peak) <= WITHIN * truth.peak
