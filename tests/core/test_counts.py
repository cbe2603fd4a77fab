"""Counts of the bundled configs, whole checkpoints to the byte, and what families say of caches,
windows and experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.formats import FORMATS
from memfit.model import catalog
from memfit.model.classes import is_bare
from memfit.model.families import build, families
from memfit.model.families._headless import NONE
from memfit.model.heads import with_head
from memfit.model.model import Model
from memfit.model.modules import Attention, Block, Layer, Linear, MoE


def known(name: str) -> Model:
    return build(catalog.entry(name).config(), name=name)


def as_published(entry: catalog.Entry) -> Model:
    """The model without a head where its config names the bare model alone."""
    model = known(entry.name)
    return with_head(model, NONE, 0) if model.encodes and is_bare(entry.config()) else model


def answered(entry: catalog.Entry) -> bool:
    """Whether a formula answers: of a type with captured graphs some configurations were not
    captured, and say so."""
    family = families().get(entry.model_type)
    if family is None or not family.graphs:
        return family is not None
    try:
        known(entry.name)
    except InputError as bad:
        return not any(word in str(bad) for word in ("no captured graph", "modelopt"))
    return True


def test_catalog() -> None:
    """Every entry that has a family counts as transformers 5.23 did on the meta device
    (`built_with`)."""
    counted = [entry for entry in catalog.entries() if entry.parameters and answered(entry)]
    wrong = {
        entry.name: (count, entry.parameters)
        for entry in counted
        if (count := as_published(entry).parameters) != entry.parameters
    }
    assert not wrong
    assert len(counted) >= 400


def test_every_family_of_the_catalog_can_be_built() -> None:
    for entry in catalog.entries():
        if answered(entry):
            assert known(entry.name).layers


@pytest.mark.parametrize(
    ("name", "size"),
    # `total_size` in model.safetensors.index.json of the two repositories: MXFP4 experts,
    # everything else in bfloat16
    [("openai/gpt-oss-20b", 13_761_264_768), ("openai/gpt-oss-120b", 65_248_815_744)],
)
def test_stored_in_mxfp4(name: str, size: int) -> None:
    model = known(name)
    assert model.dtype == "bfloat16"
    assert (
        sum(FORMATS[weight.format or model.dtype].bytes(weight.count) for weight in model.weights())
        == size
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    # as the model cards and reports have them, in tenths
    [
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),  # Jiang et al. 2024: 12.9B active of 46.7B
        ("Qwen/Qwen3-30B-A3B", 3.3),  # its card: 3.3B activated
        (
            "deepseek-ai/DeepSeek-V3",
            37.6,
        ),  # 37B in the report, which leaves out the embedding: 0.93B
        ("meta-llama/Llama-3.1-8B", 8.0),
    ],
)
def test_active(name: str, billions: float) -> None:
    assert known(name).active / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("meta-llama/Llama-3.1-8B", 2 * 8 * 128 * 32),
        ("deepseek-ai/DeepSeek-V3", 576 * 61),  # the latent of 512 and one rotary key of 64
        ("deepseek-ai/DeepSeek-V2-Lite", 576 * 27),
        ("google/gemma-2-9b", 2 * 8 * 256 * 42),
    ],
)
def test_cached_values_of_a_token(name: str, values: int) -> None:
    assert known(name).cached == values


def windows(model: Model) -> Counter[int]:
    mixers = (block.mixer for layer in model.layers for block in layer.blocks)
    return Counter(mixer.window for mixer in mixers if isinstance(mixer, Attention))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistralai/Mistral-7B-v0.1", {4096: 32}),
        ("mistralai/Mistral-7B-v0.3", {0: 32}),
        ("google/gemma-2-9b", {4096: 21, 0: 21}),
        ("google/gemma-3-12b-it", {1024: 40, 0: 8}),  # five sliding layers to one that sees all
        ("openai/gpt-oss-20b", {128: 12, 0: 12}),
        ("Qwen/Qwen2.5-7B", {0: 28}),  # it names a window and does not use it
    ],
)
def test_windows(name: str, expected: dict[int, int]) -> None:
    assert windows(known(name)) == expected


def test_towers_are_held_and_not_passed_through() -> None:
    model = known("google/gemma-3-12b-it")
    assert model.idle == sum(
        weight.count
        for weight in model.weights()
        if "vision_tower" in weight.name or "projector" in weight.name
    )
    assert model.active == model.parameters - model.idle


def test_tied_head_is_counted_once() -> None:
    """By hand: Llama 3.2 1B without and with a head of its own."""
    config: dict[str, Any] = catalog.entry("meta-llama/Llama-3.2-1B").config()
    tied, untied = build(config), build({**config, "tie_word_embeddings": False})
    width, inner, keys, vocab = 2048, 8192, 8 * 64, 128256
    layer = 2 * width * width + 2 * width * keys + 3 * width * inner + 2 * width
    assert tied.parameters == 16 * layer + vocab * width + width
    assert untied.parameters == tied.parameters + vocab * width
    assert [weight.name for weight in tied.weights()].count("lm_head.weight") == 0


def test_active_counts_experts_by_use() -> None:
    """By hand: 4 experts of which 1 is used, behind a router; everything else is passed by every
    token."""
    moe = MoE(name="mlp", experts=4, active=1, inputs=8, width=6)
    model = Model(
        name="x",
        family="x",
        prefix="layers",
        embed=(),
        layers=(Layer(blocks=(Block(mixer=moe),)),),
        final=(),
        head=Linear(name="head", inputs=8, outputs=10),
        tied=False,
        vocab=10,
        width=8,
        positions=1,
    )
    expert = 3 * 8 * 6
    assert model.parameters == 4 * expert + 4 * 8 + 80
    assert model.active == expert + 4 * 8 + 80
