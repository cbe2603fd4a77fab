"""Phi-1, 1.5 and 2: parallel blocks behind one LayerNorm, biases everywhere, half of each head
rotated."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, layer, layer_norm, plain_mlp, rotated
from memfit.model.families.llama import SMALL, attention, decoder
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Attention

EXAMPLE = {**SMALL, "model_type": "phi"}


def phi_attention(fields: Fields, width: int) -> Attention:
    mixer = attention(fields, width, qkv_bias=True, out_bias=True, style="phi")
    mixer = replace(
        mixer,
        out=replace(mixer.out, name="self_attn.dense"),
        out_dropout=dropout(fields, "resid_pdrop"),
        rotary=rotated(fields, mixer.head, "partial_rotary_factor", default=0.5),
    )
    if not fields.flag("qk_layernorm", default=False):
        return mixer
    size = max(1, width // mixer.heads)  # whatever `head_dim` says (modeling_phi.py PhiAttention)
    if size != mixer.head:
        fields.blame(
            "head_dim",
            f"norms of {size} values do not fit heads of {mixer.head}",
            of=(size, mixer.head),
        )
    return replace(
        mixer,
        q_norm=layer_norm("self_attn.q_layernorm", size),
        k_norm=layer_norm("self_attn.k_layernorm", size),
    )


@family(
    "phi",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        {**EXAMPLE, "resid_pdrop": 0.1, "embd_pdrop": 0.2, "attention_dropout": 0.3},
        {
            **EXAMPLE,
            "qk_layernorm": True,
            "num_key_value_heads": None,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": True,
        },
        {**EXAMPLE, "head_dim": 32},
    ),
)
def build(fields: Fields) -> Model:
    width, residual = fields.count("hidden_size"), dropout(fields, "resid_pdrop")
    mixer = phi_attention(fields, width)
    activation, inner = (
        fields.activation("hidden_act", default="gelu_new"),
        fields.count("intermediate_size"),
    )
    mlp = replace(plain_mlp("mlp.fc1", "mlp.fc2", width, inner, activation), dropout=residual)
    norm = layer_norm("input_layernorm", width)
    layers = (layer(norm, mixer, norm, mlp, parallel=True),) * fields.layers()
    model = decoder(fields, "phi", layers, width=width, rotary=mixer.rotary, tied=False)
    return replace(
        model,
        final=(layer_norm("model.final_layernorm", width),),
        head=replace(model.head, bias=True),
        embed_dropout=dropout(fields, "embd_pdrop"),
    )
