"""FSDP2 and DDP as torch runs them, every storage watched, beside the formulas: rank 0 of eight in
a process group that sends nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from tests.torch.watch import Watch, told  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.strategy import DDP, FSDP, Strategy  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 3001,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "use_cache": False,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "": None}
W, SLACK = 8, 2000  # bytes: scalars that the loop keeps, and tensors of a token or two


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=W, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(model: Any, layout: FSDP, replicas: int) -> Any:
    """As accelerate wraps it, with the ends as units or without."""
    mesh = (
        init_device_mesh("cpu", (W,))
        if replicas == 1
        else init_device_mesh("cpu", (replicas, W // replicas), mesh_dim_names=("r", "s"))
    )
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[layout.param_dtype], reduce_dtype=DTYPES[layout.reduce_dtype]
    )
    given = {"mesh": mesh, "mp_policy": policy}
    reshard = layout.reshard_to or layout.reshard
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **given)
    if layout.wrap == "ends":
        fully_shard(model.model.embed_tokens, reshard_after_forward=reshard, **given)
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **given)
    return (
        fully_shard(model, **given)
        if layout.reshard
        else fully_shard(model, reshard_after_forward=False, **given)
    )


def summed(buffer: Any) -> Any:
    done = torch.futures.Future()
    done.set_result(buffer)
    return done


def real(strategy: Strategy, job: Job) -> dict[str, int]:
    config = AutoConfig.for_model(**CONFIG)
    with warnings.catch_warnings(), Watch() as watch:
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[job.precision], attn_implementation="sdpa"
        )
        if strategy.fsdp is not None:
            model = sharded(model, strategy.fsdp, strategy.size("ddp"))
        elif strategy.ddp is not None:
            model = DistributedDataParallel(
                model,
                gradient_as_bucket_view=strategy.ddp.bucket_view,
                static_graph=strategy.ddp.static_graph,
            )
            model.register_comm_hook(
                None, lambda state, bucket: summed(bucket.buffer())
            )  # the group's own sum says nothing when it is done
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for step in range(3 if strategy.ddp and strategy.ddp.static_graph else 2):
            for left in range(job.accumulate, 0, -1):
                if strategy.fsdp is not None and not strategy.fsdp.sync:
                    model.set_requires_gradient_sync(left == 1)
                watch.phase = f"forward {step}"
                ids = torch.ones(1, job.seq, dtype=torch.long)
                loss = model(input_ids=ids, labels=ids.clone(), use_cache=False).loss
                watch.phase = f"backward {step}"
                loss.backward()
                del loss
            watch.phase = f"step {step}"
            optimizer.step()
            optimizer.zero_grad()
    return watch.peaks


MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (Strategy(fsdp=FSDP(size=W, wrap="layers")), {}),
        (Strategy(fsdp=FSDP(size=W, wrap="ends", **MIXED)), {}),
        (Strategy(fsdp=FSDP(size=W, wrap="layers", reduce_dtype="fp32")), {"precision": "bf16"}),
        (Strategy(fsdp=FSDP(size=W, wrap="layers", reshard=False, **MIXED)), {}),
        (Strategy(fsdp=FSDP(size=W, wrap="layers", reshard_to=2, **MIXED)), {}),
        (
            Strategy(
                fsdp=FSDP(size=4, wrap="layers", param_dtype="bf16", reduce_dtype="bf16"),
                ddp=DDP(size=2),
            ),
            {},
        ),
        (Strategy(fsdp=FSDP(size=W, wrap="layers", sync=False, **MIXED)), {"accumulate": 2}),
        (Strategy(ddp=DDP(size=W)), {}),
        (Strategy(ddp=DDP(size=W, bucket_view=True)), {}),
    ],
    ids=str,
)
def test_formulas_say_what_torch_does(strategy: Strategy, options: dict[str, Any]) -> None:
    job = Job(
        **{
            "batch": 1,
            "seq": 2,
            "precision": "fp32",
            "clip": 0.0,
            "versions": "accelerate=1.15",
            **options,
        }
    )
    seen, said = real(strategy, job), told(lower(build(CONFIG), job, strategy))
    for phase in ("forward", "backward", "step"):
        for step in (0, 2 if strategy.ddp and strategy.ddp.static_graph else 1):
            assert abs(seen[f"{phase} {step}"] - said[f"{phase} {step}"]) <= SLACK, (
                phase,
                step,
                seen,
                said,
            )
