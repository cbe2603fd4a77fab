"""bitsandbytes in the formulas: stored bytes, what undoing them holds, what is skipped and cast up,
how it loads. Sizes by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.core.tapes import LLAMA, alive, made, peak, sizes, tape_of, walked

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.formats import FORMATS
from memfit.hardware import GPU, Cluster
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.source import from_catalog
from memfit.simulate.memory import memory
from memfit.tape import Alloc

T, D, F, V, KV, R = (
    2 * 128,
    256,
    512,
    1024,
    128,
    16,
)  # tokens, width, feed-forward, vocabulary, keys, rank
N = F * D  # values of one feed-forward matrix
OLD = "bitsandbytes=0.45"


def stored(path: str, **job: Any) -> Counter[int]:
    """Weights of one module when training or inference begins."""
    begin = "prefill" if job.get("task") == "inference" else "forward"
    return sizes(
        [
            block
            for block in alive(tape_of(**job), begin)
            if block.part == "weights" and block.where == f"model.layers.1.{path}"
        ]
    )


# ------------------------------------------------------------------------------------ stored bytes
@pytest.mark.parametrize(
    ("job", "expected"),
    [
        # two values a byte, an fp32 scale for 64 values, the 16 values of the code
        ({"quant": "nf4", "double_quant": False}, {N // 2: 1, 4 * N // 64: 1, 64: 1}),
        ({"quant": "fp4", "double_quant": False}, {N // 2: 1, 4 * N // 64: 1, 64: 1}),
        # scales in bytes, one more fp32 for 256 of them, their mean, and a table of 256 for them
        ({"quant": "nf4"}, {N // 2: 1, N // 64: 1, 4 * N // 64 // 256: 1, 4: 1, 64: 1, 1024: 1}),
        # which was one for all before 0.46
        (
            {"quant": "nf4", "versions": OLD},
            {N // 2: 1, N // 64: 1, 4 * N // 64 // 256: 1, 4: 1, 64: 1},
        ),
        # a byte a value, an fp32 scale a row
        ({"quant": "int8"}, {N: 1, 4 * F: 1}),
        ({"quant": "none"}, {2 * N: 1}),
    ],
)
def test_stored(job: dict[str, Any], expected: dict[int, int]) -> None:
    assert stored("mlp.up_proj", task="inference", **job) == expected


def test_llama_3_8b_in_nf4() -> None:
    """224 matrices of 6.98 billion values at half a byte and a 64th of one, 7 small tensors each,
    and 2.10 GB left in 16 bits."""
    config = {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    tape = lower(
        build(config), Job(task="inference", quant="nf4", batch=1, seq=16, new_tokens=0), None
    )
    held = sum(
        -(-block.size // 512) * 512 for block in alive(tape, "prefill") if block.part == "weights"
    )
    values = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    small = 32 * 7 * (512 + 512 + 1024)  # code, mean, table
    second = 32 * sum(
        -(-4 * (count // 64 // 256) // 512) * 512
        for count in [4096 * 4096] * 2 + [1024 * 4096] * 2 + [4096 * 14336] * 3
    )
    rest = 2 * (2 * 128256 * 4096 + 65 * 4096)
    assert held == values // 2 + values // 64 + second + small + rest + 1024
    assert 5.30 < held / 2**30 < 5.32


# ------------------------------------------------------------------------------ what is left alone
ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}


@pytest.mark.parametrize(
    ("job", "skipped"),
    [
        ({}, {"lm_head"}),
        ({"quant_skip": "lm_head,down_proj"}, {"lm_head", "mlp.down_proj"}),
        ({"quant_skip": "model.layers.1.mlp"}, set()),
        (
            {"quant_skip": "model.layers.0.mlp,lm_head"},
            {"lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
        ),
        ({"quant_skip": "mlp"}, set()),
        ({"quant_skip": "o_proj,v_proj,k_proj,q_proj"}, ATTENTION),
        ({"quant_skip": "proj"}, {*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
    ],
)
def test_skipped(job: dict[str, Any], skipped: set[str]) -> None:
    """The head by itself; names that are given take its place. They are beginnings or ends of
    paths."""
    blocks = alive(tape_of(task="inference", quant="nf4", **job), "prefill")
    whole = {
        block.where
        for block in blocks
        if block.part == "weights" and block.op == "parameter" and len(block.formula) == 3
    }
    found = {
        where.partition("layers.0.")[2] or where
        for where in whole
        if "layers.0." in where or "layers" not in where
    }
    assert found - {"model.embed_tokens"} == skipped


def test_a_linear_class_of_its_own_is_passed_over_from_5_on() -> None:
    config = {
        "model_type": "falcon",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1024,
        "dtype": "bfloat16",
    }
    packed = [
        [
            block
            for block in made(
                tape_of(config, task="inference", quant="int8", versions=versions), "load"
            )
            if block.op == "quantize"
        ]
        for versions in ("", "transformers=4.57")
    ]
    assert packed[0] == []
    assert len(packed[1]) == 2 * 4 * 2


# ------------------------------------------------------------------------------- forward, backward
def temporaries(where: str, phase: str = "forward", **job: Any) -> list[tuple[str, int]]:
    blocks = made(
        tape_of(**{"method": "qlora", "targets": "q_proj", "prepare_kbit": False, **job}),
        phase,
        where,
    )
    return [(block.op, block.size) for block in blocks]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        # 0.50: scales in fp32, then with their mean; the weight in the input's dtype; both stay
        # until the product is made
        (
            {},
            [
                ("dequantize_blockwise", 4 * N // 64),
                ("add", 4 * N // 64),
                ("dequantize_4bit", 2 * N),
                ("linear", 2 * T * D),
            ],
        ),
        ({"double_quant": False}, [("dequantize_4bit", 2 * N), ("linear", 2 * T * D)]),
        (
            {"versions": OLD},
            [
                ("dequantize_blockwise", 4 * N // 64),
                ("dequantize_4bit", 2 * N),
                ("linear", 2 * T * D),
            ],
        ),
        # in fp16 over bf16: the input is cast, the weight comes in fp16 at once, the output is cast
        # back
        (
            {"quant_compute": "float16", "double_quant": False},
            [
                ("to", 2 * T * F),
                ("dequantize_4bit", 2 * N),
                ("linear", 2 * T * D),
                ("to", 2 * T * D),
            ],
        ),
        # up to 0.49 the weight comes as it was packed, and is cast
        (
            {"quant_compute": "float16", "double_quant": False, "versions": "bitsandbytes=0.49"},
            [
                ("to", 2 * T * F),
                ("dequantize_4bit", 2 * N),
                ("to", 2 * N),
                ("linear", 2 * T * D),
                ("to", 2 * T * D),
            ],
        ),
        # and before 0.47 the input decided, whatever was asked for
        (
            {"quant_compute": "float16", "double_quant": False, "versions": OLD},
            [("dequantize_4bit", 2 * N), ("linear", 2 * T * D)],
        ),
        (
            {"quant_compute": "float32", "double_quant": False},
            [
                ("to", 4 * T * F),
                ("dequantize_4bit", 4 * N),
                ("linear", 4 * T * D),
                ("to", 2 * T * D),
            ],
        ),
        # fp16, a byte a value and a scale a row; sizes and flags of outliers; an int32 product,
        # fp16, and the input's dtype
        (
            {"quant": "int8"},
            [
                ("to", 2 * T * F),
                ("int8_vectorwise_quant", 4 * T),
                ("int8_vectorwise_quant", T * F),
                ("abs", 2 * T * F),
                ("ge", T * F),
                ("any", 1),
                ("int8_linear_matmul", 4 * T * D),
                ("int8_mm_dequant", 2 * T * D),
                ("to", 2 * T * D),
            ],
        ),
        (
            {"quant": "int8", "precision": "fp16"},
            [
                ("int8_vectorwise_quant", 4 * T),
                ("int8_vectorwise_quant", T * F),
                ("abs", 2 * T * F),
                ("ge", T * F),
                ("any", 1),
                ("int8_linear_matmul", 4 * T * D),
                ("int8_mm_dequant", 2 * T * D),
            ],
        ),
    ],
)
def test_forward(job: dict[str, Any], expected: list[tuple[str, int]]) -> None:
    assert temporaries("layers.1.mlp.down_proj", **job) == expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (
            {},
            [
                ("dequantize_blockwise", 4 * N // 64),
                ("dequantize_4bit", 2 * N),
                ("linear", 2 * T * F),
            ],
        ),
        # fp32 activations: the gradient is cast to the compute dtype, the product of it cast back
        (
            {"prepare_kbit": True, "double_quant": False},
            [
                ("to", 2 * T * D),
                ("dequantize_4bit", 2 * N),
                ("linear", 2 * T * F),
                ("to", 4 * T * F),
            ],
        ),
        # which before 0.47 was fp32, so that the weight was cast
        (
            {"prepare_kbit": True, "double_quant": False, "versions": OLD},
            [("dequantize_4bit", 2 * N), ("to", 4 * N), ("linear", 4 * T * F)],
        ),
        ({"quant": "int8"}, [("to", 2 * N), ("mul", 4 * D), ("linear", 2 * T * F)]),
        (
            {"quant": "int8", "prepare_kbit": True},
            [("to", 4 * N), ("mul", 4 * D), ("linear", 4 * T * F)],
        ),
    ],
)
def test_backward(job: dict[str, Any], expected: list[tuple[str, int]]) -> None:
    """The weight is undone once more; sums with other gradients aside."""
    found = [
        one
        for one in temporaries("layers.1.mlp.down_proj", "backward", **job)
        if one[0] != "accumulate"
    ]
    assert found == expected


@pytest.mark.parametrize(("versions", "scales"), [("", 0), (OLD, 7)])
def test_a_single_token_needs_no_unpacked_weight(versions: str, scales: int) -> None:
    """Up to four rows the kernel reads packed weights; before 0.50 it wanted their scales in fp32
    first."""
    tape = tape_of(task="inference", quant="nf4", batch=1, new_tokens=3, versions=versions)
    prompt, token = (
        made(tape, phase, step=step) for phase, step in (("prefill", 0), ("decode", 1))
    )
    assert Counter(block.op for block in prompt)["dequantize_4bit"] == 3 * 7
    assert Counter(block.op for block in token)["dequantize_4bit"] == 0
    assert Counter(block.op for block in token)["dequantize_blockwise"] == 3 * scales


def test_int8_of_old_lays_its_weight_in_tiles_at_first_use() -> None:
    """Two layouts for a moment, then the tiles alone; bytes by rows and by columns, and a copy of
    the output."""
    tape = tape_of(
        task="inference", quant="int8", precision="fp16", new_tokens=2, versions="bitsandbytes=0.43"
    )
    first, later = (
        made(tape, phase, "layers.1.mlp.down_proj", step)
        for phase, step in (("prefill", 0), ("decode", 1))
    )
    counts = 4 * (T * 2 + 1)
    assert [(block.op, block.size) for block in first] == [
        *(("double_quant", size) for size in (4 * T, 4 * F, counts, T * F, T * F)),
        ("transform", N),
        ("transform", T * F),
        ("igemmlt", 4 * T * D),
        ("mm_dequant", 2 * T * D),
        ("mm_dequant", 4 * T),
        ("mm_dequant", 4 * D),
        ("clone", 2 * T * D),
    ]
    assert sizes(later, "transform") == {2 * F: 1}
    weights = [
        block
        for block in alive(tape, "decode", 1)
        if block.part == "weights" and block.where == "model.layers.1.mlp.down_proj"
    ]
    assert sizes(weights) == {N: 1, 4 * D: 1}


def test_pefts_layer_over_four_bits() -> None:
    """The result is cloned, the input cast for the adapter, its product cast before it is added;
    under autocast nothing is cast."""
    tape = tape_of(method="qlora", targets="o_proj", prepare_kbit=False, double_quant=False)
    found = [(block.op, block.size) for block in made(tape, "forward", "layers.1.self_attn.o_proj")]
    base = [("dequantize_4bit", 2 * D * D), ("linear", 2 * T * D), ("clone", 2 * T * D)]
    adapter = [
        ("to", 4 * T * D),
        ("linear", 4 * T * R),
        ("linear", 4 * T * D),
        ("scale", 4 * T * D),
        ("to", 2 * T * D),
    ]
    assert found == [*base, *adapter, ("add", 2 * T * D)]
    tape = tape_of(
        method="qlora",
        targets="o_proj",
        prepare_kbit=False,
        double_quant=False,
        precision="bf16-autocast",
    )
    found = [(block.op, block.size) for block in made(tape, "forward", "layers.1.self_attn.o_proj")]
    weights = [("to", 2 * R * D), ("linear", 2 * T * R), ("to", 2 * D * R)]
    assert found == [
        *base,
        *weights,
        ("linear", 2 * T * D),
        ("scale", 2 * T * D),
        ("add", 2 * T * D),
    ]


@pytest.mark.parametrize(("quant", "kept"), [("int8", 3 * T * D * 2), ("nf4", 0)])
def test_int8_keeps_its_input_in_spite_of_checkpoints(quant: str, kept: int) -> None:
    """Its context holds the input as a plain attribute, which no saved-tensor hook takes away: here
    the norm's output, which three layers share, beside what they are alone in keeping."""
    tape = tape_of(
        method="qlora", quant=quant, prepare_kbit=False, checkpointing="full", targets="o_proj"
    )
    layer = [
        block
        for block in alive(tape, "backward")
        if block.part == "activations" and "layers.1." in block.where
    ]
    norms = [
        block
        for block in layer
        if "norm" in block.where or block.where.rpartition(".")[2] == "self_attn"
    ]
    assert sum(block.size for block in norms) == kept


# ----------------------------------------------------------------- prepare_model_for_kbit_training
def test_preparation_makes_the_rest_fp32() -> None:
    """Embedding, norms and head, one after the other. The hidden states follow, and no kernel for
    fp32 takes heads in groups, so that attention has whole scores
    (ATen/native/transformers/cuda/sdp_utils.cpp)."""
    tape = tape_of(method="qlora", targets="q_proj")
    made_wide = [
        block
        for block in made(tape, "prepare")
        if block.part == "weights" and "q_proj" not in block.where
    ]
    assert sizes(made_wide) == {4 * V * D: 2, 4 * D: 3 * 2 + 1}
    for mark, event, live in walked(tape):
        if mark.phase == "prepare" and isinstance(event, Alloc) and event.where == "lm_head":
            assert sizes(
                [block for block in live.values() if block.where == "model.embed_tokens"]
            ) == {4 * V * D: 1}
    assert sizes(made(tape, "forward", "model.embed_tokens"), "embedding") == {4 * T * D: 1}
    assert sizes(made(tape, "forward", "layers.1.self_attn"), "softmax") == {
        4 * 2 * 4 * 128 * 128: 1
    }
    logits = [block for block in made(tape, "forward", "lm_head") if block.op == "linear"]
    assert sizes(logits) == {4 * T * V: 1}


def test_without_preparation_nothing_changes_dtype() -> None:
    tape = tape_of(method="qlora", targets="q_proj", prepare_kbit=False)
    assert sizes(made(tape, "prepare", "q_proj")) == {4 * R * D: 6}
    assert len(made(tape, "prepare")) == 6
    assert sizes(made(tape, "forward", "model.embed_tokens"), "embedding") == {2 * T * D: 1}


def test_stacked_experts_are_neither_packed_nor_spared() -> None:
    """They are no linear layers, so bitsandbytes leaves them, and the preparation doubles them."""
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    weights = sizes(
        [
            block
            for block in alive(tape_of(config, method="qlora", targets="q_proj"), "forward")
            if block.where.endswith("mlp.experts")
        ]
    )
    assert weights == {4 * 4 * 2 * F * D: 3, 4 * 4 * F * D: 3}


@pytest.mark.parametrize(
    ("job", "width"),
    [
        ({}, 4),
        ({"adapter_dtype": "base"}, 2),
        ({"adapter_dtype": "base", "versions": "peft=0.18"}, 4),
        ({"adapter_dtype": "base", "quant": "int8"}, 4),
    ],
)
def test_dtype_of_adapters_over_packed_weights(job: dict[str, Any], width: int) -> None:
    """Bytes are no dtype to follow; from peft 0.19 on the compute dtype of 4-bit layers is."""
    tape = tape_of(method="qlora", targets="q_proj", prepare_kbit=False, **job)
    assert sizes(made(tape, "prepare", "q_proj")) == {width * R * D: 6}


# ----------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"quant": "nf4", "double_quant": False}, [2 * N, 4 * N // 64, N // 2, 64]),
        # 5: the whole weight, an fp16 copy, scales and bytes; before, it came from the host
        ({"quant": "int8"}, [2 * N, 2 * N, 4 * F, N]),
        ({"quant": "int8", "versions": "transformers=4.57"}, [2 * N, 4 * F, N]),
        (
            {"quant": "int8", "versions": "transformers=4.35,bitsandbytes=0.43"},
            [2 * N, 4 * F, 4 * D, N, N],
        ),
        ({"quant": "none"}, [2 * N]),
    ],
)
def test_a_weight_arrives(job: dict[str, Any], expected: list[int]) -> None:
    assert [
        block.size
        for block in made(tape_of(task="inference", **job), "load", "layers.1.mlp.up_proj")
    ] == expected


PARAMETERS = 2 * V * D + 3 * (2 * D * D + 2 * KV * D + 3 * N + 2 * D) + D
LINEAR = 3 * (2 * D * D + 2 * KV * D + 3 * N)


@pytest.mark.parametrize(
    ("job", "size"),
    [
        ({"task": "inference"}, 2 * PARAMETERS),
        ({"task": "inference", "load": "host"}, 0),
        ({"method": "lora"}, 0),
        ({"method": "lora", "load": "device_map"}, 2 * PARAMETERS),
        ({"method": "qlora"}, 2 * PARAMETERS - 3 * LINEAR // 2),
        ({"method": "qlora", "quant": "int8"}, 2 * PARAMETERS - LINEAR),
        ({"method": "qlora", "versions": "transformers=4.51"}, PARAMETERS),
        ({"task": "inference", "versions": "transformers=4.49"}, 0),
    ],
)
def test_warm_up(job: dict[str, Any], size: int) -> None:
    """One block as large as the model is to be; 4.51 halved whatever was packed."""
    blocks = [block for block in made(tape_of(**job), "load") if block.op == "warmup"]
    assert sum(block.size for block in blocks) == size


@pytest.mark.parametrize(
    ("version", "half", "heads"), [("4.51", True, 2), ("4.57", False, 1), ("5.23", False, 1)]
)
def test_warm_up_of_stored_weights(version: str, half: bool, heads: int) -> None:
    """4.51 halved what any quantizer loads, and did not know that a head is tied (modeling_utils.py
    caching_allocator_warmup, factor 4)."""
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = build({**LLAMA, "tie_word_embeddings": True, "quantization_config": stored})
    tape = lower(
        model,
        Job(task="inference", batch=1, seq=16, new_tokens=0, versions=f"transformers={version}"),
    )
    (block,) = (event for event in tape.events if isinstance(event, Alloc) and event.op == "warmup")
    size = (
        sum(FORMATS[weight.format or "bfloat16"].bytes(weight.count) for weight in model.weights())
        + (heads - 1) * 2 * V * D
    )
    assert block.size == (size // 2 if half else size)


def test_warm_up_leaves_room() -> None:
    gpu = GPU(
        id="small", name="small", memory=int(1.2 * 2**30) + 2**20, memory_range=(2**30, 2**31)
    )
    tape = lower(build(LLAMA), Job(task="inference", batch=1, seq=16), None, Cluster(gpu=gpu))
    assert [
        event.size for event in tape.events if isinstance(event, Alloc) and event.op == "warmup"
    ] == [2**20]


@pytest.mark.parametrize(("family", "more"), [("mixtral", 3), ("granitemoe", 1)])
def test_stacks_of_experts_are_put_together_on_the_gpu(family: str, more: int) -> None:
    """Each expert by itself, gate and up as two stacks, and the one of both; some checkpoints have
    that already."""
    config = {**LLAMA, "model_type": family, "num_local_experts": 4, "num_experts_per_tok": 2}
    blocks = made(
        tape_of(config, task="inference"),
        "load",
        "layers.1.mlp.experts" if family == "mixtral" else "layers.1.block_sparse_moe.experts",
    )
    assert sizes(blocks)[2 * 4 * 2 * F * D] == more
    host = made(tape_of(config, task="inference", load="host"), "load")
    assert sizes(host)[2 * 4 * 2 * F * D] == 3


# ------------------------------------------------------------------------- refused; the whole tape
@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({"quant": "nf4"}, "a quantized weight cannot be trained"),
        (
            {"quant": "int8", "method": "freeze", "trainable": "norm"},
            "a quantized weight cannot be trained",
        ),
        (
            {"method": "qlora", "quant": "int8", "versions": "bitsandbytes=0.43"},
            "not supported yet: training over int8 before bitsandbytes 0.45",
        ),
        (
            {"method": "qlora", "targets": "q_proj", "modules_to_save": "mlp"},
            "a module in `modules_to_save` is quantized",
        ),
        (
            {"method": "qlora", "quant_skip": "q_proj", "loss": "liger"},
            "s fused loss needs an unquantized head",
        ),
    ],
)
def test_refused(job: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        tape_of(**job)


@pytest.mark.parametrize(
    "job",
    [
        {"method": "qlora"},
        {"method": "qlora", "quant": "int8", "checkpointing": "full"},
        {"method": "qlora", "merge": True},
        {"method": "qlora", "quant": "int8", "merge": True},
        {"task": "inference", "quant": "nf4"},
        {"task": "inference", "quant": "int8"},
    ],
)
def test_compact_equals_flat(job: dict[str, Any]) -> None:
    config = {**LLAMA, "num_hidden_layers": 8}
    flat, compact = (tape_of(config, one, **job) for one in (False, True))
    assert memory(compact, None).allocated == memory(flat, None).allocated == peak(flat)


def test_merging_packs_anew() -> None:
    """Unpacked, the product and its scaled copy, the sum, and the sum once more from the host; then
    packed."""
    tape = tape_of(method="qlora", targets="up_proj", double_quant=False, merge=True)
    found = [block.size for block in made(tape, "save", "layers.1.mlp.up_proj", 1)]
    assert found == [2 * N, 4 * N, 4 * N, 4 * N, 4 * N, 4 * N // 64, N // 2, 64]
    *_, (_, _, live) = walked(tape)
    kept = [
        block
        for block in live.values()
        if block.where == "model.layers.1.mlp.up_proj" and block.part == "weights"
    ]
    assert sizes(kept) == {N // 2: 1, 4 * N // 64: 1, 64: 1, 4 * R * D: 1, 4 * F * R: 1}


# ------------------------------------------------------------------------------------ as published
@pytest.mark.parametrize(
    ("job", "published"),
    [
        ({"precision": "bf16"}, 29.0260648727417),
        # input in fp16 and compute dtype at its default: weights come in fp16 and are cast to fp32
        (
            {
                "precision": "fp16",
                "quant": "fp4",
                "double_quant": False,
                "quant_compute": "float32",
            },
            9.543574333190918,
        ),
        # the peak is the load: bytes by columns beside those by rows
        ({"precision": "fp16", "quant": "int8"}, 15.219234466552734),
    ],
)
def test_octocoder(job: dict[str, Any], published: float) -> None:
    """Peaks of torch.cuda.max_memory_allocated that Hugging Face printed in 2023 ("Optimizing LLMs
    for Speed and Memory"), a prompt of 20 tokens and 60 more; the versions are those of the time,
    and what is missing is at most a cuBLAS workspace of the process before."""
    model = build(from_catalog("bigcode/octocoder").config)
    old = Job(
        task="inference",
        batch=1,
        seq=20,
        new_tokens=60,
        logits="all",
        attention="eager",
        versions="transformers=4.35,bitsandbytes=0.41",
        **job,
    )
    found = estimate(model, old).memory.allocated / 2**30
    assert found == pytest.approx(published, abs=8.2 / 1024)
    assert found <= published


@pytest.mark.parametrize(
    ("attention", "published"), [("eager", 37.668193340301514), ("sdpa", 32.617331981658936)]
)
def test_octocoder_with_a_long_prompt(attention: str, published: float) -> None:
    """The same page's prompt of about 5,770 tokens (its number is not printed). nvFuser makes one
    kernel of the scripted softmax, so that two tensors of scores are the peak, not five."""
    model = build(from_catalog("bigcode/octocoder").config)
    old = Job(
        task="inference",
        batch=1,
        seq=5770,
        new_tokens=60,
        logits="all",
        attention=attention,
        precision="bf16",
        versions="transformers=4.33,torch=2.0",
    )
    found = estimate(model, old).memory.allocated / 2**30
    assert found == pytest.approx(published, rel=0.03)
