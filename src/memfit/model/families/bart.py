"""BART: an encoder and a decoder with learned positions and norms behind each block."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, ratio, variants
from memfit.model.families._chains import ChainRow, chained

SIZES = {
    "vocab_size": (544, 608, 736),
    "d_model": (96, 160, 288),
    "encoder_ffn_dim": (200, 312, 184),
    "decoder_ffn_dim": (248, 280, 216),
    "encoder_attention_heads": (6, 10, 12),
    "decoder_attention_heads": (12, 5, 9),
    "max_position_embeddings": (164, 178, 194),
}
RATES: dict[str, float | str] = {
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "classifier_dropout": 0.0,
}
HEADS = ("seq2seq-lm", "masked-lm", "classification", "question-answering", "causal-lm")
BASE = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "dropout": 0.11,
    "attention_dropout": 0.13,
    "activation_dropout": 0.17,
    "classifier_dropout": 0.19,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "activation_function": "gelu",
    "scale_embedding": False,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def dims(fields: Fields) -> Dims:
    found = {name: fields.count(name) for name in SIZES if name != "d_model"}
    found["hidden_size"] = fields.count("d_model")
    for name in ("encoder_attention_heads", "decoder_attention_heads"):
        ratio(fields, found, "hidden_size", name)
        found[f"{name}_size"] = found.pop("hidden_size_each")
    return found


def kinds(fields: Fields) -> list[str]:
    return [
        *["encoder"] * fields.layers("encoder_layers"),
        *["decoder"] * fields.layers("decoder_layers"),
    ]


def row(name: str) -> ChainRow:
    return ChainRow(
        name=name,
        dims=dims,
        kinds=kinds,
        examples=variants({**BASE, "model_type": name}, SIZES),
        heads=HEADS,
        stack={"causal-lm": "decoder"},
        rates=RATES,
        pairs=True,
        defaults={"max_position_embeddings": 1024},
        silent=("is_decoder", "encoder_layers", "decoder_layers", "num_hidden_layers"),
    )


chained(row("bart"))
