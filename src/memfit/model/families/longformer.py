"""Longformer: RoBERTa's layers with attention in windows, to whole ones of which sequences are
padded. Heads that let some tokens see all (transformers 5.23 modeling_longformer.py
`global_attention_mask`) are not captured: which ones depends on data."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import bert
from memfit.model.families._captured import TRACE, Dims, variants
from memfit.model.families._chains import BATCH, ChainRow, chained
from memfit.model.families._headless import POOLER

# Four models: sizes of windows have sums of products that three may take for others.
SIZES = {
    "vocab_size": (544, 608, 736, 672),
    "hidden_size": (96, 160, 288, 336),
    "intermediate_size": (200, 312, 184, 264),
    "num_attention_heads": (6, 10, 12, 14),
    "max_position_embeddings": (164, 178, 194, 206),
    "type_vocab_size": (4, 8, 2, 5),
    "attention_window": (16, 24, 20, 28),
}
BASE = {
    "model_type": "longformer",
    "num_hidden_layers": 3,
    "hidden_dropout_prob": 0.11,
    "attention_probs_dropout_prob": 0.13,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
WINDOW = 512  # by the class's default
UNEVEN = (*BATCH, (5, 130, 64, 7))
EVEN = ((3, 96, 40, 5), (7, 120, 72, 9), (11, 160, 56, 13), (5, 140, 64, 7))


def dims(fields: Fields) -> Dims:
    """A window for each layer, which must be the same here."""
    found = bert.dims(fields)
    given = fields.config.get("attention_window")
    if isinstance(given, list):
        each = [str(one) for one in fields.listing("attention_window", fields.layers(), [])]
        if len(set(each)) > 1:
            message = "no captured graph of `longformer` with windows of several sizes"
            fields.blame("attention_window", message, TRACE)
        window = given[0] if given and isinstance(given[0], int) else WINDOW
    else:
        window = fields.count("attention_window", default=WINDOW)
    if window % 2:
        fields.blame("attention_window", f"{window} must be even", of=(window,))
    found |= {"half_window": window // 2, "window_span": window + 1}
    return found


def form(dims: Dims) -> str:
    return "" if dims["seq"] % (2 * dims["half_window"]) else "even"


chained(
    ChainRow(
        name="longformer",
        dims=dims,
        kinds=bert.kinds,
        examples=variants(BASE, SIZES),
        heads=("token-classification", "masked-lm"),
        rates={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        sizes=UNEVEN,
        defaults={"type_vocab_size": 2, "max_position_embeddings": 512},
        derived={"windows": ("seq", "2*half_window"), "chunks": ("2*windows + -1", "1")},
        form=form,
        forms={"": UNEVEN, "even": EVEN},
        before=2,
        pooler=POOLER,
        silent=("attention_window",),
        depth="num_hidden_layers",
    )
)
