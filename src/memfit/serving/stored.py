"""Linear layers as serving engines keep them: the tensors of one layer after loading, by
quantization method.

vLLM and SGLang share these layouts (SGLang took vLLM's layers over). Sources: vLLM 0.11.0
`model_executor/layers/quantization/` (fp8.py, gptq_marlin.py, awq_marlin.py, bitsandbytes.py,
modelopt.py, mxfp4.py, compressed_tensors/schemes/) and its `utils/marlin_utils*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from memfit.errors import Problem
from memfit.lazy_dataclass import dataclass
from memfit.model.quantized import MLX, Skip, mlx_only

HALF = 2  # bytes of bfloat16 and float16
FLOAT = 4
MARLIN_WORKSPACE = FLOAT  # bytes per multiprocessor (marlin_utils.py marlin_make_workspace_new)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How weights are stored. `kind` is a row of `KINDS`; `group` 0 means one scale per output;
    `skip` holds names or patterns of modules that stay in 16 bits, `only_experts` that all but the
    experts do."""

    name: str = ""
    kind: str = "plain"
    bits: int = 16
    group: int = 0
    zeros: bool = False
    order: bool = False
    skip: tuple[str, ...] = ()
    only_experts: bool = False
    head: bool = False  # the output head is quantized, too
    nested: bool = False  # bitsandbytes' scales are quantized once more
    tiles: str = ""  # whose kernels lay out MXFP4 experts; empty: by the GPU alone
    named: tuple[tuple[str, Scheme], ...] = ()  # by name within a layer; all others stay in 16 bits
    rest: bool = False  # others are stored as this one says

    def of(self, name: str) -> Scheme:
        """The scheme of one matrix, by its name within a layer."""
        if not self.named:
            return self
        return next(
            (one for known, one in self.named if known == name), self if self.rest else PLAIN
        )

    def keeps(self, name: str) -> bool:
        """Whether the module `name` stays in 16 bits."""
        return self.kind == "plain" or name in self.left_out

    @cached_property
    def left_out(self) -> Skip:
        return Skip(self.skip)


PLAIN = Scheme()


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A linear layer on one rank, of `experts` equal ones if it is a stack. `parts` are the
    outputs of the layers that were merged into one."""

    name: str
    inputs: int
    parts: tuple[int, ...]
    bias: bool = False
    experts: int = 0

    @property
    def outputs(self) -> int:
        return sum(self.parts)

    @property
    def count(self) -> int:
        return self.inputs * self.outputs * max(1, self.experts)


def ceil(value: int, by: int) -> int:
    return -(-value // by)


def plain(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    yield matrix.count * HALF


def fp8(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """A byte a value. Scales: one, one per output, or one per block of `group`²."""
    stack = max(1, matrix.experts)
    yield matrix.count
    if scheme.group:
        yield (
            stack * ceil(matrix.outputs, scheme.group) * ceil(matrix.inputs, scheme.group) * FLOAT
        )
    elif scheme.bits == 8 and scheme.order:
        # per output; without fp8 arithmetic (below 8.9) Marlin keeps them in 16 bits
        yield stack * matrix.outputs * (HALF if marlin_fp8(sm) else FLOAT)
    else:
        yield FLOAT * stack


def marlin_fp8(sm: tuple[int, int] | None) -> bool:
    """GPUs that multiply fp8 weights through Marlin, in 16 bits."""
    return sm is not None and sm < (8, 9)


def int8(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    yield matrix.count
    yield max(1, matrix.experts) * matrix.outputs * FLOAT


def int48(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    yield matrix.count // (2 if matrix.experts else 1)
    yield max(1, matrix.experts) * matrix.outputs * FLOAT


class Relaid(int):
    """Bytes of a matrix that is laid out anew once it is loaded."""


class RelaidStack(Relaid):
    """Bytes of a stack of experts' matrices that is laid out anew."""


class RelaidHalves(RelaidStack):
    """The same in 4 bits."""


def modelslim(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """Ascend's int8: a scale and an offset per output, in fp32 for experts. A matrix has beside
    them what a stated scale of its input takes (SGLang 0.5.7 hardware_backend/npu/quantization/
    linear_method_npu.py NPUW8A8Int8LinearMethod, fused_moe_method_npu.py)."""
    if matrix.experts:
        yield RelaidStack(matrix.count)
        yield from (matrix.experts * matrix.outputs * FLOAT,) * 2
    else:
        yield Relaid(matrix.count)
        yield from (matrix.outputs * HALF,) * 2
        yield from (matrix.outputs * FLOAT,) * 2
        yield from (matrix.inputs * HALF,) * 3


def modelslim4(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """Ascend's w4a8: experts in 4 bits with a scale of 8 bytes, an offset and a bias per output;
    everything else in 8 bits (NPUW4A8Int4DynamicMoEMethod)."""
    if not matrix.experts:
        yield from modelslim(matrix, scheme, sm)
        return
    yield RelaidHalves(matrix.count // 2)
    yield matrix.experts * matrix.outputs * 2 * FLOAT
    yield from (matrix.experts * matrix.outputs * FLOAT,) * 2


def packed(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """GPTQ, AWQ and compressed-tensors' packed integers, after Marlin's repacking."""
    stack = max(1, matrix.experts)
    group = scheme.group if scheme.group > 0 else matrix.inputs
    groups = ceil(matrix.inputs, group)
    yield matrix.count * scheme.bits // 8
    yield stack * groups * matrix.outputs * HALF
    if scheme.zeros:
        yield stack * groups * matrix.outputs * scheme.bits // 8
    if scheme.order:
        yield from (stack * matrix.inputs * FLOAT,) * 2  # g_idx and its sorted order


def nf4(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """bitsandbytes: halves of bytes, and a scale in fp32 for each block of 64; nested scales
    are a byte each, with a scale in fp32 for 256 of them and a table of 256."""
    yield matrix.count // 2
    for part in matrix.parts:
        scales = max(1, matrix.experts) * matrix.inputs * part // 64
        if scheme.nested:
            yield scales
            yield ceil(scales, 256) * FLOAT
            yield 256 * FLOAT
        else:
            yield scales * FLOAT


MARLIN, TRITON, FLASHINFER = "marlin", "triton", "flashinfer"
SCALE_ROWS = 256  # HopperMXScaleLayout with 8 warps (triton_kernels hopper_scale.py)


def mxfp4(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """Experts in MXFP4. The kernels want widths of whole tiles: Marlin 256 and 128, FlashInfer 256
    of both, Triton 64 of the inner width (vLLM 0.12.0 mxfp4.py create_weights; Triton on 9.0 to
    10.x alone). vLLM's Triton path keeps the scales twice, as loaded and as laid out (0.11.0 to
    0.20.2: `w13_precision_config` beside `layer.w13_weight_scale`)."""
    up = len(matrix.parts) > 1
    outer, inner = (matrix.inputs, matrix.parts[0]) if up else (matrix.parts[0], matrix.inputs)
    small = sm is not None and (9, 0) <= sm < (11, 0)
    if scheme.tiles == FLASHINFER:
        outer, inner = padded(outer, 256), padded(inner, 256)
    elif scheme.tiles == TRITON or (small and not scheme.tiles):
        inner = padded(inner, 64)
    else:
        outer, inner = padded(outer, 256), padded(inner, 128)
    count = matrix.experts * outer * inner * len(matrix.parts)
    yield count // 2
    yield count // 32
    if scheme.tiles == TRITON:
        rows, wide = (inner * len(matrix.parts), outer) if up else (outer, inner)
        yield matrix.experts * padded(rows, SCALE_ROWS) * padded(wide // 32, 2)


def padded(value: int, multiple: int) -> int:
    return ceil(value, multiple) * multiple


def fp4(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """NVFP4 (blocks of 16 with an fp8 scale) and MXFP4 (blocks of 32 with an e8m0 scale)."""
    yield matrix.count // 2
    yield matrix.count // (scheme.group or 16)


MX = 32  # values of a scale


def mxfp8(matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None) -> Iterator[int]:
    """A byte a value and an e8m0 scale for 32 of a row (vLLM 0.27.1 modelopt.py
    ModelOptMxFp8LinearMethod; SGLang 0.5.18 fp8.py Fp8LinearMethod, use_mxfp8)."""
    yield matrix.count
    yield max(1, matrix.experts) * matrix.outputs * ceil(matrix.inputs, MX)


Store = Callable[[Matrix, Scheme, "tuple[int, int] | None"], Iterator[int]]
KINDS: dict[str, Store] = {
    "plain": plain,
    "fp8": fp8,
    "int8": int8,
    "packed": packed,
    "int48": int48,
    "modelslim": modelslim,
    "modelslim4": modelslim4,
    "nf4": nf4,
    "fp4": fp4,
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
}


def tensors(
    matrix: Matrix, scheme: Scheme, sm: tuple[int, int] | None, width: int = HALF
) -> Iterator[int]:
    """Bytes of every tensor of one linear layer, in the order of loading. `width` is the size of
    the model's own numbers."""
    for size in KINDS[scheme.kind](matrix, scheme, sm):
        yield size * width // HALF if scheme.kind == "plain" else size
    if matrix.bias:
        yield matrix.outputs * max(1, matrix.experts) * width


def read_scheme(config: Any, name: str = "") -> Scheme | None:
    """The scheme of a config.json's `quantization_config`; None for a method that memfit does not
    know, and for settings of another form."""
    settings = config.get("quantization_config") or {}
    if not settings:
        return PLAIN
    if not isinstance(settings, Mapping):
        return None
    method = str(settings.get("quant_method") or "").lower()
    reader = READERS.get(method) or (READERS["modelopt"] if "producer" in settings else None)
    try:
        found = None if reader is None else reader(settings)
        skip = () if found is None else found.skip + skipped(settings)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    if found is None:
        return None
    found = replace(found, name=method, skip=skip)
    return fp4_experts(found, settings) if config.get("expert_dtype") == "fp4" else found


def fp4_experts(scheme: Scheme, settings: Mapping[str, Any]) -> Scheme:
    """DeepSeek-V4: experts in MXFP4 or NVFP4 beside fp8, whatever `ignore` lists (vLLM 0.25.0
    models/deepseek_v4/quant_config.py)."""
    group = 16 if str(settings.get("moe_quant_algo")).upper() == "NVFP4" else 32
    experts = Scheme(kind="fp4", bits=4, group=group)
    named = (("ffn.up", experts), ("ffn.down", experts), ("lm_head", PLAIN))
    return replace(scheme, named=named, rest=True, skip=())


# What engines can quantize 16-bit weights to while they load them.
ONLINE: Mapping[str, Scheme] = {
    "fp8": Scheme(name="fp8", kind="fp8", bits=8),
    # bitsandbytes_loader.py quantize_4bit(compress_statistics=True)
    "bitsandbytes": Scheme(name="bitsandbytes", kind="nf4", bits=4, group=64, nested=True),
}


def scheme_of(
    config: Mapping[str, Any],
    problems: list[Problem],
    *,
    method: object = None,
    online: Mapping[str, Scheme] = ONLINE,
) -> Scheme:
    """How the weights are stored once they are loaded; `method` quantizes plain ones meanwhile."""
    found = read_scheme(config)
    if found is None:
        settings = config["quantization_config"]
        method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
        if method == MLX:
            problems.append(mlx_only())
            return PLAIN
        problems.append(
            Problem(
                message=f"these settings of `{str(method)[:40]}` are not supported yet"
                if str(method).lower() in READERS
                else f"unknown quantization method `{str(method)[:40]}`",
                where="config.quantization_config",
            )
        )
        return PLAIN
    if not method or found.kind != "plain":
        return found
    if str(method) not in online:
        problems.append(
            Problem(
                message=f"the checkpoint is not quantized, so `{str(method)[:40]}` has nothing to "
                "read",
                where="quantization",
                hint=f"these quantize while loading: {', '.join(online)}",
            )
        )
        return found
    return online[str(method)]


def skipped(settings: Any) -> tuple[str, ...]:
    found: list[str] = []
    for key in (
        "modules_to_not_convert",
        "ignored_layers",
        "ignore",
        "exclude_modules",
        "llm_int8_skip_modules",
    ):
        names = settings.get(key)
        found += [str(name) for name in names] if isinstance(names, list) else []
    return tuple(found)


def read_fp8(settings: Any) -> Scheme:
    block = settings.get("weight_block_size")
    return Scheme(kind="fp8", bits=8, group=int(block[0]) if block else 0)


def read_packed(settings: Any) -> Scheme | None:
    bits, group = settings.get("bits"), settings.get("group_size")
    if bits not in (2, 3, 4, 8) or not isinstance(group, int):
        return None
    return Scheme(
        kind="packed",
        bits=bits,
        group=max(0, group),
        zeros=settings.get("quant_method") == "awq" and bool(settings.get("zero_point", True)),
        order=bool(settings.get("desc_act")),
        skip=("router", "mlp.gate", "shared_expert_gate"),
        head=bool(settings.get("lm_head")),
    )


def read_compressed(settings: Any) -> Scheme | None:
    """compressed-tensors: the first group of `config_groups` says how the weights are stored."""
    groups = settings.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) and groups else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    bits, kind = weights.get("num_bits"), weights.get("type")
    size = weights.get("group_size") or 0
    if kind == "float" and bits == 8:
        block = weights.get("block_structure")
        if weights.get("strategy") == "block":
            return Scheme(kind="fp8", bits=8, group=int(block[0]) if block else 128)
        return Scheme(kind="fp8", bits=8, order=weights.get("strategy") == "channel")
    if kind == "float" and bits == 4:
        return Scheme(kind="fp4", bits=4, group=size or 16)
    if kind == "int" and bits == 8 and not size:
        return Scheme(kind="int8", bits=8)
    if kind == "int" and bits in (4, 8):
        return Scheme(
            kind="packed",
            bits=bits,
            group=max(0, size),
            zeros=not weights.get("symmetric", True),
            order=weights.get("actorder") in ("group", True),
        )
    return None


def read_bnb(settings: Any) -> Scheme:
    four = settings.get("load_in_4bit", settings.get("_load_in_4bit"))
    nested = bool(settings.get("bnb_4bit_use_double_quant"))
    return (
        Scheme(kind="nf4", bits=4, group=64, nested=nested) if four else Scheme(kind="int8", bits=8)
    )


def read_modelopt(settings: Any) -> Scheme | None:
    inner = settings.get("quantization", settings)
    algorithm = str(inner.get("quant_algo", settings.get("quant_algo", ""))).upper()
    if algorithm == "MIXED_PRECISION":
        return read_mixed(inner.get("quantized_layers", settings.get("quantized_layers")))
    return modelopt_scheme(algorithm)


def modelopt_scheme(algorithm: str) -> Scheme | None:
    if algorithm == "FP8":
        return Scheme(kind="fp8", bits=8)
    if algorithm == "MXFP8":
        return Scheme(kind="mxfp8", bits=8, group=MX)
    return Scheme(kind="fp4", bits=4, group=16) if "NVFP4" in algorithm else None


# Layers that engines merge under a name of their own, by the name of a part.
MERGED = {"in_proj_qkv": "in_proj_qkvz"}


def read_mixed(layers: Any) -> Scheme | None:
    """ModelOpt's mix: an algorithm for each matrix. None where layers differ in one of theirs."""
    if not isinstance(layers, Mapping) or not layers:
        return None
    found: dict[str, Scheme] = {}
    for path, settings in layers.items():
        one = modelopt_scheme(str(settings.get("quant_algo", "")).upper())
        if one is None:
            return None
        for name in names_in_layer(str(path)):
            if found.setdefault(name, one) != one:
                return None
    kinds = [one.kind for one in found.values()]
    return Scheme(kind=max(set(kinds), key=kinds.count), bits=4, named=tuple(found.items()))


def without_head(scheme: Scheme) -> Scheme:
    """The same with an output head in 16 bits."""
    return replace(scheme, named=tuple(one for one in scheme.named if one[0] != "lm_head"))


def names_in_layer(path: str) -> tuple[str, ...]:
    """Names within a layer of what `model.layers.3.mlp.experts` stands for, or one expert."""
    name = path.split(".layers.", 1)[-1].partition(".")[2] if ".layers." in path else path
    stem, _, last = name.rpartition(".")
    block, one, _ = stem.partition(".experts.")
    if one:
        return (f"{block}.{'down' if last in ('down_proj', 'w2') else 'up'}",)
    if last == "experts":  # a stack of each projection
        return f"{stem}.up", f"{stem}.down"
    return (f"{stem}.{MERGED[last]}",) if last in MERGED else (name,)


def read_w4a8(settings: Any) -> Scheme:
    """Ascend's: experts in 4 bits with a scale per output, everything else in 8."""
    return Scheme(kind="int48", bits=4)


def read_mxfp4(settings: Any) -> Scheme:
    return Scheme(kind="mxfp4", bits=4, group=32, only_experts=True)


READERS: dict[str, Callable[[Any], Scheme | None]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": lambda settings: Scheme(kind="fp8", bits=8, order=True),
    "gptq": read_packed,
    "awq": read_packed,
    "auto-round": read_packed,
    "compressed-tensors": read_compressed,
    "bitsandbytes": read_bnb,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "mxfp4": read_mxfp4,
    "w4a8": read_w4a8,
}
