"""Weights as a file keeps them: a GGUF's own blocks stand in memory, each with its own
quantization."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.api.verbs import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.source import TensorInfo
from memfit.model.stored import doubts, layer_of, with_blocks
from memfit.simulate.memory import memory

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
SQUARE = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (256, 256))
SHAPES = {**SQUARE, "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}
SIZES = {
    "block_count": 2,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "head_count": 4,
    "head_count_kv": 4,
    "context_length": 128,
}


def test_names_tell_their_layer() -> None:
    assert [
        layer_of(name)
        for name in (
            "blk.3.attn_q.weight",
            "model.layers.12.mlp.up_proj.weight",
            "h.0.ln_1.weight",
            "token_embd.weight",
        )
    ] == [3, 12, 0, -1]


def test_blocks_replace_the_weights_of_an_inference_and_not_of_a_training() -> None:
    blocks = [
        TensorInfo(
            name=f"blk.{layer}.attn_q.weight", shape=(1,), format="Q4_K", bytes=1024 * (layer + 1)
        )
        for layer in (0, 1)
    ]
    model = with_blocks(
        build(CONFIG),
        [*blocks, TensorInfo(name="output.weight", shape=(1,), format="Q6_K", bytes=4096)],
    )
    inference = memory(lower(model, Job(task="inference", seq=16, new_tokens=1), compact=True))
    assert inference.parts["weights"] == 1024 + 2048 + 4096
    training = memory(lower(model, Job(seq=16)))
    assert training.parts["weights"] == memory(lower(build(CONFIG), Job(seq=16))).parts["weights"]


def test_a_gguf_is_counted_as_it_is_stored(tmp_path: Path) -> None:
    package, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    path = tmp_path / "mine.gguf"
    writer = package.GGUFWriter(path, "llama")
    for add, value in SIZES.items():
        getattr(writer, f"add_{add}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token {index}" for index in range(1024)])
    expected = 0
    for layer in (0, 1):
        for name, (rows, columns) in SHAPES.items():
            kind = (
                package.GGMLQuantizationType.Q6_K
                if layer and name == "ffn_down"
                else package.GGMLQuantizationType.Q4_K
            )
            block, size = package.constants.GGML_QUANT_SIZES[kind]
            expected += rows * columns // block * size
            writer.add_tensor(
                f"blk.{layer}.{name}.weight",
                numpy.zeros((rows, columns // block * size), dtype=numpy.uint8),
                raw_dtype=kind,
            )
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", numpy.zeros(256, dtype=numpy.float32))
            expected += 1024
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", numpy.zeros((1024, 256), dtype=numpy.float16))
        expected += 1024 * 512
    writer.add_tensor("output_norm.weight", numpy.zeros(256, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = estimate(str(path), task="inference", seq=16, new_tokens=1)
    assert found.memory.parts["weights"] == expected + 1024


def test_files_and_formulas_are_compared_name_by_name() -> None:
    model = build(CONFIG)
    all_there = [
        TensorInfo(name=weight.name, shape=weight.shape, format="bfloat16", bytes=2 * weight.count)
        for weight in model.weights()
    ]
    assert not list(doubts(model, all_there))
    odd = [*all_there[1:], TensorInfo(name="model.extra", shape=(1,), format="bfloat16", bytes=2)]
    messages = [problem.message for problem in doubts(model, odd)]
    assert messages == [
        "the file has tensors that the formulas do not expect: `model.extra`",
        "the file lacks tensors that the formulas expect: `model.embed_tokens.weight`",
    ]
