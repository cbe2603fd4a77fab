"""Two and four real ranks on the CPU whose experts transformers' own plan spreads: how many bytes
each holds, beside the trace and the formulas.

Routers of random weights choose unevenly: each rank is told the choices that both producers take
for granted, the experts in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed.expert_parallel")

from tests.torch.gloo import ranks, trained  # noqa: E402
from tests.torch.real_steps import Loop, traced  # noqa: E402
from tests.torch.small import Small  # noqa: E402
from tests.torch.test_gloo import apart  # noqa: E402
from tests.torch.watch import told  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.trace import trace_config  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
TRACE, FORMULAS = 0.001, 0.01  # shares of the real peak
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Planned:
    """`from_pretrained(distributed_config=...)` but for the loading: transformers' own plans on a
    model that is there."""

    ep: int
    tp: int = 1

    def __call__(self, model: Any) -> Any:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.utils import initialize_distributed_mesh

        settings = DistributedConfig(
            fsdp_size=torch.distributed.get_world_size() // self.tp,
            tp_size=self.tp,
            ep_size=self.ep,
        )
        _, meshes = initialize_distributed_mesh(settings)
        model = type(model).maybe_distribute_model(model, settings, meshes)
        for layer in model.model.layers:
            layer.mlp.experts.forward = in_turn(layer.mlp.experts.forward)
        return model


def in_turn(forward: Any) -> Any:
    def balanced(hidden: Any, places: Any, weights: Any) -> Any:
        places.data.copy_(
            (torch.arange(places.numel()) % QWEN["num_experts"]).view_as(places)
        )  # in place: no tensor that real routers lack
        return forward(hidden, places, weights)

    return balanced


@pytest.mark.parametrize(
    ("use", "again"),
    [
        ("fsdp=2 ep=2", False),
        ("fsdp=4 ep=2", True),
        ("fsdp=4 ep=4", False),
        ("tp=2 ep=2,tensor=1", False),
    ],
)
def test_every_rank_holds_what_is_said(use: str, again: bool) -> None:
    strategy = strategy_from(use.split(), None)
    job = Job(
        batch=2,
        seq=64,
        precision="fp32",
        optimizer="adamw_loop",
        clip=0.0,
        checkpointing="full" if again else "none",
        attention="eager",
    )
    loop = Loop(
        seq=64,
        optimizer=apart,
        attention="eager",
        checkpoint={"use_reentrant": False} if again else None,
    )
    real = ranks(
        strategy.ranks,
        trained,
        Small(config=QWEN),
        loop,
        Planned(strategy.size("ep"), strategy.size("tp")),
    )
    for rank, truth in enumerate(real):
        here = replace(strategy, rank=rank)
        found = traced(trace_config(QWEN, job, device="cpu", strategy=here))
        said = max(
            size
            for phase, size in told(lower(build(QWEN), job, here)).items()
            if not phase.startswith("load")
        )
        assert abs(found.before - truth.changes.before) <= 2048, rank
        assert abs(found.peak - truth.changes.peak) <= TRACE * truth.changes.peak, rank
        assert abs(said - truth.peaks["steps"]) <= FORMULAS * truth.peaks["steps"], rank
