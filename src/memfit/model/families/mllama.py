"""Llama 3.2 Vision: Llama, between whose layers others look at the picture. Text passes those by,
as it does the vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._composite import NAMES, composite, rooted
from memfit.model.families._towers import layer_norm, linear, of_kind, rms_norm
from memfit.model.model import Model
from memfit.model.modules import Attention, Embedding, Layer, Weight

EXTRA = 8  # rows of the embedding beyond the head's (transformers 5.23 modeling_mllama.py)
# Class defaults (transformers 5.23 configuration_mllama.py)
TEXT = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
CROSS = [3, 8, 13, 18, 23, 28, 33, 38]
VISION = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "max_num_tiles": 4,
    "vision_output_dim": 7680,
}
RATIOS = 8  # aspect ratios where a config lists none
KERNELS = ("eager", "sdpa")  # its masks have four dimensions (`_supports_flash_attn`)
ROOT = "model.vision_model"
EXAMPLE = {
    "model_type": "mllama",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "mllama_text_model",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1, 3],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {
        "model_type": "mllama_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 56,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2]],
        "vision_output_dim": 96,
        "intermediate_layers_indices": [0, 1],
    },
}


def parameter(name: str, *shape: int) -> Weight:
    return Weight(name=name, shape=shape)


def encoder(name: str, layers: int, width: int, inner: int, *, gated: bool) -> Iterator[Weight]:
    for number in range(layers):
        path = f"{name}.layers.{number}"
        if gated:
            yield from (parameter(f"{path}.{one}", 1) for one in ("gate_attn", "gate_ffn"))
        for one in ("q", "k", "v", "o"):
            yield from linear(f"{path}.self_attn.{one}_proj", width, width, bias=False)
        yield from linear(f"{path}.mlp.fc1", width, inner)
        yield from linear(f"{path}.mlp.fc2", inner, width)
        yield from layer_norm(f"{path}.input_layernorm", width)
        yield from layer_norm(f"{path}.post_attention_layernorm", width)


def vision(fields: Fields) -> Iterator[Weight]:
    """The tower: an encoder over a tile's patches, and a gated one over all of them."""
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    fields.divides(fields.count("attention_heads"), width, "attention_heads", "hidden_size")
    patch, tiles = fields.count("patch_size"), fields.count("max_num_tiles")
    places = (fields.count("image_size") // patch) ** 2 + 1
    listed = fields.value("supported_aspect_ratios", default=None)
    ratios = 1 + (len(listed) if isinstance(listed, list) else RATIOS)
    yield parameter(f"{ROOT}.class_embedding", width)
    shape = (width, fields.count("num_channels"), patch, patch)
    yield Weight(name=f"{ROOT}.patch_embedding.weight", shape=shape, role="linear")
    name = f"{ROOT}.gated_positional_embedding"
    yield parameter(f"{name}.gate", 1)
    yield parameter(f"{name}.embedding", places, width)
    yield parameter(f"{name}.tile_embedding.weight", ratios, tiles * places * width)
    for one in ("pre", "post"):
        name = f"{ROOT}.{one}_tile_positional_embedding"
        yield parameter(f"{name}.gate", 1)
        yield parameter(f"{name}.embedding.weight", ratios, tiles * width)
    for one in ("pre", "post"):
        yield from layer_norm(f"{ROOT}.layernorm_{one}", width)
    layers, others = fields.layers(), fields.layers("num_global_layers")
    yield from encoder(f"{ROOT}.transformer", layers, width, inner, gated=False)
    yield from encoder(f"{ROOT}.global_transformer", others, width, inner, gated=True)


def crossing(model: Model, layer: Layer, number: int) -> Iterator[Weight]:
    """A layer that looks at the picture: a layer of Llama with norms of each head's queries and
    keys, and two gates."""
    mixer = layer.blocks[0].mixer
    assert isinstance(mixer, Attention)
    path, head = f"{model.prefix}.{number}", mixer.head
    yield from (parameter(f"{path}.cross_attn_{one}_gate", 1) for one in ("attn", "mlp"))
    for weight in layer.weights():
        name = weight.name.replace("self_attn.", "cross_attn.")
        yield replace(weight, name=f"{path}.{name}")
    for one in ("q_norm", "k_norm"):
        yield from rms_norm(f"{path}.cross_attn.{one}", head)


def alone(model: Model) -> Model:
    """Without the tower; the layers that look at pictures are still there."""
    old, new = NAMES[::-1]
    idle = [one for one in model.towers if one.name.startswith(old)]
    return replace(
        rooted(model, old, new),
        family="mllama_text_model",
        towers=tuple(replace(one, name=one.name.replace(old, new, 1)) for one in idle),
        paths=tuple(one.replace(old, new, 1) for one in model.paths),
        heads=("causal-lm",),
        caching=False,
    )


@family("mllama", examples=(EXAMPLE,), alone=alone)
def build(fields: Fields) -> Model:
    text = fields.mapping("text_config")
    of_kind(fields.section("text_config"), "mllama_text_model", "language model")
    known = TEXT if text else {}
    fields.config = {**fields.config, "text_config": {**known, **text, "model_type": "llama"}}
    picture = fields.section("vision_config")
    of_kind(picture, "mllama_vision_model")
    picture.assume(**VISION)
    tower = tuple(vision(picture))
    inner = fields.section("text_config")
    named = inner.value("cross_attention_layers", default=None) is not None
    places = inner.integers("cross_attention_layers") if named else frozenset(CROSS)

    def towers(model: Model) -> Iterator[Weight]:
        yield from tower
        for number in sorted(places):
            if number < len(model.layers):
                yield from crossing(model, model.layers[number], number)
        out = picture.count("vision_output_dim")
        yield from linear("model.multi_modal_projector", out, model.width)

    model = composite(fields, "mllama", "llama", towers)
    words = model.embed[0]
    assert isinstance(words, Embedding)
    layer = model.layers[0]
    block = layer.blocks[0]
    assert isinstance(block.mixer, Attention)
    mixer = replace(block.mixer, kernels=KERNELS)
    layer = replace(layer, blocks=(replace(block, mixer=mixer), *layer.blocks[1:]))
    running = [number for number in range(len(model.layers)) if number not in places]
    if not running:
        fields.blame("cross_attention_layers", "leaves no layer that reads text")
        return model
    return replace(
        model,
        tied=False,
        embed=(replace(words, rows=words.rows + EXTRA), *model.embed[1:]),
        layers=(layer,) * len(running),
        paths=tuple(f"{model.prefix}.{number}" for number in running),
    )
