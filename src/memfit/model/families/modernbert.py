"""ModernBERT: gated layers without biases, of which one in three sees the whole sequence; the first
has no norm before its attention."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, each, ratio, variants
from memfit.model.families._chains import ChainRow, chained

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 288),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 12),
}
BASE = {
    "model_type": "modernbert",
    "num_hidden_layers": 6,
    "global_attn_every_n_layers": 3,
    "local_attention": 16,
    "embedding_dropout": 0.11,
    "mlp_dropout": 0.13,
    "attention_dropout": 0.17,
    "classifier_dropout": 0.19,
    "max_position_embeddings": 8192,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    fields.count("local_attention", default=128)
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return found


def kinds(fields: Fields) -> list[str]:
    """Every third layer sees all (transformers 5.23 configuration_modernbert.py `layer_types`)."""
    count = fields.layers()
    every = fields.count("global_attn_every_n_layers", default=3)
    usual = ["full_attention" if one % every == 0 else "sliding_attention" for one in range(count)]
    listed = [str(one) for one in fields.listing("layer_types", count, usual)]
    return ["first", *listed[1:]]


def row(name: str, pooling: str) -> ChainRow:
    return ChainRow(
        name=name,
        dims=dims,
        kinds=kinds,
        limited=False,
        examples=variants({**BASE, "classifier_pooling": pooling}, SIZES),
        heads=("classification", "token-classification", "question-answering", "masked-lm"),
        rates=dict.fromkeys(
            ("embedding_dropout", "mlp_dropout", "attention_dropout", "classifier_dropout"), 0.0
        ),
        silent=("local_attention", "global_attn_every_n_layers"),
    )


def choose(fields: Fields) -> int:
    """Classifiers of sequences read the first token, or the mean of all."""
    return int(fields.config.get("classifier_pooling") == "mean")


chained(row("modernbert", "cls"), row("modernbert-mean", "mean"), choose=choose)
