"""Separate draft models of speculative decoding: weights, cache, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.api.engine import serve
from memfit.errors import InputError

TARGET = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LAYER = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
NORMS = 2 * 4096
KINDS = {
    # a projection of two widths; embedding and head are the target's
    "eagle": (LLAMA, LAYER + 2 * 4096 * 4096 + NORMS),
    # of three; attention reads the embedding, too; a head over 32,000 tokens (0.85 GB on the hub)
    "eagle3": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
        LAYER + 4096 * 6144 + 3 * 4096 * 4096 + 32000 * (4096 + 4) + NORMS,
    ),
    # five layers, and hidden states of five layers of the target
    "dflash": (
        {
            **LLAMA,
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": 5,
            "dflash_config": {"target_layer_ids": [1, 8, 15, 22, 29]},
        },
        5 * LAYER + 5 * 4096 * 4096 + NORMS,
    ),
}


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def vllm(**given: Any) -> Any:
    options = {"engine": "vllm", "offline": True, "gpu": "h100-sxm-80gb", "max_model_len": 8192}
    return serve(TARGET, **options, **given)


def sglang(version: str = "0.5.18", **given: Any) -> Any:
    options = {"engine": "sglang", "offline": True, "gpu": "h100-sxm-80gb"}
    return serve(TARGET, **options, engine_version=version, context_length=8192, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_cache_of_a_draft(tmp_path: Path, kind: str) -> None:
    """Read as what its config says, without a `method`; each layer caches 4 KiB of a token."""
    config, values = KINDS[kind]
    draft = {"model": folder(tmp_path / f"{kind}-draft", config), "num_speculative_tokens": 3}
    plain, drafted = vllm(), vllm(speculative_config=draft)
    more = (drafted.figures["weights_gib"] - plain.figures["weights_gib"]) * 2**30
    assert more == pytest.approx(2 * values, rel=0.01)
    share = [one.figures["kv_tokens"] / one.figures["kv_gib"] for one in (plain, drafted)]
    layers = config["num_hidden_layers"]
    assert share[0] / share[1] == pytest.approx((32 + layers) / 32, rel=0.002)


def test_a_draft_that_is_a_model_keeps_its_embedding_and_its_own_heads() -> None:
    """Llama-3.2-1B: 2.30 GiB, 16 layers of 8 heads of 64."""
    draft = {"model": "meta-llama/Llama-3.2-1B-Instruct", "num_speculative_tokens": 5}
    plain, drafted = vllm(), vllm(speculative_config=draft)
    assert drafted.figures["weights_gib"] - plain.figures["weights_gib"] == pytest.approx(
        2.32, rel=0.02
    )
    share = [one.figures["kv_tokens"] / one.figures["kv_gib"] for one in (plain, drafted)]
    assert share[0] / share[1] == pytest.approx(1.25, rel=0.002)


def test_sglang_takes_a_draft_from_the_pool_since_0_5_15(tmp_path: Path) -> None:
    draft = folder(tmp_path / "draft", KINDS["eagle3"][0])
    options = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft}
    new, old = sglang(**options), sglang("0.5.9", **options)
    assert next(one.bytes for one in new.pools if one.name == "draft layers") > 0.8e9
    per_token = new.figures["kv_gib"] * 2**30 / new.figures["kv_tokens"]
    assert per_token == pytest.approx(32 * 4096, rel=0.001)
    cache = next(one.bytes for one in new.pools if one.name == "KV cache of draft layers")
    assert cache == new.figures["kv_tokens"] * 4096
    assert old.figures["kv_tokens"] > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "mtp", "num_speculative_tokens": 1}, "has no layers that guess tokens"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "needs the draft's name"),
        ({"method": "medusa", "model": TARGET}, "`method: medusa` is not supported yet"),
        ({"method": "mtp", "quantization": 8}, "`quantization: 8` must be a name"),
        ({"model": TARGET, "quantization": "fp9"}, "`fp9` has nothing to read"),
        ({"model": TARGET, "draft_tensor_parallel_size": 2}, "_size: 2` must be 1"),
    ],
)
def test_drafts_that_vllm_cannot_load(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        vllm(speculative_config=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_algorithm": "EAGLE"}, "has no layers that guess tokens"),
        ({"speculative_algorithm": "MEDUSA"}, "MEDUSA` is not supported yet"),
    ],
)
def test_drafts_that_sglang_cannot_load(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sglang(**given)


def test_a_draft_that_nobody_knows_is_one_error() -> None:
    draft = {"model": "nobody/knows-eagle3", "num_speculative_tokens": 3}
    with pytest.raises(InputError) as error:
        vllm(speculative_config=draft)
    assert [(one.message, one.where) for one in error.value.problems] == [
        (
            "`nobody/knows-eagle3` is not in the local cache of the hub, and memfit is offline",
            "speculative_config",
        )
    ]
    path = {"speculative_draft_model_path": "nobody/knows", "speculative_algorithm": "EAGLE3"}
    with pytest.raises(InputError, match="@ speculative_draft_model_path"):
        sglang(**path)
    vllm(speculative_config={"method": "ngram", "num_speculative_tokens": 3})


def test_heads_of_a_draft_must_divide(tmp_path: Path) -> None:
    config = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 128}
    draft = folder(tmp_path / "draft", config)
    with pytest.raises(InputError, match="draft model's 6 attention heads"):
        vllm(speculative_config={"model": draft, "method": "eagle"}, tensor_parallel_size=4)


def test_a_draft_is_quantized_as_its_own_option_says(tmp_path: Path) -> None:
    """Linear layers in 8 bits: vLLM's by `speculative_config`, SGLang's as the target's are."""
    draft = folder(tmp_path / "draft", LLAMA)
    plain, eighth = (
        vllm(speculative_config={"model": draft, "method": "eagle", **more}).figures["weights_gib"]
        for more in ({}, {"quantization": "fp8"})
    )
    assert (plain - eighth) * 2**30 == pytest.approx(LAYER, rel=0.01)
    options = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": draft}
    same, own = (
        next(
            one.bytes
            for one in sglang(quantization="fp8", **options, **more).pools
            if one.name == "draft layers"
        )
        for more in ({}, {"speculative_draft_model_quantization": "unquant"})
    )
    assert own - same == pytest.approx(LAYER, rel=0.02)


def test_ranks_of_a_draft_are_the_targets() -> None:
    """vLLM refuses another number for a draft that is a model."""
    draft = {"model": "meta-llama/Llama-3.2-1B-Instruct", "draft_tensor_parallel_size": 1}
    with pytest.raises(InputError, match="`draft_tensor_parallel_size: 1` must be 2"):
        vllm(speculative_config=draft, tensor_parallel_size=2)
    vllm(speculative_config=draft)


def test_a_plain_model_is_no_draft_of_eagle() -> None:
    model = "meta-llama/Llama-3.2-1B-Instruct"
    message = "EAGLE's drafts have one layer, and this model has 16"
    with pytest.raises(InputError, match=message) as bad:
        vllm(speculative_config={"model": model, "method": "eagle"})
    assert len(bad.value.problems) == 1
    with pytest.raises(InputError, match=message):
        sglang(speculative_algorithm="EAGLE", speculative_draft_model_path=model)
    assert vllm(speculative_config={"model": model, "method": "draft_model"}).figures
    assert vllm(speculative_config={"model": model}).figures


@pytest.mark.parametrize(("kind", "tables"), [("eagle", 2), ("eagle3", 1), ("dflash", 0)])
def test_sglang_sizes_the_pool_beside_a_drafts_copies(
    tmp_path: Path, kind: str, tables: int
) -> None:
    """EAGLE's embedding and head are there while the pool is sized, EAGLE-3's embedding; both are
    freed afterwards."""
    draft = folder(tmp_path / "draft", KINDS[kind][0])
    options = {"speculative_algorithm": kind.upper(), "speculative_draft_model_path": draft}
    plain = sglang(mem_fraction_static=0.8)
    drafted = sglang(mem_fraction_static=0.8, **options)
    pools = {one.name: one.bytes for one in drafted.pools}
    beside = pools["draft layers"] + pools["KV cache of draft layers"]
    freed = (plain.figures["kv_gib"] - drafted.figures["kv_gib"]) * 2**30 - beside
    assert freed == pytest.approx(tables * 128256 * 4096 * 2, abs=2e6)
