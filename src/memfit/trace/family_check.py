"""Compares a family that was just made with the real code: parameters tensor by tensor, and peaks
with the trace's on sizes that no graph was captured with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.classes import CLASSES
from memfit.model.families import build
from memfit.model.families._chains import CAUSAL, ChainRow
from memfit.model.heads import with_head
from memfit.model.model import Model
from memfit.simulate.memory import memory
from memfit.trace import trace_config
from memfit.trace.depth import buffers_of, shapes_of
from memfit.trace.pair_row import HEAD as PAIR
from memfit.trace.paths import layer_of

DEEPER = 2  # layers more than any captured model has
TARGET = 56  # tokens of a decoder beside an encoder
WORST = 0.005  # of the peak that the trace has
PRECISIONS = ("bf16", "fp32", "autocast-bf16", "fp16", "autocast-fp16")
CASES: tuple[dict[str, Any], ...] = (
    {"batch": 5, "seq": 96, "packing": False},
    {"batch": 1, "seq": 100, "method": "lora"},
    {"batch": 6, "seq": 80, "packing": False, "checkpointing": "full", "keep_outputs": True},
    {"batch": 3, "seq": 111, "task": "inference"},
)
INFERENCE = CASES[-1]
# Scores of attention, which grow with the square of it, have the peak.
LONG: dict[str, Any] = {"batch": 2, "seq": 500, "packing": False, "optimizer": "sgd"}


def unseen(row: ChainRow, sizes: Mapping[str, int], head: str) -> dict[str, Any]:
    """A config with sizes that were not captured, with more layers and labels, and with the class's
    rates of dropout; no layer is skipped, which a trace does at random."""
    kept = {key: value for key, value in row.examples[0].items() if key not in row.rates}
    end = next(end for end, name in CLASSES.items() if name == head)
    return {
        **kept,
        **sizes,
        **{key: kept[key] + DEEPER for key in (row.depths or (row.depth,))},
        "dtype": "bfloat16",
        "num_labels": 2 if head == "question-answering" else 7,
        "architectures": [end],
    }


def first_linear(model: Model) -> str:
    """A linear layer of attention, for adapters; where the layers have none, that of one that all
    share, or one behind them."""
    ends = [linear for one in (*model.final, *model.embed) for linear in one.linears()]
    shared = [one for one in ends if layer_of(one.name)]
    return next(itertools.chain(model.layers[0].linears(), shared, ends)).name.rpartition(".")[2]


def off(config: Mapping[str, Any], job: Job) -> float:
    """How far the peak is from the trace's, as a share of it."""
    ours = memory(lower(model_of(config, job.head), job)).allocated
    return ours / memory(trace_config(config, job)).allocated - 1


def model_of(config: Mapping[str, Any], head: str) -> Model:
    """The model of a head: of a composite, `causal-lm` means its language model alone."""
    return with_head(build(config), head if head == CAUSAL else "auto", 0)


def unlike_parameters(config: Mapping[str, Any], head: str) -> str:
    """The first parameter that differs from those of transformers' class; empty where none does."""
    expected = shapes_of(config, head)
    found = {one.name: one.shape for one in model_of(config, head).weights()}
    names = expected.keys() | found.keys()
    return min((one for one in names if expected.get(one) != found.get(one)), default="")


def unlike_buffers(config: Mapping[str, Any], head: str) -> str:
    """The first buffer that differs, as above: a family with the same parameters may scale what it
    embeds."""
    expected = buffers_of(config, head)
    found = {one.name: one.shape for one in build(config).tensors() if one.role == "buffer"}
    names = expected.keys() | found.keys()
    return min((one for one in names if expected.get(one) != found.get(one)), default="")


def refused_by_heads(row: ChainRow, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The precisions that a family refuses: those of its first head. Of an encoder with a decoder
    those of any head that has others, since each has a peak elsewhere."""
    heads = row.heads if row.pairs else row.heads[:1]
    found = [refused_precisions(unseen(row, sizes, head), head, row) for head in heads]
    some = [one for one in found if len(one) < len(PRECISIONS)] or found
    return tuple(one for one in PRECISIONS if any(one in each for each in some))


def refused_precisions(config: Mapping[str, Any], head: str, row: ChainRow) -> tuple[str, ...]:
    """Those in which peaks are not the trace's, or nothing runs: with checkpoints, too, where a
    decoder follows an encoder, and with long sequences, where positions have no end."""
    cases = [CASES[0], CASES[2]] if row.pairs and row.checkpoints else [CASES[0]]
    cases += [LONG] if not (row.pairs or row.limited) else []
    jobs = [{**case, "head": head, "keep_outputs": False} for case in cases]
    return tuple(
        one
        for one in PRECISIONS
        if any(fault(config, Job(**{**job, "precision": one})) for job in jobs)
    )


def infers_otherwise(row: ChainRow, sizes: Mapping[str, int]) -> bool:
    """Whether no head has the trace's peak without training: a class may keep what layers gave."""
    heads = [head for head in row.heads if head not in (CAUSAL, PAIR)]
    first = plain_precisions(row)[:1]
    jobs = [Job(**{**INFERENCE, "head": head, "precision": one}) for head in heads for one in first]
    return bool(jobs) and all(fault(unseen(row, sizes, job.head), job) for job in jobs)


def plain_precisions(row: ChainRow) -> list[str]:
    """Those that inference is asked in."""
    return [one for one in PRECISIONS if one not in row.refused and "autocast" not in one]


def fault(config: Mapping[str, Any], job: Job) -> str:
    """What is wrong with the answer to one job; empty where nothing is."""
    try:
        share = off(config, job)
    except InputError as bad:
        return bad.problems[0].message
    if abs(share) <= WORST:
        return ""
    return f"its peak is {share:+.2%} off the trace's"


def head_fault(row: ChainRow, sizes: Mapping[str, int], head: str) -> str:
    """What is wrong with one head of a family; with a language model's, as an encoder and as a
    decoder."""
    config = unseen(row, sizes, head)
    found = config_fault(row, config, head)
    if found or head != CAUSAL:
        return found
    return config_fault(row, {**config, "is_decoder": True}, head)


def config_fault(row: ChainRow, config: Mapping[str, Any], head: str) -> str:
    """What is wrong with the answers to one config. Generation is not compared, for it has no
    formula."""
    name = unlike_parameters(config, head)
    if name:
        return f"`{name}` is not as in transformers"
    free = [one for one in PRECISIONS if one not in row.refused]
    pair = {"target_seq": TARGET} if head == PAIR else {}
    for place, case in enumerate(CASES):
        if case.get("checkpointing") and not row.checkpoints:
            continue
        if "method" in case and build(config).graphs.transposed:
            continue
        if case == INFERENCE and (row.pairs or head == CAUSAL or case["task"] in row.refused):
            continue  # generation has no graphs yet
        own = plain_precisions(row) if case == INFERENCE else free
        given = {**case, **pair, "optimizer": "adamw_fused", "precision": own[place % len(own)]}
        if "method" in case:
            given["targets"] = first_linear(build(config))
        if build(config).graphs.caches:
            given.pop("keep_outputs", None)
        found = fault(config, Job(head=head, **given))
        if found:
            words = ", ".join(f"{key} {value}" for key, value in given.items())
            return f"{found} ({words})"
    return ""


__all__ = [
    "INFERENCE",
    "PRECISIONS",
    "head_fault",
    "infers_otherwise",
    "refused_by_heads",
    "unseen",
]
