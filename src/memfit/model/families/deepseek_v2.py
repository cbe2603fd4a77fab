"""DeepSeek-V2: latent attention, a few dense layers, then routed and shared experts."""

from __future__ import annotations

from memfit.model.config import LARGEST_HEADS, Fields
from memfit.model.families import family
from memfit.model.families._parts import dropout
from memfit.model.families.llama import SMALL, both_kinds, decoder, dense_mlp, gated_mlp, stack
from memfit.model.label_heads import CLASSIFIES
from memfit.model.model import Model
from memfit.model.modules import MLP, Block, Latent, Layer, Linear, MoE, Norm

EXAMPLE = {
    **SMALL,
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}


def latent_attention(fields: Fields, width: int, style: str) -> Latent:
    """Queries, keys and values by way of latents; `q_lora_rank` null: queries straight from the
    input."""
    heads = fields.count("num_attention_heads", high=LARGEST_HEADS)
    fields.count(
        "num_key_value_heads", default=heads, high=LARGEST_HEADS
    )  # of no shape, but its code divides by it
    nope, rope, value = (
        fields.count(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if rope % 2:
        fields.blame(
            "qk_rope_head_dim", f"{rope} rotated values must be an even number", of=(rope,)
        )
    latent, q_latent, bias = (
        fields.count("kv_lora_rank"),
        fields.optional("q_lora_rank"),
        fields.flag("attention_bias", default=False),
    )

    def linear(name: str, inputs: int, outputs: int, biased: bool = False) -> Linear:
        return Linear(name=f"self_attn.{name}", inputs=inputs, outputs=outputs, bias=biased)

    return Latent(
        name="self_attn",
        heads=heads,
        nope=nope,
        rope=rope,
        value=value,
        latent=latent,
        q_latent=q_latent,
        style=style,
        q_proj=None if q_latent else linear("q_proj", width, heads * (nope + rope)),
        q_a=linear("q_a_proj", width, q_latent, bias) if q_latent else None,
        q_norm=Norm(name="self_attn.q_a_layernorm", width=q_latent) if q_latent else None,
        q_b=linear("q_b_proj", q_latent, heads * (nope + rope)) if q_latent else None,
        kv_a=linear("kv_a_proj_with_mqa", width, latent + rope, bias),
        kv_norm=Norm(name="self_attn.kv_a_layernorm", width=latent),
        kv_b=linear("kv_b_proj", latent, heads * (nope + value)),
        out=linear("o_proj", heads * value, width, bias),
        dropout=dropout(fields, "attention_dropout"),
        interleaved=fields.flag("rope_interleave", default=True),
    )


def routed_experts(
    fields: Fields, width: int, *, corrected: bool, style: str, shared_bias: bool = False
) -> MoE:
    """Experts chosen within the best groups, beside shared ones; `corrected`: a bias steers the
    choice (DeepSeek-V3)."""
    experts = fields.count("n_routed_experts", "num_experts", "num_local_experts")
    groups = fields.count("n_group", default=1)
    fields.divides(groups, experts, "n_group", "the experts")
    grouped = corrected or fields.text("topk_method", default="greedy") != "greedy"
    inner, activation = (
        fields.count("moe_intermediate_size"),
        fields.activation("hidden_act", default="silu"),
    )
    shared = gated_mlp(
        "mlp.shared_experts",
        width,
        inner * fields.count("n_shared_experts"),
        activation,
        shared_bias,
    )
    return MoE(
        name="mlp",
        experts=experts,
        active=fields.count("num_experts_per_tok", high=experts),
        inputs=width,
        width=inner,
        shared=shared,
        correction_bias=corrected,
        activation=activation,
        style=style,
        groups=groups if grouped else 0,
        open_groups=fields.count("topk_group", default=1, high=groups) if grouped else 0,
        normed=corrected and fields.flag("norm_topk_prob", default=True),
    )


def latent_layer(mixer: Latent, second: MLP | MoE, width: int) -> Layer:
    first, then = (
        Norm(name=name, width=width) for name in ("input_layernorm", "post_attention_layernorm")
    )
    return Layer(blocks=(Block(norm=first, mixer=mixer), Block(norm=then, mixer=second)))


@family(
    "deepseek_v2",
    label_heads=(CLASSIFIES,),
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "q_lora_rank": None,
            "attention_bias": True,
            "mlp_bias": True,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
        {
            **EXAMPLE,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "attention_dropout": 0.1,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(q_lora_rank=1536, n_shared_experts=2, first_k_dense_replace=0)
    width, mlp_bias = fields.count("hidden_size"), fields.flag("mlp_bias", default=False)
    fields.divides(
        fields.count("num_attention_heads"), width, "num_attention_heads", "the hidden size"
    )  # its config insists
    mixer = latent_attention(fields, width, "deepseek_v2")
    dense = fields.count("first_k_dense_replace", low=0, default=0)

    def layer(routed: bool) -> Layer:
        if routed:
            return latent_layer(
                mixer,
                routed_experts(
                    fields, width, corrected=False, style="deepseek_v2", shared_bias=mlp_bias
                ),
                width,
            )
        return latent_layer(mixer, dense_mlp(fields, width, mlp_bias), width)

    layers = stack([index >= dense for index in range(fields.layers())], layer)
    both_kinds(fields, "first_k_dense_replace", read=layer)
    return decoder(fields, "deepseek_v2", layers, width=width, rotary=mixer.rope, tied=False)
