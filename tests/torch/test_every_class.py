"""Every class that transformers has for text, and for text with images or sounds, through the
trace: a training step, and generation. Every second at every commit, all with MEMFIT_WHOLE.

What is refused is in `refused_classes.txt`, by name and with its reason; a class that passes from
one side to the other makes this red.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import sampled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")

from tests.torch.small_configs import small  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.trace import trace_config  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
HEADS = {
    "causal-lm": ("CAUSAL_LM",),
    "image-text": ("IMAGE_TEXT_TO_TEXT",),
    "seq2seq-lm": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "masked-lm": ("MASKED_LM",),
    "classification": ("SEQUENCE_CLASSIFICATION",),
    "token-classification": ("TOKEN_CLASSIFICATION",),
    "question-answering": ("QUESTION_ANSWERING",),
}
GENERATING = ("causal-lm", "image-text", "seq2seq-lm")
READ_FROM = "5.23"
# What these classes want of a job: cuFFT knows no bf16; DeBERTa's biases are loaded in fp32 beside
# weights in bf16 (transformers 5.23); fewer positions than others; kernels of one
# number format.
JOBS: dict[str, dict[str, Any]] = {
    "deberta": {"precision": "fp32"},
    "fnet": {"precision": "fp32"},
    "xlstm": {"precision": "fp32"},
    "xlnet": {"precision": "fp32"},
    "blip": {"seq": 256},
    "florence2": {"seq": 512},
    "git": {"seq": 512, "images": 1},
    "kosmos-2.5": {"seq": 4096},
    "vision-encoder-decoder": {"seq": 256},
    "pp_formulanet": {"precision": "fp32"},
    **{
        kind: {"seq": 4096}
        for kind in (
            "lighton_ocr",
            "llava_next",
            "llava_next_video",
            "llava_onevision",
            "mistral3",
            "mistral_large4",
        )
    },
    "chameleon": {"seq": 1280},
    "emu3": {"seq": 3584},
    "granite4_vision": {"seq": 2048},
    "instructblip": {"seq": 256},
    "instructblipvideo": {"seq": 256},
    "perceiver": {"seq": 2048},
    "qwen4_exp": {"seq": 256},  # it goes token by token
}

TASKS = {
    ("reformer", "inference"): {"seq": 32}
}  # its table of positions ends with the sequence that it was made for
HEADED = {("masked-lm", "reformer"): {"is_decoder": False}}


def classes() -> list[tuple[str, str]]:
    found = []
    for head, mappings in HEADS.items():
        kinds = dict.fromkeys(
            kind
            for one in mappings
            for kind in getattr(modeling_auto, f"MODEL_FOR_{one}_MAPPING_NAMES")
        )
        found += [(head, kind) for kind in kinds]
    return found


def tasks(head: str, kind: str) -> list[str]:
    """Training for all; generation for a fixed half."""
    half = zlib.crc32(f"{head} {kind}".encode()) % 2 == 0
    return ["finetune", "inference"] if head in GENERATING and half else ["finetune"]


def refused() -> dict[str, str]:
    """What is said of each, by head, model type and task."""
    found = {}
    for line in (
        (Path(__file__).parent / "refused_classes.txt").read_text(encoding="utf-8").splitlines()
    ):
        if line and not line.startswith("#"):
            name, _, message = line.partition(" | ")
            found[name.strip()] = message.strip()
    return found


REFUSED = refused()


def outcome(head: str, kind: str, task: str) -> str:
    """Nothing where the trace is through, else the first words of the one message."""
    options = {"images": 1, "seq": 1024} if head == "image-text" else {"seq": 64}
    try:
        trace_config(
            small(kind) | HEADED.get((head, kind), {}),
            Job(
                task=task,
                head=head,
                new_tokens=4,
                **(options | JOBS.get(kind, {}) | TASKS.get((kind, task), {})),
            ),
            steps=1,
        )
    except InputError as bad:
        (problem,) = bad.problems
        return problem.message
    return ""


@pytest.mark.skipif(
    not transformers.__version__.startswith(READ_FROM),
    reason=f"the table is of transformers {READ_FROM}",
)
@pytest.mark.parametrize(("head", "kind"), sampled(classes(), 3))
def test_it_is_traced_or_refused_as_told(head: str, kind: str) -> None:
    found = {task: outcome(head, kind, task) for task in tasks(head, kind)}
    for task, message in found.items():
        told = REFUSED.get(f"{head} {kind} {task}", "")
        if not message and "needs the package" in told:
            continue  # here the package is installed
        assert bool(message) == bool(told), f"{head} {kind} {task}: {message or 'passes now'}"
        assert told in message


def test_the_table_names_what_there_is() -> None:
    known = {f"{head} {kind} {task}" for head, kind in classes() for task in tasks(head, kind)}
    assert set(REFUSED) <= known
    assert len(known) > 700
    assert len(REFUSED) < len(known) // 20
