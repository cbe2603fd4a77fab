"""What stands in for older versions of torch, transformers and Triton; and those versions
themselves where environments are named.

`make older` makes some and names them in `MEMFIT_ENVIRONMENTS`; each needs torch, transformers,
peft, accelerate.
"""

from __future__ import annotations

import os
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memfit.api.verbs import estimate, trace  # noqa: E402
from memfit.errors import InputError  # noqa: E402
from memfit.trace import launches, older  # noqa: E402

ENVIRONMENTS = [one for one in os.environ.get("MEMFIT_ENVIRONMENTS", "").split(os.pathsep) if one]
CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
JOBS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "checkpointed": {"checkpointing": "full"},
    "math": {"attention": "math"},
    "reentrant": {"checkpointing": "full", "reentrant": True, "method": "lora"},
    "autocast": {"precision": "autocast-fp16", "clip": 1.0},
    "eager": {"attention": "eager"},
    "evaluated": {"evaluate": True},
    "padded": {"packing": False},
    "beams": {"task": "inference", "beams": 2},
    "static": {"task": "inference", "cache": "static"},
    "no cache": {"task": "inference", "cache": "none"},
}


def states(heads: int, rows: int, head: int) -> Any:
    """As attention gets them: heads before rows, rows before heads in memory."""
    return torch.empty((2, rows, heads, head), dtype=torch.bfloat16, device="meta").transpose(1, 2)


def described(one: Any) -> Any:
    return (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one


@pytest.mark.parametrize(("rows", "keys"), [(64, 64), (2, 77), (33, 40)])
def test_fused_attention_returns_what_torchs_own_meta_function_does(rows: int, keys: int) -> None:
    query, key, value = states(4, rows, 16), states(4, keys, 16), states(4, keys, 16)
    true = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    assert [described(one) for one in older.flash(query, key, value)[:6]] == [
        described(one) for one in true[:6]
    ]
    for sums in (False, True):
        true = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, sums)
        assert [described(one) for one in older.efficient(query, key, value, None, sums)[:2]] == [
            described(one) for one in true[:2]
        ]


def test_a_cache_of_lists_is_known_at_any_length() -> None:
    cache = types.SimpleNamespace(
        key_cache=[states(2, 5, 16)] * 3, value_cache=[states(2, 5, 16)] * 3
    )
    assert older.shapes(cache, 99) == [((2, 2, 99, 16), torch.bfloat16, torch.device("meta"))] * 6
    assert older.shapes(types.SimpleNamespace(conv_states=[]), 99) is None


def test_a_cache_of_fixed_length_counts_what_it_is_given() -> None:
    cache, update = (
        types.SimpleNamespace(),
        older.updating(lambda self, keys, values, layer, cache_kwargs=None: (keys, values)),
    )
    update(cache, states(2, 5, 16), states(2, 5, 16), 0, {"cache_position": torch.arange(5)})
    assert cache.memfit_seen == 5
    update(
        cache,
        states(2, 1, 16),
        states(2, 1, 16),
        0,
        cache_kwargs={"cache_position": torch.tensor([7])},
    )
    assert cache.memfit_seen == 8


def test_arguments_of_tuned_kernels_by_name_and_by_place() -> None:
    old = types.SimpleNamespace(arg_names=["x", "y", "n"], key_idx=[2], restore_idx=[])
    new = types.SimpleNamespace(arg_names=["x", "y", "n"], keys=["n"], restore_value=["x"])
    for tuner in (old, new):
        assert launches.arguments(tuner, "keys", "key_idx") == ["n"]
    assert launches.arguments(new, "restore_value", "restore_idx") == ["x"]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("python", ENVIRONMENTS)
def test_every_way_of_working_runs_there(python: str, job: str) -> None:
    found = trace(
        CONFIG,
        framework="transformers",
        seq=64,
        new_tokens=20,
        gpu="a100-sxm-80gb",
        python=python,
        **JOBS[job],
    )
    assert found.memory.allocated > 0


@pytest.mark.slow
@pytest.mark.parametrize("python", ENVIRONMENTS)
def test_an_answer_grows_there(python: str) -> None:
    """The cache of the last token is there, whichever way that version holds it."""
    short, long = (
        trace(
            CONFIG,
            task="inference",
            batch=16,
            seq=8,
            new_tokens=tokens,
            gpu="a100-sxm-80gb",
            python=python,
        ).memory.allocated
        for tokens in (5, 400)
    )
    assert (
        long - short > 0.9 * 16 * 395 * 2 * 2 * 2 * 16 * 2
    )  # batch, tokens, layers, keys and values, heads, head size, bytes


@pytest.mark.slow
@pytest.mark.parametrize("python", ENVIRONMENTS)
def test_a_script_runs_there(python: str, tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(64, 64).cuda()\noptimizer = "
        "torch.optim.AdamW(model.parameters())\n"
        "for _ in range(3):\n    model(torch.randn(2, 64).cuda()).sum().backward()\n    "
        "optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert trace(script, python=python).parameters.total == 64 * 64 + 64
    script.write_text("import torch\ntorch.zeros(3, device=3)\n")
    with pytest.raises(InputError, match="cuda:3"):
        trace(script, python=python)


def test_flash_attn_is_there_for_modules_that_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As modules of transformers 4 do where they stand, if it seems to be installed."""
    import importlib
    import sys

    from transformers.utils import import_utils

    from memfit.trace import flash_attn, flash_older

    before = import_utils.is_flash_attn_2_available
    loaded = types.ModuleType("transformers.models.some.modeling_some")
    loaded.is_flash_attn_2_available = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    with flash_older.installed(flash_attn.functions(2)):
        assert import_utils.is_flash_attn_2_available()
        assert loaded.is_flash_attn_2_available()  # type: ignore[attr-defined]
        names = vars(importlib.import_module("flash_attn")) | vars(
            importlib.import_module("flash_attn.bert_padding")
        )
        assert vars(loaded)["flash_attn_varlen_func"] is names["flash_attn_varlen_func"]
    assert "flash_attn" not in sys.modules
    assert "flash_attn_func" not in vars(loaded)
    assert import_utils.is_flash_attn_2_available is before


def test_padding_goes_out_and_comes_back() -> None:
    from memfit.trace.flash_older import pad, unpad

    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    hidden = torch.arange(24.0).reshape(2, 3, 2, 2)
    rows, indices, ends, longest, _ = unpad(hidden, mask)
    assert rows.shape == (5, 2, 2)
    assert ends.tolist() == [0, 2, 5]
    assert longest == 3
    assert torch.equal(pad(rows, indices, 2, 3), hidden * mask[..., None, None])


@pytest.mark.slow
@pytest.mark.parametrize("python", ENVIRONMENTS)
def test_flash_attn_runs_there_as_the_formulas_say(python: str) -> None:
    """Not where transformers is older than the formulas are."""
    job = {"batch": 2, "seq": 128, "attention": "flash-attn-2", "gpu": "a100-sxm-80gb"}
    job |= {"framework": "transformers"}
    real = trace(CONFIG, python=python, **job)
    asked = ",".join(f"{name}={version}" for name, version in real.versions.items())
    ours = estimate(CONFIG, **job, versions=asked)
    assert ours.memory.allocated == pytest.approx(real.memory.allocated, rel=0.002)
