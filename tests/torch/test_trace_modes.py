"""Autocast, quantized weights and inference in a trace: lists, caches and sizes against what the
libraries state."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.torch.small import CONFIGS  # noqa: E402

from memfit.job import Job  # noqa: E402
from memfit.tape import Alloc, Free, Mark, Tape, check  # noqa: E402
from memfit.trace import autocast, cuda, trace_config  # noqa: E402
from memfit.trace.peek import peak  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LLAMA = CONFIGS["llama"]
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def traced(config: dict[str, Any] = LLAMA, **job: Any) -> Tape:
    tape = trace_config(config, Job(**{"batch": 2, "seq": 64} | job))
    check(tape)
    return tape


def blocks(tape: Tape, **wanted: Any) -> list[Alloc]:
    return [
        one
        for one in tape.events
        if isinstance(one, Alloc)
        and all(getattr(one, key) == value for key, value in wanted.items())
    ]


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without its headers")
@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER),
        ("AT_FORALL_FP32", autocast.WIDE),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.WIDE_OUTPUT),
        ("AT_FORALL_PROMOTE", autocast.PROMOTE),
    ],
)
def test_autocast_lists_are_torchs(macro: str, ours: list[str]) -> None:
    text = HEADER.read_text()
    if f"#define {macro}(_)" not in text:
        pytest.skip("written otherwise in this version")
    body = text.split(f"#define {macro}(_)")[1].split("\n\n")[0]
    names = [".".join(filter(None, found)) for found in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)]
    assert sorted(names) == sorted(ours)


def test_autocast_casts_each_weight_once_a_forward() -> None:
    tape = traced(precision="autocast-bf16", checkpointing="none")
    copies = [
        one
        for one in blocks(tape, op="_to_copy.default", where="model.layers.0.self_attn.q_proj")
        if one.formula == "[64, 64] bfloat16"
    ]
    assert len(copies) == 2  # two steps
    adapted = traced(precision="autocast-bf16", method="lora", checkpointing="full")
    copies = [
        one
        for one in blocks(adapted, op="_to_copy.default", where="model.layers.0.self_attn.q_proj")
        if one.formula == "[64, 64] bfloat16"
    ]
    assert len(copies) == 4  # a frozen weight is not cached: again for every recomputation


def test_autocast_under_its_own_state() -> None:
    weight = torch.empty(8, 4, device="meta", requires_grad=True)
    from memfit.trace.recorder import Recorder

    device = cuda.Device()
    with cuda.pretended(device), autocast.emulated(), Recorder(device):
        source = torch.empty(2, 4, device="cuda")
        assert source.device.type == "cuda"
        with torch.autocast("cuda", dtype=torch.bfloat16):
            product = torch.nn.functional.linear(source, weight)
            assert product.dtype == torch.bfloat16
            assert product.pow(2).dtype == torch.float32
            assert torch.softmax(product, -1).dtype == torch.float32
            assert torch.nn.functional.silu(product).dtype == torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert torch.nn.functional.linear(source, weight).dtype == torch.float32
        assert torch.nn.functional.linear(source, weight).dtype == torch.float32
    assert not autocast._CACHE


def test_outputs_become_fp32_as_accelerate_makes_them() -> None:
    tape = traced(precision="autocast-bf16")
    assert (
        len(blocks(tape, op="_to_copy.default", formula="[2, 64, 1000] float32")) == 4
    )  # in the loss, and after the forward


BIG = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024}


@pytest.mark.parametrize("nested", [False, True])
def test_a_4bit_weight_is_what_bitsandbytes_keeps(nested: bool) -> None:
    tape = traced(BIG, method="qlora", double_quant=nested)
    kept = Counter(
        one.formula for one in blocks(tape, part="weights", where="model.layers.0.mlp.up_proj")
    )
    count = 512 * 1024
    assert kept[f"[{count // 2}, 1] uint8"] == 1
    if nested:
        assert kept[f"[{count // 64}] uint8"] == 1
        assert kept[f"[{count // 64 // 256}] float32"] == 1
        assert kept["[256] float32"] == 1
        assert kept["[] float32"] == 1
    else:
        assert kept[f"[{count // 64}] float32"] == 1
    assert kept["[16] float32"] == 1


def test_old_versions_dequantize_in_the_dtype_of_the_weight() -> None:
    new, old = (
        traced(BIG, method="qlora", seq=256, versions=text) for text in ("", "bitsandbytes=0.45")
    )
    shape = "[1024, 512] bfloat16"
    for tape in (new, old):
        made = [
            one
            for one in blocks(tape, op="empty.memory_format", formula=shape)
            if "mlp" in one.where
        ]
        assert made
        assert all(one.part == "temporaries" for one in made)


def test_kbit_preparation_makes_embeddings_fp32() -> None:
    tape = traced(method="qlora")
    assert len(blocks(tape, part="weights", formula="[1000, 64] float32")) == 2
    assert not blocks(
        traced(method="qlora", prepare_kbit=False), part="weights", formula="[1000, 64] float32"
    )


def test_int8_keeps_its_input_for_a_frozen_weight() -> None:
    tape = traced(method="lora", quant="int8")
    assert blocks(tape, part="weights", formula="[128, 64] int8")
    assert blocks(tape, part="weights", formula="[128] float32")


def test_quantized_conv1d() -> None:
    assert blocks(
        traced(CONFIGS["gpt2"], method="qlora"),
        part="weights",
        where="transformer.h.0.attn.c_attn",
        formula=f"[{64 * 192 // 2}, 1] uint8",
    )


def test_a_dynamic_cache_grows_to_its_length() -> None:
    tape = traced(task="inference", new_tokens=40)
    cached = [
        one for one in blocks(tape, part="kv_cache") if one.where == "model.layers.0.self_attn"
    ]
    assert max(one.size for one in cached) == 2 * 2 * (64 + 40 - 1) * 16 * 2
    steps = [
        event.step for event in tape.events if isinstance(event, Mark) and event.phase == "decode"
    ]
    assert max(steps) == 39


def test_a_static_cache_is_full_from_the_start() -> None:
    cached = blocks(
        traced(task="inference", new_tokens=40, cache="static"),
        part="kv_cache",
        where="model.layers.0.self_attn",
    )
    assert {one.size for one in cached if one.size > 8} == {2 * 2 * (64 + 40 - 1) * 16 * 2}


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "gemma2", "deepseek_v3", "gpt_oss")),
    *((name, {"cache": "static"}) for name in ("llama", "gemma2")),
    ("llama", {"cache": "quantized"}),
    ("llama", {"cache": "none"}),
    ("gpt_oss", {"beams": 3}),
]


@pytest.mark.parametrize(("name", "options"), ANSWERS)
def test_skipping_the_middle_of_an_answer_changes_nothing_but_ids(
    name: str, options: dict[str, Any]
) -> None:
    """Every token of an answer takes the same code; the positions of a prompt, kept by `generate`,
    are as long as what is taken up again."""
    new, ids = 30, 2 * options.get("beams", 1) * (8 + 30) * 8
    job = Job(task="inference", batch=2, seq=8, new_tokens=new, **options)
    whole, skipped = (trace_config(CONFIGS[name], job, decode_all=every) for every in (True, False))
    check(skipped)
    assert len(skipped) < len(whole) / 2
    assert 0 <= peak(skipped)[0] - peak(whole)[0] <= ids + 512
    assert last_token(skipped, new, ids) == last_token(whole, new, ids) != []


PAIRS: dict[str, dict[str, Any]] = {
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "num_heads": 4,
        "num_layers": 2,
        "d_ff": 128,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "d_model": 64,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
        "max_position_embeddings": 128,
    },
    "whisper": {
        "d_model": 64,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
        "max_source_positions": 100,
        "pad_token_id": 0,
    },
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("options", [{}, {"batch": 3, "precision": "fp32"}])
def test_skipping_the_middle_of_an_answer_of_a_decoder_beside_an_encoder(
    kind: str, options: dict[str, Any]
) -> None:
    new = 40
    config = {"model_type": kind, "vocab_size": 600, **PAIRS[kind]}
    job = Job(task="inference", seq=24, new_tokens=new, **{"batch": 2, **options})
    job = job.replace(head="seq2seq-lm")
    whole, skipped = (trace_config(config, job, decode_all=every) for every in (True, False))
    check(skipped)
    assert len(skipped) < len(whole) / 2
    assert peak(skipped)[0] == pytest.approx(peak(whole)[0], rel=0.0005)
    for tokens in (new, new + 1):  # one more: the encoder is a call, too
        assert last_token(skipped, tokens, 512) == last_token(whole, tokens, 512) != []
    assert cached(skipped) == cached(whole) > 0
    steps = [
        {one.step for one in tape if isinstance(one, Mark) and one.phase == "decode"}
        for tape in (whole, skipped)
    ]
    assert steps[0] == {*range(1, new + 1)}
    assert steps[1] == {1, 2, 3, 4, new - 1, new} or steps[1] == {1, 2, 3, new - 1, new}


def cached(tape: Tape) -> int:
    """Bytes of keys and values when they are most."""
    alive, most, now = dict[int, int](), 0, 0
    for event in tape:
        if isinstance(event, Alloc) and event.part == "kv_cache":
            alive[event.id] = event.size
            now += event.size
            most = max(most, now)
        elif isinstance(event, Free):
            now -= alive.pop(event.id, 0)
    return most


def last_token(tape: Tape, new: int, larger: int) -> list[tuple[str, str, int]]:
    """What the model allocates for the last token, in order; what is as small as a row of ids
    aside."""
    found, on = [], False
    for event in tape.events:
        if isinstance(event, Mark):
            on = event.phase == "decode" and event.step == new - 1
        elif isinstance(event, Alloc) and on and event.where and event.size > larger:
            found.append((event.where, event.op, event.size))
    return found


def test_the_trace_runs_every_layer() -> None:
    """Nothing is extrapolated from a layer to the others: twice as many layers, and every further
    one's allocations are its own."""
    few, many = (traced({**LLAMA, "num_hidden_layers": count}) for count in (2, 4))
    paths = {
        re.match(r"model\.layers\.(\d+)", one.where)
        for one in many.events
        if isinstance(one, Alloc)
    }
    assert {found[1] for found in paths if found} == {"0", "1", "2", "3"}

    def inner(tape: Tape, layer: int) -> list[tuple[str, int]]:
        return [
            (one.op, one.size)
            for one in tape.events
            if isinstance(one, Alloc) and one.where.startswith(f"model.layers.{layer}.")
        ]

    assert inner(many, 1) == inner(many, 2) == inner(few, 1) != []


def test_logits_of_the_whole_prompt_when_asked() -> None:
    def prefill(which: str) -> int:
        return max(
            one.size for one in blocks(traced(task="inference", logits=which), part="logits")
        )

    assert prefill("all") == 2 * 64 * 1000 * 2
    assert prefill("last") == 2 * 1000 * 4  # in fp32, for the choice of the token


def test_a_device_map_warms_the_allocator_up() -> None:
    tape = traced(task="inference", new_tokens=0)
    first = next(event for event in tape.events if isinstance(event, Alloc))
    weights = sum(one.size for one in blocks(tape) if one.op == "load")
    assert weights - 2 <= first.size <= weights
    assert not [one for one in blocks(traced(), op="load") if one.size == first.size]


def test_beams_widen_the_cache() -> None:
    one, four = (
        max(
            block.size
            for block in blocks(
                traced(task="inference", new_tokens=4, beams=count), part="kv_cache"
            )
        )
        for count in (1, 4)
    )
    assert four == 4 * one


def test_a_build_with_cuda_never_asks_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers ask `torch.accelerator` for a stream. A build of torch with CUDA would ask the
    driver, and there may be none."""

    def asked(*_: Any) -> Any:
        raise AssertionError("the driver was asked")

    for name in (
        "_accelerator_getStream",
        "_accelerator_getDeviceIndex",
        "_accelerator_synchronizeDevice",
    ):
        monkeypatch.setattr(torch._C, name, asked)
    with cuda.pretended(cuda.Device()):
        assert torch.accelerator.current_accelerator().type == "cuda"
        assert not torch.accelerator.current_stream().is_capturing()
        assert torch.accelerator.current_device_index() == 0
        torch.accelerator.synchronize()
