"""Encoders with a decoder whose row `memfit new-family` made: their two stacks of layers, weights
that the class itself never trains, and positions that end. (Parameters and peaks are held to
transformers' own in `test_encoders.py`.)"""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tests.torch.test_encoders import compared, unseen

import torch
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.model.classes import CLASSES
from memfit.model.families import build
from memfit.model.families._chains import CAUSAL, CHAINS
from memfit.model.heads import with_head
from memfit.strategy import DDP, Strategy
from memfit.trace import classes
from memfit.trace.depth import shapes_of
from memfit.trace.new_family import rates_of, subject_of, unused_positions
from memfit.trace.pair_row import base_of, following, skips

HEAD = "seq2seq-lm"


def test_each_stack_has_its_field() -> None:
    """T5's decoder has as many layers as the encoder, where a config does not say."""
    subject = subject_of("umt5")
    assert subject.stacks == {"num_layers": "encoder.block", "num_decoder_layers": "decoder.block"}
    assert following(subject, list(subject.stacks)) == {
        "num_layers": ["num_layers"],
        "num_decoder_layers": ["num_decoder_layers", "num_layers"],
    }
    assert skips(subject_of("m2m_100").whole) == ["encoder_layerdrop", "decoder_layerdrop"]


def test_stacks_of_other_depths_are_the_trace_s() -> None:
    config = unseen(CHAINS["m2m_100"], HEAD) | {"encoder_layers": 2, "decoder_layers": 4}
    assert len(build(config).layers) == 6
    job = Job(head=HEAD, batch=3, seq=90, target_seq=140, optimizer="adamw_fused")
    assert abs(compared(config, job)) <= 0.005


def test_tables_that_the_class_freezes_have_no_state() -> None:
    """Marian's sines are parameters without a gradient."""
    config = unseen(CHAINS["marian"], HEAD)
    with torch.device("meta"):
        own = transformers.AutoConfig.for_model(**config)
        theirs = classes.builder(HEAD, own).from_config(own)
    frozen = [one for one in theirs.parameters() if not one.requires_grad]
    assert len(frozen) == 2
    model = build(config)
    assert model.frozen == sum(one.numel() for one in frozen)
    found = estimate(model, Job(head=HEAD, seq=64, target_seq=32))
    assert found.parameters.total - found.parameters.trainable == model.frozen


def test_a_table_that_grows_is_a_limit() -> None:
    """On the CPU a longer sequence runs; it runs other code."""
    subject = subject_of("m2m_100")
    small = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 64, "vocab_size": 544}
    subject.base = {**small, **base_of(subject)}
    rates_of(subject)
    table = {"max_position_embeddings": 164}
    assert unused_positions(subject, table, "max_position_embeddings") == 0


@pytest.mark.parametrize("name", ["bart", "m2m_100"])
@pytest.mark.parametrize("key", ["seq", "target_seq"])
def test_more_tokens_than_positions_are_refused(name: str, key: str) -> None:
    """BART's table ends there; that of M2M-100 grows, which is other code."""
    config = unseen(CHAINS[name], HEAD)
    model, job = build(config), Job(head=HEAD, batch=2, seq=64, target_seq=64)
    longest = job.replace(**{key: model.positions})
    assert abs(compared(config, longest)) <= 0.005
    with pytest.raises(InputError, match=f"for more than {model.positions} positions"):
        lower(model, job.replace(**{key: model.positions + 1}))


def test_a_source_is_seen_whole_up_to_a_length_and_a_target_at_any() -> None:
    """Blocks are the encoder's (modeling_bigbird_pegasus.py `max_tokens_to_attend`)."""
    row, more = CHAINS["bigbird_pegasus"], {"max_position_embeddings": 900}
    job = Job(batch=1, seq=(5 + 2 * 3) * 64, packing=False)
    for head in row.heads:
        config = unseen(row, head) | more
        pair = {"target_seq": 850} if head == HEAD else {}
        longest = job.replace(head=head, **pair)
        if head == CAUSAL:
            longest = longest.replace(seq=850)
        assert abs(compared(config, longest)) <= 0.0005
        if head != CAUSAL:
            with pytest.raises(InputError, match=r"for 705 tokens \(at most 704\)"):
                estimate(build(config), longest.replace(seq=705))
    for field, value in {"block_size": 16, "num_random_blocks": 2, "use_bias": True}.items():
        with pytest.raises(InputError, match=f"no captured graph of .* with `{field}`"):
            build({**config, field: value})


DECODERS = ("bart", "bigbird_pegasus", "marian", "pegasus")


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "case",
    [
        {"batch": 5, "seq": 96, "packing": False},
        {"batch": 2, "seq": 100, "method": "lora", "targets": "q_proj,v_proj"},
        {"batch": 3, "seq": 80, "precision": "autocast-bf16", "checkpointing": "full"},
    ],
)
def test_a_decoder_without_its_encoder(name: str, case: dict[str, Any]) -> None:
    """Nobody reads the weights of its attention over an encoder, nor the adapters beside them: they
    get no gradient and no states."""
    config = unseen(CHAINS[name], CAUSAL)
    model = build(config)
    assert {one.rpartition(".")[0] for one in model.paths} == {"model.decoder.layers"}
    assert {one.partition(".")[0] for one in model.unused} == {
        "encoder_attn",
        "encoder_attn_layer_norm",
    }
    off = compared(config, Job(**{"head": CAUSAL, "optimizer": "adamw_fused", **case}))
    assert abs(off) <= 0.005, f"{off:+.2%}"


def test_what_treats_weights_without_a_gradient_in_its_own_way_is_the_trace_s() -> None:
    model, job = build(unseen(CHAINS["bart"], CAUSAL)), Job(head=CAUSAL, batch=2, seq=64)
    estimate(model, job)
    with pytest.raises(InputError, match="with `adagrad`, where some weights get no gradient"):
        estimate(model, job.replace(optimizer="adagrad"))
    with pytest.raises(InputError, match="with `ddp`, where some weights get no gradient"):
        estimate(model, job, strategy=Strategy(ddp=DDP(size=2)))
    with pytest.raises(InputError, match="for generation"):
        estimate(model, Job(head=CAUSAL, task="inference", seq=64))


def test_a_head_that_runs_one_stack_says_which() -> None:
    assert CHAINS["umt5"].stack == {"token-classification": "encoder"}
    model = build(unseen(CHAINS["umt5"], "token-classification"))
    assert {one.rpartition(".")[0] for one in model.paths} == {"transformer.encoder.block"}


@pytest.mark.parametrize("head", ["classification", "question-answering"])
def test_a_bias_that_the_first_layer_makes_goes_with_its_views(head: str) -> None:
    """The encoder's, when the decoder begins: T5's layers read it under another name."""
    job = Job(head=head, batch=4, seq=120, packing=False, optimizer="adamw_fused")
    assert abs(compared(unseen(CHAINS["t5"], head), job)) <= 0.0005


WHISPER = {  # the fields of the small model that was published, 244M, that decide
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "begin_suppress_tokens": [220, 50257],
    "d_model": 768,
    "decoder_attention_heads": 12,
    "decoder_ffn_dim": 3072,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "encoder_layers": 12,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 80,
    "vocab_size": 51865,
}


def test_a_sound_has_one_length() -> None:
    """Half a minute, whatever `--seq` is; only a target ends with the positions."""
    model = build(WHISPER)
    assert model.parameters == 241_734_912
    job = Job(head=HEAD, batch=2, target_seq=200)
    assert (
        estimate(model, job).memory.allocated
        == estimate(model, job.replace(seq=64)).memory.allocated
    )
    assert not any("positions" in one.message for one in estimate(model, job).problems)
    with pytest.raises(InputError, match="for more than 448 positions"):
        estimate(model, job.replace(target_seq=449))


@pytest.mark.parametrize(
    "case",
    [
        {"batch": 5, "packing": False},
        {"batch": 5, "packing": False, "precision": "fp32", "target_seq": 56},
        {"batch": 4, "precision": "autocast-bf16", "target_seq": 56},
        {"batch": 6, "target_seq": 80, "checkpointing": "full", "keep_outputs": True},
        {"batch": 2, "target_seq": 64, "method": "lora", "targets": "q_proj"},
        {"batch": 4, "target_seq": 56, "method": "qlora"},
    ],
)
def test_sounds_have_the_peak_of_the_trace(case: dict[str, Any]) -> None:
    """Their hidden states do not lie in order: norms copy them, and so does attention, by kernel;
    autocast casts what a convolution reads; a checkpoint lets go before a bias is summed."""
    for name in ("whisper", "speech_to_text"):
        off = compared(unseen(CHAINS[name], HEAD), Job(**{"head": HEAD, "seq": 2048, **case}))
        assert abs(off) <= 0.001, f"{name} {off:+.2%}"


def gemma_pair(head: str) -> dict[str, Any]:
    """A T5Gemma of two sizes, with windows that are shorter than its sequences."""
    end = next(end for end, name in CLASSES.items() if name == head)
    encoder = {
        "num_hidden_layers": 5,
        "hidden_size": 256,
        "intermediate_size": 488,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 40,
        "vocab_size": 672,
        "sliding_window": 24,
    }
    decoder = {
        **encoder,
        "num_hidden_layers": 6,
        "hidden_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return {
        "model_type": "t5gemma",
        "encoder": encoder,
        "decoder": decoder,
        "dtype": "bfloat16",
        "num_labels": 7,
        "architectures": [f"T5Gemma{end}"],
    }


@pytest.mark.parametrize("head", [HEAD, "classification", "token-classification"])
def test_a_decoder_may_be_narrower_than_its_encoder(head: str) -> None:
    config = gemma_pair(head)
    assert {one.name: one.shape for one in build(config).weights()} == shapes_of(config, head)
    pair = {"target_seq": 90} if head == HEAD else {}
    for case in (
        {"batch": 16, "packing": False, "checkpointing": "full", "precision": "autocast-bf16"},
        {"batch": 12, "precision": "fp32"},
        {"batch": 3, "packing": False, "method": "lora", "targets": "q_proj"},
    ):
        job = Job(**{"head": head, "seq": 120, "optimizer": "sgd", **pair, **case})
        off = compared(config, job)
        assert abs(off) <= 0.005, f"{off:+.2%} {case}"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 6},
        {"attn_logit_softcapping": None},
        {"attention_bias": True},
        {"vocab_size": 680},
    ],
)
def test_other_code_of_t5gemma_is_the_trace_s(changes: dict[str, Any]) -> None:
    config = gemma_pair(HEAD)
    with pytest.raises(InputError, match=next(iter(changes))):
        build({**config, "decoder": {**config["decoder"], **changes}})


def tower_pair(head: str) -> dict[str, Any]:
    """A T5Gemma 2 whose stacks share the width alone, beside a tower of other sizes than those
    captured."""
    end = next(end for end, name in CLASSES.items() if name == head)
    common = {"vocab_size": 672, "hidden_size": 240, "sliding_window": 24}
    kinds = ["sliding_attention", "full_attention"]
    encoder = {
        **common,
        "intermediate_size": 328,
        "num_hidden_layers": 4,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 48,
        "layer_types": [*kinds[:1] * 3, *kinds[1:]],
    }
    decoder = {
        **common,
        "intermediate_size": 400,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": [*kinds[1:], *kinds[:1] * 5],
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 448,
        "patch_size": 14,
    }
    return {
        "model_type": "t5gemma2",
        "encoder": {"text_config": encoder, "vision_config": vision, "mm_tokens_per_image": 64},
        "decoder": decoder,
        "dtype": "bfloat16",
        "num_labels": 7,
        "architectures": [f"T5Gemma2{end}"],
    }


@pytest.mark.parametrize("head", [HEAD, "classification", "token-classification"])
def test_a_tower_stands_still_beside_an_encoder_and_its_decoder(head: str) -> None:
    config = tower_pair(head)
    model = build(config)
    assert {one.name: one.shape for one in model.weights()} == shapes_of(config, head)
    assert model.idle > 0
    pair = {"target_seq": 90} if head == HEAD else {}
    for case in (
        {"batch": 16, "packing": False, "checkpointing": "full", "precision": "autocast-bf16"},
        {"batch": 5, "packing": False, "precision": "fp32", "optimizer": "adamw"},
        {"batch": 3, "packing": False, "method": "lora", "targets": "q_proj"},
    ):
        job = Job(**{"head": head, "seq": 120, "optimizer": "sgd", **pair, **case})
        off = compared(config, job)
        assert abs(off) <= 0.005, f"{off:+.2%} {case}"


def test_a_class_of_two_heads_reads_text_alike() -> None:
    """transformers lists T5Gemma 2 for images and for pairs of texts. Images go to the trace."""
    config = tower_pair(HEAD)
    job = Job(head="image-text", batch=4, seq=96, target_seq=60, packing=False)
    assert abs(compared(config, job)) <= 0.005
    classifier = build(tower_pair("classification"))
    with pytest.raises(InputError, match="with a head of kind `image-text`"):
        lower(classifier, job)
    lower(with_head(classifier, "image-text", 0), job)
    with pytest.raises(InputError, match="with images"):
        lower(build(config), job.replace(images=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 6},
        {"final_logit_softcapping": 30.0},
        {"attention_bias": True},
        {"vocab_size": 680},
        {"hidden_size": 180},
        {"layer_types": ["full_attention"] * 6},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
    ],
)
def test_other_code_of_t5gemma2_is_the_trace_s(changes: dict[str, Any]) -> None:
    config = tower_pair(HEAD)
    with pytest.raises(InputError, match=next(iter(changes))):
        build({**config, "decoder": {**config["decoder"], **changes}})


def test_convolutions_in_a_list_are_no_layers() -> None:
    """Speech2Text's come before its encoder's layers; what Pop2Piano's first layers make for the
    others is told apart in each stack."""
    config = unseen(CHAINS["speech_to_text"], HEAD)
    assert {one.rpartition(".")[0] for one in build(config).paths} == {
        "model.encoder.layers",
        "model.decoder.layers",
    }
    kinds = {layer.captured.graph for layer in build(unseen(CHAINS["pop2piano"], HEAD)).layers}
    assert kinds == {"encoder_first", "encoder", "decoder_first", "decoder"}
