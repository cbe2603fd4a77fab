"""DeBERTa v2 and v3: attention that scores contents and relative positions apart."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, each, ratio, variants
from memfit.model.families._chains import ChainRow, chained

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 12),
    "max_position_embeddings": (164, 178, 194),
    "position_buckets": (32, 40, 24),
}
BASE = {
    "model_type": "deberta-v2",
    "num_hidden_layers": 3,
    "hidden_dropout_prob": 0.11,
    "attention_probs_dropout_prob": 0.13,
    "pooler_dropout": 0.17,
    "cls_dropout": 0.19,
    "relative_attention": True,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "hidden_act": "gelu",
    "pooler_hidden_act": "gelu",
}


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    fields.count("max_relative_positions", default=-1, low=-1)  # -1: as many as positions
    ratio(fields, found, "hidden_size", "num_attention_heads")
    width = found["hidden_size"]
    for key, usual in (
        ("attention_head_size", found["hidden_size_each"]),
        ("embedding_size", width),
        ("pooler_hidden_size", width),
    ):
        if fields.count(key, default=usual) != usual:
            fields.blame(key, f"no captured graph of `deberta-v2` with another `{key}`", TRACE)
    return found


def kinds(fields: Fields) -> list[str]:
    return ["layer"] * fields.layers()


chained(
    ChainRow(
        name="deberta-v2",
        dims=dims,
        kinds=kinds,
        limited=False,
        examples=variants(BASE, SIZES),
        heads=("classification", "token-classification", "question-answering", "masked-lm"),
        rates={
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "pooler_dropout": 0.0,
            "cls_dropout": "hidden_dropout_prob",
        },
        absent=("conv_kernel_size",),  # v2's xlarge: a convolution beside the first layer
        silent=("pooler_hidden_size", "max_relative_positions"),
    )
)
