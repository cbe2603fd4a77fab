"""The quantized key/value cache of transformers 5.23 with its default backend (cache_utils.py
QuantoQuantizedLayer; optimum-quanto 0.2.7).

Packed keys and values of all tokens but the last few, which wait in full precision until there are
128 of them; then everything is unpacked, joined and packed anew. Each pass unpacks what is packed,
so that its attention sees all tokens in full precision.
"""

from __future__ import annotations

from memfit.errors import Problem, raise_errors
from memfit.formats import UINT8, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower import ops
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Shape, Tensor
from memfit.program import Program

RESIDUAL = 128  # tokens that wait in full precision (cache_utils.py QuantizedLayer residual_length)
GROUP = 64  # values that share a scale and a shift (q_group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """`bits` a value, and for each group a scale and a shift in the dtype of what was packed."""

    data: Tensor
    scale: Tensor
    shift: Tensor
    shape: Shape
    format: Format


@dataclass(slots=True, kw_only=True)
class Pair:
    """A layer's keys and values: packed, and those that wait."""

    packed: tuple[Packed, Packed]
    waiting: tuple[Tensor, Tensor] | None = None

    @property
    def tokens(self) -> int:
        return self.packed[0].shape[-2] + (0 if self.waiting is None else self.waiting[0].shape[-2])


def check(program: Program) -> None:
    """What transformers or the backend refuses (cache_utils.py QuantizedCache,
    QuantoQuantizedLayer), and what has no formula."""
    job, found = program.job, []
    if job.cache_bits not in (2, 4):
        found.append(
            Problem(
                message=f"a quantized KV cache needs 2 or 4 bits, not {job.cache_bits}",
                where="job.cache_bits",
            )
        )
    if any(getattr(mixer, "window", 0) for mixer in program.model.mixers):
        message = "a quantized KV cache needs full attention in every layer"
        found.append(
            Problem(message=message, where="job.cache", hint="use `--cache dynamic` or `static`")
        )
    if job.beams > 1:
        found.append(
            Problem(
                message="not supported yet: beams over a quantized cache",
                where="job.beams",
                hint="use `--beams 1`, or another `--cache`",
            )
        )
    raise_errors(found)


def update(
    r: Recorder, pair: Pair | None, k: Tensor, v: Tensor, bits: int
) -> tuple[Pair, Tensor, Tensor]:
    """The layer's new state, and the keys and values to attend to (QuantizedLayer.update)."""
    if pair is None:
        return Pair(packed=(quantize(r, k, bits), quantize(r, v, bits))), k, v
    old = [unpacked(r, one) for one in pair.packed]
    waiting = pair.waiting or (None, None)
    keys, values = (
        joined(r, [one for one in parts if one is not None])
        for parts in zip(old, waiting, (k, v), strict=True)
    )
    held = 0 if waiting[0] is None else waiting[0].shape[-2]
    if held + k.shape[-2] >= RESIDUAL:
        first = quantize(r, keys, bits)
        pair.packed = (
            first,
            pair.packed[1],
        )  # the attribute takes the new keys before the values are packed
        pair.packed = (first, quantize(r, values, bits))
        pair.waiting = None
    else:
        first_waiting = joined(r, [one for one in (waiting[0], k) if one is not None])
        pair.waiting = (
            first_waiting,
            joined(r, [one for one in (waiting[1], v) if one is not None]),
        )
    return pair, keys, values


def joined(r: Recorder, parts: list[Tensor]) -> Tensor:
    """`cat` along the tokens: a copy, also of one alone."""
    shape = (*parts[0].shape[:-2], sum(part.shape[-2] for part in parts), parts[0].shape[-1])
    return r.tensor(shape, parts[-1].format, "cat", "kv_cache")


def quantize(r: Recorder, given: Tensor, bits: int) -> Packed:
    """`MaxOptimizer` finds scales and shifts, `quantize_affine` makes bytes, `pack_weights` packs
    them (optimum-quanto tensor/optimizers/max_optimizer.py, library/quantize.py, tensor/packed.py).
    """
    tensor = ops.packed(r, given)
    groups = (-(-tensor.count // GROUP), 1)
    low, high, reach = (r.tensor(groups, tensor.format, op) for op in ("amin", "amax", "sub"))
    scale = r.tensor(groups, tensor.format, "div", "kv_cache")
    del reach
    shift = r.tensor(groups, tensor.format, "neg", "kv_cache")
    del low, high
    moved = r.tensor(tensor.shape, tensor.format, "add")
    divided = r.tensor(tensor.shape, tensor.format, "div")
    del moved
    rounded = r.tensor(tensor.shape, tensor.format, "round")
    del divided
    clamped = r.tensor(tensor.shape, tensor.format, "clamp")
    whole = r.tensor(tensor.shape, UINT8, "to")
    del clamped, rounded
    small = (-(-whole.count * bits // 8),)
    data = r.tensor(small, UINT8, "zeros", "kv_cache")
    for _ in range(8 // bits):
        turned = r.tensor(small, UINT8, "lshift")
        del turned
    return Packed(data=data, scale=scale, shift=shift, shape=given.shape, format=given.format)


def unpacked(r: Recorder, packed: Packed) -> Tensor:
    """Bytes, then their product with the scales, less the shifts in place (tensor/qbits.py
    QBitsDequantizer)."""
    whole = r.tensor(packed.shape, UINT8, "unpack")
    out = r.tensor(packed.shape, packed.format, "dequantize", "kv_cache")
    del whole
    return out


def skipped(r: Recorder, layers: dict[str, Pair], where: str, length: int, bits: int) -> Pair:
    """What the layer holds of `length` tokens, where passes in between were not walked: tokens are
    packed in batches of `RESIDUAL`."""
    pair = layers.pop(where)
    prompt = pair.packed[0].shape[-2]
    packed = length - (length - prompt) % RESIDUAL
    shapes = [((*one.shape[:-2], packed, one.shape[-1]), one.format) for one in pair.packed]
    del pair
    kept = tuple(stored(r, shape, format, bits) for shape, format in shapes)
    left = length - packed
    waiting = (
        tuple(
            r.tensor((*shape[:-2], left, shape[-1]), format, "cat", "kv_cache")
            for shape, format in shapes
        )
        if left
        else None
    )
    return Pair(packed=kept, waiting=waiting)  # type: ignore[arg-type]  # two of each


def stored(r: Recorder, shape: Shape, format: Format, bits: int) -> Packed:
    """Packed values, without the way there."""
    count = 1
    for size in shape:
        count *= size
    groups = (-(-count // GROUP), 1)
    scale, shift = (r.tensor(groups, format, op, "kv_cache") for op in ("div", "neg"))
    return Packed(
        data=r.tensor((-(-count * bits // 8),), UINT8, "zeros", "kv_cache"),
        scale=scale,
        shift=shift,
        shape=shape,
        format=format,
    )


def flushes(passes: int) -> list[int]:
    """The decoding pass that packs everything anew for the last time, and the one before it, when
    the most waits: either may hold the most."""
    last = passes // RESIDUAL * RESIDUAL
    return [last - 1, last] if last else []
