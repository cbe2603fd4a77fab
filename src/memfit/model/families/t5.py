"""T5, and with gated feed-forwards T5 1.1 and FLAN-T5: an encoder and a decoder whose first layers
make the biases of relative positions for all others."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, variants
from memfit.model.families._chains import ChainRow, chained

SIZES = {
    "vocab_size": (544, 608, 736),
    "d_model": (96, 160, 288),
    "d_kv": (24, 16, 40),
    "d_ff": (200, 312, 184),
    "num_heads": (6, 10, 12),
    "relative_attention_num_buckets": (32, 28, 20),
}
BASE = {
    "num_layers": 3,
    "num_decoder_layers": 3,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.11,
    "classifier_dropout": 0.13,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
HEADS = ("seq2seq-lm", "token-classification", "classification", "question-answering")
NAMES = {"hidden_size": "d_model", "num_attention_heads": "num_heads", "intermediate_size": "d_ff"}


def dims(fields: Fields) -> Dims:
    found = {name: fields.count(key) for name, key in NAMES.items()}
    return found | {
        "vocab_size": fields.count("vocab_size"),
        "head_dim": fields.count("d_kv"),
        "buckets": fields.count("relative_attention_num_buckets", default=32),
    }


def scaled_dims(fields: Fields, scaled: bool) -> Dims:
    """Models whose config ties no head leave the decoder's result unscaled (transformers 5.23
    configuration_t5.py `scale_decoder_outputs`)."""
    if (fields.config.get("tie_word_embeddings") is not False) is not scaled:
        message = "no captured graph of `t5` with this `tie_word_embeddings` and feed-forward"
        fields.blame("tie_word_embeddings", message, TRACE)
    return dims(fields)


def kinds(fields: Fields) -> list[str]:
    encoder = fields.layers("num_layers")
    decoder = fields.layers("num_decoder_layers", "num_layers")
    return [
        *("encoder_first", *["encoder"] * (encoder - 1)),
        *("decoder_first", *["decoder"] * (decoder - 1)),
    ]


def row(name: str, model_type: str, ffn: str) -> ChainRow:
    base = {**BASE, "model_type": model_type, "feed_forward_proj": ffn}
    if ffn != "relu":
        base["tie_word_embeddings"] = False
    return ChainRow(
        name=name,
        dims=dims if name == "mt5" else lambda fields: scaled_dims(fields, ffn == "relu"),
        kinds=kinds,
        examples=variants(base, SIZES),
        heads=HEADS,
        stack={"token-classification": "encoder"},
        rates={"dropout_rate": 0.1, "classifier_dropout": 0.0},
        pairs=True,
        casting=(
            ".wo",
        ),  # kept in fp32 where the model is loaded in fp16 (`_keep_in_fp32_modules`)
        refused=("fp16", "fp16-autocast"),  # and hidden states are clamped then
        limited=False,  # `n_positions` is the length of its pre-training
        unties=False,  # configuration_t5.py and configuration_mt5.py tie whatever a config says
        silent=("n_positions", "num_layers", "num_decoder_layers"),
    )


def choose(fields: Fields) -> int:
    return int(str(fields.config.get("feed_forward_proj", "relu")) != "relu")


chained(row("t5", "t5", "relu"), row("t5-gated", "t5", "gated-gelu"), choose=choose)
