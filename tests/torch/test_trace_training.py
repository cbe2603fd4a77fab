"""Training as CUDA would run it: what the parts hold, which kernels are chosen, what their hidden
buffers are."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.core.tapes import alive as alive_at  # noqa: E402
from tests.torch.small import CONFIGS  # noqa: E402

from memfit import kernels  # noqa: E402
from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import lower  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.simulate.memory import memory  # noqa: E402
from memfit.tape import Alloc, Mark, Tape, check  # noqa: E402
from memfit.trace import trace_config  # noqa: E402
from memfit.trace.peek import alive, peak  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
LLAMA = CONFIGS["llama"]
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
CUBLAS = 2 * 8519680  # one for the forward thread, one for autograd's
HOPPER = SimpleNamespace(name="H100", sm=(9, 0), sms=132, memory=85_000_000_000)


def traced(
    config: dict[str, Any] = LLAMA,
    *,
    layers: int | None = None,
    steps: int = 2,
    gpu: Any = None,
    keep_outputs: bool = False,
    **job: Any,
) -> Tape:
    tape = trace_config(
        config,
        Job(**{"batch": 2, "seq": 64} | job),
        layers=layers,
        steps=steps,
        gpu=gpu,
        keep_outputs=keep_outputs,
    )
    check(tape)
    return tape


def allocations(tape: Tape, op: str) -> list[Alloc]:
    return [event for event in tape.events if isinstance(event, Alloc) and event.op.startswith(op)]


def test_an_8b_model_in_seconds_peaks_at_five_times_its_weights() -> None:
    start = time.process_time()
    tape = traced(LLAMA_8B, batch=1, seq=2048)
    taken = time.process_time() - start
    size, at, moment = peak(tape)
    weights = 8_030_261_248 * 2
    assert 5 * weights + CUBLAS <= size <= 5 * weights + CUBLAS + (1 << 20)
    assert moment.startswith("step")
    parts: Counter[str] = Counter()
    for block in alive(tape, at):
        parts[block.part] += block.size
    assert parts["weights"] == weights
    assert parts["gradients"] == weights
    assert parts["optimizer"] == 2 * weights
    assert parts["temporaries"] == weights  # the list of square roots of AdamW's foreach step
    assert taken < 20  # two seconds on an idle machine


def test_layers_are_alike() -> None:
    peaks = [peak(traced(layers=count))[0] for count in (2, 3, 4)]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


def test_a_trace_can_be_repeated() -> None:
    assert (
        traced(method="lora", checkpointing="full").events
        == traced(method="lora", checkpointing="full").events
    )


def test_the_second_step_is_the_steady_one() -> None:
    tape = traced(steps=3)
    ends = [
        index
        for index, event in enumerate(tape.events)
        if isinstance(event, Mark) and event.phase == "prepare"
    ]
    live = [sum(-(-block.size // 512) * 512 for block in alive(tape, index)) for index in ends[1:]]
    assert live[0] == live[1]


def test_outputs_that_are_kept_cost_the_logits() -> None:
    tokens = 2 * 64 * 1000 * 2
    assert peak(traced(keep_outputs=True))[0] - peak(traced())[0] == pytest.approx(tokens, abs=512)


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"precision": "bf16-autocast"},
        {"checkpointing": "full"},
        {"method": "lora", "zero_grad": "keep"},
    ],
)
def test_a_loop_that_keeps_outputs_by_both(job: dict[str, Any]) -> None:
    """The peak, what stands when the optimizer begins, and what stays when the loop is over,
    formulas beside the real code."""
    options = Job(**{"batch": 2, "seq": 64, "optimizer": "sgd", "keep_outputs": True, **job})
    ours, real = lower(build(LLAMA), options), trace_config(LLAMA, options)
    assert memory(ours).allocated == pytest.approx(memory(real).allocated, rel=0.005)
    assert memory(ours).end == pytest.approx(memory(real).end, rel=0.001)
    held = [sum(block.size for block in alive_at(tape, "step", 1)) for tape in (ours, real)]
    assert held[0] == pytest.approx(held[1], rel=0.005)


def test_a_tied_head_adds_a_second_gradient_of_the_embedding() -> None:
    tied = traced({**LLAMA, "tie_word_embeddings": True}, steps=1)
    shape = [
        one
        for one in tied.events
        if isinstance(one, Alloc) and one.formula == "[1000, 64] bfloat16"
    ]
    assert Counter(one.op for one in shape)["embedding_dense_backward.default"] == 1
    assert sum(one.op == "mm.default" for one in shape) == 1  # the head's own, added into


def test_dropout_keeps_one_byte_a_value() -> None:
    masks = [
        one
        for one in allocations(traced(CONFIGS["gpt2"], steps=1), "native_dropout.default")
        if str(one.formula).endswith("bool")
    ]
    assert masks
    assert all(one.part == "activations" for one in masks)


def test_flash_attention_backward_holds_what_the_row_says() -> None:
    tape = traced(steps=1)
    row = kernels.flash_backward(2, 4, 2, 64, 64, 16)
    name = "_scaled_dot_product_flash_attention_backward.default: "
    for buffer, size in (
        ("dq_accum", row.dq_accum),
        ("softmax_d", row.softmax_d),
        ("dk_expanded", row.dk_expanded),
    ):
        assert [one.size for one in allocations(tape, name + buffer)] == [size, size]


def test_padding_takes_the_efficient_kernel_and_repeats_keys() -> None:
    tape = traced(packing=False, steps=1)
    assert allocations(tape, "_scaled_dot_product_efficient_attention.default")
    assert not allocations(tape, "_scaled_dot_product_flash_attention")


@pytest.mark.parametrize("version", [2, 3])
def test_flash_attn_saves_and_holds_what_its_row_says(version: int) -> None:
    tape = traced(attention=f"flash-attn-{version}", steps=1)
    inside = [
        one.size
        for one in tape.events
        if isinstance(one, Alloc)
        and one.where == "model.layers.0.self_attn"
        and one.op.startswith("empty.")
    ]
    kept, held = inside[:2], inside[2:]
    assert kept == [
        2 * 4 * 64 * 4,
        16 if version == 2 else 4,
    ]  # statistics, and the state of random numbers or a semaphore
    if version == 2:
        row = kernels.flash_attn_2_backward(2, 4, 2, 64, 64, 16)
        assert held == [row.softmax_d, row.dq_accum, row.dk_expanded, row.dv_expanded]
    else:
        assert held == [
            size
            for size in kernels.flash_attn_3_backward(2, 4, 2, 64, 64, 16, hopper=False)
            if size
        ]


def test_flash_attn_takes_padding_out() -> None:
    tape = traced(attention="flash-attn-2", packing=False, steps=1)
    assert [
        one for one in allocations(tape, "index.Tensor") if one.formula == "[126, 4, 16] bfloat16"
    ]  # one token of 64 is padding


def test_hopper_takes_cudnn_and_larger_workspaces() -> None:
    tape = traced(gpu=HOPPER, steps=1)
    assert allocations(tape, "_scaled_dot_product_cudnn_attention.default")
    workspaces = [
        one.size for one in tape.events if isinstance(one, Alloc) and "cublas workspace" in one.op
    ]
    assert workspaces == [32 << 20, 32 << 20]


def test_fp32_with_grouped_queries_is_left_to_the_math_kernel() -> None:
    assert allocations(traced(precision="fp32", steps=1), "_safe_softmax.default")


def test_checkpointing_keeps_the_inputs_of_layers_only() -> None:
    config = {**LLAMA, "num_hidden_layers": 8}
    plain, kept = (
        peak(traced(config, seq=256, checkpointing=mode))[0] for mode in ("none", "full")
    )
    assert kept < plain
    half = peak(traced(config, seq=256, checkpointing="every", checkpoint_every=2))[0]
    assert kept < half < plain


def test_layers_are_marked_in_both_directions() -> None:
    marks = [
        (event.phase, event.where)
        for event in traced(steps=1).events
        if isinstance(event, Mark) and event.where
    ]
    assert marks == [
        ("forward", "model.layers.0"),
        ("forward", "model.layers.1"),
        ("backward", "model.layers.1"),
        ("backward", "model.layers.0"),
    ]


def test_gradients_know_their_module() -> None:
    blocks = [one for one in traced(steps=1).events if isinstance(one, Alloc)]
    grads = [one for one in blocks if one.part == "gradients"]
    assert {one.where for one in grads} >= {
        "lm_head",
        "model.norm",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    }
    assert sum(one.size for one in grads) == sum(
        one.size for one in blocks if one.part == "weights"
    )


def test_a_scaled_step_is_taken() -> None:
    tape = traced(precision="autocast-fp16", clip=1.0, steps=1)
    assert any(isinstance(one, Alloc) and one.part == "optimizer" for one in tape.events)


def test_routing_is_balanced_unless_a_skew_is_asked_for() -> None:
    config = CONFIGS["qwen3_moe"]
    assert (
        peak(traced(config))[0] == peak(traced(config, router_skew=2.0))[0]
    )  # the grouped product does not depend on it


@pytest.mark.parametrize(
    ("job", "where"),
    [
        ({"framework": "megatron"}, "job.framework"),
        ({"checkpointing": "selective", "reentrant": True}, "job.reentrant"),
        ({"loss": "chunked"}, "job.loss"),
        ({"versions": "torch=2.1"}, "job.versions"),
        ({"method": "freeze", "trainable": "nothing"}, "job.trainable"),
        ({"method": "lora", "targets": "nothing"}, "job.targets"),
        ({"quant": "nf4"}, "job.quant"),
        ({"task": "inference", "cache": "quantized", "cache_bits": 3}, "job.cache_bits"),
    ],
)
def test_what_cannot_be_traced_is_said(job: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as bad:
        traced(**job)
    assert [problem.where for problem in bad.value.problems] == [where]


def test_kernels_that_are_not_installed_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as where they are not
    for job in ({"loss": "liger"}, {"liger": True}):
        with pytest.raises(InputError) as bad:
            traced(**job)
        assert [problem.where for problem in bad.value.problems] == ["job.liger"]


def test_all_that_cannot_be_traced_is_said_at_once() -> None:
    with pytest.raises(InputError) as bad:
        traced(framework="megatron", unsloth="norms")
    assert {problem.where for problem in bad.value.problems} == {"job.framework", "job.unsloth"}


def test_an_unknown_model_type_is_said() -> None:
    with pytest.raises(InputError, match="`nonesuch`"):
        traced({"model_type": "nonesuch"})


def test_the_programs_own_failure_is_an_input_error() -> None:
    with pytest.raises(InputError, match="the model's code failed with"):
        traced({**LLAMA, "num_key_value_heads": 3})


@pytest.mark.parametrize(("length", "published"), [(4000, 3.99), (8000, 15.48)])
def test_math_attention_against_a_published_peak(length: int, published: float) -> None:
    """ComfyUI pull request 15135: fp16, 28 query and 4 kv heads of 128, a mask and enable_gqa, GiB
    beyond the inputs."""
    from memfit.trace import cuda, kernels_of
    from memfit.trace.recorder import Recorder

    device = cuda.Device()
    kernels_of.install(device)
    recorder = Recorder(device)
    with cuda.pretended(device), recorder, torch.no_grad():
        query, key = (
            torch.empty(1, heads, length, 128, device="cuda", dtype=torch.float16)
            for heads in (28, 4)
        )
        mask = torch.empty(1, 1, length, length, device="cuda", dtype=torch.float16)
        inputs = sum(block.size for block in recorder.blocks.values())
        torch.nn.functional.scaled_dot_product_attention(
            query, key, key, attn_mask=mask, enable_gqa=True
        )
    found = peak(Tape(events=recorder.finished(), source="trace"))[0] - inputs
    assert found / 2**30 == pytest.approx(published, rel=0.01)


def test_rms_norm_is_one_kernel_with_a_graph_and_without() -> None:
    """Where its operands have one dtype: the result and a number a row; with a graph the input is
    kept, not what it is made of."""
    from memfit.trace import cuda, kernels_of
    from memfit.trace.recorder import Recorder
    from memfit.trace.rules import References, learn

    device = cuda.Device(version=(2, 13))
    if not References.known[0]:
        learn(Recorder(device))
    kernels_of.install(device)
    source, weight = (
        torch.empty(shape, device="meta", requires_grad=True) for shape in ((64, 512), (512,))
    )
    for graph in (True, False):
        recorder = Recorder(device)
        with cuda.pretended(device), torch.set_grad_enabled(graph), recorder:
            out = torch.nn.functional.rms_norm(source, (512,), weight, 1e-6)
            if graph:
                out.sum().backward()
        sizes = [
            event.size
            for event in recorder.finished()
            if isinstance(event, Alloc) and "rms_norm." in event.op
        ]
        assert sizes[:2] == [64 * 512 * 4, 64 * 4]
        assert source.grad is not None


def test_sums_of_many_short_rows_are_made_in_parts_by_both() -> None:
    """Layer norms of more than 65536 tokens: a part for the weight's gradient and one for the
    bias', in as many places."""
    gpt2, job = {**CONFIGS["gpt2"], "n_positions": 1024, "vocab_size": 200}, Job(batch=80, seq=1000)
    tapes = lower(build(gpt2), job), traced(gpt2, batch=80, seq=1000)
    parts = [
        [
            one.size
            for one in tape
            if isinstance(one, Alloc) and one.part == "workspace" and "norm" in one.op
        ]
        for tape in tapes
    ]
    assert parts[0] == parts[1] == [2500 * 64 * 2] * 20
    assert memory(tapes[0]).allocated == memory(tapes[1]).allocated
