"""Layers as accelerate itself deals them to GPUs, and what each GPU holds under its own hooks, on
models of which nothing but shapes exists.

Two kinds of fake tensors stand for two GPUs, and every allocation is counted where it was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

accelerate = pytest.importorskip("accelerate")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from accelerate.hooks import attach_align_device_hook_on_blocks  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.parallel.device_map.shares import shares  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.strategy import Split, Strategy  # noqa: E402

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "small head": {**LLAMA, "vocab_size": 1000, "num_hidden_layers": 41},
    "qwen2": {
        **LLAMA,
        "model_type": "qwen2",
        "hidden_size": 8192,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "vocab_size": 152_064,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50_432,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_hidden_layers": 8,
        "vocab_size": 32_000,
    },
}


VERSIONS = {"accelerate": (5, 17), "transformers": (5, 23)}  # whose rules transformers follows


def dealt(config: dict[str, Any], gpus: int, library: str) -> tuple[int, ...]:
    """`device_map="auto"` (transformers 5.23 integrations/accelerate.py _get_device_map), of GPUs
    with room for all."""
    rules = {
        "accelerate": accelerate.utils.modeling,
        "transformers": transformers.integrations.accelerate,
    }[library]
    values = {key: value for key, value in config.items() if key not in ("model_type", "dtype")}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **values), dtype=torch.bfloat16
        )
    whole = {"no_split_module_classes": list(model._no_split_modules)}
    room = rules.get_balanced_memory(model, max_memory=dict.fromkeys(range(gpus), 2**40), **whole)
    placed = rules.infer_auto_device_map(model, max_memory=room, **whole)
    layers = build(config).prefix
    where = [
        placed.get(f"{layers}.{number}", placed.get(layers, placed.get(layers.rpartition(".")[0])))
        for number in range(config["num_hidden_layers"])
    ]
    return tuple(where.count(gpu) for gpu in range(gpus))


@pytest.mark.parametrize("library", VERSIONS)
@pytest.mark.parametrize("gpus", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_dealt_as_libraries_deal_them(name: str, gpus: int, library: str) -> None:
    model = build(CONFIGS[name])
    found = shares(model, gpus, model.dtype, VERSIONS[library])
    assert found == dealt(CONFIGS[name], gpus, library)


def test_where_a_head_is_half_of_the_model_no_layers_are_left_for_a_gpu() -> None:
    """accelerate then leaves the first GPU empty, or parts of the model on the host: the formulas
    refuse it. transformers 5.18 and newer leave more room, and split it."""
    config = {**LLAMA, "num_hidden_layers": 9, "vocab_size": 400_000}
    model = build(config)
    old, new = (shares(model, 2, model.dtype, version) for version in VERSIONS.values())
    assert min(dealt(config, 2, "accelerate")) == min(old) == 0
    assert new == dealt(config, 2, "transformers") == (6, 3)


# ----------------------------------------------------------------------------- what each GPU holds
FIRST, SECOND = "cpu", "meta"
BATCH, TOKENS, DEAL = 2, 128, (3, 5)
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": sum(DEAL),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


class Counted(TorchDispatchMode):
    """The most that lay on each device at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, tuple[Any, int, str]] = {}
        self.most: dict[str, int] = {}

    def see(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        known = self.blocks.get(storage._cdata)
        if known is None or known[0].expired():
            self.blocks[storage._cdata] = (
                StorageWeakRef(storage),
                -(-storage.nbytes() // 512) * 512,
                tensor.device.type,
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                self.see(one)
        self.blocks = {key: block for key, block in self.blocks.items() if not block[0].expired()}
        for device in (FIRST, SECOND):
            now = sum(size for _, size, where in self.blocks.values() if where == device)
            self.most[device] = max(now, self.most.get(device, 0))
        return out


def elsewhere(model: Any, *modules: Any) -> None:
    for one in (one for module in modules for one in module.modules()):
        for name, parameter in one._parameters.items():
            if parameter is not None:
                one._parameters[name] = torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=SECOND)
                )


def placed() -> dict[str, str]:
    layers = {
        f"model.layers.{number}": FIRST if number < DEAL[0] else SECOND
        for number in range(sum(DEAL))
    }
    return {
        "model.embed_tokens": FIRST,
        "model.rotary_emb": FIRST,
        **layers,
        "model.norm": SECOND,
        "lm_head": SECOND,
    }


def real(kind: str, reentrant: bool | None) -> Iterator[int]:
    """Two steps of a model under accelerate's hooks, as `dispatch_model` hangs them up; `reentrant`
    None: no checkpoints."""
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        ).train()
        elsewhere(model, *model.model.layers[DEAL[0] :], model.model.norm, model.lm_head)
        where = placed()
        attach_align_device_hook_on_blocks(
            model, execution_device={**where, "": FIRST}, offload=dict.fromkeys(where, False)
        )
        if reentrant is not None:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
        counted = Counted()
        for tensor in (*model.parameters(), *model.buffers()):
            counted.see(tensor)
        with counted:
            for _ in range(2):
                batch = (
                    torch.zeros(BATCH, TOKENS, dtype=torch.int64),
                    torch.zeros(BATCH, TOKENS, dtype=torch.int64),
                )
                out = model(input_ids=batch[0], labels=batch[1], use_cache=False)
                assert out.logits.device.type == FIRST
                loss = out.loss
                del out
                loss.backward()
                del loss
                model.zero_grad(set_to_none=True)
    yield from (counted.most[FIRST], counted.most[SECOND])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_each_gpu_holds_what_it_holds_under_accelerates_hooks(
    kind: str, reentrant: bool | None
) -> None:
    checkpoints = {} if reentrant is None else {"checkpointing": "full", "reentrant": reentrant}
    job = Job(batch=BATCH, seq=TOKENS, optimizer="sgd", clip=0.0, attention="eager", **checkpoints)
    for rank, peak in enumerate(real(kind, reentrant)):
        strategy = Strategy(split=Split(size=2, layers="/".join(map(str, DEAL))), rank=rank)
        found = memory(
            lower(build({**SMALL, "model_type": kind, "dtype": "bfloat16"}), job, strategy)
        )
        assert found.allocated - found.parts.get("workspace", 0) == pytest.approx(peak, rel=1e-3)
