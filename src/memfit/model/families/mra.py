"""MRA: attention on blocks of 32 tokens, of which a number is seen in full that the config says."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import bert
from memfit.model.families._captured import TRACE, Dims, variants
from memfit.model.families._chains import ChainRow, chained

BLOCK = 32  # tokens; no narrower head is answered, which the class would pad
# Four models: sizes of blocks have sums of products that three may take for others.
SIZES = {
    "vocab_size": (544, 608, 736, 672),
    "hidden_size": (96, 192, 160, 280),
    "intermediate_size": (200, 312, 184, 264),
    "num_attention_heads": (2, 3, 4, 5),
    "max_position_embeddings": (164, 228, 292, 196),
    "type_vocab_size": (4, 8, 2, 3),
    "block_per_row": (2, 1, 3, 2),
}
BASE = {
    "model_type": "mra",
    "dtype": "float32",  # attention returns that, which layers of 16 bits do not read
    "num_hidden_layers": 3,
    "hidden_dropout_prob": 0.11,
}
ALIGNED = ((3, 128, 40, 5), (7, 160, 72, 9), (11, 256, 56, 13), (5, 192, 64, 7))


def dims(fields: Fields) -> Dims:
    """`seen`: the blocks of a sequence that are seen in full (transformers 5.23 modeling_mra.py
    `num_block`)."""
    found = bert.dims(fields)
    rows = found["max_position_embeddings"] // BLOCK
    found["seen"] = min(rows * fields.count("block_per_row", default=4), rows**2)
    heads, width = found["num_attention_heads"], found["hidden_size"]
    if width < BLOCK * heads:
        message = f"no captured graph of `mra` with heads of fewer than {BLOCK} values"
        fields.blame("num_attention_heads", message, TRACE, of=(heads, width))
    return found


def form(dims: Dims) -> str:
    """Other lengths end in an error of the class's."""
    whole = dims["seq"] % BLOCK == 0 and dims["seen"] <= dims["blocks"] ** 2
    return "" if whole else "none"


chained(
    ChainRow(
        name="mra",
        dims=dims,
        kinds=bert.kinds,
        examples=variants(BASE, SIZES),
        heads=bert.SILENT,
        rates={"hidden_dropout_prob": 0.1},
        sizes=ALIGNED,
        refused=("bf16", "fp16"),
        defaults={"type_vocab_size": 1, "max_position_embeddings": 512, "block_per_row": 4},
        derived={"blocks": ("seq", str(BLOCK))},
        form=form,
        forms={"": ALIGNED},
        silent=("block_per_row", "attention_probs_dropout_prob", "add_cross_attention"),
        depth="num_hidden_layers",
    )
)
