"""What publishers write, as options of a Job: numbers, formats, adapters, versions, names of models
and GPUs. Raises `Unfit` rather than guess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError
from memfit.hardware import GPU, find_gpu, variants
from memfit.job_checks import NEWEST
from memfit.optimizers import OPTIMIZERS
from memfit.truth.case import Unfit
from memfit.truth.rows import Row, count

Options = dict[str, Any]

_LIBRARIES = {
    "hf": "transformers",
    "pytorch": "torch",
    "flash_attn": "flash-attn",
    "flash-attn": "flash-attn",
    "bnb": "bitsandbytes",
} | {one: one for one in NEWEST}
_VERSION = re.compile(
    r"\b(pytorch|[a-z][a-z_-]*)\s*(?:==|=|:)?\s*v?(\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)"
)
_LORA = re.compile(r"\b(q?lora)\b")
_RANK = re.compile(r"\b(?:r|rank)(?:\s*[=:]\s*|\s+)(\d+)(?:\.0)?\b")
_SHORT = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "mlp": "gate_proj,up_proj,down_proj",
}


def versions(text: str) -> str:
    """`transformers 4.46.0; torch 2.3.1` as `versions` of a Job; libraries that do not matter are
    left out."""
    found: dict[str, str] = {}
    for name, version in _VERSION.findall(text.lower()):
        if name in _LIBRARIES:
            found.setdefault(_LIBRARIES[name], version)
    return ",".join(f"{name}={version}" for name, version in found.items())


_EACH = re.compile(
    r"(\d{1,6})\s*(?:(?:per|/|a)\s*(?:device|gpu)|(?:x|×|\*)"
    r"\s*\d+\s*(?:grad\w*\s*)?acc\w*)\b.{0,40}"
)


def batch(row: Row) -> int:
    """A number, or a text that begins with one and says that it is each GPU's (`2 per device`, `2 x
    4 accumulation`)."""
    found = count(row.batch)
    if found is None and isinstance(row.batch, str):
        said = _EACH.fullmatch(row.batch[:99].strip().lower())
        found = count(said[1]) if said else None
    if found is None:
        raise Unfit("the batch is not stated", row.batch)
    return found


PROMPTS = ("input", "prompt", "input_tokens", "prompt_tokens", "input_len", "context")
_VAGUE = re.compile(
    r"\b(?:mean|avg|average|median|max|maximum|up "
    r"to|cap|cutoff|cutoff_len|variable|varies|var|not|un\w+|no|short|min|longest|to)\b"
    r"|[<>≤≥–]|\d\s*-\s*\d"
)
_EXACT = re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+|\d{1,7}|\d{1,4}(?=k))(k?)(?![\d.])")
_TOKENS = re.compile(r"token|pack|context|seq|^\W*[\d,]+\s*k?\W*$")


def length(value: Any) -> int:
    """A number of tokens: a number, or a text that has exactly one and does not say that it is a
    mean or a limit (`~20 tokens`, `longest 1034`, `2,048 (packed)`)."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in PROMPTS if value.get(name) is not None), None)
    found = count(value)
    if found is None and isinstance(value, str) and len(value) < 200:
        said, plain, text = (
            re.findall(r"(?:~\s*|longest\s+)(\d{1,7})\b", value),
            _EXACT.findall(value.lower()),
            value.lower(),
        )
        found = int(said[0]) or None if len(said) == 1 else None
        if found is None and len(plain) == 1 and _TOKENS.search(text) and not _VAGUE.search(text):
            found = int(plain[0][0].replace(",", "")) * (1024 if plain[0][1] else 1) or None
    if found is None:
        raise Unfit("the length of the longest sequence is not stated", value)
    return found


ANSWERS = (
    "new_tokens",
    "output",
    "max_new_tokens",
    "output_tokens",
    "generated",
    "output_len",
    "new",
)
_BOTH = re.compile(r"\D{0,20}(\d{1,7})\D{0,12}?[+,/;]\s*(\d{1,7})\s*(?:new|gen|out)")


def lengths(row: Row) -> Options:
    """Tokens of the prompt and tokens generated."""
    if isinstance(row.seq, Mapping):
        said = next((row.seq[name] for name in ANSWERS if row.seq.get(name) is not None), None)
        new = 0 if said == 0 and not isinstance(said, bool) else count(said)
        if new is None:
            raise Unfit("the number of generated tokens is not stated", said)
        return {"seq": length(row.seq), "new_tokens": new}
    both = _BOTH.match(row.seq.lower()) if isinstance(row.seq, str) and len(row.seq) < 200 else None
    if both:
        return {"seq": length(both[1]), "new_tokens": int(both[2])}
    return {"seq": length(row.seq), "new_tokens": 0}


CACHE_SIZES = ("cache_size", "max_cache_len", "cache_length", "max_cache_length", "cache_tokens")
SEQUENCE_SIZES = ("max_seq_length", "max_seq_len", "max_sequence_length")


def static_cache(row: Row) -> Options:
    """A KV cache that is made whole from the start, and its size where one is stated. The longest
    sequence of a model is a cache's size only where the row says that the cache is static."""
    text = row.text("extra", "engine", "notes")
    static = bool(
        re.search(r"\bstatic\W{0,3}(?:kv\W{0,3})?cache|cache\w*\W{1,4}static|gpt-fast", text)
    )
    names = (*CACHE_SIZES, *(SEQUENCE_SIZES if static else ()))
    size = next((found for name in names if (found := count(row.more(name)))), 0)
    if not static and not size:
        return {}
    return {"cache": "static", **({"cache_tokens": size} if size else {})}


def numbers(text: str) -> Options:
    """Precision and quantization by bitsandbytes, as the field `dtype` has them in its many
    spellings."""
    text = text.lower()
    for scheme in (
        "nvfp4",
        "mxfp4",
        "hqq",
        "aqlm",
        "int8dq",
        "int8wo",
        "int4wo",
        "uintx",
        "fp6",
        "marlin",
        "autoquant",
        "float8 dynamic",
    ):
        if scheme in text:
            raise Unfit("the weights are quantized in a way without formula", scheme)
    method = stored(text)
    options = {} if method else quantized(text)
    half = (
        "fp16"
        if re.search(r"\b(fp16|float16|16-true|f16|half)\b", text) and "bf16" not in text
        else "bf16"
    )
    named = bool(
        re.search(r"\b(mixed|amp)\b", text)
    )  # what Trainers, Lightning and torch call autocast over weights of 32 bits
    mixed = named or (
        "autocast" in text and "no autocast" not in text and "autocast_adapter" not in text
    )
    wide = (
        re.search(r"\b(fp32|float32|32-true|tf32)\b", text)
        and not mixed
        and "bf16" not in text
        and "fp16" not in text
    )
    if wide:
        options["precision"] = "fp32"
    elif mixed:
        over = named and not options and not re.search(rf"{half} weights|weights {half}", text)
        options["precision"] = (
            f"autocast-{half}"
            if over or re.search(r"fp32 weights|weights (fp32|float32)", text)
            else f"{half}-autocast"
        )
    elif method:
        options["precision"] = (
            "bf16" if method["quant_method"] == "fp8" or "bf16" in text else "fp16"
        )  # what such checkpoints compute in
    elif re.search(
        (
            r"bf16|bfloat16|fp16|float16|16-true|\bhalf\b|\b[48][- "
            r"]?bits?\b|load_in_[48]bit|\bint[48]\b|nf4|fp4"
        ),
        text,
    ):
        options["precision"] = half
    else:
        raise Unfit("the dtype is not stated", text)
    return options


# Checkpoints without groups, by their cards (`main` of 2023: bits 4, group size None, act order,
# 35.33 and 23.81 GB).
UNGROUPED = (
    "thebloke/llama-2-70b-gptq",
    "thebloke/llama-2-70b-chat-gptq",
    "thebloke/mixtral-8x7b-instruct-v0.1-gptq",
    "thebloke/mixtral-8x7b-v0.1-gptq",
)


# `quantization_config` of the kernels that a row names (transformers 4.46
# utils/quantization_config.py GPTQConfig).
GPTQ_KERNELS: dict[str, Options] = {
    "exllamav2": {"exllama_config": {"version": 2}},
    "exllama": {"exllama_config": {"version": 1}},
    "autogptq-cuda-old": {"use_exllama": False},
}


def stored(text: str, name: str = "", kernel: str = "") -> Options:
    """`quantization_config` of the checkpoint `name` that is stored quantized, or nothing; groups
    of 128 where none are stated, as nearly all have."""
    text = text.lower()
    method = next((name for name in ("gptq", "awq", "fp8", "float8") if name in text), None)
    if method is None:
        return {}
    if method in ("fp8", "float8"):
        return {"quant_method": "fp8", "weight_block_size": [128, 128]}
    bits = re.search(r"\b(?:int|w)?([2348])(?:[- ]?bits?\b|\b)", text)
    group = re.search(r"\bg(?:=|roupsize )?(-1\b|-|\d+\b)|no group", text)
    usual = -1 if name.lower() in UNGROUPED else 128
    size = (
        usual
        if group is None
        else -1
        if group[0] == "no group" or group[1] in ("-", "-1")
        else int(group[1])
    )
    kernels = GPTQ_KERNELS.get(kernel.lower(), {}) if method == "gptq" else {}
    found = {"quant_method": method, "bits": int(bits[1]) if bits else 4, "group_size": size}
    return found | kernels


def quantized(text: str) -> Options:
    """bitsandbytes, by the words it is named with."""
    if re.search(r"nf4", text):
        return {"quant": "nf4", "double_quant": bool(re.search(r"-dq|double", text))}
    if re.search(r"fp4|bnb[ -]4-?bit|4-bit base|int4 \(bnb\)", text):
        return {
            "quant": "fp4" if "fp4" in text else "nf4",
            "double_quant": bool(re.search(r"-dq|double", text)),
        }
    if "load_in_4bit" in text:
        return {"quant": "fp4", "double_quant": False}  # BitsAndBytesConfig's default
    if re.search(r"\bqlora\b.*\b4-?\s?bits?\b|\b4-?\s?bits?\b.*\bqlora\b", text):
        return {
            "quant": "nf4",
            "double_quant": bool(re.search(r"-dq|double", text)),
        }  # by its definition (arXiv 2305.14314)
    if re.search(
        (
            r"bnb.{0,3}int8|int8.{0,3}bnb|8-bit "
            r"base|load_in_8bit|(bnb|bitsandbytes).{0,6}8-?\s?bits?|llm\.int8"
        ),
        text,
    ):
        return {"quant": "int8"}
    if re.search(r"\b(int[248]|q[2-8]|[2348]-?bits?|[48]bits)\b", text):
        raise Unfit("the weights are quantized in a way without formula", text)
    return {}


def adapters(row: Row) -> Options:
    """`lora r=16 q,k,v,o`, `qlora r=32 targets=['query', 'value']`, `full`: the method with its
    rank and targets."""
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
    if re.match(r"full\b|fft\b", text):
        return {"method": "full"}
    text = re.sub(r"\brs-?lora\b", "lora", text)  # a scaling of its own, and nothing else
    named = _LORA.search(text)
    if not named or text.split()[0].strip(",:;(") not in ("lora", "qlora"):
        raise Unfit("the method has no formula", text.split()[0] if text else "not stated")
    rank = _RANK.search(text)
    if rank is None:
        raise Unfit("the rank of the adapters is not stated", text)
    options: Options = {
        "method": named[1],
        "rank": int(rank[1]),
        "targets": targets(text[rank.end() :]),
    }
    dropout = row.more("lora_dropout")
    try:
        options["dropout"] = float(dropout) if dropout is not None else 0.0
    except (TypeError, ValueError):
        raise Unfit("the dropout of the adapters is not a number", dropout) from None
    return options


def targets(text: str) -> str:
    """Which modules get adapters: names in short, names in full, or all linear ones."""
    named = re.search(r"\btargets?=(\[[^\]]*\]|[^/]*)", text)
    text = re.sub(
        r"^(?:\s|,|\))*(?:alpha\s*[=:]?\s*\d+\s*,?\s*)?(?:(?:on|for|targets?)\b:?\s*)?",
        "",
        named[1] if named else text,
    ).strip("/ []()")
    if re.match(r"all\b", text, re.IGNORECASE):
        return "all-linear"
    if re.search(r"[.^$|\\]", text):
        raise Unfit("the targets of the adapters are a pattern", text)
    names = [piece.strip(" '\"[]") for piece in re.split(r"[,+]", text)]
    names = [name for name in names if name]
    if not names:
        raise Unfit("the targets of the adapters are not stated", text)
    return ",".join(_SHORT.get(name, name) for name in names)


# The Trainer's names (transformers 5.23 training_args.py OptimizerNames) and others' for rows of
# `optimizers.py`.
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_apex_fused": "adamw_fused",
    "adamw_hf": "adamw",
    "adam": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
    "pagedadamw": "paged_adamw",
    "pagedadamw8bit": "paged_adamw_8bit",
    "lion8bit": "lion_8bit",
    "schedulefree_adamw": "schedule_free_adamw",
    "adamw_schedule_free": "schedule_free_adamw",
    "adafactor_hf": "adafactor",
    "sgd_with_momentum": "sgd_momentum",
    "lora+": "loraplus",
}
_OWN_STEP = re.compile(  # optimizers whose name holds a better-known one
    r"galore|apollo|schedule|lomo|mini|ademamix|stable|grok|anyprecision|soap|sophia|adan\b|came\b|lamb\b|muon|shampoo|badam|"
    r"lion|adafactor|adagrad|4-?bit"
)


def optimizer(text: str) -> str:
    """The optimizer and the way its step is run, where the text says."""
    text = text.lower()
    name = re.sub(r"[\s-]+", "_", re.sub(r"\(.*?\)|\{.*", "", text).strip())
    name = _OPTIMIZERS.get(name, name.replace("8_bit", "8bit"))
    if name in OPTIMIZERS and name != "adamw":
        return name
    if "paged" in text and not _OWN_STEP.search(text):
        return "paged_adamw_8bit" if "8bit" in text or "8-bit" in text else "paged_adamw"
    if re.search(r"8-?bit", text) and "not 8-bit" not in text and not _OWN_STEP.search(text):
        return "adamw_8bit"
    if ("adamw" in text or text.strip() == "adam") and not _OWN_STEP.search(text):
        return "adamw_fused" if re.search(r"fused(?!=false)", text) else "adamw"
    if re.match(r"sgd\b", text):
        return "sgd_momentum" if re.search(r"momentum(?!\W*0(\.0*)?(?![\d.]))", text) else "sgd"
    raise Unfit("the optimizer is not stated, or has no formula", text or "not stated")


ACCUMULATION = (
    "grad_accum",
    "gradient_accumulation_steps",
    "gradient_accumulation",
    "accumulation",
)
_ON, _OFF = ("true", "yes", "on", "enabled", "1"), ("none", "false", "no", "off", "disabled", "0")


def checkpointing(value: Any) -> str:
    """Whether layers are checkpointed; None, as the field is where nothing is said, is how
    frameworks begin: not."""
    if isinstance(value, bool):
        return "full" if value else "none"
    text = str(value).lower().strip()
    if text.startswith("none ") or text in _OFF:
        return "none"
    if (
        text.startswith("full")
        or text in _ON
        or re.fullmatch(r"(non-?|use_)?reentrant(=(true|false))?", text)
    ):
        return "full"
    raise Unfit("the gradient checkpointing is not stated, or has no formula", text)


def reentrant(text: str, default: bool) -> bool:
    """Whether checkpoints are, as the text says."""
    if re.search(r"non-?_?reentrant|use_reentrant\W{1,4}false", text):
        return False
    return True if "reentrant" in text else default


def attention(text: str) -> str:
    """The kernel family: flash-attn's own, SDPA, or eager."""
    text = text.lower()
    if "without" in text:
        return "sdpa"  # with and without flash-attn
    if re.search(r"flash[_ -]?att(n|ention)[_ -]?3|\bfa3\b", text):
        return "flash-attn-3"
    if text.startswith("eager (") or text.strip() == "eager":
        return "eager"
    if (
        re.search(
            (
                r"flash[_ -]?att(n|ention)[_ -]?2|\bfa-?2\b|^flash([_ "
                r"-]?att(n|ention))?$|flash[_ -]attn\b"
            ),
            text,
        )
        and "sdpa" not in text
    ):
        return "flash-attn-2"
    if "mem-efficient" in text or re.search(r"sdpa.*(memory|mem)[_ -]efficient", text):
        return "efficient"
    if re.search(r"sdpa.{0,3}flash", text):
        return "flash"
    if re.search(r"sdpa.{0,3}math|^math$", text):
        return "math"
    if re.search(r"eager|flex|fused|xformers|triton|paged|sage|ring|sparse", text):
        raise Unfit("the attention kernel is not stated, or has no formula", text)
    return "sdpa"


_QUANT_SUFFIX = re.compile(
    r"[-_](gptq|awq)([-_](int[48]|int4|4bit|8bit))?$|[-_](int[48]|[48]bits?|bnb-4bit)$|[-_]fp8$",
    re.IGNORECASE,
)


# Repositories whose config is another's, but for what quantization adds: their cards say what they
# were made of.
SAME = {
    "TheBloke/Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "TheBloke/Llama-2-13B-chat": "meta-llama/Llama-2-13b-chat-hf",
    # the same but for the weights' values
    "mistralai/Mistral-7B-v0.2 base": "mistralai/Mistral-7B-Instruct-v0.2",
    "unsloth/Mistral-7B-v0.2": "mistralai/Mistral-7B-Instruct-v0.2",
    "baichuan-inc/Baichuan2-7B-Chat": "baichuan-inc/Baichuan2-7B-Base",
    "baichuan-inc/Baichuan2-13B-Chat": "baichuan-inc/Baichuan2-13B-Base",
}


def _loosely(name: str) -> str:
    """`LLaMA-2 7B` is `Llama-2-7b-hf`: no owner, no separator between a word and its number, no
    mark of a converted checkpoint."""
    return re.sub(
        r"(?<=[a-z])-+(?=\d)",
        "",
        re.sub(r"[-_ ]+", "-", name.lower()).rpartition("/")[2].removesuffix("-hf"),
    )


def model(row: Row) -> str:
    """A name of the catalog. A mirror under another owner is the same model; a quantized variant is
    its base's."""
    from memfit.model import catalog

    if not isinstance(row.model, str) or not 0 < len(row.model) < 200:
        raise Unfit("the model is not named", row.model)
    name = re.sub(r"\s*\(.*\)\s*$", "", row.model).strip()
    base = _QUANT_SUFFIX.sub("", name)
    for candidate in (name, SAME.get(base, base), base.rpartition("/")[2]):
        found = catalog.find(candidate) if candidate else None
        if found is not None:
            return found
    loose = [one for one in catalog.names() if _loosely(one) == _loosely(base)]
    if len(loose) == 1:
        return loose[0]
    raise Unfit("no config of the model", name)


def gpu(text: Any) -> tuple[GPU | None, str]:
    """The GPU and, where several answer to the name, which was taken: the one with the least
    memory."""
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
