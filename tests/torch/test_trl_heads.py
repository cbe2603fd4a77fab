"""SFTTrainer's own heads: the formulas against TRL's code run by the trace, and the trace, told to
act as a CPU, against that code run there."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
trl = pytest.importorskip("trl", minversion="1.4", exc_type=ImportError)

from tests.torch.real_steps import Loop, real, traced  # noqa: E402
from tests.torch.small import MODELS  # noqa: E402
from tests.torch.test_trace_truth import ADAPTERS, LARGE, LORA, WITHIN  # noqa: E402

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.libraries.trl.check import FUSED  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL, transformers and PEFT
INSTALLED = tuple(map(int, trl.__version__.split(".")[:2]))
TOLD = {"framework": "trl", "loss": "chunked", "versions": f"trl={INSTALLED[0]}.{INSTALLED[1]}"}
# More words than a tile of the fused head is wide, more tokens than it has rows or a chunk of the
# older one holds.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 40000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
TIED = {"tie_word_embeddings": True}
CASES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({}, {"precision": "autocast-bf16"}),
    ({}, {"precision": "fp32", "optimizer": "sgd", "batch": 1}),
    ({}, {"seq": 2500, "optimizer": "sgd", "accumulate": 2}),
    ({}, {"precision": "bf16-autocast", "method": "lora", "seq": 2500}),
    ({}, {"method": "lora", "modules_to_save": "lm_head"}),
    ({}, {"method": "qlora", "checkpointing": "full"}),
    ({}, {"evaluate": True, "optimizer": "sgd"}),
    ({}, {"optimizer": "adafactor", "checkpointing": "full"}),
    (TIED, {"optimizer": "adamw_fused"}),
    (TIED, {"precision": "autocast-bf16", "optimizer": "sgd"}),
    ({"model_type": "gemma2", "head_dim": 32}, {"optimizer": "sgd"}),
    ({"model_type": "cohere"}, {"optimizer": "sgd"}),
)


@pytest.mark.parametrize(("config", "options"), CASES, ids=str)
def test_formulas_equal_trls_own_code(config: dict[str, Any], options: dict[str, Any]) -> None:
    job = Job(**{"batch": 2, "seq": 300, **TOLD, **options})
    ours, theirs = (
        memory(lower(build({**LLAMA, **config}), job)),
        memory(trace_config({**LLAMA, **config}, job)),
    )
    assert ours.allocated == pytest.approx(theirs.allocated, rel=0.001)
    assert ours.parts["weights"] == pytest.approx(theirs.parts["weights"], rel=0.001)


def test_it_takes_less_than_all_logits() -> None:
    plain = {"framework": "trl", "versions": "trl=1.3", "batch": 2, "seq": 2500, "optimizer": "sgd"}
    whole, parts = (
        memory(trace_config(LLAMA, Job(**told))).allocated for told in (plain, {**plain, **TOLD})
    )
    assert parts < 0.6 * whole


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"method": "lora", "targets": "q_proj,lm_head"}, "job.targets"),
        ({"method": "qlora", "quant_skip": "q_proj"}, "job.quant_skip"),
    ],
)
def test_heads_that_it_cannot_multiply_by_are_refused(options: dict[str, Any], where: str) -> None:
    job = Job(seq=64, **TOLD, **options)
    for producer in (lambda: lower(build(LLAMA), job), lambda: trace_config(LLAMA, job)):
        with pytest.raises(InputError) as bad:
            producer()
        assert where in [one.where for one in bad.value.problems]


def fused(model: Any) -> Any:
    """What SFTTrainer's `compute_loss` calls."""
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))

    def called(**inputs: Any) -> Any:
        outputs = model(**inputs, fused_lm_head=True)
        outputs.loss = (-outputs.log_probs).sum() / outputs.label_mask.sum().clamp(min=1)
        return outputs

    return called


TRUTH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "bf16": ({"precision": "bf16"}, {"dtype": "bfloat16"}),
    "autocast": ({"precision": "autocast-bf16"}, {"autocast": "bfloat16"}),
    "lora": (ADAPTERS, {"lora": LORA}),
}


@pytest.mark.skipif(
    INSTALLED < (1, 16), reason="older heads run by Triton alone, or are not this one"
)
@pytest.mark.parametrize("mode", TRUTH)
@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "gemma2", "cohere"])
def test_a_step_on_a_cpu(name: str, mode: str) -> None:
    assert INSTALLED >= FUSED
    small, (job, loop) = MODELS[name], TRUTH[mode]
    wanted = Job(
        **{"batch": 2, "seq": 64, "precision": "fp32", "framework": "trl", **small.options, **job}
    )
    found = traced(trace_config(small.config, wanted, device="cpu"))
    truth = real(small, Loop(seq=wanted.seq, head=fused, **loop))
    assert abs(found.before - truth.before) <= 256
    assert abs(found.peak - truth.peak) <= WITHIN * truth.peak
    assert found.allocations(LARGE) == truth.allocations(LARGE)
