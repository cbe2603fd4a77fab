"""Names of models as other tools write them: Ollama's `llama3.1:8b`, GGUF repositories, a short
name without its ending."""

from __future__ import annotations

import re

from memfit.errors import Problem
from memfit.lazy_dataclass import dataclass
from memfit.model import catalog

# Endings that change no size: which of them a catalog has is an accident.
ENDINGS = (
    "-instruct",
    "-it",
    "-hf",
    "-chat",
    "-base",
    "-v0.1",
    "-v0.3",
    "-instruct-hf",
    "-chat-hf",
    "-pt",
    "-python",
    "-thinking",
    "-reasoning",
)
# A quantization at the end of a name: ggml's types, and Unsloth's mixes (`UD-Q4_K_XL`).
_QUANT = re.compile(
    r"[-:_.](?:ud-)?((?:i?q[1-8]_(?:[0-9k](?:_[a-z]{1,3})?|xxs|xs|s|m|nl)|mxfp4|bf16|f16|f32|fp16))$",
    re.IGNORECASE,
)
_GGUF = re.compile(r"[-_.]gguf$", re.IGNORECASE)
_PLAIN = ("bf16", "f16", "fp16")
# Ollama's names that are no shorter form of the model's own (ollama.com/library, each tag's page).
OLLAMA = {
    "deepseek-r1:8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
    "deepseek-r1:7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-r1:14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "deepseek-r1:32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-r1:70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "llama3:8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3:70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3.1:405b": "meta-llama/Meta-Llama-3.1-405B-Instruct",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral:8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral:8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
}
LATEST = {
    "llama3.1": "8b",
    "llama3.2": "3b",
    "llama3.3": "70b",
    "llama3": "8b",
    "qwen3": "8b",
    "qwen2.5": "7b",
    "gemma3": "4b",
    "gemma2": "9b",
    "mistral": "7b",
    "mixtral": "8x7b",
    "deepseek-r1": "8b",
    "gpt-oss": "20b",
    "phi4": "14b",
}


@dataclass(frozen=True, kw_only=True)
class Meant:
    """The catalog's model that a name means, and what the answer has to say about it."""

    name: str
    notes: tuple[Problem, ...] = ()
    quant: str = ""  # ggml's quantization at the end of the name


def meant(name: str) -> Meant | None:
    """The one model of the catalog that `name` means in another tool's words, or None."""
    quant = _QUANT.search(name)
    bare = _GGUF.sub("", name[: quant.start()] if quant else name)
    bare = _GGUF.sub("", bare) if bare != name else bare
    ollama = ":" in bare or bare.lower() in LATEST
    owned = "/" in name and bare == name  # somebody's own model: no other is meant
    key = exact(bare) or (None if owned else short(bare.rpartition("/")[2]) or of_words(bare))
    others = 0
    if key is None and "/" not in name:
        key, others = of_one_size(bare)
    if key is None:
        return None
    read = f"`{name[:80]}` is read as {key}"
    read += f", one of {others + 1} models of its size" if others else ""
    if quant and quant[1].lower() not in _PLAIN:
        packed = quant[1].upper()
        read_so = f"{read}, with its own weights, not {packed}"
        notes = (note(read_so, FILE.format("llama.cpp")),)
        return Meant(name=key, notes=notes, quant=packed)
    if ollama:
        stored = f"{read}, with its own weights; Ollama's file is quantized"
        return Meant(name=key, notes=(note(stored, FILE.format("ollama")),))
    plain = key.lower() in (bare.lower(), f"{key.rpartition('/')[0]}/{bare}".lower())
    stored = "" if quant is None else quant[1].upper()
    return Meant(name=key, notes=() if plain else (note(read),), quant=stored)


def is_quantized(name: str) -> bool:
    """Whether a name ends with one of ggml's quantizations (`Qwen3-8B-GGUF:Q4_K_M`)."""
    quant = _QUANT.search(name)
    return quant is not None and quant[1].lower() not in _PLAIN


def ollama_tag(name: str) -> bool:
    """Whether a name is written as in Ollama's library (`qwen3:8b`) and means a model that is
    known; without a tag it may be a family's name as well."""
    return ":" in name and not is_quantized(name) and meant(name) is not None


FILE = "add `--engine {}` to run that file, or `--quant nf4` or `int8`"


def note(message: str, hint: str = "") -> Problem:
    return Problem(message=message, where="model", hint=hint, level="note")


def exact(name: str) -> str | None:
    """A name of Ollama's library, or one that the catalog knows."""
    low = name.lower().removesuffix(":latest").removeprefix("library/")
    low = f"{low}:{LATEST[low]}" if low in LATEST else low
    listed = OLLAMA.get(low)
    if listed is not None and catalog.find(listed):
        return listed
    return catalog.find(name) or (short(low) if low != name.lower() else None)


def of_words(name: str) -> str | None:
    """A name of Ollama's library without its separators: `deepseek r1 8b`."""
    return next((exact(one) for one in OLLAMA if squeezed(one) == squeezed(name)), None)


def short(name: str) -> str | None:
    """The one model whose name is `name` but for separators and an ending that changes no size."""
    wanted = squeezed(name)
    if len(wanted) < 4 or not any(letter.isdigit() for letter in wanted):
        return None
    names = [(squeezed(one.rpartition("/")[2]), one) for one in catalog.names()]
    same = [one for plain, one in names if plain == wanted]
    same = same or [one for plain, one in names if plain == f"meta{wanted}"]
    if not same:
        endings = [squeezed(ending) for ending in ENDINGS]
        ended = {
            plain.removeprefix(wanted): one for plain, one in names if plain.startswith(wanted)
        }
        same = [ended[ending] for ending in endings if ending in ended][:1]
    return same[0] if len(same) == 1 else None


def of_one_size(name: str) -> tuple[str | None, int]:
    """The model whose name begins with these words, and how many others do, where all have the same
    number of parameters: how they were trained changes no byte. One that is not quantized comes
    first."""
    dotted = re.sub(r"(?<![\d.])(\d)(?=[-_ ]|$)", r"\1.0", name)  # `granite-4`
    for word in dict.fromkeys((name, dotted)):
        some = [one for one in catalog.names() if begins(word, one)]
        if some:
            break
    else:
        return None, 0
    entries = [catalog.entry(one) for one in some]
    if len({one.parameters or one.published for one in entries}) > 1:
        return None, 0
    plain = [one for one in entries if "quantization_config" not in one.config()] or entries
    likely = min((one.name for one in plain), key=lambda one: (one.count("-"), len(one), one))
    return likely, len(entries) - 1


def begins(name: str, model: str) -> bool:
    """Whether a model's name begins with the letters of `name` and goes on with a new word:
    `gpt-oss-2` is no 20B, and `qwen3` no Qwen3.5."""
    owner, _, short = model.lower().rpartition("/")
    short = re.sub(r"(?<=\d)_(?=\d)", ".", short)  # `Llama-3_3`
    rest = short.removeprefix(f"{owner}-").removeprefix("meta-")
    wanted = squeezed(name)
    if len(wanted) < 4:
        return False
    for letter in wanted:
        rest = rest.lstrip("-_ ")
        if not rest.startswith(letter):
            return False
        rest = rest[1:]
    return not rest or rest[0] in "-_"


def squeezed(name: str) -> str:
    """The name without separators; a dot belongs to a number and stays (`2.5` is not 25)."""
    return re.sub(r"[-_:\s]", "", name.lower())
