"""Encoders, encoder-decoders, classifiers and models that see, traced as a CPU, against real steps there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.real_steps import SMALL, real, traced  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.tape import check  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LARGE = 5057
# oneDNN repacks the operands of convolutions; a learned attention bias gets its gradient through copies that CUDA does not make.
SCRATCH = {"llava", "gemma3", "paligemma", "qwen2_vl", "whisper", "t5"}
BATCH, SEQ = 2, 64
Given = Callable[[Any, int, int], dict[str, Any]]
BERT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 1000, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "vocab_size": 1000, "max_position_embeddings": 128, "dropout": 0.0, "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip
WHISPER = {
    **BART, "model_type": "whisper", "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 128, "bos_token_id": 2, "eos_token_id": 2,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
TEXT = {**SMALL, "model_type": "llama", "head_dim": 16}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
LLAVA = {"model_type": "llava", "text_config": TEXT, "vision_config": CLIP, "image_token_index": 999}
GEMMA3 = {
    "model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 32}, "vision_config": SIGLIP,
    "mm_tokens_per_image": 4, "image_token_index": 999,
}  # fmt: skip
PALIGEMMA = {
    "model_type": "paligemma", "text_config": {**SMALL, "model_type": "gemma", "head_dim": 16}, "vision_config": {**SIGLIP, "projection_dim": 64},
    "image_token_index": 999, "projection_dim": 64,
}  # fmt: skip
QWEN2_VL = {
    "model_type": "qwen2_vl", "text_config": {**SMALL, "model_type": "qwen2_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8},
    "image_token_id": 999, "vision_start_token_id": 998, "vision_end_token_id": 997, "video_token_id": 996,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    builder: str
    given: Given
    options: dict[str, Any] = field(default_factory=dict)


def pairs(model: Any, batch: int, seq: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 1000, (batch, seq)), "labels": torch.randint(3, 1000, (batch, 24))}


def sounds(model: Any, batch: int, seq: int) -> dict[str, Any]:
    return {"input_features": torch.randn(batch, 16, 100), "labels": torch.randint(3, 1000, (batch, 24))}


def classes(model: Any, batch: int, seq: int) -> dict[str, Any]:
    return {"input_ids": torch.full((batch, seq), 5), "labels": torch.zeros(batch, dtype=torch.int64)}


def seen(tokens: int, marks: tuple[int, ...], kinds: str = "", **more: Any) -> Given:
    def give(model: Any, batch: int, seq: int) -> dict[str, Any]:
        ids = torch.full((batch, seq), 5)
        ids[:, : len(marks)] = torch.tensor(marks)
        inputs = {"input_ids": ids}
        if "image_grid_thw" in more:
            inputs["image_grid_thw"] = torch.tensor(more["image_grid_thw"] * batch)
            inputs["pixel_values"] = torch.randn(batch * 16, 3 * 2 * 8 * 8)
        else:
            inputs["pixel_values"] = torch.randn(batch, 3, 32, 32)
        if kinds:
            inputs[kinds] = (ids == 999).to(torch.int64)
        labels = torch.full((batch, seq), 5)
        labels[:, : len(marks)] = -100
        return {**inputs, "labels": labels}

    return give


CASES = {
    "bert": Case({**BERT, "model_type": "bert"}, "AutoModelForMaskedLM", lambda model, batch, seq: same(batch, seq)),
    "roberta": Case({**BERT, "model_type": "roberta", "pad_token_id": 0}, "AutoModelForMaskedLM", lambda model, batch, seq: same(batch, seq)),
    "bert-classes": Case({**BERT, "model_type": "bert"}, "AutoModelForSequenceClassification", classes, {"head": "classification"}),
    "llama-classes": Case({**SMALL, "model_type": "llama", "pad_token_id": 0}, "AutoModelForSequenceClassification", classes, {"head": "classification"}),
    "t5": Case(T5, "AutoModelForSeq2SeqLM", pairs, {"target_seq": 24}),
    "bart": Case({**BART, "model_type": "bart"}, "AutoModelForSeq2SeqLM", pairs, {"target_seq": 24}),
    "whisper": Case(WHISPER, "AutoModelForSpeechSeq2Seq", sounds, {"target_seq": 24}),
    "llava": Case(LLAVA, "AutoModelForImageTextToText", seen(16, (999,) * 16), {"images": 1}),
    "gemma3": Case(GEMMA3, "AutoModelForImageTextToText", seen(4, (999,) * 4, "token_type_ids"), {"images": 1}),
    "paligemma": Case(PALIGEMMA, "AutoModelForImageTextToText", seen(16, (999,) * 16, "token_type_ids"), {"images": 1}),
    "qwen2_vl": Case(
        QWEN2_VL, "AutoModelForImageTextToText", seen(4, (998, 999, 999, 999, 999, 997), "mm_token_type_ids", image_grid_thw=[[1, 4, 4]]),
        {"images": 1, "image_size": 32},
    ),
}  # fmt: skip


def same(batch: int, seq: int) -> dict[str, Any]:
    ids = torch.randint(3, 1000, (batch, seq))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", sorted(CASES))
def test_equals_the_real_step(name: str) -> None:
    case = CASES[name]
    tape = trace_config(case.config, Job(batch=BATCH, seq=SEQ, precision="fp32", **case.options), device="cpu")
    check(tape)
    found, truth = traced(tape), real(case.config, batch=BATCH, seq=SEQ, builder=case.builder, given=case.given)
    assert found.before == pytest.approx(truth.before, abs=256)
    assert found.peak == pytest.approx(truth.peak, rel=0.0005)
    if name not in SCRATCH:
        assert found.allocations(LARGE) == truth.allocations(LARGE)
