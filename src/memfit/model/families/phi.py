"""Phi-1, 1.5 and 2: one norm for attention and feed-forward side by side, half of each head rotated, a head with a bias."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import LARGEST_HEADS, Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout, equal_heads, layer, layer_norm, plain_mlp, rotated
from memfit.model.families.llama import rotary_buffers
from memfit.model.modules import Attention, Embedding, Linear, Model, Norm

SMALL = {
    "model_type": "phi", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
    "vocab_size": 512, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def attention(fields: Fields, width: int) -> Attention:
    """Norms on queries and keys are as wide as a head."""
    heads, head = equal_heads(fields, width, "num_attention_heads")
    keys = fields.count("num_key_value_heads", default=heads, high=LARGEST_HEADS)
    fields.divides(keys, heads, "num_key_value_heads", "the query heads")
    norms: tuple[Norm | None, ...] = (None, None)
    if fields.flag("qk_layernorm", default=False):
        norms = tuple(layer_norm(f"self_attn.{one}_layernorm", head) for one in "qk")
    return Attention(
        name="self_attn", heads=heads, kv_heads=keys, head=head, style="phi", q_norm=norms[0], k_norm=norms[1],
        project=tuple(
            Linear(name=f"self_attn.{one}_proj", inputs=width, outputs=count * head, bias=True)
            for one, count in (("q", heads), ("k", keys), ("v", keys))
        ),
        out=Linear(name="self_attn.dense", inputs=width, outputs=width, bias=True),
        rotary=rotated(fields, head, "partial_rotary_factor", default=0.5),
        dropout=dropout(fields, "attention_dropout"), out_dropout=dropout(fields, "resid_pdrop"),
    )  # fmt: skip


@family(
    "phi",
    examples=(
        SMALL,
        {**SMALL, "num_key_value_heads": 2, "qk_layernorm": True, "partial_rotary_factor": 0.25, "hidden_act": "gelu"},
        {**SMALL, "tie_word_embeddings": True, "resid_pdrop": 0.1, "embd_pdrop": 0.2, "attention_dropout": 0.3},
    ),
)
def build(fields: Fields) -> Model:
    width, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    mixer = attention(fields, width)
    mlp = plain_mlp("mlp.fc1", "mlp.fc2", width, fields.count("intermediate_size"), fields.activation("hidden_act", default="gelu_new"))
    norm = layer_norm("input_layernorm", width)
    one = layer(norm, mixer, norm, replace(mlp, dropout=mixer.out_dropout), parallel=True)
    return Model(
        name="phi", family="phi", prefix="model.layers", layers=(one,) * fields.layers(),
        embed=(Embedding(name="model.embed_tokens", rows=vocab, width=width),), final=(layer_norm("model.final_layernorm", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab, bias=True), tied=fields.flag("tie_word_embeddings", default=False),
        vocab=vocab, width=width, positions=fields.count("max_position_embeddings", default=2048, high=2**40), dtype=fields.dtype(),
        embed_dropout=dropout(fields, "embd_pdrop"), buffers=rotary_buffers(mixer.rotary),
    )  # fmt: skip
