"""llama.cpp's less usual architectures: their tensors, caches and refusals. tests/engines compares
their graphs with llama.cpp itself."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from tests.core.test_llamacpp import run
from tests.engines.llamacpp_models import CASES, SMALL, small

from memfit.api.engine import serve
from memfit.errors import InputError, SourceError
from memfit.model import catalog
from memfit.serving.llamacpp.convert import converted
from memfit.serving.llamacpp.engine import read_command
from memfit.serving.llamacpp.loading import check
from memfit.serving.llamacpp.memory import Buffers, buffers, signature
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import BACKENDS, HOST, Machine, loaded_anyway, place
from memfit.serving.llamacpp.settings import Settings
from memfit.units import MIB

CPU = Machine(backend=BACKENDS["cpu"])
TOKEN = 2  # bytes of a value of the cache


def config_of(name: str) -> dict[str, Any]:
    found = catalog.find(name)
    assert found is not None
    return dict(catalog.entry(found).config())


def named(name: str, quantization: str = "F16") -> GgufModel:
    return converted(config_of(name), name, quantization)


def held(model: GgufModel, **settings: Any) -> Buffers:
    return buffers(model, Settings(**{"context": 1024, **settings}), CPU)


# ------------------------------------------------------------------ searched layers


def test_searched_layers_have_the_published_parameters() -> None:
    """Safetensors of Llama-3.3-Nemotron-Super-49B hold 49,867,145,216; a GGUF file adds 64 factors
    of rotation. 49 of the 80 layers have attention."""
    model = named("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    assert model.parameters == 49_867_145_216 + 64
    assert held(model).kv[HOST] == 49 * 1024 * 2 * 8 * 128 * TOKEN


def test_without_flash_attention_all_layers_keep_the_values_of_the_widest() -> None:
    """Two layers have attention, with 2 and 1 heads of 64 values; all six keep 128 values then."""
    model = small("nemotron-nas")
    assert held(model).kv[HOST] == 1024 * (128 + 64) * 2 * TOKEN
    assert held(model, flash=False).kv[HOST] == 1024 * (128 + 64 + 6 * 128) * TOKEN


def test_a_layer_may_be_empty_only_where_the_metadata_say_so() -> None:
    model = small("nemotron-nas")
    assert not model.of_layer(3)
    check(model, "file")
    inner = model.facts["feed_forward_length"]
    assert isinstance(inner, tuple)
    facts = {**model.facts, "feed_forward_length": (*inner[:3], 512, *inner[4:])}
    with pytest.raises(SourceError, match=r"1 of them have no tensors \(the first: 3\)"):
        check(replace(model, facts=facts), "file")


def test_searched_layers_need_an_entry_each() -> None:
    config = config_of("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    config["block_configs"] = config["block_configs"][1:]
    with pytest.raises(SourceError, match="an entry for each of 80 layers"):
        converted(config, "cut", "F16")


# ------------------------------------------------------------------ indexers


@pytest.mark.parametrize(
    ("name", "indexed"),
    [("zai-org/GLM-5.2", 21), ("zai-org/GLM-5", 78), ("deepseek-ai/DeepSeek-V3.2", 61)],
)
def test_indexers_keep_keys_of_their_own(name: str, indexed: int) -> None:
    """512 latent and 64 rotary values in each layer, 128 of the indexer where there is one."""
    model = named(name)
    assert model.layers == (61 if "DeepSeek" in name else 78)
    assert held(model).kv[HOST] == 1024 * (model.layers * 576 + indexed * 128) * TOKEN


def test_glm_5_has_the_published_parameters() -> None:
    """The model card says 744 B; the layer that predicts further tokens is stored beside them. Its
    expert matrices are loaded by nobody."""
    model = named("zai-org/GLM-5")
    extra = [one for one in model.tensors if one.layer == 78]
    assert round(model.parameters / 1e9) == 754
    assert round((model.parameters - sum(one.count for one in extra)) / 1e9) == 744
    assert held(model).model[HOST] < model.bytes - sum(one.bytes for one in extra) + 2**20


def test_the_zeros_of_each_indexed_layer_are_there_from_the_start() -> None:
    """256 chosen tokens of 512 in 32 bits for each layer, and no equal layer is left out."""
    few = small("deepseek_v32")
    config = {**SMALL, **CASES["deepseek_v32"], "model_type": "deepseek_v32"}
    more = converted({**config, "num_hidden_layers": few.layers + 4}, "more", "F16")
    assert held(more).compute[HOST] - held(few).compute[HOST] == 4 * 256 * 512 * 4


def test_an_indexer_that_is_missing_or_lies_is_named() -> None:
    model = small("glm_moe_dsa")
    without = [one for one in model.tensors if not one.name.startswith("blk.0.indexer")]
    with pytest.raises(SourceError, match=r"no tensor `blk\.0\.indexer"):
        held(replace(model, tensors=tuple(without)))
    facts = {**model.facts, "attention.indexer.head_count": 3}
    with pytest.raises(SourceError, match="not for the heads"):
        check(replace(model, facts=facts), "file")
    check(model, "file")


def test_a_file_may_leave_out_the_layer_that_predicts_further_tokens() -> None:
    model = small("deepseek_v32")
    assert model.number("block_count") == 6
    assert not model.of_layer(5)
    check(model, "file")


# ------------------------------------------------------------------ heads of windows


def test_step_needs_the_heads_of_its_windows() -> None:
    """Its class has 96 heads there and 64 elsewhere; the catalog's config says 64 alone."""
    with pytest.raises(SourceError, match="how many heads layers with windows have"):
        named("stepfun-ai/Step-3.7-Flash")


def test_step_loads_the_optional_tensors_of_layers_that_guess() -> None:
    model = small("step3p5")
    assert (model.layers, model.number("block_count")) == (6, 8)
    extra = {one.name.partition(".")[2].partition(".")[2] for one in model.of_layer(7)}
    loaded = {one.name.partition(".")[2].partition(".")[2] for one in loaded_anyway(model, 7)}
    left = {"attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight"}
    left |= {"attn_output.weight", "ffn_norm.weight"}
    left |= {"nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight"}
    assert extra - loaded == left
    assert not loaded_anyway(small("glm4_moe"), 3)


# ------------------------------------------------------------------ encoders and decoders


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("google-t5/t5-small", 60_506_624),
        ("google/flan-t5-base", 247_577_856),
        ("google/flan-t5-xl", 2_849_757_184),
        ("google/mt5-small", 300_176_768),
    ],
)
def test_t5_has_the_published_parameters(name: str, parameters: int) -> None:
    """Of their safetensors; files keep an output matrix that is not tied."""
    assert named(name).parameters == parameters


def test_t5_keeps_the_cache_of_its_decoder_and_logits_of_all_tokens() -> None:
    model = named("google/flan-t5-base")
    found = held(model, context=512)
    assert found.kv[HOST] == 512 * 12 * 2 * 768 * TOKEN
    assert found.compute[HOST] > 512 * 32128 * 4  # tokens, vocabulary, 32 bits
    assert found.output == 32128 * 4


def test_t5_layers_of_both_halves_lie_on_one_device() -> None:
    model = named("google/flan-t5-base")
    gpu = Machine(backend=BACKENDS["cuda"], free=(2**34,))
    places = place(model, Settings(gpu_layers=3), gpu)
    for half in ("enc", "dec"):
        homes = [places.tensors[f"{half}.blk.{layer}.ffn_up.weight"] for layer in (9, 10, 11)]
        assert homes == [HOST, "CUDA0", "CUDA0"]
        assert places.tensors[f"{half}.output_norm.weight"] == "CUDA0"


def test_t5_with_a_cache_for_each_slot_is_refused_with_the_flag_that_works() -> None:
    model = small("t5")
    with pytest.raises(InputError, match="stops with 4 of them"):
        held(model, parallel=4)
    assert held(model, parallel=4, unified=True).kv[HOST]
    code, text = run("google/flan-t5-base:Q8_0", "--engine", "llamacpp", "-np", "2", "-c", "512")
    assert code == 2
    assert "--kv-unified" in text


def test_t5_is_run_by_the_program_that_runs_its_encoder() -> None:
    answer = serve("google/flan-t5-xl:Q8_0", engine="llamacpp", gpu="rtx-4090", offline=True)
    assert "`llama-server` stops with `t5`" in answer.problems[0].message
    assert answer.command.startswith("llama-completion -m flan-t5-xl-Q8_0.gguf")
    assert " -np 1 " in answer.command
    name, flags = read_command(shlex.split(answer.command))
    assert (name, "-np" in flags) == ("flan-t5-xl-Q8_0.gguf", True)


def test_the_speed_of_t5_is_not_known() -> None:
    answer = serve("google/flan-t5-xl:Q8_0", engine="llamacpp", gpu="rtx-4090", offline=True)
    assert answer.speed is None
    assert "encoder and a decoder" in answer.untimed


# ------------------------------------------------------------------ windows and copies


def test_mimo_keeps_longer_keys_than_values() -> None:
    """Nine layers see all, 39 a window of 128 tokens and the batch; keys have 192 values for 4 and
    8 heads. Published parameters leave out the experts' biases."""
    model = named("XiaomiMiMo/MiMo-V2-Flash")
    assert model.parameters == 308_778_768_832 + 47 * 256
    found = held(model, context=4096)
    assert found.kv[HOST] == 9 * 4096 * 4 * (192 + 128) * TOKEN
    assert found.kv_window[HOST] == 39 * 768 * 8 * (192 + 128) * TOKEN


def test_gemma_3n_keeps_twenty_layers_of_35() -> None:
    """The published Q8_0 file has 7.35 GB. Sixteen of the layers with a cache see a window."""
    assert round(named("google/gemma-3n-E4B-it", "Q8_0").bytes / 1e9, 2) == 7.35
    found = held(named("google/gemma-3n-E4B-it"), context=8192)
    assert found.kv[HOST] == 4 * 8192 * 2 * 2 * 256 * TOKEN
    assert found.kv_window[HOST] == 16 * 1024 * 2 * 2 * 256 * TOKEN


def test_the_sparse_layers_of_gemma_3n_count() -> None:
    """Layers that differ in what they compute alone are not taken for equal."""
    model = small("gemma3n_text")
    places = place(model, Settings(), CPU)
    kinds = [signature(model, places, layer) for layer in range(25)]
    assert kinds[5] == kinds[6] != kinds[10] == kinds[11]
    assert kinds[4] != kinds[5]
    assert kinds[20] != kinds[11]


# ------------------------------------------------------------------ encoders


def test_encoders_have_no_output_matrix() -> None:
    """The published file of nomic-embed-text v1.5 in 16 bits has 274 MB; a GPU has all of it but
    the tables of inputs, of which the output takes no copy."""
    model = named("nomic-ai/nomic-embed-text-v1.5")
    assert model.parameters == 136_731_648
    gpu = Machine(backend=BACKENDS["cuda"], free=(2**34,))
    found = buffers(model, Settings(context=2048), gpu)
    assert round(found.model["CUDA0"] / MIB, 2) == 216.14
    assert round((found.model["CUDA0"] + found.model[HOST]) / 1e6) == 274
    assert not found.kv


def test_modernbert_sees_all_in_every_third_layer() -> None:
    """Published parameters, without the bias of the decoder that guesses masked tokens."""
    model = named("answerdotai/ModernBERT-base")
    assert model.parameters == 149_655_232 - 50_368
    assert [layer for layer in range(22) if not model.slides(layer)] == list(range(0, 22, 3))
    assert not held(model).kv_window


# ------------------------------------------------------------------ what is remembered


def test_placements_are_remembered_by_what_they_depend_on() -> None:
    model, gpu = small("qwen3_moe"), Machine(backend=BACKENDS["cuda"], free=(2**34,))
    first = place(model, Settings(context=4096), gpu)
    assert place(model, Settings(context=8192, cache_k="q8_0"), gpu) is first
    for changed in (
        Settings(gpu_layers=1),
        Settings(cpu_moe=1),
        Settings(overrides=(("attn_q", "CPU"),)),
        Settings(kv_offload=False),
    ):
        assert place(model, changed, gpu) != first
    assert place(model, Settings(), replace(gpu, backend=BACKENDS["vulkan"])) != first


def test_a_second_answer_counts_the_layers_anew_for_other_caches() -> None:
    """Equal layers are counted once; what they keep follows the settings."""
    model = small("gemma4")
    one, two = (held(model, cache_k=kind, cache_v=kind) for kind in ("f16", "f32"))
    assert two.kv[HOST] == 2 * one.kv[HOST]
    assert two.kv_window[HOST] == 2 * one.kv_window[HOST]
