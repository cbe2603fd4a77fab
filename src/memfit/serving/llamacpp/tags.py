"""Ollama's library: which model and quantization a tag means.

Names, default sizes and default quantizations: ollama.com/library as the table in Ollama's README
lists it (v0.6.1, v0.13.5), with the sizes of its files as a check. A tag that names a quantization
(`8b-instruct-q8_0`) says so itself; else the library's files are Q4_K_M, the older ones Q4_0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.registry import nearest
from memfit.serving.llamacpp.quantize import ALIASES, BASES


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`repo` with `{}` for the size; `sizes` where a size's repository has a name of its own."""

    repo: str
    latest: str
    quant: str = "Q4_K_M"
    sizes: Mapping[str, str] | None = None
    kept: str = ""  # matrices of these files that have another type, as `attn_v=F16`


LIBRARY: Mapping[str, Entry] = {
    "llama2": Entry(repo="meta-llama/Llama-2-{}b-chat-hf", latest="7b", quant="Q4_0"),
    "llama3": Entry(repo="meta-llama/Meta-Llama-3-{}B-Instruct", latest="8b", quant="Q4_0"),
    "llama3.1": Entry(repo="meta-llama/Meta-Llama-3.1-{}B-Instruct", latest="8b"),
    "llama3.2": Entry(
        repo="meta-llama/Llama-3.2-{}B-Instruct",
        latest="3b",
        sizes={"1b": "meta-llama/Llama-3.2-1B-Instruct:Q8_0"},
    ),
    "llama3.3": Entry(repo="meta-llama/Llama-3.3-{}B-Instruct", latest="70b"),
    "llama4": Entry(
        repo="meta-llama/Llama-4-Scout-17B-16E-Instruct",
        latest="scout",
        sizes={"maverick": "meta-llama/Llama-4-Maverick-17B-128E-Instruct"},
    ),
    "codellama": Entry(repo="codellama/CodeLlama-{}b-Instruct-hf", latest="7b", quant="Q4_0"),
    "mistral": Entry(repo="mistralai/Mistral-{}B-Instruct-v0.3", latest="7b", quant="Q4_0"),
    "mistral-nemo": Entry(repo="mistralai/Mistral-Nemo-Instruct-2407", latest="12b", quant="Q4_0"),
    "mistral-small": Entry(repo="mistralai/Mistral-Small-24B-Instruct-2501", latest="24b"),
    "mistral-small3.1": Entry(repo="mistralai/Mistral-Small-3.1-24B-Instruct-2503", latest="24b"),
    "mistral-small3.2": Entry(repo="mistralai/Mistral-Small-3.2-24B-Instruct-2506", latest="24b"),
    "mistral-large": Entry(repo="mistralai/Mistral-Large-Instruct-2411", latest="123b"),
    "ministral-3": Entry(repo="mistralai/Ministral-3-{}B-Instruct-2512", latest="8b"),
    "devstral-small-2": Entry(repo="mistralai/Devstral-Small-2-24B-Instruct-2512", latest="24b"),
    "nemotron-3-nano": Entry(repo="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", latest="30b"),
    "devstral": Entry(repo="mistralai/Devstral-Small-2505", latest="24b"),
    "mixtral": Entry(
        repo="mistralai/Mixtral-8x7B-Instruct-v0.1",
        latest="8x7b",
        quant="Q4_0",
        sizes={"8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1"},
    ),
    "gemma": Entry(repo="google/gemma-{}b-it", latest="7b", quant="Q4_0"),
    "gemma2": Entry(repo="google/gemma-2-{}b-it", latest="9b", quant="Q4_0"),
    "gemma3": Entry(
        repo="google/gemma-3-{}b-it", latest="4b", sizes={"270m": "google/gemma-3-270m-it:Q8_0"}
    ),
    "gemma4": Entry(  # the latest has 9.6 GB (docs/context-length.mdx of ollama, August 2026)
        repo="google/gemma-4-{}B-it",
        latest="e4b",
        sizes={
            "e2b": "google/gemma-4-E2B-it",
            "e4b": "google/gemma-4-E4B-it",
            "26b": "google/gemma-4-26B-A4B-it",
        },
    ),
    "qwen": Entry(repo="Qwen/Qwen1.5-{}B-Chat", latest="4b", quant="Q4_0"),
    "qwen2": Entry(repo="Qwen/Qwen2-{}B-Instruct", latest="7b", quant="Q4_0"),
    "qwen2.5": Entry(repo="Qwen/Qwen2.5-{}B-Instruct", latest="7b"),
    "qwen2.5-coder": Entry(repo="Qwen/Qwen2.5-Coder-{}B-Instruct", latest="7b"),
    "qwen3": Entry(
        repo="Qwen/Qwen3-{}B",
        latest="8b",
        sizes={"30b": "Qwen/Qwen3-30B-A3B", "235b": "Qwen/Qwen3-235B-A22B"},
        # `type f16: 64 tensors` of 64 layers (ollama/ollama#14774), bytes of layers in #13372
        kept="attn_v=F16",
    ),
    "qwen3-coder": Entry(
        repo="Qwen/Qwen3-Coder-30B-A3B-Instruct",
        latest="30b",
        sizes={"480b": "Qwen/Qwen3-Coder-480B-A35B-Instruct"},
    ),
    "qwen3.5": Entry(
        repo="Qwen/Qwen3.5-{}B",
        latest="9b",
        sizes={
            "35b": "Qwen/Qwen3.5-35B-A3B",
            "122b": "Qwen/Qwen3.5-122B-A10B",
            "397b": "Qwen/Qwen3.5-397B-A17B",
        },
    ),
    # `qwen3.6` takes some 24 GB (docs/integrations/hermes.mdx of ollama, August 2026)
    "qwen3.6": Entry(repo="Qwen/Qwen3.6-{}B", latest="35b", sizes={"35b": "Qwen/Qwen3.6-35B-A3B"}),
    "qwq": Entry(repo="Qwen/QwQ-32B", latest="32b"),
    "deepseek-r1": Entry(
        repo="deepseek-ai/DeepSeek-R1-Distill-Qwen-{}B",
        latest="8b",
        sizes={
            "8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
            "70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
            "671b": "deepseek-ai/DeepSeek-R1-0528",
        },
    ),
    "deepseek-v3": Entry(repo="deepseek-ai/DeepSeek-V3", latest="671b"),
    "phi": Entry(repo="microsoft/phi-2", latest="2.7b", quant="Q4_0"),
    "phi3": Entry(
        repo="microsoft/Phi-3-mini-128k-instruct",
        latest="mini",
        quant="Q4_0",
        sizes={"medium": "microsoft/Phi-3-medium-128k-instruct"},
    ),
    "phi4": Entry(repo="microsoft/phi-4", latest="14b"),
    "phi4-mini": Entry(repo="microsoft/Phi-4-mini-instruct", latest="3.8b"),
    "gpt-oss": Entry(repo="openai/gpt-oss-{}b", latest="20b", quant="F16"),
    "tinyllama": Entry(repo="TinyLlama/TinyLlama-1.1B-Chat-v1.0", latest="1.1b", quant="Q4_0"),
    "smollm2": Entry(
        repo="HuggingFaceTB/SmolLM2-{}B-Instruct",
        latest="1.7b",
        quant="Q8_0",
        sizes={
            "135m": "HuggingFaceTB/SmolLM2-135M-Instruct:F16",
            "360m": "HuggingFaceTB/SmolLM2-360M-Instruct:F16",
        },
    ),
    "command-r": Entry(repo="CohereForAI/c4ai-command-r-08-2024", latest="35b"),
    "yi": Entry(repo="01-ai/Yi-1.5-{}B-Chat", latest="6b", quant="Q4_0"),
    "starcoder2": Entry(repo="bigcode/starcoder2-{}b", latest="3b", quant="Q4_0"),
    "olmo2": Entry(repo="allenai/OLMo-2-1124-{}B-Instruct", latest="7b"),
    "granite3.3": Entry(repo="ibm-granite/granite-3.3-{}b-instruct", latest="8b"),
    "falcon3": Entry(repo="tiiuae/Falcon3-{}B-Instruct", latest="7b"),
}
_QUANT = re.compile(r"(?:^|-)((?:iq|q)\d[a-z0-9_]*|fp16|f16|bf16|f32|mxfp4)$", re.IGNORECASE)
_WORDS = re.compile(r"-(instruct|it|chat|text|code|base)(-20\d\d)?(-v[\d.]+)?(?=$|-)")


def resolve(spec: str) -> tuple[str, str] | None:
    """(repository, quantization) of a tag; None where the name is none of the library's."""
    name, _, tag = spec.strip().lower().removeprefix("ollama.com/library/").partition(":")
    entry = LIBRARY.get(name.removeprefix("library/"))
    if entry is None:
        return None
    found = _QUANT.search(tag)
    quantization = ""
    if found is not None:
        quantization = found[1].upper()
        quantization = ALIASES.get(quantization, quantization)
        tag = tag[: found.start()]
    if quantization and quantization not in BASES:
        close = nearest(quantization, BASES, 1)
        raise InputError.one(
            f"`{spec[:60]}` names the unknown quantization `{quantization[:20]}`",
            where="model",
            hint=f"did you mean `{close[0]}`?" if close else "",
        )
    size = _WORDS.sub("", f"-{tag}").strip("-")
    if size in ("", "latest"):
        size = entry.latest
    special = (entry.sizes or {}).get(size)
    if special is None and "{}" not in entry.repo and size != entry.latest:
        raise unknown_size(spec, entry)
    if special is None and not re.fullmatch(r"[\dx.]+[bm]", size) and "{}" in entry.repo:
        raise unknown_size(spec, entry)
    repo, _, own = (special or entry.repo.format(size.rstrip("b"))).partition(":")
    stored = quantization or own or entry.quant
    return repo, f"{stored} {entry.kept}".strip() if stored == entry.quant else stored


def tag_of(repo: str) -> str:
    """The library's tag whose files are made of this repository; empty where there is none."""
    for name, entry in LIBRARY.items():
        named = {size: special.partition(":")[0] for size, special in (entry.sizes or {}).items()}
        before, sized, after = entry.repo.partition("{}")
        found = re.fullmatch(rf"{re.escape(before)}([\d.x]+){re.escape(after)}", repo)
        size = next((one for one, other in named.items() if other == repo), "")
        if not size and sized:
            size = f"{found[1]}b" if found else ""
        elif not size and entry.repo == repo:
            size = entry.latest
        if size and (resolve(f"{name}:{size}") or ("",))[0] == repo:
            return f"{name}:{size}"
    return ""


def unknown_size(spec: str, entry: Entry) -> InputError:
    sizes = ", ".join((entry.latest, *(entry.sizes or {})))
    return InputError.one(
        f"`{spec[:60]}` is no size that memfit knows of this model",
        where="model",
        hint=f"known: {sizes}",
    )
