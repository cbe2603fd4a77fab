"""Every kind of block in every way of training: a trace told to act as a CPU against real steps
there, allocation by allocation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.sampling import sampled

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.torch.real_steps import Changes, Loop, real, traced  # noqa: E402
from tests.torch.small import MODELS  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.tape import check  # noqa: E402
from memfit.trace import selective, trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)  # of transformers and PEFT

WITHIN = 0.005  # of the real peak of live bytes
LARGE = 5000  # bytes; among smaller blocks are what kernels use for a moment
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ADAPTERS = {"method": "lora", "rank": 8, "alpha": 16.0}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The options of a job, and the same for the real loop. `every`: all models go through it, not
    one of each kind."""

    job: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    every: bool = False


def optimizer(name: str, make: Any) -> Mode:
    return Mode(job={"optimizer": name}, loop={"optimizer": make})


def adafactor(trained: list[Any]) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)


MODES = {
    "full": Mode(every=True),
    "bf16": Mode(job={"precision": "bf16"}, loop={"dtype": "bfloat16"}),
    "autocast-bf16": Mode(job={"precision": "autocast-bf16"}, loop={"autocast": "bfloat16"}),
    "autocast-fp16": Mode(job={"precision": "autocast-fp16"}, loop={"autocast": "float16"}),
    "bf16-autocast": Mode(
        job={"precision": "bf16-autocast"}, loop={"autocast": "bfloat16", "dtype": "bfloat16"}
    ),
    "lora": Mode(job=ADAPTERS, loop={"lora": LORA}),
    "lora-bf16": Mode(
        job={**ADAPTERS, "precision": "bf16"}, loop={"dtype": "bfloat16", "lora": LORA}
    ),
    "merged": Mode(job={**ADAPTERS, "merge": True}, loop={"lora": LORA, "merge": True}),
    "checkpointed": Mode(
        job={"checkpointing": "full"}, loop={"checkpoint": {"use_reentrant": False}}
    ),
    "reentrant": Mode(
        job={"checkpointing": "full", "reentrant": True},
        loop={"checkpoint": {"use_reentrant": True}},
    ),
    "selective": Mode(
        job={"checkpointing": "selective"},
        loop={"checkpoint": {"use_reentrant": False, "context_fn": selective.contexts}},
    ),
    "accumulated": Mode(job={"accumulate": 2}, loop={"accumulate": 2}),
    "clipped": Mode(
        job={"clip": 1.0, "zero_grad": "before_backward"},
        loop={"clip": 1.0, "zero_grad": "before_backward"},
    ),
    "frozen": Mode(job={"method": "freeze", "trainable": "1."}, loop={"frozen": "1."}),
    "kept": Mode(
        job={"keep_outputs": True, "zero_grad": "keep"},
        loop={"keep_outputs": True, "zero_grad": "keep"},
    ),
    "eager": Mode(job={"attention": "eager"}, loop={"attention": "eager"}),
    "adamw_fused": optimizer("adamw_fused", lambda trained: torch.optim.AdamW(trained, fused=True)),
    "adamw_loop": optimizer(
        "adamw_loop", lambda trained: torch.optim.AdamW(trained, foreach=False)
    ),
    "sgd": optimizer("sgd", lambda trained: torch.optim.SGD(trained, lr=1e-3)),
    "sgd_momentum": optimizer(
        "sgd_momentum", lambda trained: torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    ),
    "rmsprop": optimizer("rmsprop", torch.optim.RMSprop),
    "adagrad": optimizer("adagrad", torch.optim.Adagrad),
    "adafactor": optimizer("adafactor", adafactor),
}
# One of each kind of block, or more where they differ in what they keep.
KINDS = {
    "llama": "grouped heads, rotary, gated",
    "llama-biased-tied": "biases, a tied table",
    "mistral-window": "a sliding window",
    "mixtral": "experts",
    "qwen2_moe": "a shared expert",
    "gemma2": "capped scores, alternating windows",
    "phi3": "fused projections",
    "deepseek_v3": "latent attention, grouped experts",
    "gpt_oss": "sinks, biased experts",
    "gpt2": "learned positions, dropout",
    "gpt_neox": "fused, parallel",
    "bloom": "distances in place of positions",
    "falcon": "one head, parallel",
    "olmo2": "norms behind",
    "cohere": "parallel, scaled logits",
    "mamba": "a selective scan",
    "bamba": "a scan beside attention",
    "t5": "encoder and decoder, a learned bias",
    "bert": "an encoder",
    "llava": "a vision tower",
}
CASES = [
    (name, mode) for mode, what in MODES.items() for name in MODELS if what.every or name in KINDS
]


def both(name: str, mode: Mode) -> tuple[Changes, Changes]:
    small, job, loop = MODELS[name], dict(mode.job), dict(mode.loop)
    if "lora" in loop:
        loop["lora"] = {**loop["lora"], **small.lora}
        targets = loop["lora"]["target_modules"]
        job["targets"] = targets if isinstance(targets, str) else ",".join(targets)
    wanted = Job(**{"batch": 2, "seq": 64, "precision": "fp32", **small.options, **job})
    tape = trace_config(small.config, wanted, device="cpu")
    check(tape)
    return traced(tape), real(small, Loop(seq=wanted.seq, **loop))


@pytest.mark.parametrize(("name", "mode"), sampled(CASES, 2))
def test_a_step(name: str, mode: str) -> None:
    found, truth = both(name, MODES[mode])
    assert (
        abs(found.before - truth.before) <= 256
    )  # step counters of 4 bytes, which live on the CPU in any case
    assert abs(found.peak - truth.peak) <= WITHIN * truth.peak
    assert found.allocations(LARGE) == truth.allocations(LARGE)


def test_every_mode_has_twenty_models() -> None:
    for mode in MODES:
        assert sum(one == mode for _, one in CASES) >= 20
