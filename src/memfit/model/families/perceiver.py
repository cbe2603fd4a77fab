"""Perceiver as a classifier of bytes: attention from an array of latents, whose length is the
config's, over the text."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import TRACE, Dims, each, ratio, variants
from memfit.model.families._chains import ChainRow, chained
from memfit.model.families._headless import NONE

SIZES = {
    "vocab_size": (544, 608, 736),
    "d_model": (72, 136, 232),
    "d_latents": (96, 160, 336),
    "num_latents": (20, 36, 52),
    "qk_channels": (64, 120, 192),
    "num_self_attention_heads": (4, 5, 3),
    "num_cross_attention_heads": (2, 5, 4),
    "max_position_embeddings": (164, 178, 194),
}
VALUES = "v_channels"  # as wide as the latents, to which they are added
DEPTH = "num_self_attends_per_block"


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    for heads in ("num_self_attention_heads", "num_cross_attention_heads"):
        for width in ("qk_channels", "d_latents"):
            ratio(fields, found, width, heads)
            kind = heads.split("_")[1]
            found[f"{width}_each_{kind}"] = found.pop(f"{width}_each")
    latents, values = found["d_latents"], fields.count(VALUES, default=found["d_latents"])
    if values != latents:
        message = f"no captured graph of `perceiver` with another `{VALUES}`"
        fields.blame(VALUES, message, TRACE, of=(latents, values))
    return found


chained(
    ChainRow(
        name="perceiver",
        dims=dims,
        kinds=lambda fields: ["layer"] * fields.layers(DEPTH),
        examples=variants(
            {"model_type": "perceiver", DEPTH: 3, "attention_probs_dropout_prob": 0.11},
            {**SIZES, VALUES: SIZES["d_latents"]},
        ),
        heads=("classification",),
        rates={"attention_probs_dropout_prob": 0.1},
        defaults={"vocab_size": 262, "max_position_embeddings": 2048, "num_latents": 256},
        checkpoints=False,
        bare=NONE,
        depth=DEPTH,
    )
)
