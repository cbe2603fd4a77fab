"""One GPU whose last modules stay in CPU memory or on disk: where each module lies, what comes to
the GPU in a pass, and what is refused. tests/torch/test_device_map.py compares the placement with
transformers' own."""

from __future__ import annotations

from typing import Any

import pytest

from memfit import estimate
from memfit.errors import InputError
from memfit.formats import FORMATS
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build, families
from memfit.parallel.device_map.placement import ON_CPU, ON_DISK, Limit, Unit, places
from memfit.strategy import Split, Strategy
from memfit.tape import Alloc, Free, Tape
from memfit.units import GIB

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYER, TABLE = 2 * (4 * 256 * 256 + 3 * 256 * 704 + 2 * 256), 2 * 4000 * 256
PASSES = 3


def tape(gpu: str, cpu: str = "", **options: Any) -> Tape:
    job = Job(**{"task": "inference", "batch": 1, "seq": 64, "new_tokens": PASSES, **options})
    return lower(build(LLAMA), job, Strategy(split=Split(size=1, gpu=gpu, cpu=cpu)))


def allocations(tape: Tape, op: str) -> list[Alloc]:
    return [event for event in tape if type(event) is Alloc and event.op == op]


def test_the_gpu_keeps_room_for_the_largest_module_to_come() -> None:
    """The head is 2,048,000 bytes, which stay free beside embedding and layers on the GPU."""
    room = 2 * TABLE + 2 * LAYER
    two, one = (
        {
            event.where.split(".")[2]
            for event in allocations(tape(str(size) + "B"), "parameter")
            if ".layers." in event.where
        }
        for size in (room, room - 1)
    )
    assert two == {"0", "1"}
    assert one == {"0"}


def test_each_pass_copies_what_is_not_on_the_gpu_one_module_at_a_time() -> None:
    found = tape(f"{2 * TABLE + LAYER}B")
    moved = allocations(found, "to_device")
    assert sum(event.size for event in moved) == PASSES * (3 * LAYER + 512 + TABLE)
    live: dict[int, int] = {}
    most = 0
    sizes = {event.id: event.size for event in moved}
    for event in found:
        if type(event) is Alloc and event.id in sizes:
            live[event.id] = event.size
        elif type(event) is Free:
            live.pop(event.id, None)
        most = max(most, sum(live.values()))
    assert most == TABLE
    assert not live


@pytest.mark.parametrize(
    "family", ["gpt2", "gemma2", "qwen3_moe", "deepseek_v3", "mamba2", "lfm2", "qwen3_next"]
)
def test_each_pass_copies_every_parameter(family: str) -> None:
    """With nothing on the GPU; a tied table comes twice. Layers of captured graphs come whole."""
    model = build({**families()[family].examples[0], "model_type": family, "dtype": "bfloat16"})
    job = Job(task="inference", batch=1, seq=16, new_tokens=2)
    found = lower(model, job, Strategy(split=Split(size=1, gpu="0", cpu="0")))
    moved = sum(event.size for event in allocations(found, "to_device"))
    whole = sum(
        FORMATS[one.format or "bfloat16"].bytes(one.count)
        for one in model.weights()
        if one.role != "buffer"
    )
    table = 2 * model.vocab * model.width if model.tied else 0
    assert moved == pytest.approx(2 * (whole + table), rel=0.01)


@pytest.mark.parametrize("nothing", ["0", "0GiB", " 0 MB"])
def test_a_limit_of_nothing_is_written_with_or_without_a_unit(nothing: str) -> None:
    assert [*tape(nothing, nothing)] == [*tape("1B", "1B")]


def test_the_cache_of_all_layers_is_on_the_gpu() -> None:
    def cached(one: Tape) -> int:
        return sum(event.size for event in one if type(event) is Alloc and event.part == "kv_cache")

    assert cached(tape("3MB")) == cached(tape("1GiB")) > 0


def test_what_fits_is_as_without_a_device_map() -> None:
    job = Job(task="inference", batch=1, seq=64, new_tokens=PASSES)
    plain = lower(build(LLAMA), job)
    assert [*tape("1GiB")] == [*plain]


def test_the_cpu_keeps_room_too_and_the_rest_lies_on_disk() -> None:
    found = [Unit(path=f"layers.{index}", bytes=10) for index in range(8)]
    limits = [
        Limit(device="gpu", size=30, reserves=True),
        Limit(device=ON_CPU, size=40, reserves=True),
    ]
    where = places([Unit(path="embed", bytes=5), *found], limits)
    assert [where[one.path] for one in found] == ["gpu", *[ON_CPU] * 3, *[ON_DISK] * 4]
    assert where["embed"] == "gpu"


def test_an_estimate_says_what_lies_where() -> None:
    asked = {"task": "inference", "gpu": "rtx-4090", "new_tokens": 2}
    found = estimate("meta-llama/Llama-3.1-8B", use="split=1,gpu=4GiB,cpu=6GiB", **asked)
    notes = [one.message for one in found.problems if "in each pass" in one.message]
    cpu, disk = notes
    assert cpu.startswith(
        "4.9 GiB of weights stay in CPU memory: model.layers.5 to model.layers.16"
    )
    assert disk.startswith("7.1 GiB of weights stay on disk: model.layers.17 to lm_head")
    assert found.host.size == pytest.approx(4.9 * GIB, rel=0.01)
    whole = estimate("meta-llama/Llama-3.1-8B", **asked)
    assert whole.memory.allocated > 15 * GIB
    assert found.memory.allocated == pytest.approx(4.26 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("split=1,gpu=abc", {}, "`abc` is not an amount of memory @ use split.gpu"),
        ("split=1,cpu=-3GiB", {}, "`-3GiB` is not an amount of memory @ use split.cpu"),
        ("split=1,layers=32", {}, "`layers` is for several GPUs"),
        ("split=1,gpu=2GiB", {"task": "train"}, "does not train a model with weights in CPU"),
        ("split=1,gpu=2GiB", {"quant": "nf4"}, "offloaded weights with packed weights"),
        ("split=2,gpu=2GiB", {"gpu": "2xrtx-4090"}, "beside several GPUs"),
        ("split=1", {"gpu": "2xrtx-4090"}, "use `split=2` alone"),
        ("split=2", {"gpu": "4xrtx-4090"}, "use `split=4` alone"),
    ],
)
def test_what_is_refused(use: str, options: dict[str, Any], message: str) -> None:
    asked = {"task": "inference", "gpu": "rtx-4090", "framework": "transformers", **options}
    with pytest.raises(InputError) as bad:
        estimate("meta-llama/Llama-3.1-8B", use=use, **asked)
    assert message in str(bad.value)
