"""Outlines whose parts differ in size: MiMo-V2's keys and values, ERNIE 4.5 VL's two mixtures,
MiniMax-M3's small heads."""

from __future__ import annotations

import pytest

import memfit
from memfit.model import catalog
from memfit.model.source import from_catalog
from memfit.serving.base import Question
from memfit.serving.sglang.pools import cells
from memfit.serving.sglang.setup import set_up as set_up_sglang
from memfit.serving.subject import subject_from
from memfit.serving.vllm.engine import per_layer_inputs
from memfit.serving.vllm.setup import set_up
from memfit.serving.vllm.specs import layer_specs
from memfit.serving.weights import rank_sizes
from memfit.truth.served import UNSEEN, judge, read_served

MIMO = "XiaomiMiMo/MiMo-V2-Flash"
M3 = "MiniMaxAI/MiniMax-M3"
TOWERS = {MIMO: 0, M3: 0, "baidu/ERNIE-4.5-VL-28B-A3B-PT": 774_662_016}


@pytest.mark.parametrize("name", TOWERS)
def test_the_outline_has_all_parameters(name: str) -> None:
    subject = subject_from(from_catalog(catalog.find(name)))
    assert subject.model is not None
    assert subject.model.parameters == subject.parameters
    towers = sum(one.count for one in subject.model.towers)
    assert towers == TOWERS[name]


def test_values_smaller_than_keys() -> None:
    """Nine full layers with 4 heads, 39 windows with 8, keys of 192 and values of 128."""
    subject = subject_from(from_catalog(catalog.find(MIMO)))
    setup = set_up(Question(subject=subject, options={"tensor_parallel_size": 4}))
    specs = layer_specs(setup)
    assert [one.page for one in specs if one.kind == "full"] == [16 * (192 + 128) * 2] * 9
    near = [one for one in specs if one.kind == "sliding"]
    assert [(one.page, one.window) for one in near] == [(16 * 2 * (192 + 128) * 2, 128)] * 39
    assert 4096 * (16 * 192 + 192 + 128) in rank_sizes(setup.model, setup.rank)


@pytest.mark.parametrize(("ranks", "heads"), [(2, 2), (8, 1)])
def test_small_heads_pick_blocks(ranks: int, heads: int) -> None:
    """MiniMax-M3: 60 layers with 4 heads of keys and values; 57 have a key of 128 numbers more,
    whole on every rank and in 16 bits beside a cache in 8."""
    subject = subject_from(from_catalog(catalog.find(M3)))
    for name, size in (("auto", 2), ("fp8", 1)):
        options = {"tensor_parallel_size": ranks, "kv_cache_dtype": name}
        specs = layer_specs(set_up(Question(subject=subject, options=options)))
        assert {one.block for one in specs} == {128}
        pages = [one.page // 128 for one in specs]
        assert sorted(pages) == sorted([heads * 256 * size] * 60 + [256] * 57)
    setup = set_up_sglang(Question(subject=subject, options={"tp_size": ranks}))
    assert cells(setup) == (60 * heads * 512 + 57 * 256, 0)
    assert 6144 * (heads + 1) * 128 * 2 in rank_sizes(setup.model, setup.rank)


def test_a_text_without_a_type_has_that_of_the_whole() -> None:
    """The vision model's config names no type of its text."""
    made = subject_from(from_catalog(catalog.find("nvidia/MiniMax-M3-NVFP4"))).model
    assert made is not None
    assert sum(one.count for one in made.towers) == 427_040_132_864 - 426_174_565_632


def test_gemma_3n() -> None:
    """20 of 35 layers have a cache, four of them for all tokens; engines keep keys and values of
    the other 15, too, with their norms. Rows of tokens are in the table of a layer's inputs."""
    name = "google/gemma-3n-E4B-it"
    subject = subject_from(from_catalog(name))
    assert subject.model is not None
    assert subject.parameters is not None
    kept = 15 * (2 * 2 * 256 * 2048 + 256)
    assert subject.model.parameters == subject.parameters + kept
    setup = set_up(Question(subject=subject, options={}))
    specs = layer_specs(setup)
    assert [sum(one.kind == kind for one in specs) for kind in ("full", "sliding")] == [4, 16]
    assert {one.page for one in specs} == {16 * 2 * 2 * 256 * 2}
    assert per_layer_inputs(setup) == setup.batched * 35 * 256 * 2
    # SGLang gives all layers a cache
    assert cells(set_up_sglang(Question(subject=subject, options={})))[0] == 7 * 2 * 2 * 256 * 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_mix_with_mxfp8(engine: str) -> None:
    """MiniMax-M3 of NVIDIA: experts in NVFP4, all other matrices with a scale for 32 values, but
    routers, the tower, the embedding and the head."""
    name = "nvidia/MiniMax-M3-NVFP4"
    subject = subject_from(from_catalog(name))
    assert subject.model is not None
    experts = 57 * 128 * 3 * 6144 * 3072
    towers = sum(one.count for one in subject.model.towers)
    plain = towers + 2 * 200_064 * 6144 + 2 * 57 * 128 * 6144  # routers are in fp32
    rest = subject.model.parameters - experts - towers - 2 * 200_064 * 6144 - 57 * 128 * 6144
    stored = experts * (1 / 2 + 1 / 16) + 2 * plain + rest * (1 + 1 / 32)
    found = memfit.serve(name, engine=engine, gpu="b300", offline=True)
    assert found.figures["weights_gib"] * 2**30 == pytest.approx(stored, rel=0.002)


def test_layers_that_share_a_cache_have_none_in_vllm() -> None:
    """Gemma 4 E4B: 24 of 42 layers keep keys and values, 4 of them for all tokens; SGLang gives the
    others a cache, too. unseen-0161 has 224,353 tokens in 4.1 GiB."""
    subject = subject_from(from_catalog("google/gemma-4-E4B-it"))
    specs = layer_specs(set_up(Question(subject=subject, options={}, version="0.22.1")))
    assert [sum(one.kind == kind for one in specs) for kind in ("full", "sliding")] == [4, 20]
    row = next(one for one in read_served(UNSEEN) if one.id == "unseen-0161")
    found = judge(row).predicted
    assert found["kv_tokens"] / found["kv_gib"] == pytest.approx(224_353 / 4.1, rel=0.01)


@pytest.mark.parametrize(
    ("log", "error"), [("unseen-0021", 0.001), ("unseen-0107", 0.003), ("unseen-0161", 0.004)]
)
def test_gemma_4_keeps_values_that_are_keys_and_those_of_shared_caches(
    log: str, error: float
) -> None:
    """0.07, 0.5 and 1.2 % before."""
    off = judge(next(one for one in read_served(UNSEEN) if one.id == log)).error("weights_gib")
    assert off is not None
    assert abs(off) < error


def test_inputs_of_every_layer_wait_for_a_step() -> None:
    """Gemma 4 E4B: 42 layers with 256 numbers of each token."""
    subject = subject_from(from_catalog("google/gemma-4-E4B-it"))
    few, many = (
        set_up(Question(subject=subject, options={"max_num_batched_tokens": tokens}))
        for tokens in (2048, 8192)
    )
    assert per_layer_inputs(many) - per_layer_inputs(few) == 6144 * 42 * 256 * 2
