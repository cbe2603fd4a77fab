"""Nemotron Super and Ultra (`nemotron-nas`, arXiv 2411.19146): Llama whose layers were searched one
by one, with feed-forwards of different widths, and some without attention. Its code
(modeling_decilm.py) ships with the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memfit.model.config import LARGEST_HEADS, Fields
from memfit.model.families import family
from memfit.model.families.llama import SMALL, attention, decoder, gated_mlp, stack
from memfit.model.model import Model
from memfit.model.modules import Block, Layer, Norm

MULTIPLE = 256  # of a feed-forward's width (modeling_decilm.py _find_multiple)


class Kind(NamedTuple):
    """A layer: query heads that share a key head, and the factor of its feed-forward; 0 for
    neither."""

    group: int
    factor: float


def example(*kinds: tuple[int, float]) -> dict[str, Any]:
    blocks = [
        {
            "attention": {"no_op": not group, "n_heads_in_group": group or None},
            "ffn": {"no_op": not factor, "ffn_mult": factor or None},
        }
        for group, factor in kinds
    ]
    unread = ("num_key_value_heads", "intermediate_size")
    plain = {key: value for key, value in SMALL.items() if key not in unread}
    return {
        **plain,
        "model_type": "nemotron_nas",
        "num_hidden_layers": len(blocks),
        "block_configs": blocks,
    }


def kind_of(block: Any, fields: Fields) -> Kind:
    parts = [
        block.get(name) if isinstance(block, Mapping) else None for name in ("attention", "ffn")
    ]
    first, second = (part if isinstance(part, Mapping) else {} for part in parts)
    if any(part.get("replace_with_linear") for part in (first, second)):
        fields.blame("block_configs", "linear replacements of attention or MLP are unsupported")
    group = 0 if first.get("no_op") else first.get("n_heads_in_group")
    factor = 0 if second.get("no_op") else second.get("ffn_mult")
    wrong = [
        name
        for name, value, whole in (("n_heads_in_group", group, True), ("ffn_mult", factor, False))
        if isinstance(value, bool)
        or not isinstance(value, int if whole else (int, float))
        or not 0 <= value <= 2**16
    ]
    if wrong:
        fields.blame("block_configs", f"`{wrong[0]}` of a layer must be a number")
        return Kind(1, 1.0)
    return Kind(int(group), float(factor))  # type: ignore[arg-type]


@family("nemotron_nas", brought=True, examples=(example((2, 2.625), (0, 1.0), (2, 5.25)),))
def build(fields: Fields) -> Model:
    width = fields.count("hidden_size")
    queries = fields.count("num_attention_heads", high=LARGEST_HEADS)
    bias = fields.flag("attention_bias", default=False)
    blocks = fields.value("block_configs", default=[])
    count = fields.layers()
    if not isinstance(blocks, list) or len(blocks) != count:
        message = f"`block_configs` needs {count} entries, one a layer"
        fields.blame("block_configs", message, of=(count,))
        blocks = []
    activation = fields.activation("hidden_act", default="silu")

    def layer(kind: Kind) -> Layer:
        found = []
        if kind.group:
            own = Fields({**fields.config, "num_key_value_heads": max(1, queries // kind.group)})
            mixer = attention(own, width, qkv_bias=bias, out_bias=bias)
            found.append(Block(norm=Norm(name="input_layernorm", width=width), mixer=mixer))
            fields.problems += [one for one in own.problems if one not in fields.problems]
        if kind.factor:
            inner = -(-int(2 * kind.factor * width / 3) // MULTIPLE) * MULTIPLE
            second = gated_mlp("mlp", width, inner, activation)
            norm = Norm(name="post_attention_layernorm", width=width)
            found.append(Block(norm=norm, mixer=second))
        return Layer(blocks=tuple(found))

    layers = stack([kind_of(block, fields) for block in blocks], layer)
    rotary = fields.count("head_dim", default=max(1, width // queries))
    return decoder(fields, "nemotron_nas", layers, width=width, rotary=rotary, tied=False)
