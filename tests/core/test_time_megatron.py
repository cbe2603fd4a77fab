"""Time under Megatron: Transformer Engine's products, one expert at a time, and what is done with
gradients and weights once a step."""

import pytest

from memfit.hardware import Cluster, find_gpu, rates
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.simulate.time import Meter, alone
from memfit.strategy import DDP, EP, PP, TP, Strategy
from memfit.tape import Comm, Compute, Event, Mark, Tape

SHAPE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MIXTRAL = {**SHAPE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
JOB = Job(
    framework="megatron",
    task="pretrain",
    batch=1,
    seq=256,
    loss="te",
    precision="bf16-master",
    optimizer="adam_fused",
    clip=1.0,
)
B200 = find_gpu("b200")
CLUSTER = Cluster(gpu=B200, gpus_per_node=8)


def written(strategy: Strategy, shape: dict[str, object] = SHAPE, job: Job = JOB) -> Tape:
    return lower(build(shape, name=str(shape["model_type"])), job, strategy, CLUSTER, compact=False)


def computed(tape: Tape, where: str) -> dict[str, list[Compute]]:
    """Of the last step, by phase."""
    found: dict[str, list[Compute]] = {"forward": [], "backward": [], "step": []}
    phase = ""
    for event in tape:
        if type(event) is Mark:
            phase = event.phase
            if phase == "forward" and event.where == "" and found["step"]:
                found = {name: [] for name in found}
        elif type(event) is Compute and phase in found and event.where.endswith(where):
            found[phase].append(event)
    return found


def test_transformer_engine_s_products_have_a_table_where_they_were_measured():
    one = (2 * 4096 * 8192 * 28672, 2 * (4096 * 8192 + 8192 * 28672 + 4096 * 28672), "bf16")
    rate = one[0] / 2.25e15
    assert rates(B200, "te").product(*one) == pytest.approx(
        rate / 0.49, rel=0.03
    )  # 0.474 to 0.494 in the three layouts
    assert rates(B200).product(*one) == pytest.approx(
        rate / 0.542, rel=0.01
    )  # the mean of what lasts on two machines
    assert rates(B200, "te").launch == rates(B200).launch
    h100 = find_gpu("h100-sxm")
    assert rates(h100, "te").product(*one) == rates(h100).product(*one)


@pytest.mark.parametrize("split", [1, 2])
def test_a_product_s_two_gradients(split):
    """Each as much as the forward's; the matrix's reads and writes a sum in fp32, and the head's
    product is of gathered rows."""
    strategy = (
        Strategy(tp=TP(size=split, sequence=True)) if split > 1 else Strategy(ddp=DDP(size=2))
    )
    for where, values in (("lm_head", 4096 * 512), ("mlp.down_proj", 1024 * 512)):
        found = computed(written(strategy), where)
        count = len(found["forward"])
        assert count
        assert [event.flops for event in found["backward"]] == [
            found["forward"][0].flops
        ] * 2 * count
        assert found["forward"][0].flops == 2 * 256 * values // split
        inputs, matrix = found["backward"][:2]
        assert matrix.bytes - inputs.bytes == (8 - 2) * values // split


def test_experts_are_products_of_their_own():
    found = computed(written(Strategy(ddp=DDP(size=2), ep=EP(size=2)), MIXTRAL), "experts")
    assert {event.kernels for phase in ("forward", "backward") for event in found[phase]} == {4}
    known = rates(B200, "te")
    meter = Meter(known, frozenset({"te_linear"}), alone)
    meter.compute(Compute("te_linear", 32 * 10**10, 32 * 10**7, "bf16", "", 0, 32), 1)
    assert meter.parts["matmul"] == pytest.approx(32 * known.product(10**10, 10**7, "bf16"))
    assert meter.parts["matmul"] > known.product(32 * 10**10, 32 * 10**7, "bf16")
    assert meter.kernels == 32


@pytest.mark.parametrize("micro", [4, 32])
def test_gradients_are_summed_once_a_step_whatever_the_pipeline_does(micro):
    """Check, division, sum, norm, clipping, cast and nought of 4 bytes a value, or of those of a
    quarter of them."""
    strategy = Strategy(ddp=DDP(size=4, distributed=True), pp=PP(size=2))
    tape = written(strategy, job=Job(**{**vars(JOB), "accumulate": micro}))
    step, before = last_step(tape)
    sums = [event for event in step if type(event) is Comm]
    assert [event.op for event in sums] == ["reduce_scatter", "all_gather"]
    values = sums[0].size // 4
    swept = {event.op: event.bytes for event in step if type(event) is Compute}
    whole = {
        "check_grads": 4 * values,
        "scale_gradients": 8 * values,
        "zero_grad_buffer": 4 * values,
    }
    assert swept == {
        **whole,
        "l2norm": values,
        "clip_gradients": 2 * values,
        "copy_parameters": 6 * (values // 4),
    }
    assert not any(type(event) is Comm and event.group == "dp" for event in before)


def last_step(tape: Tape) -> tuple[list[Event], list[Event]]:
    """Events of the optimizer, and of the passes before it."""
    number = max(event.step for event in tape if type(event) is Mark)
    found: tuple[list[Event], list[Event]] = [], []
    mark = Mark("load", "", 0)
    for event in tape:
        if type(event) is Mark:
            mark = event
        elif mark.step == number:
            found[mark.phase != "step"].append(event)
    return found
