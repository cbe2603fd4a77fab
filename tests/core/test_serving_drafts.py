"""Draft layers, mixed quantization, and what caches of hybrid models keep for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfit.api.engine import serve
from memfit.errors import InputError, Problem
from memfit.model import catalog
from memfit.model.source import from_catalog
from memfit.serving.base import Question
from memfit.serving.sglang.setup import set_up as set_up_sglang
from memfit.serving.stored import read_scheme, scheme_of
from memfit.serving.subject import subject_from
from memfit.serving.vllm.setup import Setup, set_up
from memfit.serving.vllm.specs import layer_specs
from memfit.truth.served import UNSEEN, judge, read_served

MIXED = "nvidia/Qwen3.6-35B-A3B-NVFP4"
MTP = {"method": "mtp", "num_speculative_tokens": 2}


def settings(name: str, version: str = "0.22.1", **options: Any) -> Setup:
    subject = subject_from(from_catalog(catalog.find(name) or name))
    return set_up(Question(subject=subject, options=options, version=version))


def gib(name: str, version: str = "0.22.1", **options: Any) -> float:
    asked = {"engine": "vllm", "offline": True, "engine_version": version, **options}
    return float(serve(name, **asked).figures["weights_gib"])


def test_a_log_with_draft_layers() -> None:
    """Qwen3.6-35B-A3B in ModelOpt's mix with one MTP layer in 16 bits, vLLM 0.22.1: 21.93 GiB, one
    block for 2,128 tokens, and 24.62 requests of 262,144 tokens in 74.76 GiB."""
    row = next(one for one in read_served(UNSEEN) if one.id == "unseen-0013")
    assert judge(row).predicted["weights_gib"] == pytest.approx(21.93, rel=0.006)
    blocks = {one.block for one in layer_specs(settings(MIXED, **row.options))}
    assert 2128 in blocks
    bytes_, answer = 74.76 * 2**30, judge(row).predicted
    share = answer["max_concurrency"] / answer["kv_gib"] / 2**30
    assert share * bytes_ == pytest.approx(24.62, rel=0.005)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        # attention, 256 experts of 512, a shared one, the router, and the projection
        ("Qwen/Qwen3.6-35B-A3B", 2 * (257 * 3 * 512 * 2048 + 258 * 2048 + 2 * 2048**2)),
        # DeepSeek-V3: 256 experts of 2,048 in fp8
        ("deepseek-ai/DeepSeek-V3", 257 * 3 * 2048 * 7168),
    ],
)
def test_weights_of_a_draft_layer(name: str, layer: int) -> None:
    more = gib(name, speculative_config=MTP) - gib(name)
    assert more == pytest.approx(layer / 2**30, rel=0.06)


def test_a_path_to_the_model_itself_loads_its_draft_layers_alone(tmp_path: Path) -> None:
    """As for DeepSeek's models in SGLang's and vLLM's guides: the draft is a copy of the target."""
    copy = tmp_path / "copy"
    copy.mkdir()
    config = from_catalog(catalog.find("deepseek-ai/DeepSeek-V3") or "").config
    (copy / "config.json").write_text(json.dumps(config))
    few = {"tp_size": 16, "gpu": "16xh100", "offline": True}
    eagle = {"engine": "sglang", "speculative_algorithm": "EAGLE", **few}
    both = serve("deepseek-ai/DeepSeek-V3", speculative_draft_model_path=str(copy), **eagle)
    one, none = (
        serve("deepseek-ai/DeepSeek-V3", **which) for which in (eagle, {"engine": "sglang", **few})
    )
    assert both.figures == one.figures != none.figures
    named = {"model": str(copy), "num_speculative_tokens": 1}
    assert gib("deepseek-ai/DeepSeek-V3", speculative_config=named) == gib(
        "deepseek-ai/DeepSeek-V3", speculative_config=MTP
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "speculative_config` must be a JSON object"),
        ([], "speculative_config` must be a JSON object"),
        ({"model": 5}, "`model: 5` must be a name or a path"),
        ({"model": "", "method": "eagle"}, "`model: ` must be a name or a path"),
        ({"num_speculative_tokens": 3}, "neither `method` nor `model`"),
        ({"method": "mtp", "num_speculative_tokens": -3}, "-3` must be an integer from 1 to 1024"),
        ({"method": "mtp", "num_speculative_tokens": 10**21}, "must be an integer from 1 to 1024"),
        ({"method": "mtp", "num_speculative_tokens": "x"}, "x` must be an integer"),
        ({"method": 5, "num_speculative_tokens": True}, "method: 5` must be a name"),
    ],
)
def test_drafts_that_are_none(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(MIXED, speculative_config=given)


def test_states_of_cached_prefixes_and_of_guesses() -> None:
    def pages(version: str = "0.22.1", **options: Any) -> int:
        found = layer_specs(settings(MIXED, version, **options))
        return next(one.states for one in found if one.kind == "state")

    assert (pages(), pages(enable_prefix_caching=True)) == (1, 2)
    assert pages(enable_prefix_caching=True, speculative_config=MTP) == 4
    assert pages("0.13.0", enable_prefix_caching=True) == 1


def test_modelopts_mix_is_read_by_name() -> None:
    config = {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
                "model.layers.0.linear_attn.in_proj_qkv": {"quant_algo": "FP8"},
            },
        }
    }
    scheme = read_scheme(config)
    assert scheme is not None
    names = ("mlp.up", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "lm_head")
    assert [scheme.of(name).kind for name in names] == ["fp4", "fp8", "plain", "plain"]
    layers = config["quantization_config"]["quantized_layers"]
    layers["model.layers.1.mlp.experts"] = {"quant_algo": "FP8"}  # type: ignore[index]
    assert read_scheme(config) is None


def test_prefixes_of_mamba_keep_the_state_of_each_block() -> None:
    """`mamba_cache_mode` is "all" where vLLM's class supports it: a page for each block."""

    name, few = "nvidia/Nemotron-H-8B-Base-8K", {"max_model_len": 8192}

    def pages(version: str, **options: Any) -> tuple[int, int]:
        found = layer_specs(settings(name, version, **few, **options))
        blocks = -(-8192 // next(one.block for one in found if one.kind != "state"))
        return next(one for one in found if one.kind == "state").pages(8192, 2048), blocks

    assert pages("0.22.1")[0] == pages("0.13.0", enable_prefix_caching=True)[0] == 1
    kept, blocks = pages("0.22.1", enable_prefix_caching=True)
    assert kept == blocks > 2


@pytest.mark.parametrize(
    "settings",
    [
        [1],
        {"quant_method": "modelopt", "quantization": 3},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": 3}},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": [1]},
        {"quant_method": "gptq", "bits": "x"},
    ],
)
def test_quantization_of_another_form_is_refused(settings: object) -> None:
    found: list[Problem] = []
    scheme_of({"quantization_config": settings}, found)
    assert [one.where for one in found] == ["config.quantization_config"]


def test_sglang_refuses_a_vision_tower_without_numbers() -> None:
    subject = subject_from(from_catalog("Qwen/Qwen3.6-27B"))
    config = {**subject.config, "vision_config": {"hidden_size": "x"}}
    question = Question(subject=replace(subject, config=config))
    with pytest.raises(InputError, match="`hidden_size: x` must be an integer of at least 1"):
        set_up_sglang(question)


def test_a_checkpoint_may_say_how_the_cache_is_kept() -> None:
    name = "nvidia/Qwen3.6-27B-NVFP4"
    assert settings(name).kv_dtype == "fp8"
    assert settings(name, kv_cache_dtype="bfloat16").kv_dtype == "bfloat16"
    assert settings(name, "0.13.0").kv_dtype == "auto"
    assert settings(MIXED).kv_dtype == "auto"


def sglang(name: str, version: str = "0.5.18", **options: Any) -> dict[str, float]:
    asked = {"engine": "sglang", "gpu": "h200", "offline": True, "engine_version": version}
    answer = serve(name, **asked, mem_fraction_static=0.8, **options)
    found = {pool.name: pool.bytes / 2**30 for pool in answer.pools}
    return {**found, "tokens": answer.figures["kv_tokens"]}


def test_sglangs_draft_layers_are_part_of_its_share() -> None:
    """From 0.5.15 on the pool gives up the draft layer, its copies of embedding and head, and one
    layer of 16 more for each token; before, all of it takes what the share leaves free."""
    name, draft = (
        "Qwen/Qwen3.6-27B",
        {"speculative_algorithm": "EAGLE", "disable_radix_cache": True},
    )
    given = {"max_running_requests": 8}
    alone, both = sglang(name, **given, disable_radix_cache=True), sglang(name, **given, **draft)
    copies = 2 * 248_320 * 5120 * 2 / 2**30
    taken = both["draft layers"] + copies + both["states of guessed tokens"]
    assert both["KV cache of draft layers"] == pytest.approx(both["KV cache"] / 16, rel=0.001)
    lost = alone["KV cache"] - both["KV cache"] - both["KV cache of draft layers"]
    assert lost == pytest.approx(taken, rel=0.001)
    older = sglang(name, "0.5.9", **given, **draft)
    lost = alone["KV cache"] - older["KV cache"]
    assert lost == pytest.approx(older["states of guessed tokens"], rel=0.001)


def test_states_of_guessed_tokens() -> None:
    """Each running request keeps a state for each guessed token: 48 requests of four tokens beside
    a draft unless limited, and never more than a third of the states."""
    name = "Qwen/Qwen3.6-27B"
    assert sglang(name)["states of guessed tokens"] == 0
    many = sglang(name, speculative_algorithm="EAGLE")
    few = sglang(name, speculative_algorithm="EAGLE", max_running_requests=12)
    assert many["states of guessed tokens"] == pytest.approx(4 * many["states"] / 3, rel=0.05)
    assert few["states of guessed tokens"] < many["states of guessed tokens"]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"speculative_algorithm": "EAGLE"}, 4),
        ({"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 6}, 6),
        # speculative_hook.py of 0.5.18: 12 n-gram tokens; steps and one more on one branch
        ({"speculative_algorithm": "NGRAM"}, 12),
        (
            {
                "speculative_algorithm": "NEXTN",
                "speculative_num_steps": 7,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 4,
            },
            8,
        ),
    ],
)
def test_guessed_tokens_of_a_step(given: dict[str, Any], tokens: int) -> None:
    few = {"max_running_requests": 2, "disable_radix_cache": True}
    found = sglang("Qwen/Qwen3.6-27B", **few, **given)
    assert found["states of guessed tokens"] == pytest.approx(tokens * found["states"])


def test_states_too_few_for_one_request_are_no_fit() -> None:
    """A step of 10,000 guessed tokens leaves no state for a request: SGLang does not start."""
    many = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 10_000}
    answer = serve("Qwen/Qwen3.6-27B", engine="sglang", gpu="h200", offline=True, **many)
    assert not answer.fits
    assert "state cache is too small" in answer.failure
    assert answer.remedy
