"""ModernVBERT: ModernBERT's layers beside a tower that images pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from memfit.model.config import Fields
from memfit.model.families import _captured
from memfit.model.families._captured import TRACE, Dims, stored
from memfit.model.families._chains import CHAINS, ChainRow, chained
from memfit.model.families._siglip import vision_tower
from memfit.model.families.modernbert import choose
from memfit.model.modules import Weight

TEXT = "text_config"
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
HEADS = ("classification", "token-classification", "masked-lm")
SHUFFLE = 4  # patches along a side that become one token
Tower = Callable[[Fields], tuple[Weight, ...]]


def seeing(name: str, text: str, tower: Tower) -> ChainRow:
    """The row of an encoder whose text part is that of another family; the class around it makes
    the head and drops out what it reads."""
    own = CHAINS[text]
    kind = own.examples[0]["model_type"]
    pooling = own.examples[0]["classifier_pooling"]

    def dims(fields: Fields) -> Dims:
        inner = fields.section(TEXT)
        if inner.text("model_type", default=kind) != kind:
            message = f"no captured graph of `{name}` with another text part than `{kind}`"
            inner.blame("model_type", message, TRACE)
        found = own.dims(inner)
        inner.count(own.positions, default=512, high=2**40)
        data = stored(text)
        outside = {"classifier_pooling", "classifier_dropout"}
        assumed = {key: one for key, one in data["assumed"].items() if key not in outside}
        _captured.unlike(own, inner, {**data, "assumed": assumed}, found)
        return found

    rates = {f"{TEXT}.{key}": one for key, one in own.rates.items() if "classifier" not in key}
    return replace(
        own,
        name=name,
        dims=dims,
        kinds=lambda fields: own.kinds(fields.section(TEXT)),
        examples=tuple(
            {
                "model_type": name.partition("-")[0],
                TEXT: {**one, "classifier_dropout": 0.0},
                "vision_config": VISION,
                "classifier_pooling": pooling,
                "classifier_dropout": own.examples[0]["classifier_dropout"],
            }
            for one in own.examples
        ),
        heads=HEADS,
        rates={**rates, "classifier_dropout": 0.0},
        silent=("image_token_id", "pixel_shuffle_factor", "classifier_bias"),
        absent=(),
        depth="",
        tied=False,
        tower=tower,
    )


def connected(fields: Fields, *, pools: bool) -> Iterator[Weight]:
    """The tower, and the layer that makes tokens of its patches. `pools`: whether the class has a
    pooling head there by default."""
    vision = fields.section("vision_config")
    vision.assume(vision_use_head=pools)
    width, found = vision_tower(vision, "model.vision_model")
    yield from found
    text = fields.section(TEXT).count("hidden_size")
    patches = fields.count("pixel_shuffle_factor", default=SHUFFLE, high=64) ** 2
    name = "model.connector.modality_projection.weight"
    yield Weight(name=name, shape=(text, width * patches), role="linear")


def tower(fields: Fields) -> tuple[Weight, ...]:
    """What images pass through (transformers 5.23 modeling_modernvbert.py ModernVBertModel)."""
    return tuple(connected(fields, pools=True))


chained(
    seeing("modernvbert", "modernbert", tower),
    seeing("modernvbert-mean", "modernbert-mean", tower),
    choose=choose,
)
