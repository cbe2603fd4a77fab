"""GLM-4.7-Flash: DeepSeek-V3 whose dense layers are listed."""

from __future__ import annotations

from memfit.model.config import Fields, shown
from memfit.model.families import family
from memfit.model.families._parts import rotated
from memfit.model.families.deepseek_v2 import EXAMPLE as V2
from memfit.model.families.deepseek_v2 import latent_attention, latent_layer, routed_experts
from memfit.model.families.llama import both_kinds, decoder, dense_mlp, stack
from memfit.model.model import Model
from memfit.model.modules import Layer

EXAMPLE = {key: value for key, value in V2.items() if key != "first_k_dense_replace"} | {
    "model_type": "glm4_moe_lite"
}


def routed_layers(fields: Fields, default: list[bool]) -> list[bool]:
    """`mlp_layer_types`: `dense` or `sparse` for each layer."""
    count = fields.layers()
    listed = fields.listing(
        "mlp_layer_types", count, ["sparse" if routed else "dense" for routed in default]
    )
    if unknown := [item for item in listed if item not in ("dense", "sparse")]:
        fields.blame(
            "mlp_layer_types",
            f"unknown layer type `{shown(unknown[0])}`",
            "known: `dense`, `sparse`",
        )
    return [item == "sparse" for item in listed]


@family(
    "glm4_moe_lite",
    examples=(
        EXAMPLE,
        {
            **EXAMPLE,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "q_lora_rank": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
)
def build(fields: Fields) -> Model:
    fields.assume(q_lora_rank=768, n_shared_experts=1, num_experts_per_tok=4)
    width = fields.count("hidden_size")
    mixer = latent_attention(fields, width, "deepseek_v3")

    def layer(routed: bool) -> Layer:
        second = (
            routed_experts(fields, width, corrected=True, style="deepseek_v3")
            if routed
            else dense_mlp(fields, width)
        )
        return latent_layer(mixer, second, width)

    layers = stack(routed_layers(fields, [index > 0 for index in range(fields.layers())]), layer)
    both_kinds(fields, "mlp_layer_types", read=layer)
    rotary = rotated(fields, mixer.rope, "partial_rotary_factor", default=1.0)
    return decoder(fields, "glm4_moe_lite", layers, width=width, rotary=rotary, tied=False)
