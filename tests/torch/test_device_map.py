"""Where modules of a model on one GPU, CPU and disk lie, compared with transformers' own rules on
the meta device, and what moves in a pass with accelerate's own hooks on the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
ours = pytest.importorskip("transformers.integrations.accelerate")

from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.parallel.device_map.placement import Limit, places, units  # noqa: E402
from memfit.strategy import Split, Strategy  # noqa: E402
from memfit.tape import Alloc  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(ours, "infer_auto_device_map"), reason="transformers before 5 asks accelerate"
)
TEXT: dict[str, Any] = {
    "num_attention_heads": 4,
    "vocab_size": 3000,
    "max_position_embeddings": 512,
    "num_hidden_layers": 5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_key_value_heads": 2,
    **TEXT,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "narrow": LLAMA | {"vocab_size": 200, "dtype": "float32"},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 128,
        "n_layer": 5,
        "n_head": 4,
        "n_positions": 256,
        "vocab_size": 2000,
        "dtype": "float32",
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mlp_only_layers": [1, 3],
        **TEXT,
    },
}
SHARES = (0.0, 0.1, 0.25, 0.4, 0.6, 0.85, 1.0, 1.4)


def meta(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), dtype=getattr(torch, config["dtype"])
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_modules_lie_where_transformers_puts_them(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    config = CONFIGS[name]
    model, known = meta(config), units(build(config), config["dtype"])
    total = sum(unit.bytes for unit in known)
    assert total == ours.compute_module_sizes(model)[0][""]
    parameters = [path for path, _ in model.named_parameters()]
    patterns = set()
    for gpu in SHARES:
        for cpu in SHARES:
            room = {0: int(total * gpu), "cpu": int(total * cpu)}
            found = ours.infer_auto_device_map(
                model, max_memory=dict(room), no_split_module_classes=model._no_split_modules
            )
            limits = [
                Limit(device=str(device), size=size, reserves=True) for device, size in room.items()
            ]
            mine = places(known, limits)
            theirs = ours.expand_device_map(found, parameters)
            assert {path: device_of(path, mine) for path in parameters} == {
                path: str(device) for path, device in theirs.items()
            }, (gpu, cpu)
            patterns.add(tuple(mine.values()))
    assert len(patterns) > 8


def device_of(parameter: str, places: dict[str, str]) -> str:
    return next(place for path, place in places.items() if f"{parameter}.".startswith(f"{path}."))


def test_hooks_move_each_module_alone(tmp_path: Path) -> None:
    """accelerate offloads to disk here, with the CPU in place of the GPU: the modules whose hooks
    load weights are those that the tape copies."""
    small = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**small), dtype=torch.bfloat16
    )
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu"}
    away = ("model.layers.1", "model.layers.2", "model.norm", "lm_head")
    accelerate.dispatch_model(
        model, where | dict.fromkeys(away, "disk"), main_device="cpu", offload_dir=str(tmp_path)
    )
    hooked = {
        name
        for name, module in model.named_modules()
        if any(hook.offload for hook in hooks_of(module))
        and [*module.named_parameters(recurse=False)]
    }
    layer, table = (
        sum(2 * one.numel() for one in part.parameters())
        for part in (model.model.layers[0], model.lm_head)
    )
    job = Job(task="inference", batch=1, seq=16, new_tokens=1)
    strategy = Strategy(split=Split(size=1, gpu=f"{layer + 2 * table}B"))
    tape = lower(build(small), job, strategy)
    moved = {event.where for event in tape if type(event) is Alloc and event.op == "to_device"}
    assert moved == hooked
    assert len(moved) == 2 * 9 + 2


def hooks_of(module: Any) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    found = getattr(hook, "hooks", (hook,))
    return [one for one in found if hasattr(one, "offload")]
