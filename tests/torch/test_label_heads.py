"""Heads of labels on decoders: transformers says which classes there are, and their parameters; the
trace says their peaks."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tests.sampling import WHOLE

import torch
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.model.classes import CLASSES
from memfit.model.families import _rows, build, families, find
from memfit.model.heads import with_head
from memfit.model.label_heads import SEQUENCE, SPAN, TOKENS
from memfit.simulate.memory import memory
from memfit.tape import check as legal
from memfit.trace import classes, trace_config

WORST = 0.005  # of the peak that the trace has
HEADS = (SEQUENCE, TOKENS, SPAN)
ENDS = {head: end for end, head in CLASSES.items()}
DECODERS = sorted(kind for kind, one in families().items() if not (one.heads or one.brought))

MADE = frozenset(_rows.names())  # by a command that leaves out what is not one of the usual heads


def named(kind: str, head: str, example: int = 0) -> dict[str, Any]:
    """A configuration of a family that names the class of this head, with 7 labels; GPT-J's code
    answers questions with 2 alone."""
    labels = 2 if (kind, head) == ("gptj", SPAN) else 7
    config = {**find(kind).examples[example], "model_type": kind}
    return {**config, "architectures": [ENDS[head]], "num_labels": labels}


def parameters_of(config: dict[str, Any], head: str) -> tuple[Any, dict[str, Any]] | None:
    """transformers' class without values, and its parameters; None where it has no such class."""
    own = transformers.AutoConfig.for_model(**config)
    builder = classes.builder(head, own)
    if builder is None:
        return None
    with torch.device("meta"):
        model = builder.from_config(own)
    return model, {key: tuple(one.shape) for key, one in model.named_parameters()}


@pytest.mark.parametrize("kind", DECODERS)
def test_classes_and_parameters_are_those_of_transformers(kind: str) -> None:
    known = {row.head for row in find(kind).label_heads}
    for head in HEADS:
        config = named(kind, head)
        found = parameters_of(config, head)
        if kind not in MADE:
            assert (found is not None) == (head in known), head
        if found is None or head not in known:
            continue
        model = build(config)
        assert {one.name: one.shape for one in model.weights()} == found[1]
        assert model.labelled is not None
        dropout = getattr(found[0], "dropout", None)
        assert model.labelled.dropout == (0.0 if dropout is None else dropout.p)


# What is asked of the families, a case for each class in turn.
CASES: tuple[dict[str, Any], ...] = (
    {"batch": 5, "seq": 96, "packing": False},
    {"batch": 4, "seq": 72, "method": "lora"},
    {"batch": 3, "seq": 120, "precision": "autocast-bf16", "checkpointing": "full"},
    {"batch": 2, "seq": 80, "precision": "bf16-autocast", "method": "lora", "packing": False},
)
# In every run; all with MEMFIT_WHOLE: written and captured programs, a tower, experts, each kind of
# class.
SOME = {
    ("llama", SEQUENCE),
    ("qwen3", SPAN),
    ("gemma2", TOKENS),
    ("gpt2", TOKENS),
    ("gptj", SPAN),
    ("mixtral", SEQUENCE),
    ("qwen3_5", SEQUENCE),
    ("qwen3_next", SPAN),
}
ALL = [(kind, row.head) for kind in DECODERS for row in find(kind).label_heads]


def differs(kind: str, head: str, **case: Any) -> float:
    """By how much the peak of the formula differs from that of the trace."""
    config = {**named(kind, head), "dtype": "bfloat16"}
    model = with_head(build(config), head, case.get("labels", 0))
    if "method" in case:
        case["targets"] = next(model.layers[0].linears()).name.rpartition(".")[2]
    job = Job(**{"optimizer": "adamw_fused", "head": head, **case})
    tape = lower(model, job)
    legal(tape)
    return memory(tape).allocated / memory(trace_config(config, job)).allocated - 1


@pytest.mark.parametrize(("kind", "head"), ALL if WHOLE else sorted(SOME))
def test_peaks_are_those_of_the_trace(kind: str, head: str) -> None:
    turn = ALL.index((kind, head))
    for case in CASES if WHOLE else [CASES[turn % len(CASES)]]:
        off = differs(kind, head, **case)
        assert abs(off) <= WORST, f"{off:+.2%} {case}"


@pytest.mark.parametrize(
    ("head", "case"),
    [
        (SEQUENCE, {"labels": 1}),
        (SEQUENCE, {"method": "qlora"}),
        (TOKENS, {"method": "qlora", "quant_skip": "score"}),
        (SEQUENCE, {"liger": True}),
        (SPAN, {"task": "inference", "new_tokens": 0}),
    ],
)
def test_other_questions_have_the_peak_of_the_trace(head: str, case: dict[str, Any]) -> None:
    """One label's squared error, packed weights beside a whole head, other kernels, no loss."""
    off = differs("llama", head, batch=3, seq=72, **case)
    assert abs(off) <= WORST, f"{off:+.2%}"


def test_captured_graphs_refuse_labels_without_training() -> None:
    """They ended in a traceback: no setting of a decoder has labels and no loss."""
    config = {**named("diffllama", SEQUENCE), "dtype": "bfloat16"}
    with pytest.raises(InputError, match="for inference with a head of labels"):
        estimate(build(config), Job(task="inference", head=SEQUENCE, batch=2, seq=64))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_modules_before_a_head_of_labels_run_when_the_model_has_returned(dropout: float) -> None:
    """ModernBERT's decoder has a layer there, and dropout; the masks are gone by then."""
    config = named("modernbert-decoder", SEQUENCE) | {"classifier_dropout": dropout}
    job = Job(head=SEQUENCE, batch=16, seq=600, packing=False, optimizer="sgd")
    off = memory(lower(build(config), job)).allocated / memory(trace_config(config, job)).allocated
    assert abs(off - 1) <= WORST / 5, f"{off - 1:+.2%}"


def test_peft_fails_where_the_formula_says_so() -> None:
    """An adapter on a head that PEFT trains whole."""
    config = {**named("llama", TOKENS), "dtype": "bfloat16"}
    job = Job(head=TOKENS, method="lora", seq=64)
    with pytest.raises(InputError, match="modules_to_save cannot be applied"):
        trace_config(config, job)
    with pytest.raises(InputError, match="when `all-linear` adds an adapter"):
        estimate(build(config), job)


@pytest.mark.parametrize("name", ["LlamaForMultipleChoice", "LlamaForRewardModel"])
def test_the_trace_runs_no_other_class_than_the_one_that_a_config_names(name: str) -> None:
    config = {**find("llama").examples[0], "architectures": [name]}
    with pytest.raises(InputError, match=f"no trace of the class `{name}`") as bad:
        trace_config(config, Job(seq=32))
    assert "`--head`: `causal-lm`, `classification`" in bad.value.problems[0].hint
    own = transformers.AutoConfig.for_model(**config)
    assert classes.chosen(own, "causal-lm")[0] == "causal-lm"
