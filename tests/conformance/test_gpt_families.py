"""GPT-like families against the code that runs them: what it caches, which dropouts act; and what
has no formula is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.model.families import build, find
from memfit.model.model import Model
from memfit.model.modules import MLP, Attention

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NAMES = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "gptj",
    "codegen",
    "gpt_bigcode",
    "biogpt",
    "mpt",
    "xglm",
    "persimmon",
    "phi",
)
BATCH, LENGTH = 2, 24  # longer than GPT-Neo's window, which saves nothing in the cache


EXAMPLES = [
    pytest.param(config, id=f"{name}-{index}")
    for name in NAMES
    for index, config in enumerate(find(name).examples)
]


def real(config: Mapping[str, Any], **more: Any) -> Any:
    options = {**config, **more}
    made = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")


def mixers(model: Model, kind: type) -> list[Any]:
    return [
        block.mixer
        for layer in model.layers
        for block in layer.blocks
        if isinstance(block.mixer, kind)
    ]


@pytest.mark.parametrize("config", EXAMPLES)
def test_the_cache_holds_what_the_code_keeps(config: Mapping[str, Any]) -> None:
    with torch.no_grad():
        output = real(config).eval()(torch.zeros(BATCH, LENGTH, dtype=torch.long), use_cache=True)
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in output.past_key_values.layers)
    assert kept == BATCH * LENGTH * sum(
        mixer.cached_expanded for mixer in mixers(build(config), Attention)
    )


@pytest.mark.parametrize("config", EXAMPLES)
def test_dropouts_are_those_that_act(
    config: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    acted: Counter[float] = Counter()
    original = torch.nn.functional.dropout

    def noted(value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        acted[p] += bool(training and p)
        return original(value, p, training, inplace)

    monkeypatch.setattr(torch.nn.functional, "dropout", noted)
    real(config, layerdrop=0.0).train()(torch.zeros(BATCH, LENGTH, dtype=torch.long))
    model = build(config)
    expected = Counter([model.embed_dropout])
    for mixer in mixers(model, Attention):
        expected.update([mixer.dropout, mixer.out_dropout])
    for mixer in mixers(model, MLP):
        expected.update([mixer.inner_dropout, mixer.dropout])
    assert +acted == Counter({p: count for p, count in expected.items() if p})


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_head": 5}, "n_head"),
        ("gpt2", {"attn_pdrop": 1.5}, "attn_pdrop"),
        ("gpt_neo", {"attention_types": [[["global"], 10**12]]}, "attention_types"),
        ("gpt_neo", {"attention_types": [[["sideways"], 4]]}, "attention_types"),
        ("gpt_neox", {"rotary_pct": 0.2}, "rotary_pct"),
        ("opt", {"activation_function": "glue"}, "activation_function"),
        ("bloom", {"pretraining_tp": 4, "slow_but_exact": True}, "slow_but_exact"),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, "num_kv_heads"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("gptj", {"rotary_dim": 18}, "rotary_dim"),
        ("codegen", {"n_head": 2}, "n_head"),
        ("mpt", {"expansion_ratio": 2}, "expansion_ratio"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln"),
    ],
)
def test_what_has_no_formula_is_refused(name: str, change: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        build({**find(name).examples[0], **change})
    assert [problem.where for problem in caught.value.problems] == [f"config.{where}"]


def test_all_problems_come_at_once() -> None:
    with pytest.raises(InputError) as caught:
        build(
            json.loads(
                '{"model_type": "gpt_neo", "hidden_size": 65, "num_layers": -1, '
                '"num_heads": 4, "vocab_size": "many"}'
            )
        )
    assert {problem.where.rpartition(".")[2] for problem in caught.value.problems} == {
        "num_layers",
        "num_heads",
        "vocab_size",
        "max_position_embeddings",
    }
