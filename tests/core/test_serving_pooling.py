"""vLLM's models for embeddings, scores and labels: encoders, which have no KV cache, and decoders
without their output head."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit.api.engine_plan import plan_engine
from memfit.errors import InputError
from memfit.hardware import find_gpu
from memfit.model import catalog
from memfit.model.families import build
from memfit.model.source import from_catalog
from memfit.report.engine_answer import write
from memfit.serving import find_engine
from memfit.serving.base import Device, Question
from memfit.serving.subject import of_config, subject_from
from memfit.serving.text_encoders import is_encoder
from memfit.serving.vllm.graphs import captured, sizes
from memfit.serving.vllm.setup import Setup, set_up
from memfit.serving.vllm.specs import layer_specs
from memfit.serving.weights import rank_bytes
from memfit.units import GIB, MIB

BGE, RERANKER = "BAAI/bge-m3", "BAAI/bge-reranker-v2-m3"
BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
MODERN = {
    **BERT,
    "model_type": "modernbert",
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
}


def question(model: Any, version: str = "", gpu: str = "l4", **options: object) -> Question:
    known = find_gpu(gpu)
    device = Device(name=known.name, total=known.memory, gpu=known)
    subject = (
        subject_from(from_catalog(catalog.find(model)))
        if isinstance(model, str)
        else of_config(model, "a model")
    )
    return Question(subject=subject, devices=(device,), options=options, version=version)


def settings(model: Any, version: str = "", gpu: str = "l4", **options: object) -> Setup:
    return set_up(question(model, version, gpu, **options))


def test_an_encoder_fills_the_gpu_with_no_cache() -> None:
    found = memfit.serve(BGE, engine="vllm", gpu="l4")
    pools = {one.name: one.bytes for one in found.pools}
    assert pools["KV cache"] == 0
    assert not {"kv_tokens", "max_concurrency", "available_kv_gib"} & set(found.figures)
    assert found.device < 0.1 * found.usable
    assert found.device == sum(pools.values())
    text = write(found)
    assert "no KV cache: a step takes 8,192 tokens of at most 256 requests" in text
    assert "KV cache for" not in text
    assert "GPU KV cache size" not in text
    assert "Model loading took 1.0559 GiB" in text


def test_weights_of_bge_are_those_of_the_checkpoint_without_its_pooler() -> None:
    """Tables in rows of 64; each tensor in blocks of 512 bytes."""
    setup = settings(BGE)
    published = subject_from(from_catalog(BGE)).parameters
    assert published is not None
    pooler = 1024 * 1024 + 1024
    padding = (250_048 - 250_002) + (8256 - 8194) + (64 - 1)
    bytes_ = 2 * (published - pooler + padding * 1024)
    assert rank_bytes(setup.model, setup.rank) == pytest.approx(bytes_, abs=400 * 512)


def test_heads_of_scores_are_in_fp32() -> None:
    plain, scored = settings(BGE), settings(RERANKER)
    more = rank_bytes(scored.model, scored.rank) - rank_bytes(plain.model, plain.rank)
    assert more == pytest.approx(4 * (1024 * 1024 + 1024 + 1024 + 1), abs=4 * 512)


@pytest.mark.parametrize(
    ("model", "version", "gpu", "tokens", "requests"),
    [
        (BGE, "0.11.0", "l4", 8192, 256),
        (BERT, "0.11.0", "l4", 512, 256),  # one whole prompt
        (BERT, "0.11.1", "l4", 2048, 256),  # as many tokens as other models
        (BERT, "0.24.0", "h100-sxm", 8192, 1024),
        (BERT, "0.10.0", "l4", 32768, 256),  # V0
    ],
)
def test_a_step_takes_whole_prompts(
    model: Any, version: str, gpu: str, tokens: int, requests: int
) -> None:
    setup = settings(model, version, gpu)
    assert (setup.batched, setup.requests) == (tokens, requests)


def test_a_longer_prompt_than_a_step_is_refused_as_vllm_does() -> None:
    found = memfit.serve(BGE, engine="vllm", gpu="l4", max_num_batched_tokens=4096)
    assert found.failure.startswith("ValueError: max_num_batched_tokens (4096) is smaller than")
    assert found.remedy == "--max-num-batched-tokens 8192 or --max-model-len 4096"


def test_a_step_that_does_not_fit_offers_one_that_does() -> None:
    found = memfit.serve(BGE, engine="vllm", gpu="l4", max_num_batched_tokens=2_000_000)
    assert "out of memory" in found.failure
    words = found.remedy.split()
    assert words[0] == "--max-num-batched-tokens"
    again = memfit.serve(BGE, engine="vllm", gpu="l4", max_num_batched_tokens=int(words[1]))
    assert again.fits
    assert again.device > 0.95 * again.usable


def test_as_much_has_to_be_free_as_for_any_model() -> None:
    asked = question(BGE, gpu="t4", gpu_memory_utilization=0.995)
    found = find_engine("vllm").answer(asked)
    assert "less than desired GPU memory utilization" in found.failure
    assert found.remedy.startswith("--gpu-memory-utilization 0.9")


def test_before_0_10_1_a_cache_is_set_aside_that_stays_empty() -> None:
    old, new = settings(BGE, "0.10.0"), settings(BGE, "0.10.2")
    assert (old.rules.engine, new.rules.engine) == (0, 1)
    assert len(layer_specs(old)) == 24
    assert layer_specs(new) == []
    found = memfit.serve(BGE, engine="vllm", gpu="l4", engine_version="0.10.0")
    assert found.device > 0.85 * found.usable


def test_graphs_in_pieces_alone() -> None:
    setup = settings(BGE)
    assert captured(setup) == len(sizes(setup)) == 51
    decoder = settings("Qwen/Qwen3-Embedding-0.6B", runner="pooling")
    assert captured(decoder) == 51
    assert captured(settings("Qwen/Qwen3-Embedding-0.6B")) > 51


@pytest.mark.parametrize(
    ("words", "pooled"),
    [
        ({}, False),
        ({"runner": "pooling"}, True),
        ({"runner": "generate", "task": "embed"}, False),
        ({"convert": "classify"}, True),
        ({"convert": "none"}, False),
        ({"task": "score"}, True),
        ({"task": "generate"}, False),
    ],
)
def test_words_that_make_a_decoder_pool(words: dict[str, str], pooled: bool) -> None:
    setup = settings("Qwen/Qwen3-8B", "0.24.0", "a100-sxm-80gb", **words)
    assert setup.pooling is pooled
    assert setup.second_runner is not pooled
    assert layer_specs(setup)
    head = 151_936 * 4096 * 2
    plain = settings("Qwen/Qwen3-8B", "0.24.0", "a100-sxm-80gb")
    less = rank_bytes(plain.model, plain.rank) - rank_bytes(setup.model, setup.rank)
    assert less == pytest.approx(head if pooled else 0, abs=2 * MIB)


@pytest.mark.parametrize(
    ("kind", "pooled"),
    [
        ("Qwen3ForCausalLM", False),
        ("Qwen3ForSequenceClassification", True),
        ("Qwen3Model", True),
        ("LMHeadModel", False),
    ],
)
def test_a_class_says_whether_it_pools(kind: str, pooled: bool) -> None:
    config = dict(catalog.entry("Qwen/Qwen3-0.6B").config())
    assert settings({**config, "architectures": [kind]}).pooling is pooled


def test_all_run_the_second_runner_once_all_do() -> None:
    assert not settings(BGE, "0.27.0").second_runner
    assert settings(BGE, "0.29.0").second_runner


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_a_head_of_masked_words_has_a_table_of_its_own(architecture: str) -> None:
    bare = settings({**BERT, "architectures": ["BertModel"]})
    setup = settings({**BERT, "architectures": [architecture]})
    more = rank_bytes(setup.model, setup.rank) - rank_bytes(bare.model, bare.rank)
    words = 30522 * 384 + 30522 + 384 * 384 + 3 * 384
    expected = 2 * words if architecture == "BertForMaskedLM" else 0
    assert more == pytest.approx(expected, abs=5 * 512)


@pytest.mark.parametrize(
    "config",
    [
        BERT,
        {**BERT, "model_type": "roberta", "pad_token_id": 1},
        {**MODERN, "architectures": ["ModernBertModel"]},
        {**BERT, "model_type": "gte", "hidden_act": "gelu", "architectures": ["GteModel"]},
        {**BERT, "model_type": "nomic_bert", "hidden_act": "silu"},
    ],
    ids=lambda one: str(one["model_type"]),
)
def test_the_outline_has_the_layers_that_training_knows(config: dict[str, Any]) -> None:
    """Parameters of all layers and embeddings, against the graphs of transformers' classes."""
    found = settings(config).model
    known = build(config)
    ours = sum(one.count for layer in found.layers for one in layer.weights())
    theirs = sum(one.count for layer in known.layers for one in layer.weights())
    assert ours == theirs
    assert is_encoder(found)


@pytest.mark.parametrize(
    ("name", "kind", "tokens"),
    [
        ("bge-large-en-v1.5", "bert", 512),
        ("all-MiniLM-L6-v2", "bert", 512),
        ("multilingual-e5-large", "xlm-roberta", 512),
        ("ms-marco-MiniLM-L6-v2", "bert", 512),
        ("gte-large-en-v1.5", "new", 8192),
        ("ModernBERT-large", "modernbert", 8192),
        ("nomic-embed-text-v1.5", "nomic_bert", 2048),
    ],
)
def test_well_known_models_by_name(name: str, kind: str, tokens: int) -> None:
    entry = catalog.entry(name)
    assert entry.model_type == kind
    found = memfit.serve(name, engine="vllm", gpu="t4")
    assert found.figures["max_model_len"] == tokens
    assert found.parameters == entry.parameters
    held = found.figures["weights_gib"] * GIB / (2 * entry.parameters)
    assert 0.96 < held < 1.03  # without poolers and heads of words, tables in rows of 64


@pytest.mark.parametrize("name", [BGE, RERANKER])
def test_sglang_sets_a_cache_aside_for_an_encoder(name: str) -> None:
    """Two vectors a layer and token, as for a decoder; heads in 16 bits."""
    found = memfit.serve(name, engine="sglang", gpu="l4")
    entry = catalog.entry(name)
    config = entry.config()
    token = 4 * config["hidden_size"] * config["num_hidden_layers"]
    assert found.figures["kv_gib"] * GIB == found.figures["kv_tokens"] * token
    assert found.figures["kv_gib"] > 15
    assert entry.parameters is not None
    held = found.figures["weights_gib"] * GIB / (2 * entry.parameters)
    assert 0.97 < held < 1.06  # whole segments of the allocator
    assert not any("graphs" in one.message for one in found.problems)


def test_sglang_has_no_other_encoders() -> None:
    with pytest.raises(InputError, match="`modernbert` is an encoder"):
        memfit.serve("ModernBERT-base", engine="sglang", gpu="l4")


def test_what_no_encoder_can_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="is an encoder, not supported with this engine yet"):
        memfit.serve(BGE, engine="tgi", gpu="l4")
    with pytest.raises(InputError, match="models with an encoder"):
        plan_engine(BGE, engine="vllm", gpu="l4")
    with pytest.raises(InputError, match="not supported yet: model_type `nomic_bert`"):
        memfit.serve({**BERT, "model_type": "nomic_bert", "moe_every_n_layers": 2}, engine="vllm")


def test_half_of_the_layers_on_each_of_two_gpus() -> None:
    one, two = settings(BGE), settings(BGE, tensor_parallel_size=2)
    assert rank_bytes(two.model, two.rank) == pytest.approx(
        rank_bytes(one.model, one.rank) / 2, rel=0.01
    )
    assert rank_bytes(one.model, one.rank) / GIB == pytest.approx(1.0559, abs=1e-4)
