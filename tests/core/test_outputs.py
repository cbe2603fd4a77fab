"""What a model returns beside its loss: a key/value cache that nobody reads, and fp32 copies under
autocast. Sizes by hand, and figures."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.tapes import alive, walked

from memfit.estimate import estimate
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.source import from_catalog
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Tape

B, S, D, V, LAYERS, HEAD = 2, 96, 64, 512, 3, 16
BIGCODE = {
    "model_type": "gpt_bigcode",
    "n_embd": D,
    "n_layer": LAYERS,
    "n_head": D // HEAD,
    "n_positions": 128,
    "vocab_size": V,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": V,
    "intermediate_size": 96,
}
FUSED = 2 * B * S * (D + 2 * HEAD)  # of a layer: queries, and one key/value head


def tape(config: dict[str, Any], **job: Any) -> Tape:
    return lower(build(config), Job(batch=B, seq=S, optimizer="sgd", **job))


def held(config: dict[str, Any], size: int, **job: Any) -> int:
    """Blocks of that size that stand beside the loss."""
    return max(
        sum(one.size == size for one in live.values())
        for _, event, live in walked(tape(config, **job))
        if isinstance(event, Alloc) and event.op == "nll_loss"
    )


@pytest.mark.parametrize(
    ("versions", "framework", "layers"),
    [
        ("transformers=4.48,trl=0.13", "trl", LAYERS),
        ("transformers=4.52,trl=0.21", "trl", LAYERS),
        ("transformers=4.52,trl=0.22", "trl", 0),  # switched off in the call
        ("transformers=4.53,trl=0.13", "trl", 0),  # checkpointing switches it off
        ("transformers=4.48", "transformers", LAYERS),
    ],
)
def test_checkpointed_bigcode_keeps_every_layers_projection(
    versions: str, framework: str, layers: int
) -> None:
    assert (
        held(
            BIGCODE,
            FUSED,
            versions=versions,
            framework=framework,
            checkpointing="full",
            precision="bf16",
        )
        == layers
    )


@pytest.mark.parametrize(
    ("versions", "config", "job", "filled"),
    [
        ("transformers=4.48", LLAMA, {}, True),
        ("transformers=4.44", LLAMA, {}, False),  # only outside of training
        ("transformers=4.42", LLAMA, {}, True),
        ("transformers=4.48", LLAMA, {"checkpointing": "full"}, False),
        ("transformers=4.48", {**LLAMA, "use_cache": False}, {}, False),
        ("transformers=5.23", LLAMA, {}, False),
        ("transformers=4.48,trl=0.22", LLAMA, {"framework": "trl"}, False),
    ],
)
def test_a_cache_holds_keys_and_values_beside_what_is_saved(
    versions: str, config: dict[str, Any], job: dict[str, Any], filled: bool
) -> None:
    """Groups are repeated for the kernel, so that only the cache holds the one key and the one
    value head."""
    size = 2 * B * S * HEAD
    assert held(config, size, versions=versions, precision="bf16", attention="eager", **job) == (
        2 * LAYERS if filled else 0
    )


@pytest.mark.parametrize(
    ("precision", "copies"), [("bf16-autocast", 1), ("autocast-bf16", 1), ("bf16", 0), ("fp32", 0)]
)
def test_accelerate_makes_outputs_fp32_under_autocast(precision: str, copies: int) -> None:
    found = [
        event
        for event in tape(LLAMA, precision=precision).events
        if isinstance(event, Alloc) and event.op == "float" and event.size == 4 * B * S * V
    ]
    assert len(found) == copies * 2  # in each of two steps


@pytest.mark.parametrize(
    ("versions", "pairs"), [("transformers=4.47", LAYERS), ("transformers=4.48", 0)]
)
def test_a_cache_of_tuples_is_made_fp32_too(versions: str, pairs: int) -> None:
    found = [
        event
        for event in tape(LLAMA, precision="bf16-autocast", versions=versions).events
        if isinstance(event, Alloc)
    ]
    assert (
        sum(
            event.op == "float" and event.part == "kv_cache" and event.size == 4 * B * S * HEAD
            for event in found
        )
        == 2 * 2 * pairs
    )


def test_narrow_logits_under_autocast() -> None:
    """log_softmax stays in 16 bits, what nll_loss reads is an fp32 copy, and both wait for the
    backward."""
    begin = [
        one.size
        for one in alive(
            tape(
                BIGCODE,
                precision="bf16-autocast",
                versions="transformers=4.48",
                checkpointing="full",
            ),
            "backward",
        )
    ]
    rows = B * (S - 1)
    assert begin.count(2 * rows * V) == 1
    assert begin.count(4 * rows * V) == 1


SANTACODER = (
    "transformers=4.48.1,torch=2.4.1,peft=0.13.2,accelerate=1.0.1,"
    "bitsandbytes=0.43.3,flash-attn=2.7.3,trl=0.13.0"
)
QLORA = {
    "method": "qlora",
    "precision": "bf16-autocast",
    "quant": "nf4",
    "targets": "c_attn",
    "rank": 16,
    "dropout": 0.1,
    "prepare_kbit": False,
}


@pytest.mark.parametrize(
    ("job", "measured"),
    [
        ({"precision": "bf16", "batch": 8}, 14.1498),
        ({"precision": "bf16", "batch": 8, "unsloth": "rotary,norms,loss"}, 12.6501),
        ({**QLORA, "batch": 8}, 16.2858),
        ({**QLORA, "batch": 8, "unsloth": "rotary,norms,loss,adapters"}, 13.2852),
    ],
)
def test_santacoder_as_measured(job: dict[str, Any], measured: float) -> None:
    """foundation-model-stack/fms-acceleration @876e2ed scripts/benchmarks/refs/a100_80gb.csv, peak
    allocated in GiB."""
    source = from_catalog("bigcode/gpt_bigcode-santacoder")
    options = Job(
        framework="trl",
        task="finetune",
        seq=2048,
        clip=1.0,
        checkpointing="full",
        reentrant=True,
        attention="flash-attn-2",
        versions=SANTACODER,
        **job,
    )
    found = estimate(build(source.config, name=source.name), options).memory.allocated
    assert found / 2**30 == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize(("job", "pairs"), [({}, LAYERS), ({"checkpointing": "full"}, 0)])
def test_a_loop_by_hand_keeps_what_the_model_returns(job: dict[str, Any], pairs: int) -> None:
    """The logits, and the keys and values that each layer's cache copied: until the next forward is
    over, so two of each beside its loss."""
    plain, kept = (tape(LLAMA, precision="bf16", keep_outputs=one, **job) for one in (False, True))
    returned = 2 * B * S * V + 2 * pairs * 2 * B * S * HEAD
    assert memory(kept).end - memory(plain).end == returned
    size = 2 * B * S * V
    most = [
        max(sum(one.size == size for one in live.values()) for _, _, live in walked(found))
        for found in (plain, kept)
    ]
    assert most[1] >= most[0] + 1


@pytest.mark.parametrize(
    ("job", "measured"),
    [
        ({"method": "lora", "rank": 32, "targets": "q_proj,v_proj"}, 6.4489),
        ({"method": "lora", "rank": 64, "targets": "q_proj,v_proj"}, 6.5857),
        ({"method": "full"}, 24.2743),
    ],
)
def test_held_after_a_step_as_measured(job: dict[str, Any], measured: float) -> None:
    """huggingface/peft method_comparison/MetaMathQA @09ba20c4fc, memory_allocated after
    optimizer.step, mean of 5000 steps, in GiB."""
    source = from_catalog("meta-llama/Llama-3.2-3B")
    options = Job(
        batch=4,
        seq=210,
        packing=False,
        zero_grad="keep",
        keep_outputs=True,
        versions="torch=2.13.0,transformers=5.13.1,peft=0.19.2",
        **job,
    )
    found = estimate(build(source.config, name=source.name), options).memory.end
    assert found / 2**30 == pytest.approx(measured, rel=0.002)
