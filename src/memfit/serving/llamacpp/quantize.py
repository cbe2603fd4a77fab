"""Which type `llama-quantize` gives each tensor, for a quantization by name.

Rules: `llama_tensor_get_type_impl`, `tensor_allows_quantization` and `tensor_type_fallback` of
src/llama-quant.cpp (llama.cpp, summer of 2026; the K-quant mixtures are unchanged since 2024).
Files made with an importance matrix differ in a few rows (Q4_0, IQ3_XXS, IQ4_XS), and publishers
such as Unsloth (`UD-…`) have mixtures of their own: name the file for those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.ggml import GGML_TYPES, GgmlType
from memfit.registry import nearest
from memfit.serving.llamacpp.model import GgufModel, GgufTensor

TYPES: Mapping[str, GgmlType] = {
    **{row.name: row for row in GGML_TYPES.values()},
    "F32": GGML_TYPES[0],
    "F16": GGML_TYPES[1],
    "BF16": GGML_TYPES[30],
}
# Name of a file type: the type that most of its tensors get (tools/quantize/quantize.cpp).
_BASES = """
F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q2_K_S=Q2_K Q3_K_S=Q3_K Q3_K_M=Q3_K Q3_K_L=Q3_K
Q4_K_S=Q4_K Q4_K_M=Q4_K Q5_K_S=Q5_K Q5_K_M=Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S=IQ2_XS
IQ2_M=IQ2_S IQ3_XXS IQ3_XS=IQ3_S IQ3_S IQ3_M=IQ3_S IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4_MOE=MXFP4
"""
BASES: Mapping[str, str] = {
    name: base or name for name, _, base in (one.partition("=") for one in _BASES.split())
}
ALIASES = {
    "Q3_K": "Q3_K_M",
    "Q4_K": "Q4_K_M",
    "Q5_K": "Q5_K_M",
    "FP16": "F16",
    "MXFP4": "MXFP4_MOE",
}
KEPT_PARTS = (
    "_norm.weight",
    "ffn_gate_inp.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "ffn_gate_tid2eid.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
)
SMALLER = {"IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ2_S", "IQ2_M", "IQ1_M"}
_EIGHT = "Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS"
EIGHT_EXPERTS = frozenset(_EIGHT.split())  # with eight experts, `attn_output` gets Q5_K
FALLBACKS = {
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "IQ4_XS": "IQ4_NL",
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "IQ4_NL"),
}


def usual(config: Mapping[str, Any]) -> str:
    """What `-hf` looks for where no quantization is named (common/arg.cpp), or the one that a model
    is published in."""
    stored = config.get("quantization_config")
    own = isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"
    return "MXFP4_MOE" if own else "Q4_K_M"


def file_type(name: str) -> str:
    """The canonical name of a quantization, or an error with the nearest."""
    key = name.strip().upper().replace("-", "_")
    key = ALIASES.get(key, key)
    if key in BASES:
        return key
    own = f"{key.removeprefix('UD_').removesuffix('_XL')}_M"
    own = own.replace("Q6_K_M", "Q6_K").replace("Q8_M", "Q8_0")
    if key.endswith("_XL"):
        raise InputError.one(
            f"`{name[:40]}` is its publisher's own mix of types, which only the file says",
            where="quant",
            hint="give the file, whose header is enough"
            + (f", or llama.cpp's `{own}`, the nearest" if own in BASES else ""),
        )
    close = nearest(key, BASES, 1)
    raise InputError.one(
        f"unknown GGUF quantization `{name[:40]}`",
        where="quant",
        hint=(f"did you mean `{close[0]}`? " if close else "") + f"one of {', '.join(BASES)}",
    )


def mixture(name: str) -> tuple[str, Mapping[str, str]]:
    """A quantization, and the types of matrices that have another one: `Q4_K_M attn_v=F16`, as
    `llama-quantize --tensor-type` takes them."""
    first, *others = name.split() or [""]
    pairs = [one.partition("=") for one in others]
    if not all(matrix and kind in TYPES for matrix, _, kind in pairs):
        raise InputError.one(
            f"unknown GGUF quantization `{name[:40]}`",
            where="quant",
            hint="a quantization, then matrices of another type: `Q4_K_M attn_v=F16`",
        )
    return file_type(first), {matrix: kind for matrix, _, kind in pairs}


def category(name: str) -> str:
    """What kind of tensor a name stands for (`tensor_get_category`)."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embedding"
    for part, found in (
        ("attn_qkv.weight", "qkv"),
        ("attn_kv_b.weight", "kv_b"),
        ("attn_v.weight", "v"),
        ("attn_k.weight", "k"),
        ("attn_q.weight", "q"),
        ("attn_output.weight", "out"),
        ("ffn_up", "up"),
        ("ffn_gate", "gate"),
        ("ffn_down", "down"),
    ):
        if part in name:
            return found
    return "other"


def quantizable(tensor: GgufTensor) -> bool:
    """Whether a tensor may be quantized at all: matrices, but no norms, routers or small ones."""
    sizes = [size for size in tensor.sizes if size > 1]
    dims = len(tensor.sizes)
    while dims > 1 and tensor.sizes[dims - 1] == 1:
        dims -= 1
    if dims < 2 or not sizes or not tensor.name.endswith("weight"):
        return False
    if tensor.name in ("position_embd.weight", "token_types.weight"):
        return False
    return not any(part in tensor.name for part in KEPT_PARTS)


def more_bits(index: int, count: int) -> bool:
    """The first and last eighth of the layers, and every third between them."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


@dataclass
class _Counts:
    """How many tensors of a kind there are, and how many have been seen."""

    total: int = 0
    seen: int = 0


class Quantizer:
    """Types for the tensors of one model in the order of `llama-quantize`: by layer, then name."""

    def __init__(self, model: GgufModel, name: str) -> None:
        self.model = model
        self.ftype, self.kept = mixture(name)
        self.base = BASES[self.ftype]
        self.experts = model.number("expert_count")
        kv_heads = max(1, max((model.kv_heads(one) for one in range(model.layers)), default=1))
        self.group = max(1, model.heads(0)) // kv_heads
        self.tied = "output.weight" not in model.by_name
        self.counts = {key: _Counts() for key in ("v", "down", "gate", "up")}
        self.counts["v"].total = sum(
            self._counted(category(tensor.name)) == "v" for tensor in model.tensors
        )
        for key in ("down", "gate", "up"):  # the number of layers, whatever they hold
            self.counts[key].total = model.layers
        # LLM_TYPE_70B: 80 layers of Llama (llama-model.cpp load_hparams)
        self.seventy = model.arch == "llama" and model.layers == 80

    @staticmethod
    def _counted(kind: str) -> str:
        return (
            "v" if kind in ("v", "qkv", "kv_b") else kind if kind in ("down", "gate", "up") else ""
        )

    def type_of(self, tensor: GgufTensor) -> GgmlType:
        if tensor.type.name in ("MXFP4", "NVFP4"):
            return tensor.type  # stored so by the publisher, and left so
        if self.base in ("F32", "F16", "BF16"):
            small = len(tensor.sizes) < 2 or tensor.type.name == "float32"
            return TYPES["F32"] if small or not quantizable(tensor) else TYPES[self.base]
        if not quantizable(tensor):
            return tensor.type
        kind = category(tensor.name)
        found = self.kept.get(tensor.name.split(".")[-2]) or self._rule(kind)(kind, tensor)
        key = self._counted(kind)
        if key:
            self.counts[key].seen += 1
        return self._fitting(found, tensor)

    def _fitting(self, name: str, tensor: GgufTensor) -> GgmlType:
        row = TYPES[name]
        if tensor.sizes[0] % row.block:
            row = TYPES[FALLBACKS.get(name, "F16")]
            if tensor.sizes[0] % row.block:
                row = TYPES["F16"]
        return row

    def _rule(self, kind: str) -> Callable[[str, GgufTensor], str]:
        if kind == "output" or (kind == "embedding" and self.tied):
            return self._output
        if self.ftype == "MXFP4_MOE":
            return lambda _, tensor: "MXFP4" if len(tensor.sizes) > 2 else "Q8_0"
        if kind == "embedding":
            return self._embedding
        if self.ftype in SMALLER:
            return self._smallest
        rules = {"v": self._value, "qkv": self._value, "kv_b": self._value, "k": self._key}
        return {**rules, "q": self._key, "down": self._down, "out": self._out}.get(kind, self._rest)

    def _layer(self, key: str, tensor: GgufTensor) -> tuple[int, int]:
        counts = self.counts[key]
        index = tensor.layer if self.experts > 1 else counts.seen
        return index, counts.total

    def _output(self, _: str, tensor: GgufTensor) -> str:
        if self.ftype == "MXFP4_MOE" or self.model.arch == "falcon":
            return "Q8_0"
        if tensor.sizes[0] % TYPES[self.base].block:
            return "Q8_0"
        if self.ftype in SMALLER or self.ftype == "IQ3_XXS":
            return "Q5_K"
        return self.base if self.base == "Q8_0" else "Q6_K"

    def _embedding(self, _: str, __: GgufTensor) -> str:
        if self.ftype in ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"):
            return "Q2_K"
        if self.ftype in ("IQ2_S", "IQ2_M", "IQ3_XXS"):
            return "IQ3_S"
        return "Q4_K" if self.ftype in ("TQ1_0", "TQ2_0") else self.base

    def _smallest(self, kind: str, tensor: GgufTensor) -> str:
        second = self.ftype in ("IQ2_S", "IQ2_M")
        if self._counted(kind) == "v":
            return "Q4_K" if self.group >= 4 or self.experts >= 4 else "IQ3_S" if second else "Q2_K"
        if kind == "k" and self.experts == 8:
            return "Q4_K"
        if kind == "down":
            first = self.counts["down"].seen < self.counts["down"].total // 8
            return ("IQ3_S" if second else "Q2_K") if first else self.base
        if kind == "out":
            if self.experts == 8:
                return "Q5_K"
            if self.ftype in ("IQ1_S", "IQ1_M"):
                return "IQ2_XXS"
            return "IQ3_S" if second else self.base
        return self.base

    def _value(self, kind: str, _: GgufTensor) -> str:
        counts, ftype, many = self.counts["v"], self.ftype, self.group >= 4
        found = self.base
        if ftype == "Q2_K":
            found = "Q4_K" if many else "Q3_K"
        elif (ftype == "Q2_K_S" and many) or ftype == "IQ3_M":
            found = "Q4_K"
        elif ftype == "IQ3_XXS":
            found = "Q4_K" if many else "IQ3_S"
        elif ftype in ("IQ3_XS", "IQ3_S") and many:
            found = "Q4_K"
        elif ftype == "Q3_K_M":
            found = "Q5_K" if counts.seen < 2 else "Q4_K"
        elif ftype == "Q3_K_L" or (ftype in ("IQ4_NL", "IQ4_XS") and many):
            found = "Q5_K"
        elif ftype in ("Q4_K_M", "Q5_K_M") and more_bits(counts.seen, counts.total):
            found = "Q6_K"
        elif ftype == "Q4_K_S" and counts.seen < 4:
            found = "Q5_K"
        if self.seventy and found in ("Q3_K", "Q4_K"):
            found = "Q5_K"
        return "Q8_0" if self.experts == 8 else found

    def _key(self, kind: str, _: GgufTensor) -> str:
        if kind == "k" and self.experts == 8:
            return "Q8_0"
        return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(self.ftype, self.base)

    def _down(self, _: str, tensor: GgufTensor) -> str:
        index, count = self._layer("down", tensor)
        ftype, falcon = self.ftype, self.model.arch == "falcon"
        eighth, better = index < count // 8, more_bits(index, count)
        if ftype == "Q2_K":
            return "Q3_K"
        if ftype == "IQ3_XXS":
            return "Q4_K" if eighth else "Q3_K"
        if ftype == "Q3_K_M":
            if index < count // 16:
                return "Q5_K"
            return "Q4_K" if not falcon or better else "Q3_K"
        if ftype == "Q3_K_L":
            return "Q4_K" if falcon else "Q5_K"
        if ftype == "Q4_K_M" and falcon:
            return "Q6_K" if index < count // 16 else "Q5_K" if better else "Q4_K"
        if ftype in ("Q4_K_M", "Q5_K_M") and better:
            return "Q6_K"
        if ftype == "IQ3_M" and (eighth or (self.experts == 8 and better)):
            return "Q4_K"
        if eighth and ftype == "Q2_K_S":
            return "Q4_K"
        if eighth and (ftype in ("IQ4_NL", "IQ4_XS") or (ftype == "Q4_K_S" and not falcon)):
            return "Q5_K"
        return self.base

    def _out(self, _: str, __: GgufTensor) -> str:
        ftype = self.ftype
        if self.model.arch == "falcon":
            return "Q4_K" if ftype == "Q3_K_L" else self.base
        if self.experts == 8:
            five = [
                "Q2_K",
                "IQ3_XS",
                "IQ3_XXS",
                "Q3_K_S",
                "Q3_K_M",
                "IQ4_NL",
                "Q4_K_S",
                "Q4_K_M",
                "IQ3_S",
                "IQ3_M",
                "IQ4_XS",
            ]
            return "Q5_K" if ftype in five else self.base
        table = {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
        return {**table, "IQ3_M": "Q4_K"}.get(ftype, self.base)

    def _rest(self, kind: str, tensor: GgufTensor) -> str:
        if kind in ("gate", "up") and self.ftype == "IQ3_XS":
            index, count = self._layer(kind, tensor)
            if count // 8 <= index < 7 * count // 8:
                return "IQ3_XXS"
        return self.base


def order(name: str) -> tuple[int, str]:
    """The order in which `llama-quantize` goes through a file (`weight_name_comparer`)."""
    if name.startswith("blk."):
        return int(name.split(".", 2)[1]), name
    return -1, name


def quantized(model: GgufModel, name: str) -> GgufModel:
    """The model with the types that `llama-quantize` would give its tensors."""
    quantizer = Quantizer(model, name)
    made = {
        tensor.name: replace(tensor, type=quantizer.type_of(tensor))
        for tensor in sorted(model.tensors, key=lambda one: order(one.name))
    }
    return replace(model, tensors=tuple(made[tensor.name] for tensor in model.tensors))
