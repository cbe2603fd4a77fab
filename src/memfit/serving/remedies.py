"""What to set so that an engine starts. Every offer was asked first, and starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from memfit.errors import InputError
from memfit.serving.base import Question, ServingEngine
from memfit.serving.flags import read_flags
from memfit.serving.result import ServingAnswer

ROUNDS = 3  # of settings that lead to each other: more GPUs, then a shorter length
USEFUL = 2048  # tokens: with fewer, other weights or more GPUs are the better way
EMPTY = ("out of memory", "not enough memory", "no available memory")  # weights leave no room


def with_remedy(engine: ServingEngine, question: Question, answer: ServingAnswer) -> ServingAnswer:
    """`answer` with settings under which the engine starts, as far as any were found: first with
    the same weights on the GPUs of the question, else with smaller weights or on more GPUs."""
    flag = engine.shared_flag
    if answer.fits or not question.devices or not flag:
        return answer
    spread = {flag: str(len(question.devices))} if answer.gpus < len(question.devices) else {}
    found = [leads(engine, question, one) for one in alternatives(answer.remedy, flag)]
    if not any(found) and spread:
        found = [leads(engine, question, spread)]
    if not any(found) and any(words in answer.failure.lower() for words in EMPTY):
        smaller = (
            leads(engine, question, {**spread, **one}) for one in quantized(engine, question)
        )
        found = [next(filter(None, smaller), ""), on_more_gpus(engine, question, answer, flag)]
    remedy = " or ".join(filter(None, found))
    return replace(answer, remedy=remedy) if remedy else answer


def alternatives(remedy: str, shared: str) -> Iterator[dict[str, str]]:
    """The engine's own ways out (`--max-model-len 4096 or …`) but for more GPUs and prose."""
    for one in remedy.split(" or "):
        words = one.split()
        if one.startswith("--") and len(words) % 2 == 0 and words[0] != shared:
            yield dict(zip(words[::2], words[1::2], strict=True))


def quantized(engine: ServingEngine, question: Question) -> Iterator[dict[str, str]]:
    """Weights that the engine quantizes as it loads them, where nothing else is asked for."""
    stored = question.subject.config.get("quantization_config")
    if not stored and not question.options.get("quantization"):
        yield from ({"--quantization": name} for name in engine.online(question))


def on_more_gpus(
    engine: ServingEngine, question: Question, answer: ServingAnswer, flag: str
) -> str:
    """On as many GPUs as the engine's own remedy names. Where the question names several, their
    new number is a setting, too."""
    words = answer.remedy.split()
    if words[:1] != [flag] or not words[1].isdecimal():
        return ""
    count, device = int(words[1]), question.devices[0]
    several = len(question.devices) > 1
    wider = replace(question, devices=(device,) * count if several else question.devices)
    found = leads(engine, wider, {flag: words[1]})
    if not found or not several or device.gpu is None:
        return found
    return f"--gpu {count}x{device.gpu.id} {found}"


def leads(engine: ServingEngine, question: Question, settings: Mapping[str, str]) -> str:
    """`settings`, with those that the engine asks for next, once it starts; else nothing."""
    settings, least = dict(settings), USEFUL
    for _ in range(ROUNDS):
        answer = asked(engine, question, settings)
        if answer is None:
            return ""
        length = int(answer.figures.get("max_concurrency_len", least))
        if answer.fits:
            words = " ".join(f"{name} {value}" for name, value in settings.items())
            return words if length >= least else ""
        least = min(least, length)  # where less is asked for
        following = next(alternatives(answer.remedy, engine.shared_flag), {})
        if not following or following.items() <= settings.items():
            return ""
        settings |= following
    return ""


def asked(
    engine: ServingEngine, question: Question, settings: Mapping[str, str]
) -> ServingAnswer | None:
    """The engine's answer under further settings; None where it takes no such setting."""
    words: Sequence[str] = [word for pair in settings.items() for word in pair]
    _, values = read_flags(engine.options, words, [], engine.title)
    try:
        return engine.answer(replace(question, options={**question.options, **values}))
    except InputError:
        return None


__all__ = ["with_remedy"]
