"""Configs that nobody can run: one InputError that names everything wrong, never a traceback, in
bounded time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InputError, Problem
from memfit.model.families import build, families
from memfit.model.model import Model
from memfit.model.modules import Attention

FAMILIES = {one.name: one for one in families().values()}
EXAMPLES = [
    (name, dict(example)) for name, one in sorted(FAMILIES.items()) for example in one.examples
]
CASES = [
    pytest.param(example, id=f"{name}-{example['model_type']}-{index}")
    for index, (name, example) in enumerate(EXAMPLES)
]
BY_TYPE = {
    kind: [example for _, example in EXAMPLES if example["model_type"] == kind]
    for kind in families()
}
# Of no weight or activation, whatever they are; `n_ctx` and `seq_length` are old names beside
# others.
IGNORED = {
    "pad_token_id",
    "topk_group",
    "num_nextn_predict_layers",
    "eos_token_id",
    "mask_token_id",
    "decoder_start_token_id",
    "bos_token_id",
    "n_ctx",
    "seq_length",
    "alibi_bias_max",
}
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


def places(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where the whole numbers stand, inner configs included; rope parameters are not among them."""
    for key, value in config.items():
        if isinstance(value, dict) and (key.endswith("_config") or "num_hidden_layers" in value):
            yield from places(value, (*path, key))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (*path, key)


def changed(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**config, key: changed(config[key], tuple(rest), value) if rest else value}


def problems(config: Mapping[str, Any]) -> tuple[Model | None, tuple[Problem, ...]]:
    try:
        return build(config), ()
    except InputError as error:
        return None, error.problems


def blamed(config: Mapping[str, Any]) -> set[str]:
    with pytest.raises(InputError) as caught:
        build(config)
    assert caught.value.problems
    assert all(
        problem.message and problem.where.startswith("config") for problem in caught.value.problems
    )
    return {problem.where for problem in caught.value.problems}


def blamed_alone(example: Mapping[str, Any], value: Any) -> set[tuple[str, ...]]:
    """The numbers that are refused when they alone are `value`; the others are of no weight in this
    example."""
    found = set()
    for path in places(example):
        where = {problem.where for problem in problems(changed(example, path, value))[1]}
        assert not where or ".".join(("config", *path)) in where
        if where:
            found.add(path)
    return found


@pytest.mark.parametrize(
    "value",
    [-2, -(10**12), 10**18, 10**400, "many", 1.5, math.inf, math.nan, [], {"a": 1}, True],
    ids=lambda value: repr(value)[:9],
)
def test_every_number_is_checked(value: Any) -> None:
    for model_type, examples in BY_TYPE.items():
        there = {
            path
            for example in examples
            for path in places(example)
            if path[-1] not in IGNORED and not path[-1].endswith(("_token_id", "_pad_id"))
        }
        assert not there - set().union(*(blamed_alone(example, value) for example in examples)), (
            model_type
        )


@pytest.mark.parametrize("example", CASES)
def test_all_at_once(example: dict[str, Any]) -> None:
    expected = blamed_alone(example, "x")
    config = example
    for path in expected:
        config = changed(config, path, "x")
    assert blamed(config) >= {".".join(("config", *path)) for path in expected}


@pytest.mark.parametrize("value", [0, 10**12])
def test_sizes_in_range(value: int) -> None:
    """Each family has a width, a number of layers and a vocabulary, under whatever names."""
    for model_type, examples in BY_TYPE.items():
        found = {path[-1] for example in examples for path in blamed_alone(example, value)}
        assert found & {
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "n_layers",
            "encoder_layers",
            "num_encoder_layers",
            "decoder_layers",
            "num_self_attends_per_block",
        }, model_type
        assert (
            len(found & {"hidden_size", "n_embd", "n_embed", "d_model", "emb_dim", "dim"}) >= 1
        ), model_type


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_nothing_but_a_type(name: str) -> None:
    for model_type in FAMILIES[name].model_types:
        assert (
            len(blamed({"model_type": model_type})) >= 3
        )  # width, layers and vocabulary at the least


@pytest.mark.parametrize("example", CASES)
def test_heads_that_do_not_divide(example: dict[str, Any]) -> None:
    blocks = build(example).layers[0].blocks
    attention = blocks[0].mixer if blocks else None
    key = next((key for key in HEADS if key in example), "")
    related = example.get("head_dim") is None or example.get("num_key_value_heads")
    if (
        key and related and isinstance(attention, Attention)
    ):  # latent attention asks for no relation
        with pytest.raises(InputError, match=r"divide|heads of"):
            build({**example, key: 5})


@pytest.mark.parametrize(
    "model_type",
    [
        None,
        7,
        "",
        [],
        "no_such_family",
        "lama",
        "llama.build",
        "../llama",
        "_parts",
        "x" * 10**6,
        "é\ud800",
    ],
)
def test_model_types(model_type: Any) -> None:
    with pytest.raises(InputError) as caught:
        build({"model_type": model_type, "hidden_size": 64})
    assert len(str(caught.value)) < 400


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"`qwen3_moe`.*\n.*--by trace"):
        build({"model_type": "qwen3-moee"})


KEYS = sorted({key for _, example in EXAMPLES for key in example} - {"model_type"})
NUMBERS = st.integers(-3, 300) | st.integers(-(10**40), 10**40) | st.floats()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "gelu", "bfloat16"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from([*KEYS, "partial_rotary_factor", "quant_method"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """An example with some of its values replaced, taken away or added; also inside its inner
    configs."""
    _, example = draw(st.sampled_from(EXAMPLES))
    config = json.loads(json.dumps(example))
    for _ in range(draw(st.integers(1, 5))):
        inner = [
            value
            for key, value in config.items()
            if key.endswith("_config") and isinstance(value, dict)
        ]
        target = draw(st.sampled_from([config, *inner]))
        key = draw(
            st.sampled_from(sorted(set(target) - {"model_type"}) or KEYS) | st.sampled_from(KEYS)
        )
        if draw(st.booleans()):
            target[key] = draw(VALUES)
        else:
            target.pop(key, None)
    return dict(config)


@settings(max_examples=400)
@given(mutated())
def test_only_input_errors_escape(config: dict[str, Any]) -> None:
    start = process_time()
    model, found = problems(config)
    assert bool(model) != bool(found)
    assert len(found) < 200
    assert sum(len(str(problem)) for problem in found) < 40_000
    if model:
        assert model.parameters > 0
        assert all(
            min(weight.shape, default=1) > 0
            for layer in set(model.layers)
            for weight in layer.weights()
        )
    assert process_time() - start < 5


@pytest.mark.parametrize("which", ["attn", "expert"])
def test_a_period_holds_its_first_layer(which: str) -> None:
    """Else no layer has attention, or experts: the class refuses it."""
    config = {**BY_TYPE["jamba"][0], f"{which}_layer_period": 2, f"{which}_layer_offset": 2}
    with pytest.raises(InputError, match=f"2 is not less than `{which}_layer_period` 2"):
        build(config)


def test_a_width_of_states_is_that_of_its_heads() -> None:
    config = {**BY_TYPE["falcon_h1"][0], "mamba_d_ssm": 200}
    with pytest.raises(InputError, match="200 is not `mamba_n_heads` times `mamba_d_head`"):
        build(config)


@pytest.mark.parametrize("times", [0, -2, 0.001])
def test_a_multiplier_leaves_a_width(times: float) -> None:
    """LFM2's feed-forward had a negative number of parameters."""
    config = {**BY_TYPE["lfm2"][0], "block_ffn_dim_multiplier": times}
    assert blamed(config) == {"config.block_ffn_dim_multiplier"}
    narrow = {**BY_TYPE["lfm2"][0], "intermediate_size": 1}
    assert blamed(narrow) == {"config.intermediate_size"}
