"""Questions without a verb, and which verb they mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memfit.cli.errors import complain
from memfit.errors import Problem
from memfit.serving import GGUF_ENGINE, SERVER_ENGINE, TAG_ENGINE
from memfit.words.gpus import is_gpu

HELP_WORDS = ("help", "-h", "--help-all", "version")
OWN = ("--help", "--help-all", "-h", "--version", "-V")
FORMS = ("--json",)
METHODS = ("lora", "qlora", "full")
BETWEEN = ("on", "with", "for", "using", "in", "a", "an", "my", "one")
LONGEST = 6  # words of a GPU's name: `2 x rtx 4060 ti 16gb`
PASTED = ("estimate", "card")  # verbs behind which people paste other programs' commands

TRAIN = ("train", "training", "finetune", "fine-tune", "finetuning", "fine-tuning", "tune", "sft")
ANSWER = ("infer", "inference", "generate", "chat", "run")
SERVE = ("serve", "serving", "deploy")


def routed(words: Sequence[str], verbs: Collection[str]) -> list[str]:
    """A question without a verb with the verb that it means: `card`, or `estimate` where it says
    what is to be done."""
    if words and words[0] in HELP_WORDS:
        return helped(words)
    first = words[0] if words else ""
    if first not in verbs or first in PASTED:
        from memfit.cli.command_lines import pasted

        if meant := pasted(words):
            return meant
    if not first or first in verbs or first in OWN:
        return list(words)
    if first.lower() in (*TRAIN, *ANSWER, *SERVE) and not is_model(first):
        return by_task(first.lower(), words[1:], verbs) or list(words)
    if not first.startswith("-") and is_gpu(first) and not is_model(first):
        first, words = "--gpu", ["--gpu", *words]
    if not first.startswith("-"):
        placed = named_by_place(words)
        if not modelled(placed[0], verbs):
            return list(words)
        first, words = placed[0], placed
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not set(flags) <= own_flags() or first.endswith((".yaml", ".yml")):
        return ["estimate", *words]
    return ["card", *words]


def by_task(task: str, rest: Sequence[str], verbs: Collection[str]) -> list[str]:
    """`train MODEL …` or `serve MODEL …` as `estimate` with the options that the task means; no
    words where no model follows, since then it may be anything."""
    asked = routed(rest, verbs)
    if asked[:1] not in (["card"], ["estimate"]) or asked[1:2] in ([], ["--help"]):
        return []
    words = asked[1:]
    given = {word.partition("=")[0] for word in words}
    means = [] if given & {"--engine", "--task"} else meant_options(task, words)
    command = " ".join(("estimate", *means))
    note = Problem(message=f"`{task}` is read as `memfit {command}`", level="note")
    complain((note,))
    return ["estimate", *words, *means]


def meant_options(task: str, words: Sequence[str]) -> list[str]:
    """What a task's word says about an estimate of `words`."""
    from memfit.model.spellings import is_quantized, ollama_tag

    if task in TRAIN:
        return []
    if any(map(ollama_tag, words)):
        return ["--engine", TAG_ENGINE]
    if any(is_quantized(word) or word.lower().endswith(".gguf") for word in words):
        return ["--engine", GGUF_ENGINE]
    return ["--engine", SERVER_ENGINE] if task in SERVE else ["--task", "inference"]


def named_by_place(words: Sequence[str]) -> list[str]:
    """`qwen3 8b lora rtx 4090` with options for the method and the GPU: only what stands before
    the first option."""
    count = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    name, options, rest = [words[0]], list[str](), list(words[1:count])
    while rest:
        if "--gpu" not in options and (long := gpu_words(rest)):
            gpu, rest = " ".join(rest[:long]), rest[long:]
            if name[-1].isdecimal() and is_name(name[:-1]) and not is_name(name):
                gpu = f"{name.pop()} x {gpu}"  # `llama 3 8b 2 a100`, not `gpt 2 a100`
            options += ["--gpu", gpu]
            continue
        word = rest.pop(0)
        if word.lower() in METHODS:
            options += ["--method", word.lower()]
        elif word.lower() not in BETWEEN:
            name.append(word)
    return [*joined(name), *options, *words[count:]]


def gpu_words(words: Sequence[str]) -> int:
    """How many of the first words name a GPU: as many as possible, or 0. A Mac without its memory
    is meant for one, too; a number alone may belong to the model."""
    from memfit.hardware.apple import without_memory

    counts = words[0].isdecimal() and len(words[0]) < 3
    if counts and words[1:2] not in (["x"], ["X"]):
        return 0
    for long in range(min(LONGEST, len(words)), 0, -1):
        whole = " ".join(words[:long])
        if (is_gpu(whole) and not is_model(whole)) or without_memory(whole, "gpu"):
            return long
    return 0


def joined(name: list[str]) -> list[str]:
    """The words of a model's name as one, where they are one."""
    return [" ".join(name)] if is_name(name) else name


def is_name(words: Sequence[str]) -> bool:
    """Whether the words together name a model, or a family of models."""
    from memfit.model.family_names import models_of
    from memfit.model.spellings import meant

    whole = " ".join(words)
    return bool(words) and bool(is_model(whole) or meant(whole) is not None or models_of(whole))


def own_flags() -> frozenset[str]:
    """The options of a card, under all their names."""
    from memfit.api.card import OPTIONS
    from memfit.spellings import names

    known = [f"--{name}" for name in names((*OPTIONS, "model"))]
    return frozenset((*known, "--gpus", "--no-offline", *FORMS, "--help"))


def helped(words: Sequence[str]) -> list[str]:
    """`help COMMAND`, `-h` and `version` as the options that they mean."""
    if words[0] == "version":
        return ["--version"]
    return [*words[1:2], "--help"] if words[0] == "help" else ["--help"]


def is_model(word: str) -> bool:
    from pathlib import Path

    from memfit.model import catalog

    return catalog.find(word) is not None or Path(word).exists()


def modelled(word: str, verbs: Collection[str]) -> bool:
    """Whether a word is rather a model's name than a verb that is misspelled."""
    from pathlib import Path

    from memfit.model import catalog
    from memfit.model.family_names import is_closed, models_of
    from memfit.registry import nearest

    if catalog.find(word) or any(part in word for part in "/.:") or is_closed(word):
        return True
    if models_of(word):
        return True
    known = catalog.alike(word) or catalog.family(word) or Path(word).is_dir()
    return not nearest(word, verbs) and bool(known)


__all__ = ["is_model", "modelled", "routed"]
