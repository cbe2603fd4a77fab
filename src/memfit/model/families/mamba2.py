"""Mamba 2: layers of a state-space model in chunks."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 224),
    "num_heads": (8, 10, 8),
    "head_dim": (24, 32, 56),
    "state_size": (16, 40, 24),
    "n_groups": (2, 5, 4),
    "chunk_size": (16, 40, 24),
}
SIZES["state_size"] = (48, 72, 88)
BASE = {"model_type": "mamba2", "num_hidden_layers": 3, "expand": 2, "conv_kernel": 4}


def dims(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    ratio(fields, found, "num_heads", "n_groups")
    inner = fields.count("expand", default=2) * found["hidden_size"]
    conv = inner + 2 * found["n_groups"] * found["state_size"]
    return {
        **found,
        "inner": inner,
        "conv_dim": conv,
        "projected": inner + conv + found["num_heads"],
    }


captured(
    Row(
        name="mamba2",
        dims=dims,
        kinds=lambda fields: [
            "first",
            *["mamba"] * (fields.layers() - 1),
        ],  # its residual is fp32 from then on
        examples=variants(BASE, SIZES),
        derived={
            "chunks": ("seq", "chunk_size"),
            "states": ("chunks + 1", "1"),
            "conv_length": ("seq + 3", "1"),
        },
        silent=("time_step_rank",),
        positions="max_position_embeddings",
    )
)
