"""What publishers write, as options of a Job: numbers, formats, adapters, versions, names of models and GPUs. Raises `Unfit` rather than guess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError
from memfit.hardware import GPU, find_gpu, variants
from memfit.job import NEWEST
from memfit.truth.case import Unfit
from memfit.truth.rows import Row, count

Options = dict[str, Any]

_LIBRARIES = {"pytorch": "torch", "flash_attn": "flash-attn", "flash-attn": "flash-attn", "bnb": "bitsandbytes"} | {
    one: one for one in NEWEST
}
_VERSION = re.compile(r"\b(pytorch|[a-z][a-z_-]*)\s*(?:==|=|:)?\s*v?(\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)")
_LORA = re.compile(r"\b(q?lora)\b")
_RANK = re.compile(r"\b(?:r|rank)=(\d+)(?:\.0)?\b")
_SHORT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "mlp": "gate_proj,up_proj,down_proj"}


def versions(text: str) -> str:
    """`transformers 4.46.0; torch 2.3.1` as `versions` of a Job; libraries that do not matter are left out."""
    found: dict[str, str] = {}
    for name, version in _VERSION.findall(text.lower()):
        if name in _LIBRARIES:
            found.setdefault(_LIBRARIES[name], version)
    return ",".join(f"{name}={version}" for name, version in found.items())


def batch(row: Row) -> int:
    found = count(row.batch)
    if found is None:
        raise Unfit("the batch is not stated", row.batch)
    return found


def length(value: Any) -> int:
    """A number of tokens: a number, or a text that has exactly one approximation of it (`~20 tokens`, `longest 1034`)."""
    found = count(value)
    if found is None and isinstance(value, str) and len(value) < 200:
        said = re.findall(r"(?:~\s*|longest\s+)(\d{1,7})\b", value)
        found = int(said[0]) if len(said) == 1 else None
    if found is None:
        raise Unfit("the length of the longest sequence is not stated", value)
    return found


def lengths(row: Row) -> Options:
    """Tokens of the prompt and tokens generated."""
    if isinstance(row.seq, Mapping):
        new = count(row.seq.get("new_tokens"))
        if new is None:
            raise Unfit("the number of generated tokens is not stated", row.seq.get("new_tokens"))
        return {"seq": length(row.seq.get("input")), "new_tokens": new}
    return {"seq": length(row.seq), "new_tokens": 0}


def numbers(text: str) -> Options:
    """Precision and quantization by bitsandbytes, as the field `dtype` has them in its many spellings."""
    text = text.lower()
    for scheme in ("nvfp4", "mxfp4", "hqq", "aqlm", "int8dq", "int8wo", "int4wo", "uintx", "fp6", "marlin", "autoquant", "float8 dynamic"):
        if scheme in text:
            raise Unfit("the weights are quantized in a way without formula", scheme)
    method = stored(text)
    options = {} if method else quantized(text)
    half = "fp16" if re.search(r"\b(fp16|float16|16-true|f16)\b", text) and "bf16" not in text else "bf16"
    wide = re.search(r"\b(fp32|float32|32-true)\b", text) and "autocast" not in text and "bf16" not in text and "fp16" not in text
    mixed = "autocast" in text and "no autocast" not in text and "autocast_adapter" not in text
    if wide:
        options["precision"] = "fp32"
    elif mixed:
        options["precision"] = f"autocast-{half}" if re.search(r"fp32 weights|weights (fp32|float32)|-mixed", text) else f"{half}-autocast"
    elif method:
        options["precision"] = "bf16" if method["quant_method"] == "fp8" or "bf16" in text else "fp16"  # what such checkpoints compute in
    elif re.search(r"bf16|bfloat16|fp16|float16|16-true|\b[48][- ]?bits?\b|\bint[48]\b|nf4|fp4", text):
        options["precision"] = half
    else:
        raise Unfit("the dtype is not stated", text)
    return options


def stored(text: str) -> Options:
    """`quantization_config` of a checkpoint that is stored quantized, or nothing; groups of 128 where none are stated, as nearly all have."""
    text = text.lower()
    method = next((name for name in ("gptq", "awq", "fp8", "float8") if name in text), None)
    if method is None:
        return {}
    if method in ("fp8", "float8"):
        return {"quant_method": "fp8", "weight_block_size": [128, 128]}
    bits = re.search(r"\b(?:int|w)?([2348])(?:[- ]?bits?\b|\b)", text)
    group = re.search(r"\bg(?:=|roupsize )?(-1\b|-|\d+\b)|no group", text)
    size = 128 if group is None else -1 if group[0] == "no group" or group[1] in ("-", "-1") else int(group[1])
    return {"quant_method": method, "bits": int(bits[1]) if bits else 4, "group_size": size}


def quantized(text: str) -> Options:
    """bitsandbytes, by the words it is named with."""
    if re.search(r"nf4", text):
        return {"quant": "nf4", "double_quant": bool(re.search(r"-dq|double", text))}
    if re.search(r"fp4|bnb 4-?bit|4-bit base|int4 \(bnb\)", text):
        return {"quant": "fp4" if "fp4" in text else "nf4", "double_quant": bool(re.search(r"-dq|double", text))}
    if re.search(r"bnb.{0,3}int8|int8.{0,3}bnb|8-bit base|load_in_8bit", text):
        return {"quant": "int8"}
    if re.search(r"\b(int[248]|q[2-8]|[2348]-?bits?|[48]bits)\b", text):
        raise Unfit("the weights are quantized in a way without formula", text)
    return {}


def adapters(row: Row) -> Options:
    """`lora r=16 q,k,v,o`, `qlora r=32 targets=['query', 'value']`, `full`: the method with its rank and targets."""
    text = row.text("method")
    for other in (
        "dora",
        "galore",
        "lisa",
        "llamapro",
        "neft",
        "loha",
        "lokr",
        "vera",
        "oft",
        "prefix",
        "prompt",
        "p_tuning",
        "block coordinate",
    ):
        if re.search(rf"(?<![a-z]){other}", text) and f"use_{other}=false" not in text:
            raise Unfit("the method has no formula", other)
    if text.split()[:1] == ["full"]:
        return {"method": "full"}
    named = _LORA.search(text)
    if not named or text.split()[0] not in ("lora", "qlora"):
        raise Unfit("the method has no formula", text.split()[0] if text else "not stated")
    rank = _RANK.search(text)
    if rank is None:
        raise Unfit("the rank of the adapters is not stated", text)
    options: Options = {"method": named[1], "rank": int(rank[1]), "targets": targets(text[rank.end() :])}
    dropout = row.more("lora_dropout")
    try:
        options["dropout"] = float(dropout) if dropout is not None else 0.0
    except (TypeError, ValueError):
        raise Unfit("the dropout of the adapters is no number", dropout) from None
    return options


def targets(text: str) -> str:
    """Which modules get adapters: names in short, names in full, or all linear ones."""
    named = re.search(r"\btargets?=(\[[^\]]*\]|[^/]*)", text)
    text = (named[1] if named else text).strip("/ []()")
    if re.match(r"all\b", text, re.IGNORECASE):
        return "all-linear"
    if re.search(r"[.^$|\\]", text):
        raise Unfit("the targets of the adapters are a pattern", text)
    names = [piece.strip(" '\"[]") for piece in re.split(r"[,+]", text)]
    names = [name for name in names if name]
    if not names:
        raise Unfit("the targets of the adapters are not stated", text)
    return ",".join(_SHORT.get(name, name) for name in names)


def optimizer(text: str) -> str:
    """The optimizer and the way its step is run, where the text says."""
    text = text.lower()
    if "paged" in text:
        return "paged_adamw_8bit" if "8bit" in text or "8-bit" in text else "paged_adamw"
    if re.search(r"8-?bit", text) and "not 8-bit" not in text:
        return "adamw_8bit"
    if "adamw" in text or text.strip() == "adam":
        return "adamw_fused" if re.search(r"fused(?!=false)", text) else "adamw"
    if re.match(r"sgd\b", text):
        return "sgd"
    raise Unfit("the optimizer is not stated, or has no formula", text or "not stated")


def checkpointing(value: Any) -> str:
    if isinstance(value, bool):
        return "full" if value else "none"
    text = str(value).lower()
    if text.startswith("none ") or text == "none":
        return "none"
    if text.startswith("full"):
        return "full"
    raise Unfit("the gradient checkpointing is not stated, or has no formula", text)


def attention(text: str) -> str:
    """The kernel family: flash-attn's own, SDPA, or eager."""
    text = text.lower()
    if re.search(r"flash[_ -]?att(n|ention)[_ -]?3", text):
        return "flash-attn-3"
    if re.search(r"flash[_ -]?att(n|ention)[_ -]?2", text):
        return "flash-attn-2"
    if text.startswith("eager (") or text.strip() == "eager":
        return "eager"
    if "mem-efficient" in text:
        return "efficient"
    if "sdpa flash" in text:
        return "flash"
    if "eager" in text or "flex" in text or "fused" in text:
        raise Unfit("the attention kernel is not stated, or has no formula", text)
    return "sdpa"


_QUANT_SUFFIX = re.compile(r"[-_](gptq|awq)([-_](int[48]|int4|4bit|8bit))?$|[-_](int[48]|[48]bits?|bnb-4bit)$|[-_]fp8$", re.IGNORECASE)


# Repositories whose config is another's, but for what quantization adds: their cards say what they were made of.
SAME = {
    "TheBloke/Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "TheBloke/Llama-2-13B-chat": "meta-llama/Llama-2-13b-chat-hf",
    "unsloth/Mistral-7B-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",  # the same but for the weights' values
    "baichuan-inc/Baichuan2-7B-Chat": "baichuan-inc/Baichuan2-7B-Base",
    "baichuan-inc/Baichuan2-13B-Chat": "baichuan-inc/Baichuan2-13B-Base",
}


def model(row: Row) -> str:
    """A name of the catalog. A mirror under another owner is the same model; a quantized variant is its base's."""
    from memfit.model import catalog

    if not isinstance(row.model, str) or not 0 < len(row.model) < 200:
        raise Unfit("the model is not named", row.model)
    name = re.sub(r"\s*\(.*\)\s*$", "", row.model).strip()
    base = _QUANT_SUFFIX.sub("", name)
    for candidate in (name, SAME.get(base, base), base.rpartition("/")[2]):
        found = catalog.find(candidate) if candidate else None
        if found is not None:
            return found
    raise Unfit("no config of the model", name)


def gpu(text: Any) -> tuple[GPU | None, str]:
    """The GPU and, where several answer to the name, which was taken: the one with the least memory."""
    if not isinstance(text, str):
        return None, ""
    name = re.sub(r"\s*\(.*\)\s*$", "", text)[:100].strip()
    for candidate in (name, re.sub(r"\s+\d+\s*G[Bi]+$", "", name)):
        try:
            return find_gpu(candidate), ""
        except InputError:
            several = variants(candidate)
        if several:
            least = min(several, key=lambda one: one.memory)
            return least, f"taken for {least.name}"
    return None, ""
