"""GPT-J: one norm for attention and feed-forward side by side, a table of sines in every layer, a
head with a bias."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import (
    EAGER_OR_FLASH,
    apart,
    dropout,
    equal_heads,
    side_by_side,
    sines,
)
from memfit.model.label_heads import ANSWERS_LABELLED, CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import Attention, Linear

SMALL = {
    "model_type": "gptj",
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 512,
    "rotary_dim": 8,
}


@family(
    "gptj",
    label_heads=(
        CLASSIFIES,
        ANSWERS_LABELLED,
    ),
    examples=(
        SMALL,
        {
            **SMALL,
            "n_inner": 96,
            "activation_function": "gelu",
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.2,
            "attn_pdrop": 0.3,
            "rotary_dim": 16,
        },
        {**SMALL, "tie_word_embeddings": True},
    ),
)
def build(fields: Fields) -> Model:
    """Scores are computed in fp32 (transformers 5.23 modeling_gptj.py GPTJAttention._attn)."""
    width = fields.count("n_embd", "hidden_size")
    heads, head = equal_heads(fields, width, "n_head", "num_attention_heads")
    positions = fields.count("n_positions", "max_position_embeddings")
    rotary, table = sines(fields, head, positions, "attn.embed_positions")
    mixer = Attention(
        name="attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="gptj",
        kernels=EAGER_OR_FLASH,
        rotary=rotary,
        buffers=table,
        project=apart("attn", width, bias=False),
        out=Linear(name="attn.out_proj", inputs=width, outputs=width),
        dropout=dropout(fields, "attn_pdrop"),
    )
    return side_by_side(fields, "gptj", mixer, positions)
