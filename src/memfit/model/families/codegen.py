"""CodeGen: GPT-J's layer with one fused projection that is laid out for four devices."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import EAGER, dropout, equal_heads, side_by_side, sines
from memfit.model.model import Model
from memfit.model.modules import Attention, Linear

SMALL = {
    "model_type": "codegen",
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 512,
    "rotary_dim": 8,
}
PARTS = 4  # transformers 5.23 modeling_codegen.py CodeGenAttention.forward mp_num


@family(
    "codegen",
    examples=(
        SMALL,
        {
            **SMALL,
            "n_head": 8,
            "n_inner": 96,
            "activation_function": "relu",
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.2,
            "attn_pdrop": 0.3,
        },
        {**SMALL, "tie_word_embeddings": True, "n_ctx": 128, "rotary_dim": 16},
    ),
)
def build(fields: Fields) -> Model:
    """The table of sines is not cast, so rotated queries and keys are fp32
    (CodeGenAttention.forward), and so are the scores."""
    width = fields.count("n_embd", "hidden_size")
    heads, head = equal_heads(fields, width, "n_head", "num_attention_heads")
    fields.divides(PARTS, heads, fields.key(("n_head", "num_attention_heads")), "the query heads")
    positions = fields.count("n_positions", "max_position_embeddings")
    rotary, table = sines(fields, head, positions, "attn.embed_positions")
    mixer = Attention(
        name="attn",
        heads=heads,
        kv_heads=heads,
        head=head,
        style="codegen",
        kernels=EAGER,
        rotary=rotary,
        buffers=table,
        project=(Linear(name="attn.qkv_proj", inputs=width, outputs=3 * width),),
        out=Linear(name="attn.out_proj", inputs=width, outputs=width),
        dropout=dropout(fields, "attn_pdrop"),
    )
    return side_by_side(fields, "codegen", mixer, positions)
