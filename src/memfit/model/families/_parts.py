"""What the GPT-like families share: plain feed-forwards, LayerNorms, equal heads, and the frame
that GPT-2 named."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.config import LARGEST_HEADS, Fields, shown
from memfit.model.model import Model
from memfit.model.modules import (
    MLP,
    Attention,
    Block,
    Embedding,
    Layer,
    Linear,
    Module,
    Norm,
    Weight,
)

EAGER = ("eager",)  # code that writes the scores out and cannot use a fused kernel
EAGER_OR_FLASH = ("eager", "flash")


def dropout(fields: Fields, *keys: str, default: float = 0.0) -> float:
    """A probability; transformers keeps these active in training, also in fine-tuning."""
    value = fields.value(*keys, default=default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        fields.blame(fields.key(keys), f"`{shown(value)}` is not a probability", "from 0 to 1")
        return default
    return float(value)


def without(fields: Fields, key: str, expected: object, why: str) -> None:
    """Refuse an option that transformers' code for this family does not have, or that changes what
    has no formula here."""
    value = fields.value(key, default=expected)
    if value != expected:
        fields.blame(
            key,
            f"`{key}` {shown(value)} is not supported yet: {why}",
            "`--by trace` runs the real code instead (extra `trace`)",
        )


def equal_heads(fields: Fields, width: int, *keys: str) -> tuple[int, int]:
    """(heads, head size) where the heads share the width equally."""
    heads = fields.count(*keys, high=LARGEST_HEADS)
    fields.divides(heads, width, fields.key(keys), "the hidden size")
    return heads, max(1, width // heads)


def layer_norm(
    name: str, width: int, *, bias: bool = True, affine: bool = True, style: str = "layer"
) -> Norm:
    return Norm(name=name, width=width, style=style, bias=bias and affine, affine=affine)


def apart(name: str, width: int, *, bias: bool) -> tuple[Linear, ...]:
    """Queries, keys and values from three projections of the same size."""
    return tuple(
        Linear(name=f"{name}.{one}_proj", inputs=width, outputs=width, bias=bias) for one in "qkv"
    )


def plain_mlp(
    up: str,
    down: str,
    width: int,
    inner: int,
    activation: str,
    *,
    bias: bool = True,
    conv1d: bool = False,
) -> MLP:
    """down(act(up(x))), the two named in full."""
    return MLP(
        name=up.rpartition(".")[0],
        style="plain",
        activation=activation,
        up=Linear(name=up, inputs=width, outputs=inner, bias=bias, conv1d=conv1d),
        down=Linear(name=down, inputs=inner, outputs=width, bias=bias, conv1d=conv1d),
    )


def layer(
    norm: Norm,
    attention: Attention,
    second: Norm,
    mlp: MLP,
    *,
    order: str = "pre",
    parallel: bool = False,
) -> Layer:
    """Attention and feed-forward, one after the other or side by side; side by side they may share
    one norm."""
    blocks = (
        Block(norm=norm, mixer=attention, order=order),
        Block(norm=second, mixer=mlp, order=order),
    )
    return Layer(blocks=blocks, parallel=parallel)


def frame(
    fields: Fields,
    name: str,
    layers: tuple[Layer, ...],
    *,
    width: int,
    positions: int,
    tied: bool,
    learned: bool = True,
    head_bias: bool = False,
) -> Model:
    """`transformer.wte`, `wpe` (where positions are learned), `h`, `ln_f`, `lm_head`, as in
    GPT-2."""
    vocab = fields.count("vocab_size")
    embed: tuple[Module, ...] = (Embedding(name="transformer.wte", rows=vocab, width=width),)
    if learned:
        embed += (Embedding(name="transformer.wpe", rows=positions, width=width, style="learned"),)
    return Model(
        name=name,
        family=name,
        prefix="transformer.h",
        layers=layers,
        embed=embed,
        final=(layer_norm("transformer.ln_f", width),),
        head=Linear(name="lm_head", inputs=width, outputs=vocab, bias=head_bias),
        tied=fields.flag("tie_word_embeddings", default=tied),
        vocab=vocab,
        width=width,
        positions=positions,
        dtype=fields.dtype(),
    )


def rotated(fields: Fields, head: int, *keys: str, default: float) -> int:
    """How many values of a head are rotated: `partial_rotary_factor` of the rope parameters wins
    over the older keys (transformers 5.23 modeling_rope_utils.py convert_rope_params_to_dict). The
    tables there follow a `head_dim` of their own."""
    without(fields, "head_dim", head, "this family divides the hidden size equally among its heads")
    rope = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    share = rope.get("partial_rotary_factor")
    if share is None:
        share = fields.value(*keys, default=default)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        fields.blame(
            fields.key(keys), f"`{shown(share)}` must be a fraction of a head", "above 0, at most 1"
        )
        return head
    size = int(head * share)
    if size < 2 or size % 2:
        fields.blame(
            fields.key(keys),
            f"{size} rotated values of a head of {head} must be an even number",
            of=(head,),
        )
    return max(2, size)


def sines(fields: Fields, head: int, positions: int, name: str) -> tuple[int, tuple[Weight, ...]]:
    """(rotated values, the table of their sines and cosines that every layer keeps in fp32), as in
    GPT-J and CodeGen."""
    rotary = fields.count("rotary_dim", default=64, low=2)
    if rotary % 2 or rotary > head:
        fields.blame(
            "rotary_dim",
            f"{rotary} rotated values exceed a head of {head}",
            "must be an even number, at most the head size",
            of=(rotary, head),
        )
    return rotary, (Weight(name=name, shape=(positions, rotary), role="buffer", format="float32"),)


def side_by_side(fields: Fields, name: str, attention: Attention, positions: int) -> Model:
    """The frame of GPT-J and CodeGen: one norm, attention and feed-forward next to each other, an
    untied head with a bias."""
    width, residual = attention.out.inputs, dropout(fields, "resid_pdrop")
    activation, inner = (
        fields.activation("activation_function", default="gelu_new"),
        fields.count("n_inner", default=4 * width),
    )
    mlp = replace(plain_mlp("mlp.fc_in", "mlp.fc_out", width, inner, activation), dropout=residual)
    norm = layer_norm("ln_1", width)
    one = layer(norm, replace(attention, out_dropout=residual), norm, mlp, parallel=True)
    layers = (one,) * fields.layers("n_layer", "num_hidden_layers")
    model = frame(
        fields,
        name,
        layers,
        width=width,
        positions=positions,
        tied=False,
        learned=False,
        head_bias=True,
    )
    return replace(model, embed_dropout=dropout(fields, "embd_pdrop"))
