"""The quantized cache with the real optimum-quanto on a CPU, where that is installed (it compiles
an extension at first use)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")

from tests.torch.real_steps import generated, traced  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LARGE = 30_000
# large blocks until the prompt's keys and values are packed; a CPU unpacks them by other kernels
# than CUDA's
PACKED = 100


def test_the_prompt_is_packed_as_quanto_does_it() -> None:
    job = Job(task="inference", cache="quantized", batch=4, seq=256, new_tokens=4, precision="fp32")
    found = traced(trace_config(LLAMA, job, device="cpu", decode_all=True))
    truth = generated(
        LLAMA,
        batch=4,
        seq=256,
        new=4,
        cache_implementation="quantized",
        cache_config={"backend": "quanto", "nbits": 4},
    )
    assert found.before == truth.before
    assert found.peak == pytest.approx(truth.peak, rel=0.005)
    assert found.allocations(LARGE)[:PACKED] == truth.allocations(LARGE)[:PACKED]
