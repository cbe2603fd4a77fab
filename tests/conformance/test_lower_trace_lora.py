"""Adapters and packed weights: the formulas against the real PEFT and transformers on meta tensors,
allocation by allocation."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from tests.conformance.grid import grown

from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, families
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Free, Mark, Tape

pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = pytest.mark.torch

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
LLAMA = {"model_type": "llama", **SMALL}
QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": True, **SMALL}
LEAST = 8192  # smaller blocks are flags and scalars, which the formulas leave out
ROOM = 64 * 1024  # what those may sum to
# Labels of what is neither kept for good nor handed in differ between the two where an operation
# stands between two modules.
PASSING = frozenset({"activations", "temporaries", "logits", "workspace", "inputs", "buffers"})

JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"dropout": 0.1},
    {"adapter_dtype": "base"},
    {"adapter_dtype": "base", "dropout": 0.1, "targets": "q_proj,v_proj"},
    {"targets": "q_proj,k_proj,v_proj,o_proj", "checkpointing": "full"},
    {"checkpointing": "full", "dropout": 0.1},
    {"checkpointing": "full", "reentrant": True},
    {"checkpointing": "every", "checkpoint_every": 2},
    {"targets": "down_proj", "rslora": True, "precision": "fp16"},
    {"precision": "bf16-autocast"},
    {"precision": "bf16-autocast", "dropout": 0.1, "checkpointing": "full"},
    {"precision": "autocast-bf16", "targets": "q_proj,up_proj"},
    {"precision": "fp32", "attention": "eager"},
    {"modules_to_save": "lm_head,embed_tokens"},
    {"targets": "q_proj,lm_head", "modules_to_save": "norm"},
    {"accumulate": 2, "clip": 1.0, "optimizer": "adamw_fused"},
    {"method": "freeze", "trainable": "layers.2.,lm_head"},
    {"method": "freeze", "trainable": "norm", "checkpointing": "full"},
    {"method": "qlora"},
    {"method": "qlora", "double_quant": False, "quant": "fp4", "dropout": 0.1},
    {"method": "qlora", "prepare_kbit": False, "checkpointing": "full"},
    {"method": "qlora", "precision": "bf16-autocast", "checkpointing": "full"},
    {"method": "qlora", "quant_compute": "float16", "modules_to_save": "lm_head"},
    {"method": "qlora", "quant_skip": "lm_head,down_proj", "versions": "bitsandbytes=0.49"},
    {"method": "qlora", "framework": "trl", "precision": "bf16-autocast", "versions": "trl=1.5"},
    {
        "method": "qlora",
        "framework": "trl",
        "precision": "bf16-autocast",
        "modules_to_save": "lm_head",
        "versions": "trl=0.25",
    },
    {"method": "qlora", "quant": "int8"},
    {"method": "qlora", "quant": "int8", "prepare_kbit": False, "checkpointing": "full"},
    {
        "method": "qlora",
        "quant": "int8",
        "precision": "bf16-autocast",
        "checkpointing": "full",
        "reentrant": True,
    },
)


def traced(config: dict[str, Any], job: Job) -> Tape:
    from memfit.trace import trace_config

    return trace_config(config, job)


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def peak(tape: Tape) -> tuple[int, Counter[str]]:
    """The highest live sum, and its parts."""
    live: dict[int, Alloc] = {}
    total = best = 0
    parts = Counter[str]()
    for event in tape.events:
        if isinstance(event, Alloc):
            live[event.id] = event
            total += rounded(event.size)
            if total > best:
                best, parts = total, Counter()
                for block in live.values():
                    parts["passing" if block.part in PASSING else block.part] += rounded(block.size)
        elif isinstance(event, Free):
            total -= rounded(live.pop(event.id).size)
    return best, parts


def sections(tape: Tape) -> dict[tuple[str, int, str], Counter[int]]:
    """What each layer allocates in each forward and backward, by size."""
    found: dict[tuple[str, int, str], Counter[int]] = {}
    phase = ("load", 0)
    for event in tape.events:
        if isinstance(event, Mark):
            phase = (event.phase, event.step)
        elif (
            isinstance(event, Alloc) and phase[0] in ("forward", "backward") and event.size >= LEAST
        ):
            layer = re.match(r"(.*?\.\d+)(\.|$)", event.where)
            if layer:
                found.setdefault((*phase, layer[1]), Counter())[event.size] += 1
    return found


def agree(config: dict[str, Any], job: Job, *, layers: bool = True) -> None:
    ours, theirs = lower(build(config), job), traced(config, job)
    (high, parts), (wanted, known) = peak(ours), peak(theirs)
    assert high == pytest.approx(wanted, rel=0.01)
    assert {
        part for part in parts.keys() | known.keys() if abs(parts[part] - known[part]) > ROOM
    } == set()
    if layers:
        one, other = sections(ours), sections(theirs)
        assert {
            place: (one[place] - other[place], other[place] - one[place])
            for place in one
            if one[place] != other[place]
        } == {}
        assert one.keys() == other.keys()


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize(
    "job", JOBS, ids=lambda job: "-".join(str(value) for value in job.values()) or "plain"
)
def test_allocations(config: dict[str, Any], job: dict[str, Any]) -> None:
    """The peak, its parts, and every allocation of every layer. Reentrant checkpoints run a layer's
    recomputation under another name."""
    agree(
        config,
        Job(**{"method": "lora", "batch": 2, "seq": 256, **job}),
        layers=not job.get("reentrant"),
    )


# One of each way in which families hold their linear layers: Conv1D, fused projections, experts in
# stacks, a shared expert, a class of their own, a tower beside.
KINDS = (
    "gpt2",
    "gpt_neox",
    "phi3",
    "glm4",
    "granite",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "granitemoe",
    "falcon",
    "opt",
)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "job",
    [
        {"method": "lora", "checkpointing": "full"},
        {"method": "qlora"},
        {"method": "qlora", "quant": "int8"},
    ],
    ids=str,
)
def test_families(name: str, job: dict[str, Any]) -> None:
    family = next(one for one in families().values() if one.name == name)
    agree({**family.examples[0], "dtype": "bfloat16"}, Job(batch=2, seq=64, **job), layers=False)


@pytest.mark.parametrize(
    "job",
    [{}, {"quant": "int8"}, {"quant": "fp4", "double_quant": False, "precision": "fp32"}],
    ids=str,
)
def test_merging_over_packed_weights(job: dict[str, Any]) -> None:
    """PEFT unpacks each weight, adds to it, takes it over the host and packs it anew: every block
    of it, and how high that comes."""
    config = {key: value for key, value in LLAMA.items() if key != "dtype"}
    wanted = Job(
        **{"method": "qlora", "merge": True, "batch": 1, "seq": 16, "optimizer": "sgd", **job}
    )
    ours, theirs = lower(build(config), wanted), traced(config, wanted)
    assert saved(ours) == saved(theirs)
    assert sum(saved(theirs).values()) > 100
    heights = [
        max(one.allocated for one in memory(tape).timeline if one.phase == "save")
        for tape in (ours, theirs)
    ]
    assert heights[0] == pytest.approx(heights[1], abs=ROOM)


def saved(tape: Tape) -> Counter[int]:
    """What is allocated at the end, by size."""
    phase, found = "", Counter[int]()
    for event in tape.events:
        if isinstance(event, Mark):
            phase = event.phase
        elif isinstance(event, Alloc) and phase == "save" and event.size >= LEAST:
            found[event.size] += 1
    return found


@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe"])
def test_selective_checkpoints_count_the_routers_product(name: str) -> None:
    """An adapter on a router is a product of its two matrices (PEFT's ParamWrapper), which the
    policy counts like every other."""
    config = {**grown(families()[name].examples[0]), "dtype": "bfloat16"}
    job = Job(method="lora", checkpointing="selective", batch=2, seq=384)
    ours, theirs = (peak(tape)[0] for tape in (lower(build(config), job), traced(config, job)))
    assert ours == pytest.approx(theirs, rel=0.002)
