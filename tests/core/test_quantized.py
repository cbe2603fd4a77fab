"""Checkpoints stored quantized: the bytes of their weights, by hand, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

import memfit
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.formats import FORMATS
from memfit.hardware import Cluster, find_gpu
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.model import Model
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Compute, Free
from memfit.techniques import stored

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
PRODUCTS = 2 * (4 * 256 * 256 + 3 * 256 * 512)  # values in the linear layers of both layers
INPUTS = 2 * (6 * 256 + 512)  # of the linear layers, one after the other
REST = 2 * (2 * 1024 * 256 + 5 * 256)  # embedding, head and norms in bf16


def weights(settings: dict[str, Any] | None) -> int:
    config = SMALL if settings is None else {**SMALL, "quantization_config": settings}
    job = Job(task="inference", seq=16, new_tokens=1)
    parts = memory(lower(build(config), job)).parts
    return parts["weights"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, 2 * PRODUCTS),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, PRODUCTS // 16384 * 16388),
        ({"quant_method": "fp8"}, PRODUCTS),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            PRODUCTS // 256 * 133 + 4 * INPUTS,
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, PRODUCTS // 128 * 69),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
            PRODUCTS // 8192 * 4101 + 4 * INPUTS,
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1},
            PRODUCTS // 4096 * 4099 + 4 * INPUTS,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, PRODUCTS // 16 * 9),
    ],
)
def test_stored_bytes(settings: dict[str, Any] | None, expected: int) -> None:
    assert weights(settings) == expected + REST


def test_names_and_patterns_stay_as_they_are() -> None:
    base = {"quant_method": "fp8"}
    half = 4 * 256 * 256  # the attention of one layer, which stays at two bytes
    assert weights({**base, "ignore": ["model.layers.0.self_attn*"]}) == weights(base) + half
    assert weights({**base, "modules_to_not_convert": ["self_attn"]}) == weights(base) + 2 * half


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "quip"},
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": -1},
        {"quant_method": "fp8", "weight_block_size": [7]},
        {"quant_method": 5},
        {},
        {"bits": 4},
    ],
)
def test_what_is_not_known_is_refused(settings: dict[str, Any]) -> None:
    if not settings:
        assert weights(settings) == weights(None)
        return
    with pytest.raises(InputError, match="quantization_config"):
        weights(settings)


def test_rows_hold_what_they_say() -> None:
    assert (
        FORMATS["gptq-4bit-g128"].bytes(4096 * 4096)
        == 4096 * 4096 // 2 + 4096 * 4096 // 128 * 5 // 2
    )


def test_plain_formats_have_the_bits_of_their_names() -> None:
    found = {
        name: (one.block_bytes, int(bits[2]))
        for name, one in FORMATS.items()
        if (bits := re.fullmatch(r"(u?int|b?float|complex)(\d+)", name)) and one.block == 1
    }
    assert found.keys() >= {"int32", "uint8", "float32", "bfloat16", "complex64"}
    assert {name for name, (size, bits) in found.items() if 8 * size != bits} == set()


def test_eight_bits_of_autogptq_are_older_kernels() -> None:
    """An output of zeros in fp32, input and scales cast, the kernel, and a cast back (AutoGPTQ 0.7
    qlinear_cuda_old.py), where ExLlama and GPTQModel take one; for many rows bits are shifted into
    int32, which stand beside the int16 made of them."""
    gpu = Cluster(gpu=find_gpu("a100-sxm-80gb"))
    eight, four = (
        build(
            {
                **SMALL,
                "quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": 128},
            }
        )
        for bits in (8, 4)
    )

    def kernels(model: Model, versions: str) -> int:
        job = Job(task="inference", seq=1, new_tokens=8, versions=versions)
        found = estimate(model, job, gpu, precise=False).generation
        assert found is not None
        return found.kernels

    old, new = "transformers=4.48", "transformers=4.49"
    assert kernels(eight, old) - kernels(four, old) == 2 * 7 * 4
    assert kernels(eight, new) == kernels(four, new)
    tape = lower(eight, Job(task="inference", seq=128, new_tokens=1, versions=old))
    assert {event.size for event in tape if isinstance(event, Alloc) and event.op == "shift"} == {
        4 * 256 * 256,
        4 * 256 * 512,
    }


def quantized(method: str, **more: Any) -> dict[str, Any]:
    settings = {"quant_method": method, "bits": 4, "group_size": 128}
    return {**SMALL, **more, "quantization_config": settings}


def loaded(config: dict[str, Any], **options: Any) -> list[Alloc]:
    job = Job(task="inference", seq=128, new_tokens=2, **options)
    return [event for event in lower(build(config), job) if isinstance(event, Alloc)]


def test_scales_zeros_and_indices_are_blocks_of_their_own() -> None:
    """One matrix of 256 by 256 in 4 bits: values, zero points, scales, and the group of each input
    (AutoGPTQ 0.7 nn_modules/qlinear/qlinear_exllama.py)."""
    query = [
        one.size for one in loaded(quantized("gptq")) if one.where.endswith("0.self_attn.q_proj")
    ]
    assert query[:4] == [256 * 256 // 2, 256 * 256 // 256, 256 * 256 // 64, 4 * 256]
    assert len([one for one in query[:5] if one == 4 * 256]) == 2  # scales happen to be as large
    query = [
        one.size for one in loaded(quantized("awq")) if one.where.endswith("0.self_attn.q_proj")
    ]
    assert query[:3] == [256 * 256 // 2, 256 * 256 // 256, 256 * 256 // 64]


def test_exllama_unpacks_into_one_buffer() -> None:
    """As large as the largest weight in fp16, kept, in place of a block for each product; there is
    none where GPTQModel runs, and none for 8 bits."""
    old = loaded(quantized("gptq"), versions="transformers=4.48")
    assert [one.size for one in old if one.op == "temp_dq"] == [2 * 256 * 512]
    assert not [one for one in old if one.op == "dequantize"]
    new = loaded(quantized("gptq"), versions="transformers=4.49")
    assert not [one for one in new if one.op == "temp_dq"]
    assert [one for one in new if one.op == "dequantize"]
    sorted_rows = quantized("gptq")
    sorted_rows["quantization_config"]["desc_act"] = True
    state = [one.size for one in loaded(sorted_rows, versions="transformers=4.48")]
    assert 2 * 2048 * 512 in state


def test_exllamas_second_kernels_keep_one_scratch_block() -> None:
    """The largest weight in fp16 and fp32 outputs for 8 sequences of 2,048 tokens: 864 + 135 MiB
    for a model of 13 B, whose widest matrix is 5,120 by 13,824; and two orders for each matrix."""
    chosen = quantized("gptq")
    chosen["quantization_config"]["exllama_config"] = {"version": 2}
    found = loaded(chosen, versions="transformers=4.35")
    scratch = [one.size for one in found if one.op == "scratch"]
    assert scratch == [512 * 2048 * 8 * 4 + 2 * 256 * 512 + 2 * 128]
    assert not [one for one in found if one.op in ("temp_dq", "dequantize", "shift")]
    orders = [one.size for one in found if one.op in ("q_perm", "q_invperm")]
    assert orders.count(2 * 512) == 2 * 2  # down_proj of two layers; other inputs have 256 values
    assert orders.count(2 * 256) == 2 * 2 * 6
    for versions in ("transformers=4.49", "transformers=4.57"):  # GPTQModel chooses its own
        assert not [one for one in loaded(chosen, versions=versions) if one.op == "scratch"]
    large = {"hidden_size": 5120, "intermediate_size": 13824}
    block = [
        one.size
        for one in loaded({**chosen, **large}, versions="transformers=4.35")
        if one.op == "scratch"
    ]
    assert block == [(864 + 135) * 2**20 + 256]


@pytest.mark.parametrize("off", [{"use_exllama": False}, {"disable_exllama": True}])
def test_without_exllama_four_bits_are_shifted_by_torch(off: dict[str, bool]) -> None:
    """Above 127 rows: int32, int8 twice, a difference and the product in fp16 (AutoGPTQ 0.7
    nn_modules/qlinear/qlinear_cuda_old.py); with sorted rows scales and zeros of each value."""
    chosen = quantized("gptq")
    chosen["quantization_config"] |= off
    found = loaded(chosen, versions="transformers=4.35")
    query = [one for one in found if one.where.endswith("0.self_attn.q_proj")]
    values = 256 * 256
    blocks = [(one.op, one.size // values) for one in query if one.size >= values]
    unpacked = [one for one in blocks if one[0] not in ("linear", "cublas")]
    assert unpacked == [("shift", 4), ("to", 1), ("bitwise_and", 1), ("sub", 1), ("mul", 2)]
    assert not [one for one in found if one.op in ("temp_dq", "scratch")]
    chosen["quantization_config"]["desc_act"] = True
    found = loaded(chosen, versions="transformers=4.35")
    query = [one for one in found if one.where.endswith("0.self_attn.q_proj")]
    indexed = [one.size for one in query if one.op == "index"]
    assert indexed == [2 * values, values]


def test_exllama_unpacks_with_a_kernel_of_its_own() -> None:
    """The buffer is kept, so no block stands for the kernel that fills it: more than 50 rows are
    unpacked, and the product reads the whole weight; fewer are multiplied packed."""
    job = Job(task="inference", seq=128, new_tokens=2, versions="transformers=4.48")
    query = [
        one
        for one in lower(build(quantized("gptq")), job)
        if isinstance(one, Compute) and one.where.endswith("0.self_attn.q_proj")
    ]
    packed = 256 * 256 // 2 + 256 * 256 // 256 + 256 * 256 // 64
    assert [(one.op, one.flops > 0, one.bytes) for one in query] == [
        ("unpack", False, packed + 2 * 256 * 256),
        ("linear", True, 2 * 2 * 128 * 256 + 2 * 256 * 256),
        ("linear", True, 2 * 2 * 256 + packed),
    ]


def test_older_kernels_read_and_write_what_they_say() -> None:
    """128 rows by torch's own operations, then one by the kernel in fp32: the input, the output,
    and the weight in fp16, or as it is stored with its scales in fp32."""
    chosen = quantized("gptq")
    chosen["quantization_config"]["use_exllama"] = False
    job = Job(task="inference", seq=128, new_tokens=2, versions="transformers=4.35")
    up = [
        one
        for one in lower(build(chosen), job)
        if isinstance(one, Compute) and one.where.endswith("0.mlp.up_proj")
    ]
    values = 256 * 512
    stored = values // 2 + values // 256 + values // 64
    assert [(one.flops, one.bytes) for one in up] == [
        (2 * 128 * values, 2 * (128 * 256 + 128 * 512 + values)),
        (2 * values, stored + 4 * (256 + 512 + values // 128)),
    ]


def test_a_gradient_through_a_stored_weight_reads_it_unpacked() -> None:
    """The output's gradient in, the input's out, and the weight in their dtype."""
    job = Job(method="lora", targets="q_proj", seq=128, batch=1, precision="fp16", packing=True)
    products = [
        (one.flops, one.bytes)
        for one in lower(build(quantized("gptq")), job)
        if isinstance(one, Compute) and one.where.endswith("1.mlp.up_proj") and one.flops
    ]
    values = 256 * 512
    backward = (2 * 128 * values, 2 * (128 * 512 + 128 * 256 + values))
    assert backward in products


def test_fp8_in_blocks_quantizes_its_input_with_a_scale_for_128_values() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = loaded({**SMALL, "quantization_config": fp8})
    down = [one for one in found if one.where.endswith("0.mlp.down_proj") and one.op == "quantize"]
    assert [one.size for one in down] == [128 * 512, 4 * 128 * 4, 512, 4 * 4]  # prompt, one token


def test_autoawq_stores_a_tied_head_apart() -> None:
    """Both are there until the weights are tied, after the last of them, and before rotary tables
    come (which transformers 4.37 has in every layer)."""
    tied = quantized("awq", tie_word_embeddings=True)
    job = Job(task="inference", seq=16, new_tokens=1, versions="transformers=4.37")
    tape = list(lower(build({**tied, "model_type": "qwen2"}), job))
    apart = next(one for one in tape if isinstance(one, Alloc) and one.op == "load")
    assert apart.size == 2 * 1024 * 256
    freed = next(
        place for place, one in enumerate(tape) if isinstance(one, Free) and one.id == apart.id
    )
    weights, tables = (
        [
            place
            for place, one in enumerate(tape)
            if isinstance(one, Alloc) and one.part == part and ".layers." in one.where
        ]
        for part in ("weights", "buffers")
    )
    assert max(weights) < freed < min(tables)
    for config, load in ((tied, "host"), (quantized("awq"), "device_map")):
        assert not [one for one in loaded(config, load=load) if one.op == "load"]
    other = quantized("gptq", tie_word_embeddings=True)
    assert not [one for one in loaded(other, load="device_map") if one.op == "load"]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("mxfp4", 4 + 8 / 32),
        ("mxfp8", 8 + 8 / 32),
        ("nvfp4", 4 + 8 / 16),
        *[(f"int4-g{group}", 4 + 16 / group) for group in (32, 64, 128)],
        *[(f"gptq-4bit-g{group}", 4 + (16 + 4) / group) for group in (32, 64, 128)],
        *[(f"awq-4bit-g{group}", 4 + (16 + 4) / group) for group in (32, 64, 128)],
        *[(f"gptq-8bit-g{group}", 8 + (16 + 8) / group) for group in (32, 64, 128)],
    ],
)
def test_a_value_and_its_part_of_a_scale_and_a_zero_point(name: str, bits: float) -> None:
    assert FORMATS[name].bits == bits
    assert 8 * FORMATS[name].bytes(2**20) == bits * 2**20


SIDE = 4096  # of a square weight
GROUPED: dict[str, tuple[float, ...]] = {
    # bytes for each value: the values, then their scales and zero points, in tensors of their own
    "mxfp4": (1 / 2, 1 / 32),
    "mxfp8": (1, 1 / 32),
    "nvfp4": (1 / 2, 1 / 16),
    "fp8-block128": (1, 4 / 128**2),
    **{f"int4-g{group}": (1 / 2, 2 / group) for group in (32, 64, 128)},
    **{f"awq-4bit-g{group}": (1 / 2, 1 / 2 / group, 2 / group) for group in (32, 64, 128)},
    **{f"gptq-4bit-g{group}": (1 / 2, 1 / 2 / group, 2 / group) for group in (32, 64, 128)},
    **{f"gptq-8bit-g{group}": (1, 2 / group, 1 / group) for group in (32, 64, 128)},
    "gptq-4bit-gall": (1 / 2, 1 / 2 / SIDE, 2 / SIDE),
    "gptq-8bit-gall": (1, 2 / SIDE, 1 / SIDE),
}


@pytest.mark.parametrize(("name", "parts"), GROUPED.items())
def test_the_tensors_of_a_packed_weight(name: str, parts: tuple[float, ...]) -> None:
    """GPTQ keeps the group of each input in four bytes more (`g_idx`)."""
    found = FORMATS[name].tensors(SIDE**2, SIDE)
    index = [4 * SIDE] if name.startswith("gptq") else []
    assert list(found) == [*(part * SIDE**2 for part in parts), *index]
    # and a row of one value more has a block more of each
    longer = FORMATS[name].tensors(SIDE**2 + 1, SIDE)
    assert all(more > one for more, one in zip(longer, found[: len(parts)], strict=False))


def test_every_plain_format_is_as_wide_as_its_name() -> None:
    widths = {
        name: int(found[1]) // 8
        for name, one in FORMATS.items()
        if one.name == name
        and name not in GROUPED
        and (found := re.fullmatch(r"[a-z]+?(\d+)(?:_e\dm\d(?:fnu?)?)?", name))
    }
    assert len(widths) == 16
    assert {name: FORMATS[name].bytes(1) for name in widths} == widths
    assert {FORMATS[name].block for name in widths} == {1}
    assert FORMATS["bool"].bytes(1000) == 1000  # torch keeps a byte for each


@pytest.mark.parametrize("twice", [False, True])
def test_weights_of_mlx_are_for_mlx_alone(twice: bool) -> None:
    """mlx-lm names no method: such a model was answered as one of 16 bits."""
    four = {"bits": 4, "group_size": 64}
    config = {**SMALL, "quantization": four, **({"quantization_config": four} if twice else {})}
    with pytest.raises(InputError, match="in MLX's format") as bad:
        build(config)
    assert "--engine mlx" in bad.value.problems[0].hint
    for engine in ("vllm", "sglang", "tgi"):
        with pytest.raises(InputError, match="in MLX's format"):
            memfit.serve(config, engine=engine, gpu="l40s")
    plain = memfit.serve(SMALL, engine="mlx", gpu="m4-max-64gb").figures["weights_gib"]
    assert memfit.serve(config, engine="mlx", gpu="m4-max-64gb").figures["weights_gib"] < plain / 2


WEIGHTS, FRAMEWORK = "config.quantization_config", "job.framework"
REFUSED = {
    # what is stored, the job, and where something is said: errors, warnings and notes
    ("", "transformers", "full"): [],
    ("fp8", "transformers", "full"): [],
    ("fp8", "transformers", "lora"): [],
    ("fp8", "megatron", "full"): [("note", WEIGHTS)],
    ("fp8", "megatron", "inference"): [("error", FRAMEWORK)],
    ("gptq", "megatron", "lora"): [("error", FRAMEWORK)],
    ("fp8", "torchtune", "full"): [("error", FRAMEWORK)],
    ("gptq", "transformers", "full"): [("error", "job.method")],
    ("awq", "trl", "full"): [("error", "job.method")],
    ("gptq", "transformers", "lora"): [],
    ("gptq", "transformers", "qlora"): [("error", "job.quant")],
    ("gptq", "transformers", "inference"): [],
    ("fp8", "transformers", "qlora"): [("error", "job.quant")],
    ("modelopt", "transformers", "lora"): [("error", WEIGHTS)],
    ("modelopt", "transformers", "inference"): [("warning", WEIGHTS)],
    ("compressed-tensors", "transformers", "inference"): [("warning", WEIGHTS)],
    ("gguf", "transformers", "lora"): [("note", "model")],
    ("gguf", "transformers", "inference"): [("note", "model")],
}


@pytest.mark.parametrize("asked", REFUSED, ids=" ".join)
def test_what_is_said_of_weights_that_are_stored_quantized(asked: tuple[str, str, str]) -> None:
    name, framework, method = asked
    options = {"task": "inference"} if method == "inference" else {"method": method}
    gguf = name == "gguf"
    config = {"quantization_config": {"quant_method": name}} if name and not gguf else {}
    program: Any = SimpleNamespace(
        job=Job(framework=framework, **options),
        model=SimpleNamespace(config=config, stored="Q4_K_M" if gguf else ""),
    )
    assert [(one.level, one.where) for one in stored.check(program)] == REFUSED[asked]


@pytest.mark.parametrize(
    ("version", "packed"), [("5.16", False), ("5.17", True), ("5.18", True), ("4.57", False)]
)
def test_the_blocks_of_a_gguf_lie_as_stored_since_a_version(version: str, packed: bool) -> None:
    """transformers 5.17 quantizers/quantizer_gguf.py; before it and in training a file is
    dequantized."""
    for options, stays in (({"task": "inference"}, packed), ({"method": "lora"}, False)):
        program: Any = SimpleNamespace(
            job=Job(versions=f"transformers={version}", **options),
            model=SimpleNamespace(config={}, stored="Q4_K_M"),
        )
        assert stored.stays(program) is stays
        (said,) = stored.check(program)
        assert ("dequantize" in said.message) is not stays
    program.model.stored = ""
    assert stored.stays(program) is False
