"""What the formulas write compactly is what they write in full: same peak, same parts, same blocks, same moments."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.job import Job
from memfit.lower import lower, walked
from memfit.lower.expand import expanded
from memfit.model.families import Family, build, families
from memfit.model.modules import Model
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Event, Free, check

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 9, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 3, "seq": 77},
    {"checkpointing": "full"},
    {"method": "lora"},
    {"method": "lora", "checkpointing": "full", "reentrant": True},
    {"method": "qlora"},
    {"precision": "autocast-bf16"},
    {"precision": "fp32", "optimizer": "sgd"},
    {"accumulate": 3},
    {"optimizer": "adamw_fused"},
    {"optimizer": "adafactor"},
    {"evaluate": True},
    {"packing": False, "batch": 2},
    {"task": "inference"},
    {"task": "inference", "cache": "static", "batch": 4},
)


@pytest.mark.parametrize("options", JOBS, ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()) or "plain")
def test_compact_is_flat_in_fewer_events(options: dict[str, Any]) -> None:
    model, job = build(LLAMA), Job(**{"seq": 128, **options})
    compact, flat = lower(model, job, compact=True), lower(model, job)
    check(compact)
    check(flat)
    assert compact.repeats
    assert len(compact) < len(flat)
    one, other = memory(compact), memory(flat)
    assert one.allocated == other.allocated
    assert one.parts == other.parts
    assert one.groups == other.groups
    assert one.timeline == other.timeline
    assert one.end == other.end


def numbered(events: tuple[Event, ...]) -> list[Event]:
    """Blocks by the order in which they come: numbers have no other meaning."""
    ids: dict[int, int] = {}
    out: list[Event] = []
    for event in events:
        if isinstance(event, Alloc):
            ids[event.id] = len(ids)
        out.append(event._replace(id=ids[event.id]) if isinstance(event, (Alloc, Free)) else event)
    return out


def written_out(model: Model, job: Job) -> tuple[Event, ...] | None:
    events, spans, program = walked(model, job, None, compact=True)
    assert spans
    return expanded(events, spans, program.entries, model.prefix)


@pytest.mark.parametrize("options", JOBS, ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()) or "plain")
def test_a_compact_tape_written_out_is_the_walk_through_every_layer(options: dict[str, Any]) -> None:
    model, job = build(LLAMA), Job(**{"seq": 128, **options})
    flat = written_out(model, job)
    assert flat is not None
    assert numbered(flat) == numbered(walked(model, job, None, compact=False)[0])


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
FAMILIES = sorted({family.name: family for family in families().values()}.items())
ALTERNATE = {"cohere2", "exaone4", "olmo3", "smollm3", "gpt_neo"}  # more layers than these tests have before they repeat


@pytest.mark.parametrize("family", [pytest.param(family, id=name) for name, family in FAMILIES if name not in ALTERNATE])
@pytest.mark.parametrize("task", ["finetune", "inference"])
def test_every_family_is_written_out_as_it_is_walked(family: Family, task: str) -> None:
    config = {key: value for key, value in family.examples[0].items() if key != "layer_types"}
    inner = dict(config.get("text_config", config))
    inner.update({key: 8 for key in LAYERS if key in inner})
    config = {**config, "text_config": inner} if "text_config" in config else inner
    model, job = build(config), Job(task=task, seq=16, new_tokens=16) if task == "inference" else Job(seq=16)
    flat = written_out(model, job)
    if flat is None:
        assert (family.name, task) == ("gpt_oss", "inference")  # its cache's windows are not alike in neighbours: layers are walked
        return
    assert numbered(flat) == numbered(walked(model, job, None, compact=False)[0])
