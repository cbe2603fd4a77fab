"""Models that take more than text and images, against real steps on the CPU: places of words,
pooled patches, a robot's state, sound in step, patches of bytes. What they are given is written
here by hand, as their processors would."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.23")

from tests.torch.real_steps import Loop, real, traced  # noqa: E402
from tests.torch.small import CLIP, SIGLIP, SMALL, Small  # noqa: E402
from tests.torch.test_trace_truth import LARGE, WITHIN  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.tape import check  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)
Given = dict[str, Any]
GEMMA = {**SMALL, "model_type": "gemma", "head_dim": 16}
BLT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


def text(batch: int, seq: int) -> Given:
    ids = torch.randint(3, 200, (batch, seq))
    return {"input_ids": ids, "labels": ids.clone()}


def document(model: Any, batch: int, seq: int) -> Given:
    """UDOP: words with their corners, an image, an answer."""
    boxes = torch.randint(0, 500, (batch, seq, 2))
    found = {
        "input_ids": torch.randint(3, 1000, (batch, seq)),
        "bbox": torch.cat((boxes, boxes + 20), -1),
    }
    return {
        **found,
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "labels": torch.randint(3, 1000, (batch, 24)),
    }


def pools(model: Any, batch: int, seq: int) -> Given:
    """Molmo 2: with 12 patches a side, 8 of which a crop shows beyond its neighbours', an image of
    168 pixels takes one crop beside the whole."""
    ids = torch.full((batch, seq), 5)
    ids[:, :72] = 999
    kinds, labels = (ids == 999).to(torch.int64), torch.where(ids == 999, -100, ids)
    into = torch.arange(72 * 4).view(72, 4).repeat(batch, 1)
    return {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "labels": labels,
        "pixel_values": torch.randn(batch * 2, 144, 3 * 14 * 14),
        "image_token_pooling": into.to(torch.int32),
        "image_grids": torch.tensor([[6, 6, 6, 6]] * batch),
        "image_num_crops": torch.tensor([2] * batch),
    }


def robot(model: Any, batch: int, seq: int) -> Given:
    ids = torch.full((batch, seq), 5)
    ids[:, :16] = 999
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(batch, 1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(batch, 1, dtype=torch.bool),
        "state": torch.randn(batch, 8),
        "actions": torch.randn(batch, 10, 8),
    }


def heard(model: Any, batch: int, seq: int) -> Given:
    return {**text(batch, seq), "input_features": torch.randn(batch, 16, 8 * seq)}


def looked_at(model: Any, batch: int, seq: int) -> Given:
    return {**text(batch, seq), "pixel_values": torch.randn(batch, 3, 32, 32)}


CASES: dict[str, Small] = {
    "udop": Small(
        config={
            "model_type": "udop",
            "d_model": 64,
            "d_ff": 128,
            "d_kv": 16,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 1000,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "image_size": 32,
            "patch_size": 8,
            "max_2d_position_embeddings": 64,
        },
        builder="AutoModelForImageTextToText",
        given=document,
        options={"images": 1, "target_seq": 24, "head": "image-text"},
    ),
    "molmo2": Small(
        config={
            "model_type": "molmo2",
            "image_patch_id": 999,
            "text_config": {
                **SMALL,
                "head_dim": 16,
                "additional_vocab_size": 8,
                "rope_scaling_layers": [0],
            },
            "vision_config": {
                **BLT,
                "num_key_value_heads": 4,
                "image_size": [168, 168],
                "patch_size": 14,
            },
            "adapter_config": {**BLT, "text_hidden_size": 64, "vision_feature_layer": [-1, 0]},
        },
        builder="AutoModelForImageTextToText",
        given=pools,
        options={"images": 1, "seq": 96, "head": "image-text", "image_size": 168},
    ),
    "pi0": Small(
        config={
            "model_type": "pi0",
            "chunk_size": 10,
            "max_state_dim": 8,
            "max_action_dim": 8,
            "dit_config": {**GEMMA, "hidden_size": 32},
            "vlm_config": {
                "model_type": "paligemma",
                "text_config": GEMMA,
                "vision_config": {**SIGLIP, "projection_dim": 64, "vision_use_head": False},
                "image_token_id": 999,
                "projection_dim": 64,
            },
        },
        builder="AutoModelForImageTextToText",
        given=robot,
        options={"images": 1, "head": "image-text"},
    ),
    "voxtral_realtime": Small(
        config={
            "model_type": "voxtral_realtime",
            "text_config": {**SMALL, "head_dim": 16, "sliding_window": 64},
            "audio_config": {
                **BLT,
                "num_mel_bins": 16,
                "max_position_embeddings": 512,
                "sliding_window": 64,
            },
        },
        builder="AutoModelForSpeechSeq2Seq",
        given=heard,
        options={"head": "seq2seq-lm"},
    ),
    # Every byte is a patch of its own: with the threshold below all entropies that is so for real,
    # too.
    "blt": Small(
        config={
            "model_type": "blt",
            "vocab_size": 260,
            "patch_size": 1,
            "patching_threshold": -1.0,
            "max_position_embeddings": 512,
            "patcher_config": {**BLT, "vocab_size": 260, "max_position_embeddings": 512},
            "encoder_config": {
                **BLT,
                "vocab_size": 260,
                "max_position_embeddings": 512,
                "hidden_size_global": 128,
            },
            "decoder_config": {
                **BLT,
                "vocab_size": 260,
                "max_position_embeddings": 512,
                "hidden_size_global": 128,
            },
            "global_config": {**BLT, "hidden_size": 128, "head_dim": 32},
            "encoder_hash_byte_group_vocab": 500,
        },
        given=lambda model, batch, seq: text(batch, seq),
    ),
    "git": Small(
        config={
            **{key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
            "model_type": "git",
            "vision_config": {**CLIP, "model_type": "git_vision_model"},
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        given=looked_at,
        options={"images": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step(name: str) -> None:
    small = CASES[name]
    wanted = Job(**{"batch": 2, "seq": 64, "precision": "fp32", **small.options})
    tape = trace_config(small.config, wanted, device="cpu")
    check(tape)
    found, truth = traced(tape), real(small, Loop(seq=wanted.seq))
    assert abs(found.before - truth.before) <= 256
    assert abs(found.peak - truth.peak) <= WITHIN * truth.peak
    assert found.allocations(LARGE) == truth.allocations(LARGE)
