"""Frameworks with modelling code of their own: recorded peaks of the real code, and what their
scripts cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.hardware import Cluster, find_gpu
from memfit.job import Job
from memfit.kernels import cublas_workspace
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.memory import Memory, memory
from memfit.tape import Alloc, Free, Mark
from memfit.techniques.framework import FACTS

SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
OLD = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"} | {
    "intermediate_size": 2048
}
LARGE_HEADS = {**SMALL, "head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "qwen2": {**SMALL, "tie_word_embeddings": False},
    "qwen3": {**SMALL, "tie_word_embeddings": False, "head_dim": 64},
    "gemma": {**LARGE_HEADS, "num_key_value_heads": 1},
    "gemma2": {**LARGE_HEADS, "sliding_window": 64},
    "gpt_neox": {**OLD, "rotary_pct": 0.25},
    "falcon": {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 8192,
    },
    "phi": {**OLD, "partial_rotary_factor": 0.5},
}
EVERYWHERE = (
    "q_proj,k_proj,v_proj,o_proj,dense,gate_proj,up_proj,down_proj,"
    "fc1,fc2,dense_h_to_4h,dense_4h_to_h,lm_head"
)
# What litgpt 0.5.13's own model and loop allocated at most under the recorder of
# tests/torch/test_litgpt.py: 2 x 512 tokens, SGD.
LITGPT = [
    ("llama", "full", "bf16", 271_732_736),
    ("llama", "full", "fp32", 379_202_560),
    ("llama", "full", "autocast-bf16", 346_172_416),
    ("qwen2", "full", "bf16", 271_738_880),
    ("qwen3", "full", "bf16", 292_876_288),
    ("gemma", "full", "bf16", 297_160_704),
    ("gemma2", "full", "bf16", 474_292_224),
    ("gpt_neox", "full", "bf16", 237_521_920),
    ("falcon", "full", "bf16", 221_387_776),
    ("phi", "full", "bf16", 259_666_432),
]
# The same with AdamW, and adapters of rank 8 on every linear layer and the head.
LITGPT_LORA = [
    ("llama", 236_680_704),
    ("gemma", 262_305_280),
    ("phi", 218_196_480),
    ("gpt_neox", 222_341_632),
    ("falcon", 206_043_648),
]
# Six tokens after a prompt of 300, by the generator of 0.5.13 over a cache of its own.
LITGPT_SAID = [("llama", 63_478_272), ("gemma", 67_829_248), ("falcon", 62_119_424)]


def needs(name: str, framework: str, **fields: Any) -> Memory:
    model = build({"model_type": name, **CONFIGS[name]}, name=name)
    return memory(lower(model, Job(**{"framework": framework, "batch": 2, "seq": 512, **fields})))


@pytest.mark.parametrize(("name", "method", "precision", "real"), LITGPT)
def test_litgpt_allocates_what_its_own_code_does(
    name: str, method: str, precision: str, real: int
) -> None:
    assert needs(
        name, "litgpt", method=method, precision=precision, optimizer="sgd"
    ).allocated == pytest.approx(real, rel=5e-5)


@pytest.mark.parametrize(("name", "real"), LITGPT_LORA)
def test_litgpt_adapters_allocate_what_its_own_code_does(name: str, real: int) -> None:
    assert needs(
        name, "litgpt", method="lora", rank=8, targets=EVERYWHERE
    ).allocated == pytest.approx(real, rel=5e-5)


@pytest.mark.parametrize(("name", "real"), LITGPT_SAID)
def test_litgpt_generates_as_its_own_code_does(name: str, real: int) -> None:
    asked = {"task": "inference", "batch": 1, "seq": 300, "new_tokens": 6}
    assert needs(name, "litgpt", **asked).allocated == pytest.approx(real, rel=5e-5)


def test_litgpt_reads_all_of_its_cache_before_0_5_4() -> None:
    """In the last pass keys and values of 8 heads, not of 2, over 306 tokens and not 305."""
    asked = {"task": "inference", "batch": 1, "seq": 4, "new_tokens": 2000, "precision": "fp32"}
    assert (
        needs("llama", "litgpt", **asked).allocated
        < needs("llama", "litgpt", **asked, versions="litgpt=0.4").allocated
    )


PACKED = {"method": "qlora", "optimizer": "paged_adamw", "targets": "q_proj,v_proj"}


def test_litgpt_holds_the_inputs_of_packed_layers_into_the_next_forward() -> None:
    """Until 0.43 bitsandbytes' function keeps its input as an attribute, which goes with the graph;
    the logits of the step before, which the loop's variable holds, hold the graph. So there are two
    of each input of a packed layer that nothing else keeps when the next logits are made: what two
    norms give, what attention gives as the output takes it, and the product of gate and up."""
    old, new = (
        needs("llama", "litgpt", **PACKED, versions=f"litgpt=0.4,bitsandbytes=0.{minor}")
        for minor in (42, 43)
    )
    tokens, layers = 2 * 512, 4
    inputs = layers * tokens * 2 * (3 * 512 + 1408)
    assert 1.5 * inputs < old.allocated - new.allocated < 2.1 * inputs


def test_litgpt_packs_once_more_when_it_reads_the_checkpoint() -> None:
    """All is packed by then; a weight in fp16 and its bytes by rows and by columns come beside it,
    the head's first, which is the largest here."""
    asked = {
        "task": "inference",
        "batch": 1,
        "seq": 8,
        "new_tokens": 2,
        "precision": "fp16",
        "quant": "int8",
    }
    found = needs("falcon", "litgpt", **asked, versions="litgpt=0.4,bitsandbytes=0.42")
    assert found.at is not None
    assert (found.at.phase, found.at.where) == ("load", "lm_head")
    assert found.parts["temporaries"] == pytest.approx(
        3 * 512 * 8192, rel=0.01
    )  # the last bytes are those of the weight already


def test_litgpt_with_a_sequence_of_one_piece_and_of_one_token() -> None:
    for seq in (1, 64, 129):
        assert (
            needs("llama", "litgpt", seq=seq, method="lora").allocated
            < needs("llama", "litgpt", seq=512, method="lora").allocated
        )


def test_litgpt_forgot_the_cap_of_logits_in_pieces() -> None:
    """Before 0.5.5 they kept no tanh: 2 bytes for each of 2 · 512 · 8192 logits."""
    fields = {"method": "lora", "targets": "q_proj,v_proj"}
    now, before = (
        needs("gemma2", "litgpt", **fields),
        needs("gemma2", "litgpt", **fields, versions="litgpt=0.4"),
    )
    assert now.allocated - before.allocated == 2 * 2 * 512 * 8192


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"checkpointing": "full"}, "litgpt does not support checkpointing `full`"),
        (
            "llama",
            {"method": "qlora"},
            "litgpt trains quantized models with bitsandbytes' PagedAdamW only",
        ),
        (
            "llama",
            PACKED,
            "not supported yet: litgpt 0",
        ),
        (
            "llama",
            {**PACKED, "quant": "int8", "versions": "litgpt=0.4"},
            "litgpt's int8 supports generation in fp16 only",
        ),
        (
            "llama",
            {**PACKED, "precision": "autocast-bf16", "versions": "litgpt=0.4"},
            "litgpt does not quantize under `autocast-bf16`",
        ),
        (
            "llama",
            {"task": "inference", "new_tokens": 0},
            "litgpt generates at least 1 token",
        ),
        ("llama", {"task": "inference", "beams": 2}, "litgpt does not support beam search"),
    ],
)
def test_litgpt_refuses_what_it_has_no_formula_for(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        needs(name, "litgpt", **fields)


def test_torchtune_weighs_norms_in_fp32_since_0_5() -> None:
    """`F.rms_norm` keeps the normed values in fp32 where single steps kept them in bf16: two bytes
    a value more, in two norms of each of 4 layers and the last, whose own input is kept anyway."""
    fields = {"loss": "plain", "optimizer": "sgd"}
    now, before = (
        needs("llama", "torchtune", **fields),
        needs("llama", "torchtune", **fields, versions="torchtune=0.4"),
    )
    assert now.allocated - before.allocated == 9 * 2 * 512 * 512 * 2


# ---------------------------------------------------------------------------------------- Megatron
B, S, D, N, K, H, F, V = 2, 512, 512, 8, 2, 64, 1408, 8192
T = B * S


def megatron(layers: int = 4, gpu: str = "h100-sxm", **fields: Any) -> Memory:
    config = {"model_type": "llama", **CONFIGS["llama"], "num_hidden_layers": layers}
    job = Job(**{"framework": "megatron", "batch": B, "seq": S, **fields})
    return memory(lower(build(config, name="llama"), job, cluster=Cluster(gpu=find_gpu(gpu))))


def of_a_layer(**fields: Any) -> int:
    """What one more layer adds to the activations at the peak, which is at the loss."""
    return megatron(5, **fields).parts["activations"] - megatron(4, **fields).parts["activations"]


# Inputs of two norms and what they give; queries, a key and a value for each group, the result;
# SwiGLU's input and its result. In fp32 a number a row for each norm, and a sum a query; two
# scalars of random state (Korthikanti et al., arXiv 2205.05198, without dropout's masks, with the
# gate, and with attention that keeps no scores).
KEPT = 2 * T * (4 * D + N * H + 2 * K * H + N * H + 2 * F + F) + 2 * 4 * T + 4 * T * N + 2 * 8


def test_megatron_keeps_what_its_kernels_save() -> None:
    assert of_a_layer() == KEPT


def test_flash_attention_wants_sequences_first() -> None:
    """On an A100, TE's choice: the result is turned back by a copy, and both are kept; one sequence
    needs none."""
    state = 8  # three scalars, not two
    assert of_a_layer(gpu="a100-sxm-80gb") == KEPT + 2 * T * N * H + state
    assert of_a_layer(gpu="a100-sxm-80gb", batch=1) == of_a_layer(gpu="h100-sxm", batch=1) + state


def test_recomputation_keeps_inputs() -> None:
    assert of_a_layer(checkpointing="full") == 2 * T * D


def test_selective_recomputation_keeps_all_that_was_projected() -> None:
    """The value that a checkpoint is given is a view, and what it is a view of stays: more than the
    sums that are dropped."""
    assert of_a_layer(checkpointing="selective") == KEPT - 4 * T * N - 2 * 8 + 2 * T * (N + K) * H


@pytest.mark.parametrize("precision", ["bf16", "bf16-master"])
def test_megatron_holds_eighteen_bytes_a_parameter(precision: str) -> None:
    parts, parameters = (
        megatron(precision=precision).parts,
        build({"model_type": "llama", **CONFIGS["llama"]}, name="llama").parameters,
    )
    found = {
        name: parts[name] / parameters for name in ("weights", "gradients", "master", "optimizer")
    }
    assert found == {"weights": 2, "gradients": 4, "master": 4, "optimizer": 8}


def test_megatron_holds_a_block_for_each_shape_of_matrix() -> None:
    """Products return it as the gradient that they have added up elsewhere; TE's own workspace, and
    torch's for the head, forward and backward, stand beside."""
    dummies = 2 * (D * (N + 2 * K) * H + D * N * H + 2 * D * F + D * F + D * V)
    found = megatron().parts["workspace"] - dummies - (2**25 + 2**10)
    assert found == 2 * cublas_workspace((9, 0), (2, 13))


def test_megatron_as_measured_on_eight_gpus() -> None:
    """SimuMax, B200, Megatron-LM with TE 2.11, 12 layers of Llama-3-70B's shape over 2 stages,
    states over 4 ranks: 68149.2 MiB on the first stage, which holds two micro-batches at its peak,
    64479.5 on the last. Their arithmetic here: 9 bytes a parameter, this framework's layers, a
    block for each shape, TE's workspace, and what SwiGLU's backward adds (its two gradients and the
    residual's, less the result that is gone), or the last norm, its result and the logits that a
    fused loss overwrites."""
    shape = {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    mib, tokens, found = 2**20, 4096, {}
    for layers in (1, 2):
        model = build({**shape, "num_hidden_layers": layers}, name="llama")
        job = Job(framework="megatron", batch=1, seq=tokens)
        found[layers] = (
            model.parameters,
            memory(lower(model, job, cluster=Cluster(gpu=find_gpu("b200")))).parts["activations"],
        )
    weights, kept = (found[2][index] - found[1][index] for index in (0, 1))
    stage = 9 * (6 * weights + 128256 * 8192)
    blocks = 2 * (8192 * 10240 + 8192 * 8192 + 3 * 8192 * 28672) + 2**25
    first = stage + blocks + 2 * 6 * kept + 2 * tokens * (2 * 28672 + 8192)
    last = stage + blocks + 2 * 128256 * 8192 + 6 * kept + 2 * tokens * (2 * 8192 + 128256)
    assert first == pytest.approx(68149.2 * mib, rel=2e-3)
    assert last == pytest.approx(64479.5 * mib, rel=4e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_megatron_answers_its_families_whole_and_in_short(name: str, checkpointing: str) -> None:
    model = build({"model_type": name, **CONFIGS[name], "num_hidden_layers": 8}, name=name)
    job = Job(
        framework="megatron", batch=2, seq=256, checkpointing=checkpointing, clip=1.0, accumulate=4
    )
    whole, short = (memory(lower(model, job, compact=compact)) for compact in (False, True))
    assert whole.allocated == short.allocated
    assert whole.parts == short.parts


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"method": "lora"}, "not supported yet: method `lora` with megatron"),
        ("llama", {"precision": "fp32"}, "megatron does not support precision `fp32`"),
        ("llama", {"optimizer": "adamw_8bit"}, "megatron does not support optimizer `adamw_8bit`"),
        (
            "llama",
            {"checkpointing": "every", "checkpoint_every": 2},
            "megatron does not support checkpointing `every`",
        ),
        ("llama", {"attention": "eager"}, "megatron does not support attention `eager`"),
        ("llama", {"loss": "chunked"}, "megatron does not support loss `chunked`"),
        ("gemma2", {}, "not supported yet: megatron with the family `gemma2`"),
        ("llama", {"task": "inference"}, "not supported yet: generation with megatron"),
    ],
)
def test_megatron_refuses_what_it_has_no_formula_for(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        needs(name, "megatron", **fields)


@pytest.mark.parametrize("framework", ["transformers", "torchtune", "torchtitan", "megatron"])
def test_the_longest_batch_holds_what_a_run_of_such_batches_holds(framework: str) -> None:
    """Tables of positions are as long as the longest sequence, too."""
    model = build({**CONFIGS["llama"], "model_type": "llama"})
    mixed, alike = (
        Job(framework=framework, **options)
        for options in ({"seq": 64, "longest": 512}, {"seq": 512})
    )
    one, other = (memory(lower(model, job)) for job in (mixed, alike))
    assert one.allocated == other.allocated
    assert one.parts == other.parts


def test_the_older_loss_in_chunks_keeps_the_probabilities_of_all() -> None:
    """Eight chunks of fp32 beside the model's own logits when the backward begins; the newer one
    has run its backward by then."""
    model = build({**CONFIGS["llama"], "model_type": "llama"})
    found = {}
    for version in ("0.1", "0.3"):
        tape = lower(
            model,
            Job(framework="torchtitan", seq=64, loss="chunked", versions=f"torchtitan={version}"),
        )
        alive: dict[int, int] = {}
        for event in tape:
            if type(event) is Mark and event.phase == "backward":
                break
            if type(event) is Alloc and event.op == "log_softmax":
                alive[event.id] = event.size
            elif type(event) is Free:
                alive.pop(event.id, None)
        found[version] = sorted(alive.values())
    assert found == {"0.1": [8 * model.head.outputs * 4] * 8, "0.3": []}


@pytest.mark.parametrize(("kept", "tensors"), [(False, 0), (True, 1)])
def test_the_loop_of_2024_held_the_logits_that_its_model_had_made_wide(
    kept: bool, tensors: int
) -> None:
    """What is alive of logits beside the probabilities when the second step's backward begins:
    those of this step in fp32; those of the step before went when its forward was over."""
    model = build({**CONFIGS["llama"], "model_type": "llama"})
    tape = lower(
        model,
        Job(
            framework="torchtitan",
            seq=64,
            precision="bf16",
            keep_outputs=kept,
            versions="torchtitan=0.1",
        ),
    )
    alive: dict[int, Alloc] = {}
    for event in tape:
        if type(event) is Mark and event.phase == "backward" and event.step == 1:
            break
        if type(event) is Alloc and event.part == "logits" and event.op != "log_softmax":
            alive[event.id] = event
        elif type(event) is Free:
            alive.pop(event.id, None)
    count = 64 * model.head.outputs
    assert [one.size for one in alive.values() if one.size >= 2 * count] == [4 * count] * tensors


def test_what_is_peculiar_to_each_framework() -> None:
    """From their sources: litgpt loads a tied head as a second matrix, generates with one cache,
    and has bitsandbytes' layers; torchtitan stacks experts; Megatron pads the vocabulary
    (--make-vocab-size-divisible-by 128) and always keeps fp32 copies. No other framework does."""
    flags: dict[str, set[str]] = {
        name: {framework for framework, facts in FACTS.items() if getattr(facts, name)}
        for name in ("unties", "generates", "one_cache", "packs", "stacks", "master", "padded")
    }
    assert flags == {
        "unties": {"litgpt"},
        "generates": {"litgpt"},
        "one_cache": {"litgpt"},
        "packs": {"litgpt"},
        "stacks": {"torchtitan"},
        "master": {"megatron"},
        "padded": {"megatron"},
    }
    assert FACTS["megatron"].padded == 128
