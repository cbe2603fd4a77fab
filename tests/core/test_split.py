"""One process's GPUs that work one after the other: who holds what, counted by hand, and the runs
that ms-swift published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memfit import estimate
from memfit.api.plan import plan
from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.report.text import OUTER, large_parts
from memfit.simulate.memory import Memory, memory
from memfit.strategy import DDP, FSDP, Split, Strategy
from memfit.tape import Alloc

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
HIDDEN = 2 * 128 * 256 * 2  # sequences x tokens x width x bytes
LOGITS = 2 * 128 * 4000


def held(
    rank: int, gpus: int = 2, layers: str = "", compact: bool = False, **options: Any
) -> Memory:
    strategy = Strategy(split=Split(size=gpus, layers=layers), rank=rank)
    return memory(
        lower(
            build(LLAMA),
            Job(**{"batch": 2, "seq": 128, "optimizer": "sgd", **options}),
            strategy,
            compact=compact,
        )
    )


def whole(**options: Any) -> Memory:
    return memory(
        lower(build(LLAMA), Job(**{"batch": 2, "seq": 128, "optimizer": "sgd", **options}))
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpointing": "full"},
        {"checkpointing": "full", "reentrant": True},
        {"method": "lora"},
    ],
)
def test_weights_of_all_gpus_are_those_of_the_model(options: dict[str, Any]) -> None:
    apart = [held(rank, 3, "3/3/2", **options).parts["weights"] for rank in range(3)]
    assert sum(apart) == whole(**options).parts["weights"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpointing": "full"},
        {"checkpointing": "full", "reentrant": True},
        {"accumulate": 4},
    ],
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_compact_tape_tells_the_same(rank: int, options: dict[str, Any]) -> None:
    flat, short = (held(rank, 3, "3/3/2", compact=compact, **options) for compact in (False, True))
    assert (flat.allocated, flat.parts) == (short.allocated, short.parts)


def sizes(rank: int, op: str, **options: Any) -> list[int]:
    strategy = Strategy(split=Split(size=2, layers="4/4"), rank=rank)
    tape = lower(
        build(LLAMA), Job(**{"batch": 2, "seq": 128, "optimizer": "sgd", **options}), strategy
    )
    return [
        event.size
        for event in tape
        if isinstance(event, Alloc)
        and event.op == op
        and event.size in (HIDDEN, 2 * LOGITS, 4 * LOGITS)
    ]


def test_what_goes_from_one_to_the_other() -> None:
    """In each of two steps: the first gets the logits, in fp32 too under autocast, and a gradient;
    the second gets hidden states, and once more where its layer runs again if hooks are
    checkpointed, too (transformers before 5.23). No other layer of a GPU is handed anything."""
    assert sizes(0, "to_device") == 2 * [2 * LOGITS, HIDDEN]
    assert sizes(0, "float", precision="bf16-autocast") == 2 * [4 * LOGITS]
    assert sizes(1, "to_device") == 2 * [HIDDEN]
    assert sizes(1, "to_device", checkpointing="full") == 2 * [HIDDEN]
    assert sizes(1, "to_device", checkpointing="full", versions="transformers=4.57") == 4 * [HIDDEN]


@pytest.mark.parametrize(("transformers", "layers"), [("5.17", "3/5"), ("5.18", "4/4")])
def test_layers_are_dealt_with_room_for_the_head_on_the_first(
    transformers: str, layers: str
) -> None:
    """An equal share is 8.5 MB, and a quarter more than a layer 2.0, than the head 2.6. Embedding
    and room for the head leave 6.4 or 6.9 MB for layers of 1.6 MB."""
    options = {"versions": f"transformers={transformers}"}
    first, second = (held(rank, **options).parts["weights"] for rank in range(2))
    assert first < second
    assert first == held(0, layers=layers, **options).parts["weights"]


@pytest.mark.parametrize(
    ("change", "options", "where"),
    [
        ({"ddp": DDP(size=2)}, {}, "use ddp"),
        ({"fsdp": FSDP(size=2)}, {}, "use fsdp"),
        ({"split": Split(size=2, layers="4/5")}, {}, "use split.layers"),
        ({"split": Split(size=2, layers="a")}, {}, "use split.layers"),
        ({"split": Split(size=9)}, {}, "use split"),
        ({}, {"task": "inference", "beams": 2}, "job"),
        ({}, {"method": "qlora"}, "use split.layers"),
        ({}, {"framework": "torchtune"}, "use split"),
        ({}, {"activation_offload": "streams"}, "job.activation_offload"),
        ({}, {"evaluate": True}, "job"),
        ({}, {"loss": "liger"}, "job.loss"),
    ],
)
def test_what_has_no_formula_is_refused(
    change: dict[str, Any], options: dict[str, Any], where: str
) -> None:
    strategy = replace(Strategy(split=Split(size=2)), **change)
    with pytest.raises(InputError) as caught:
        lower(build(LLAMA), Job(**options), strategy)
    assert where in [problem.where for problem in caught.value.problems]


def test_a_tied_head_is_refused() -> None:
    with pytest.raises(InputError, match="whose head is the embedding"):
        lower(build({**LLAMA, "tie_word_embeddings": True}), Job(), Strategy(split=Split(size=2)))


SWIFT: dict[str, Any] = {
    "batch": 1,
    "method": "lora",
    "targets": "c_attn",
    "precision": "bf16-autocast",
    "attention": "flash-attn-2",
    "packing": False,
    "checkpointing": "full",
    "reentrant": True,
    "accumulate": 16,
    "clip": 1.0,
    "versions": "transformers=4.36,torch=2.1",
    "use": "split=2",
    "gpu": "2xa100-sxm-80gb",
}


@pytest.mark.parametrize(
    ("seq", "gib"), [(512, (67.68, 73.07)), (1024, (70.25, 77.11)), (2048, (73.71, 78.54))]
)
def test_qwen_72b_as_ms_swift_measured_it(seq: int, gib: tuple[float, float]) -> None:
    """Reserved on both GPUs (docs/source_en/LLM/Benchmark.md at b40f31df7^), at whatever lengths up
    to the cap."""
    found = estimate("Qwen/Qwen-72B-Chat", seq=seq, **SWIFT)
    outside = (found.device - found.held) / 2**30
    assert [one.device / 2**30 - outside for one in found.ranks] == pytest.approx(gib, rel=0.07)


def test_what_ran_out_of_memory_does_not_fit() -> None:
    assert estimate("Qwen/Qwen-72B-Chat", seq=4096, **SWIFT).verdict == "no"


def test_tensors_pass_the_host_one_at_a_time() -> None:
    """The largest is the embedding."""
    job = {"gpu": "2xl4", "batch": 2, "seq": 128, "framework": "transformers"}
    assert estimate(LLAMA, use="split=2", **job).host.size == 2 * 4000 * 256
    assert estimate(LLAMA, use="ddp=2", **job).host.size == 2 * build(LLAMA).parameters


def test_a_plan_may_take_it() -> None:
    """13 billion values in 16 bits, which neither GPU holds alone."""
    named = {
        "method": "lora",
        "precision": "bf16",
        "checkpointing": "full",
        "optimizer": "adamw_fused",
        "liger": "no",
    }
    found = plan(
        "meta-llama/Llama-2-13b-hf",
        gpu="2xrtx-4090",
        seq=1024,
        global_batch=1,
        use="split=2",
        **named,
    )
    assert [(row.kind.layout, row.estimate.verdict, row.estimate.time) for row in found.rows] == [
        ("split", "fits", None)
    ]


GENERATES = {"task": "inference", "precision": "bf16", "new_tokens": 8}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_divides_weights_and_cache(cache: str) -> None:
    """Three GPUs hold what one holds, and each the keys and values of its own layers."""
    options = {**GENERATES, "cache": cache}
    parts = [held(rank, gpus=3, **options) for rank in range(3)]
    one = whole(**options)
    for name in ("weights", "kv_cache"):
        assert sum(part.parts[name] for part in parts) == one.parts[name]


def test_logits_of_a_generation_return_to_the_first_gpu() -> None:
    """The last token's: they are computed on the last GPU, chosen from on the first in fp32."""
    sizes = []
    for rank in range(3):
        strategy = Strategy(split=Split(size=3), rank=rank)
        tape = lower(build(LLAMA), Job(**{"batch": 2, "seq": 128, **GENERATES}), strategy)
        made = [one.size for one in tape if isinstance(one, Alloc) and one.part == "logits"]
        sizes.append(set(made))
    row = 2 * 4000  # of two requests
    assert sizes == [{2 * row, 4 * row}, set(), {2 * row}]


def test_a_generation_on_several_gpus_has_no_time() -> None:
    answer = estimate(LLAMA, gpu="2xh100-sxm", use="split", **GENERATES)
    assert answer.fits
    assert "2 NVIDIA" in answer.summary()
    assert {"context", "fragmentation"} == set(OUTER) & set(large_parts(answer))  # no NCCL
    with pytest.raises(InputError, match="with beams, a quantized cache"):
        estimate(LLAMA, gpu="2xh100-sxm", use="split", beams=2, **GENERATES)


def test_where_a_gpu_gets_no_layer_the_hint_is_a_split_that_works() -> None:
    def asked(layers: str) -> str:
        try:
            held(0, 8, layers)
        except InputError as bad:
            return str(bad)
        return ""

    assert "every GPU needs at least one layer" in asked("")
    assert asked("").endswith("use fewer GPUs, or `layers=1/1/1/1/1/1/1/1`")
    assert not asked("1/1/1/1/1/1/1/1")
    assert asked("2/1/1/1/1/1/1/0").endswith("use fewer GPUs")
