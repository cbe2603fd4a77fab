"""StarCoder 2: LayerNorms, biases everywhere, a plain feed-forward, dropout on what each block
adds."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, layer, layer_norm, plain_mlp
from memfit.model.families.llama import SMALL, attention, decoder
from memfit.model.label_heads import CLASSIFIES, TAGS
from memfit.model.model import Model

EXAMPLE = {key: value for key, value in SMALL.items() if key != "tie_word_embeddings"} | {
    "model_type": "starcoder2"
}


@family(
    "starcoder2",
    label_heads=(
        CLASSIFIES,
        TAGS,
    ),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "use_bias": False,
            "sliding_window": 64,
            "tie_word_embeddings": False,
            "head_dim": 32,
        },
        {
            **EXAMPLE,
            "residual_dropout": 0.1,
            "embedding_dropout": 0.2,
            "attention_dropout": 0.3,
            "hidden_act": "gelu",
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(num_key_value_heads=2)
    width, bias, residual = (
        fields.count("hidden_size"),
        fields.flag("use_bias", default=True),
        dropout(fields, "residual_dropout"),
    )
    mixer = attention(
        fields,
        width,
        qkv_bias=bias,
        out_bias=bias,
        window=fields.optional("sliding_window"),
        repeated_until=(4, 48),
    )
    activation, inner = (
        fields.activation("hidden_act", default="gelu_pytorch_tanh"),
        fields.count("intermediate_size"),
    )
    mlp = replace(
        plain_mlp("mlp.c_fc", "mlp.c_proj", width, inner, activation, bias=bias), dropout=residual
    )
    norms = layer_norm("input_layernorm", width), layer_norm("post_attention_layernorm", width)
    one = layer(norms[0], replace(mixer, out_dropout=residual), norms[1], mlp)
    model = decoder(
        fields, "starcoder2", (one,) * fields.layers(), width=width, rotary=mixer.rotary, tied=True
    )
    return replace(
        model,
        final=(layer_norm("model.norm", width),),
        embed_dropout=dropout(fields, "embedding_dropout"),
    )
