"""The SigLIP vision tower: what it holds while the language model reads text."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.model.config import Fields
from memfit.model.modules import Linear, Norm, Weight

# Class defaults of SiglipVisionConfig (transformers 5.23 configuration_siglip.py)
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}


def perceptron(name: str, width: int, inner: int) -> Iterator[Weight]:
    yield from Linear(name=f"{name}.fc1", inputs=width, outputs=inner, bias=True).weights()
    yield from Linear(name=f"{name}.fc2", inputs=inner, outputs=width, bias=True).weights()


def norm(name: str, width: int) -> Iterator[Weight]:
    return Norm(name=name, width=width, style="layer", bias=True).weights()


def layer(name: str, width: int, inner: int) -> Iterator[Weight]:
    yield from norm(f"{name}.layer_norm1", width)
    for one in ("k", "v", "q", "out"):
        yield from Linear(
            name=f"{name}.self_attn.{one}_proj", inputs=width, outputs=width, bias=True
        ).weights()
    yield from norm(f"{name}.layer_norm2", width)
    yield from perceptron(f"{name}.mlp", width, inner)


def pooling(name: str, width: int, inner: int) -> Iterator[Weight]:
    """The attention that pools an image into one vector; its projections lie in one tensor
    (torch.nn.MultiheadAttention)."""
    yield Weight(name=f"{name}.probe", shape=(1, 1, width))
    yield Weight(name=f"{name}.attention.in_proj_weight", shape=(3 * width, width), role="linear")
    yield Weight(name=f"{name}.attention.in_proj_bias", shape=(3 * width,), role="bias")
    yield from Linear(
        name=f"{name}.attention.out_proj", inputs=width, outputs=width, bias=True
    ).weights()
    yield from norm(f"{name}.layernorm", width)
    yield from perceptron(f"{name}.mlp", width, inner)


def vision_tower(fields: Fields, name: str) -> tuple[int, tuple[Weight, ...]]:
    """(its width, all of its weights and buffers), as modeling_siglip.py of transformers 5.23
    builds them."""
    kind = fields.text("model_type", default="siglip_vision_model")
    if kind != "siglip_vision_model":
        fields.blame(
            "model_type",
            f"not supported yet: the vision tower `{kind[:40]}`",
            "known: `siglip_vision_model`",
        )
    fields.assume(**DEFAULTS)
    width, inner, layers = (
        fields.count("hidden_size"),
        fields.count("intermediate_size"),
        fields.layers(),
    )
    fields.divides(
        fields.count("num_attention_heads"), width, "num_attention_heads", "the hidden size"
    )
    patch, channels = fields.count("patch_size"), fields.count("num_channels")
    patches = (fields.count("image_size") // patch) ** 2
    if not patches:
        fields.blame("patch_size", f"a patch of {patch} is larger than the image", of=(patches,))

    def weights() -> Iterator[Weight]:
        yield Weight(
            name=f"{name}.embeddings.patch_embedding.weight",
            shape=(width, channels, patch, patch),
            role="linear",
        )
        yield Weight(name=f"{name}.embeddings.patch_embedding.bias", shape=(width,), role="bias")
        yield Weight(
            name=f"{name}.embeddings.position_embedding.weight",
            shape=(patches, width),
            role="embedding",
        )
        yield Weight(
            name=f"{name}.embeddings.position_ids",
            shape=(1, patches),
            role="buffer",
            format="int64",
        )
        for index in range(layers):
            yield from layer(f"{name}.encoder.layers.{index}", width, inner)
        yield from norm(f"{name}.post_layernorm", width)
        if fields.flag("vision_use_head", default=True):
            yield from pooling(f"{name}.head", width, inner)

    return width, tuple(weights())
