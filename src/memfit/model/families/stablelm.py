"""StableLM 2 and 3B: LayerNorms, a quarter of each head rotated; the 12B has a norm for every head
and parallel blocks."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, layer, layer_norm, rotated
from memfit.model.families.llama import SMALL, attention, decoder, dense_mlp
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model
from memfit.model.modules import Norm

EXAMPLE = {**SMALL, "model_type": "stablelm"}


def per_head(name: str, heads: int, head: int) -> Norm:
    """A LayerNorm module for each head (modeling_stablelm.py StableLmLayerNormPerHead)."""
    return Norm(name=name, width=head, heads=heads, split=True, style="layer")


@family(
    "stablelm",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        {**EXAMPLE, "hidden_dropout": 0.2, "attention_dropout": 0.1},
        {
            **EXAMPLE,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
        },
        {
            **EXAMPLE,
            "use_qkv_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=32)
    fields.config = {**fields.config, "head_dim": None}  # its attention shares the width equally
    width = fields.count("hidden_size")
    mixer = attention(
        fields,
        width,
        qkv_bias=fields.flag("use_qkv_bias", default=False),
        out_bias=False,
        style="stablelm",
    )
    mixer = replace(
        mixer, rotary=rotated(fields, mixer.head, "partial_rotary_factor", default=0.25)
    )
    if fields.flag("qk_layernorm", default=False):
        q = per_head("self_attn.q_layernorm", mixer.heads, mixer.head)
        mixer = replace(
            mixer, q_norm=q, k_norm=per_head("self_attn.k_layernorm", mixer.kv_heads, mixer.head)
        )
    mlp = replace(dense_mlp(fields, width), dropout=dropout(fields, "hidden_dropout"))
    parallel, first = (
        fields.flag("use_parallel_residual", default=False),
        layer_norm("input_layernorm", width),
    )
    one = layer(
        first,
        mixer,
        first if parallel else layer_norm("post_attention_layernorm", width),
        mlp,
        parallel=parallel,
    )
    model = decoder(
        fields, "stablelm", (one,) * fields.layers(), width=width, rotary=mixer.rotary, tied=False
    )
    return replace(model, final=(layer_norm("model.norm", width),))
