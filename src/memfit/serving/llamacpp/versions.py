"""Builds of llama.cpp, and the build inside each version of Ollama."""

from __future__ import annotations

import re

from memfit.errors import InputError
from memfit.serving.llamacpp.settings import NEWEST

# The first version of Ollama that carries a build: files `LLAMA_CPP_VERSION` and `Makefile.sync` of
# ollama/ollama at those tags. Commits without a build number are placed by their date.
OLLAMA: tuple[tuple[tuple[int, int, int], int], ...] = (
    ((0, 1, 0), 2000),
    ((0, 1, 38), 2900),
    ((0, 4, 0), 3970),
    ((0, 6, 0), 4780),  # d7cfe1ff, February 2025
    ((0, 7, 0), 5350),  # de4c07f9, May 2025
    ((0, 11, 5), 6150),  # e54d41be, August 2025
    ((0, 12, 4), 6646),
    ((0, 13, 0), 6840),
    ((0, 13, 2), 7108),
    ((0, 13, 5), 7436),  # ec98e200, 2025-12-16; kept until 0.24
    ((0, 30, 0), 9452),
    ((0, 30, 8), 9509),
    ((0, 30, 10), 9672),
)
# From 0.30 on Ollama starts llama-server itself; before, runners of its own held embeddings beside
# the logits (`embeddings` on in llama.go NewContextParams).
LLAMA_SERVER = (0, 30, 0)


def build_number(version: str) -> int:
    """`b8133`, `8133 (2b6dfe8)` or nothing (the newest that memfit knows)."""
    text = version.strip()
    if not text:
        return NEWEST
    match = re.match(r"(?:build[ :-]*)?b?(\d{1,6})\b", text, re.IGNORECASE)
    if match is None:
        raise InputError.one(
            f"`{text[:40]}` is no build of llama.cpp",
            where="engine_version",
            hint="like `b9509`",
        )
    build = int(match[1])
    return build if build >= FIRST_GGUF else NEWEST  # shallow clones count their own few commits


FIRST_GGUF = 1046  # August 2023: no earlier build reads a GGUF file


def ollama_version(version: str) -> tuple[int, int, int]:
    text = version.strip().removeprefix("v")
    if not text:
        return (9, 0, 0)
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise InputError.one(
            f"`{text[:40]}` is no version of Ollama", where="engine_version", hint="like `0.13.5`"
        )
    return int(match[1]), int(match[2]), int(match[3] or 0)


def ollama_build(version: str) -> int:
    """The build of llama.cpp inside a version of Ollama."""
    asked = ollama_version(version)
    if asked >= (9, 0, 0):
        return NEWEST
    return max(build for first, build in OLLAMA if first <= max(asked, OLLAMA[0][0]))
