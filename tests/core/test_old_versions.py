"""Older transformers: every family is answered or refused in words, whatever the version."""

from typing import Any

import pytest
from tests.sampling import sampled

from memfit import estimate
from memfit.errors import InputError
from memfit.model.families import families
from memfit.tape import Alloc

VERSIONS = ("4.36", "4.40", "4.44", "4.47", "4.52", "5.0")
LATE = ("falcon", "gpt_neox", "persimmon")  # supported from 4.45 on


@pytest.mark.parametrize("version", VERSIONS)
def test_every_family_is_answered_or_refused(version: str) -> None:
    """Every third family, others for the next version; all with MEMFIT_WHOLE."""
    refused = set()
    asked = dict(sampled(sorted(families().items()), 3, VERSIONS.index(version)))
    for name, family in asked.items():
        for task in () if family.graphs else ("finetune", "inference"):
            try:
                found = estimate(
                    dict(family.examples[0]),
                    versions=f"transformers={version}",
                    seq=16,
                    new_tokens=2,
                    task=task,
                    framework="transformers",
                )
            except InputError as bad:
                refused.add((name, bad.problems[0].message.partition(":")[0]))
            else:
                assert found.memory.allocated > 0
    assert refused == (
        {(name, "not supported yet") for name in LATE if name in asked}
        if float(version) < 4.45
        else set()
    )


@pytest.mark.parametrize("family", ["phi", "stablelm"])
def test_layers_pick_from_tables_of_their_own_before_4_45(family: str) -> None:
    """Peaks of transformers 4.40.2 with torch 2.4.1 under the trace: 25,981,440 and 24,303,104
    bytes."""
    config = dict(families()[family].examples[0])
    found = estimate(
        config, versions="transformers=4.40,torch=2.4", seq=256, batch=2, framework="transformers"
    )
    assert found.memory.allocated == pytest.approx(
        {"phi": 25_981_440, "stablelm": 24_303_104}[family], rel=2e-3
    )


GROUPED = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# by the trace of transformers 4.47.1 with torch 2.13: a step of two sequences of 512 tokens, and
# four tokens behind 1,024
SEEN = {
    "qwen2": (93_602_816, 23_288_320),
    "mistral": (91_683_328, 23_282_688),
    "starcoder2": (72_706_560, 22_253_056),
    "llama": (89_390_080, 22_234_112),
}


@pytest.mark.parametrize("family", SEEN)
def test_groups_are_repeated_for_flash_attn(family: str) -> None:
    """But Llama's; and Mistral's logits are made fp32 by the model itself, whose own then go."""
    config = {"model_type": family, **GROUPED} | (
        {} if family in ("llama", "qwen2") else {"sliding_window": None}
    )
    versions = "transformers=4.47.1,accelerate=1.2.1,peft=0.14.0,trl=0.13.0"
    step = estimate(
        config,
        versions=versions,
        attention="flash-attn-2",
        batch=2,
        seq=512,
        framework="transformers",
    )
    answer = estimate(
        config,
        versions=versions,
        attention="flash-attn-2",
        task="inference",
        seq=1024,
        new_tokens=4,
    )
    assert (step.memory.allocated, answer.memory.allocated) == pytest.approx(SEEN[family], rel=1e-3)
    newer = estimate(
        config,
        versions="transformers=4.51.3",
        attention="flash-attn-2",
        task="inference",
        seq=1024,
        new_tokens=4,
    )
    assert (newer.memory.allocated < 0.97 * answer.memory.allocated) is (family != "llama")


@pytest.mark.parametrize("of", [{}, {"unsloth": "loss"}, {"framework": "litgpt"}])
@pytest.mark.parametrize(("torch", "slices"), [("2.8", 2), ("2.9", 1)])
def test_a_colon_over_all_words_is_a_slice(torch: str, slices: int, of: dict[str, Any]) -> None:
    """Its backward fills a tensor without the last position, between that of the loss and that of
    the slice of positions (ATen/TensorIndexing.h applySlice of 2.8.0 and 2.9.1; transformers, its
    loss by Unsloth, and litgpt's finetune/full.py alike)."""
    found = estimate(
        {"model_type": "mistral", **GROUPED, "sliding_window": None},
        versions=f"transformers=4.47.1,torch={torch}",
        batch=2,
        seq=512,
        **{"framework": "transformers", **of},
    )
    rows = [
        event.size // (2 * 1024 * 4)
        for event in found.memory.tape.events
        if isinstance(event, Alloc) and event.op == "slice" and event.size >= 2 * 511 * 1024 * 4
    ]
    assert rows == [511, 512][-slices:] * 2  # two steps


@pytest.mark.parametrize(
    ("version", "copied", "peak"),
    [("4.48", 511, None), ("4.57.3", 512, 596_669_952), ("5.0", 512, 529_473_024)],
)
def test_granite_moe_made_its_logits_fp32_until_5(
    version: str, copied: int, peak: int | None
) -> None:
    """4.48.1 cut the logits that the model had made fp32; 4.57.3 hands them to the loss function,
    which pads the labels, and returns them; 5.0 returns those of the product. Peaks by the trace of
    4.57.3 and of 5.23, whose loops keep the outputs."""
    found = estimate(
        dict(families()["granitemoe"].examples[0]) | {"vocab_size": 32_000},
        versions=f"transformers={version}",
        framework="transformers",
        batch=2,
        seq=512,
        keep_outputs=True,
    )
    probabilities = {
        event.size
        for event in found.memory.tape.events
        if isinstance(event, Alloc) and event.op == "log_softmax"
    }
    assert probabilities == {2 * copied * 32_000 * 4}
    if peak is not None:
        assert found.memory.allocated == pytest.approx(peak, rel=2e-3)
