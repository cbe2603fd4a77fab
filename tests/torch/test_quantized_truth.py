"""QLoRA on a CPU by bitsandbytes' own kernels against a trace told to act as one: what is packed,
what is unpacked for a product, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip(
    "bitsandbytes", minversion="0.48", exc_type=ImportError
)  # its first version with kernels for CPUs

from tests.torch.test_trace_truth import ADAPTERS, KINDS, LARGE, LORA, WITHIN, Mode, both  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
    ),
]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
QLORA = {**ADAPTERS, "method": "qlora"}
MODES = {
    "nf4": Mode(job=QLORA, loop={"lora": LORA, "quant": NF4}),
    "once": Mode(
        job={**QLORA, "double_quant": False},
        loop={"lora": LORA, "quant": {**NF4, "bnb_4bit_use_double_quant": False}},
    ),
    "fp4": Mode(
        job={**QLORA, "quant": "fp4"},
        loop={"lora": LORA, "quant": {**NF4, "bnb_4bit_quant_type": "fp4"}},
    ),
    "checkpointed": Mode(
        job={**QLORA, "checkpointing": "full"},
        loop={"lora": LORA, "quant": NF4, "checkpoint": {"use_reentrant": False}},
    ),
}
INT8 = {"quant": {"load_in_8bit": True}, "lora": LORA}
EIGHT_BITS = {**QLORA, "quant": "int8"}
MODES |= {
    "int8": Mode(job=EIGHT_BITS, loop=INT8),
    "int8, checkpointed": Mode(
        job={**EIGHT_BITS, "checkpointing": "full"},
        loop={**INT8, "checkpoint": {"use_reentrant": False}},
    ),
}
MODES |= {
    f"{name}, merged": Mode(
        job={**MODES[name].job, "merge": True}, loop={**MODES[name].loop, "merge": True}
    )
    for name in ("nf4", "int8")
}
OPTIMIZERS = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw": "PagedAdamW",
    "lion_8bit": "Lion8bit",
    "ademamix_8bit": "AdEMAMix8bit",
    "rmsprop_bnb": "RMSprop",
}


def made(name: str) -> Callable[[list[Any]], Any]:
    """As the Trainer makes it: states of the embedding, the first parameter, stay in 32 bits
    (transformers 5.23 trainer_optimizer.py)."""

    def make(trained: list[Any]) -> Any:
        import bitsandbytes

        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        # it knows parameters by `id`, which one of an earlier model may have had
        manager.initialize()
        manager.override_config(trained[0], "optim_bits", 32)
        return getattr(bitsandbytes.optim, name)(trained)

    return make


MODES |= {
    name: Mode(job={"optimizer": name}, loop={"optimizer": made(real)})
    for name, real in OPTIMIZERS.items()
}
# Mamba multiplies by a packed weight itself, which stops the real program, too.
NAMES = ["starcoder2" if name == "mamba" else name for name in KINDS]
EVERY = ("nf4", "int8")
CASES = [(name, mode) for mode in MODES for name in NAMES if mode in EVERY or name == "llama"]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_step(name: str, mode: str) -> None:
    """In 8 bits a CPU that trains multiplies by the unpacked weight (bitsandbytes
    autograd/_functions.py `matmul`); merging packs again."""
    found, truth = both(name, MODES[mode])
    assert abs(found.before - truth.before) <= 256
    assert abs(found.peak - truth.peak) <= WITHIN * truth.peak
    assert found.allocations(LARGE) == truth.allocations(LARGE)


def test_four_and_eight_bits_have_twenty_models() -> None:
    for mode in EVERY:
        assert len({name for name, one in CASES if one == mode}) >= 20
