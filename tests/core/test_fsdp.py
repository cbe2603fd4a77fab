"""FSDP2 by formulas: what stands side by side while layers are gathered and reduced, as the real
code was watched to have it."""

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.hardware import parse_cluster
from memfit.job import Job
from memfit.lower import lower, walked
from memfit.lower.expand import expanded
from memfit.model.families import build
from memfit.model.model import Model
from memfit.simulate.memory import memory
from memfit.strategy import DDP, FSDP, Strategy
from memfit.tape import Alloc, Event, Free, Mark, Tape, check
from memfit.truth.models import built
from memfit.uses import strategy_from

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 4000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LAYER = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256  # parameters
EMBED, TAIL = 4000 * 256, 4000 * 256 + 256
ROOT = EMBED + TAIL
ALL = 8 * LAYER + ROOT
MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
W = 8


@pytest.fixture(scope="module")
def model() -> Model:
    return build(CONFIG)


def peaks(tape: Tape, *parts: str) -> dict[str, int]:
    """The most that blocks of these parts hold in each phase, by the bytes asked for."""
    live, phase = 0, ""
    sizes: dict[int, int] = {}
    most: dict[str, int] = {}
    for event in tape:
        if type(event) is Alloc and event.part in parts:
            sizes[event.id] = event.size
            live += event.size
        elif type(event) is Free:
            live -= sizes.get(event.id, 0)
        elif type(event) is Mark:
            phase = event.phase
        most[phase] = max(most.get(phase, 0), live)
    return most


def run(model: Model, strategy: Strategy, **options: Any) -> Tape:
    tape = lower(model, Job(**{"precision": "fp32", "seq": 32, **options}), strategy)
    check(tape)
    return tape


@pytest.mark.parametrize(
    ("layout", "buffers"),
    [
        # root gathered; the root's buffer, the first layer's and its copy
        ({}, 4 * 2 * (ROOT + LAYER)),
        (MIXED, 2 * 2 * (ROOT + LAYER)),
        ({**MIXED, "reshard": False}, 2 * ALL + 2 * 2 * LAYER),
        ({**MIXED, "reshard_to": 2}, 2 * ROOT + 7 * LAYER + 2 * 3 * LAYER),
        ({**MIXED, "wrap": "ends"}, 2 * (LAYER + TAIL + TAIL)),
        ({**MIXED, "prefetch": 5}, 2 * ROOT + 2 * 6 * LAYER + 2 * LAYER + 2 * LAYER // W),
        ({**MIXED, "wrap": "none"}, 2 * 2 * ALL),
    ],
    ids=str,
)
def test_three_buffers_stand_side_by_side_in_the_forward(
    model: Model, layout: dict[str, Any], buffers: int
) -> None:
    tape = run(model, Strategy(fsdp=FSDP(size=W, **{"wrap": "layers", **layout})))
    assert peaks(tape, "communication")["forward"] == buffers


@pytest.mark.parametrize(
    ("layout", "replicas", "held"),
    [
        # root, its gathered layer and copy, the input of the reduction before, and shards that five
        # layers got: at the copy-out
        (MIXED, 1, 2 * ROOT + 2 * 2 * LAYER + 4 * LAYER + 7 * 4 * LAYER // W),
        (
            {"param_dtype": "bf16", "reduce_dtype": "bf16"},
            1,
            2 * ROOT + 3 * 2 * LAYER + 7 * 4 * LAYER // W,
        ),
        (MIXED, 2, 2 * ROOT + 2 * 2 * LAYER + 4 * LAYER + 7 * 4 * LAYER // 4),
        (
            {"param_dtype": "bf16", "reduce_dtype": "bf16"},
            2,
            2 * ROOT + 3 * 2 * LAYER + 7 * (4 + 2) * LAYER // 4,
        ),
    ],
    ids=str,
)
def test_a_reduction_s_input_stays_until_the_next(
    model: Model, layout: dict[str, Any], replicas: int, held: int
) -> None:
    strategy = Strategy(
        fsdp=FSDP(size=W // replicas, wrap="layers", **layout),
        ddp=DDP(size=replicas) if replicas > 1 else None,
    )
    tape = run(model, strategy)
    copied: list[int] = []  # what is held when the first layer was copied out in backward
    live, phase, sizes = 0, "", dict[int, int]()
    for event in tape:
        if type(event) is Alloc and (
            event.part == "communication" or (event.op in ("reduce_scatter", "to") and event.stream)
        ):
            sizes[event.id] = event.size
            live += event.size
            if phase == "backward" and event.op == "unshard" and event.where == "model.layers.0":
                copied.append(live)
        elif type(event) is Free:
            live -= sizes.get(event.id, 0)
        elif type(event) is Mark:
            phase = event.phase
    assert max(copied) == held


def test_shards_of_all_ranks_are_the_model(model: Model) -> None:
    """Weights, gradients and states, whatever the rank's number is; rows that fill up the last one
    are counted."""
    odd = build({**CONFIG, "vocab_size": 4001})
    held = [
        memory(
            run(odd, Strategy(fsdp=FSDP(size=W), rank=rank), seq=2, optimizer="adamw_fused")
        ).parts
        for rank in range(W)
    ]
    assert sum(one["weights"] for one in held) == 4 * (odd.parameters + 2 * 7 * 256)
    assert sum(one["optimizer"] for one in held) == 8 * odd.parameters + W * 4 * sum(
        1 for _ in odd.weights()
    )
    assert held[0]["optimizer"] > held[-1]["optimizer"]


def test_accumulation_without_reductions_keeps_whole_gradients(model: Model) -> None:
    layout = FSDP(size=W, wrap="layers", sync=False, param_dtype="bf16", reduce_dtype="fp32")
    assert peaks(run(model, Strategy(fsdp=layout), accumulate=2), "gradients")["forward"] == 4 * ALL
    narrow = FSDP(size=W, wrap="layers", sync=False, param_dtype="bf16", reduce_dtype="bf16")
    assert peaks(run(model, Strategy(fsdp=narrow), accumulate=2), "gradients")["forward"] == 2 * ALL
    with_sync = FSDP(size=W, wrap="layers", param_dtype="bf16", reduce_dtype="fp32")
    assert (
        peaks(run(model, Strategy(fsdp=with_sync), accumulate=2), "gradients")["forward"]
        == 4 * ALL // W
    )


def test_adapters_alone_are_reduced(model: Model) -> None:
    tape = run(
        model,
        Strategy(fsdp=FSDP(size=W, param_dtype="bf16", reduce_dtype="fp32")),
        method="lora",
        precision="bf16",
    )
    adapters = 16 * (4 * (256 + 256) + 3 * (256 + 512))
    inputs = [
        event.size
        for event in tape
        if type(event) is Alloc and event.op == "reduce_scatter" and not event.stream
    ]
    assert set(inputs) == {4 * adapters}
    gathered = {
        event.size
        for event in tape
        if type(event) is Alloc
        and event.op == "all_gather"
        and event.where.startswith("model.layers")
    }
    assert 2 * (LAYER + adapters) in gathered


def test_offloaded_shards_cost_nothing_on_the_device(model: Model) -> None:
    parts = memory(run(model, Strategy(fsdp=FSDP(size=W, offload=True, param_dtype="bf16")))).parts
    assert not parts.keys() & {"weights", "optimizer", "master"}
    assert parts["communication"] > 2 * ROOT


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"wrap": "layers"},
    {"wrap": "layers", **MIXED},
    {"reshard": False},
    {"reshard_to": 2},
    {"sync": False},
    {"prefetch": 1},
    {"offload": True},
)
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full"},
    {"method": "lora"},
    {"accumulate": 3, "clip": 1.0},
    {"method": "qlora", "checkpointing": "full"},
    {"precision": "autocast-bf16", "evaluate": True},
    {"checkpointing": "full", "reentrant": True},
)


@pytest.mark.parametrize("options", JOBS, ids=str)
@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_one_layer_stands_for_all(
    model: Model, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    job, strategy = Job(seq=32, **options), Strategy(fsdp=FSDP(size=W, **layout), ddp=DDP(size=2))
    short, long = walked(model, job, None, strategy), walked(model, job, None, strategy, None)
    assert short is not None
    assert long is not None
    (events, spans, program, _), flat = short, long.events
    assert spans
    written = expanded(events, spans, program.entries, model.path)
    if written is not None:  # else every layer is walked
        assert numbered(written) == numbered(flat)
    one, other = (
        memory(lower(model, job, strategy, compact=True)),
        memory(Tape(events=flat, source="formula")),
    )
    assert (one.allocated, one.parts, one.end) == (other.allocated, other.parts, other.end)
    assert sum(one.parts.values()) == one.allocated


def numbered(events: tuple[Event, ...]) -> list[Event]:
    """Blocks by the order in which they come."""
    ids: dict[int, int] = {}
    out: list[Event] = []
    for event in events:
        if isinstance(event, (Alloc, Free)):
            out.append(event._replace(id=ids.setdefault(event.id, len(ids))))
        else:
            out.append(event)
    return out


def test_ten_thousand_ranks_are_one_tape(model: Model) -> None:
    few, many = (
        run(model, Strategy(fsdp=FSDP(size=8), ddp=DDP(size=replicas))) for replicas in (2, 1250)
    )
    assert memory(few).parts == memory(many).parts
    assert len(few) == len(many)


@pytest.mark.parametrize(
    ("layout", "options", "said"),
    [
        (FSDP(size=8), {"task": "inference"}, "inference with FSDP"),
        (FSDP(size=8), {"quant": "int8", "method": "lora"}, "stored as bytes"),
        (FSDP(size=8, reshard_to=3), {}, "`reshard_to=3` does not divide 8 ranks"),
        (FSDP(size=8), {"optimizer": "adafactor"}, "hint: use another `--optimizer`"),
        (FSDP(size=8), {"framework": "megatron"}, "under megatron"),
        (FSDP(size=8), {"precision": "bf16-master"}, "fp32 copies of shards"),
    ],
)
def test_what_is_not_known_is_refused(
    model: Model, layout: FSDP, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        lower(model, Job(**options), Strategy(fsdp=layout))


@pytest.mark.parametrize("use", ["fsdp=4", "fsdp=2 tp=2", "fsdp=4,version=1"])
def test_routers_that_stay_fp32_beside_other_weights_are_not_sharded_with_them(use):
    """torch stops at them, and the trace with it: only training method has to be alike under FSDP2,
    everything under FSDP1."""
    model = built("baidu/ERNIE-4.5-21B-A3B-PT")
    strategy, cluster = strategy_from(use.split(), 4), parse_cluster("4xh100-sxm")
    with pytest.raises(InputError, match="uniform"):
        estimate(model, Job(seq=512), cluster, strategy)
    assert estimate(
        model, Job(seq=512, precision="autocast-bf16"), cluster, strategy, precise=False
    ).memory.allocated
    adapted = Job(seq=512, method="lora", targets="q_proj,v_proj")
    if strategy.fsdp.version == 2:
        assert estimate(model, adapted, cluster, strategy, precise=False).memory.allocated
    else:
        with pytest.raises(InputError, match="uniform"):
            estimate(model, adapted, cluster, strategy)
