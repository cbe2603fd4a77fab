"""Models spread over ranks: what each rank has, against the whole; the buffers of collectives;
sizes that cannot be."""

import dataclasses

import pytest

from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import build
from memfit.model.model import Model
from memfit.model.modules import Weight
from memfit.program import Program, placed
from memfit.simulate.memory import memory
from memfit.strategy import CP, DDP, FSDP, TP, Strategy, ZeRO
from memfit.tape import Alloc, Comm
from memfit.techniques import apply

SHAPE = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MODEL = build(SHAPE, name="llama")
JOB = Job(framework="megatron", batch=2, seq=256, loss="te")


def program(strategy: Strategy, model: Model = MODEL, job: Job = JOB) -> Program:
    return apply(
        Program(
            model=model,
            job=job,
            entries=placed(model.layers, False),
            weights=model.dtype,
            strategy=strategy,
        )
    )


def counts(model: Model) -> dict[str, Weight]:
    return {weight.name: weight for weight in model.weights()}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_ranks_of_tensor_parallelism_share_the_model(size: int) -> None:
    """Every matrix once over all ranks, norms on each of them; eight ranks have two copies of four
    key and value heads."""
    whole, part = counts(MODEL), counts(program(Strategy(tp=TP(size=size))).model)
    assert whole.keys() == part.keys()
    for name, weight in whole.items():
        copies = (
            size
            if weight.role == "norm"
            else size // 4
            if size > 4 and name.endswith(("k_proj.weight", "v_proj.weight"))
            else 1
        )
        assert part[name].count * size == weight.count * copies, name


def test_a_vocabulary_is_padded_for_all_ranks() -> None:
    odd = build({**SHAPE, "vocab_size": 4100}, name="llama")
    part = program(Strategy(tp=TP(size=4)), odd).model
    assert part.head.outputs == 4608 // 4  # 512·9 rows
    assert program(Strategy(), odd).model.head.outputs == 4224  # 128·33


@pytest.mark.parametrize("sequence", [True, False])
def test_collectives_of_a_layer(sequence: bool) -> None:
    """With sequence parallelism two all-gathers and two reduce-scatters a layer and pass, and the
    weights' gradients gather once more; else one all-reduce after each row-parallel product, and
    one before each column-parallel one in backward."""
    tape = lower(MODEL, JOB, Strategy(tp=TP(size=4, sequence=sequence)))
    whole = 2 * 256 * 512 * 2  # sequences, tokens, width, bytes
    found: dict[str, int] = {}
    for event in tape:
        if type(event) is Comm and ".3" in event.where:
            assert (event.size, event.ranks, event.group) == (whole, 4, "tp")
            found[event.op] = found.get(event.op, 0) + 1
    steps = 2
    assert found == (
        {"all_gather": 6 * steps, "reduce_scatter": 4 * steps}
        if sequence
        else {"all_reduce": 4 * steps}
    )
    buffers = [event.size for event in tape if type(event) is Alloc and event.op == "all_gather"]
    assert set(buffers) == ({whole} if sequence else set())


def test_what_a_rank_keeps_of_a_layer() -> None:
    """Per token and layer: two inputs and two normed ones; queries, keys, values; the result of
    attention as FlashAttention leaves it and turned back; gate, up and their product; and in fp32
    what the two norms and the softmax keep."""
    tokens, width, heads, kv, ffn, size = 512, 512, 8, 4, 1024, 4
    found = {}
    for layers in (8, 9):
        model = build({**SHAPE, "num_hidden_layers": layers}, name="llama")
        found[layers] = memory(
            lower(model, JOB, Strategy(tp=TP(size=size, sequence=True)), compact=True)
        ).parts["activations"]
    split = 2 * (4 * width + (3 * heads + 2 * kv) * 64 + 3 * ffn) + 2 * 4
    exact = tokens * split // size + tokens * heads // size * 4
    assert found[9] - found[8] == pytest.approx(exact, rel=1e-3)


def test_splitting_saves_memory_and_compact_tapes_agree() -> None:
    found = []
    for size in (1, 2, 4, 8):
        strategy = Strategy(tp=TP(size=size, sequence=True))
        short, flat = (
            memory(lower(MODEL, JOB, strategy, compact=compact)) for compact in (True, False)
        )
        assert short.parts == flat.parts
        found.append(flat.allocated)
    assert found == sorted(found, reverse=True)


def test_the_distributed_optimizer_shares_copies_and_states_out() -> None:
    found = [
        memory(
            lower(MODEL, JOB, Strategy(ddp=DDP(size=size, distributed=True)), compact=True)
        ).parts
        for size in (1, 4)
    ]
    for part in ("master", "optimizer"):
        assert found[1][part] == pytest.approx(found[0][part] / 4, rel=1e-3)
    assert found[1]["gradients"] == found[0]["gradients"] == 4 * MODEL.parameters
    alone, same = (
        memory(lower(MODEL, JOB, Strategy(ddp=DDP(size=size)), compact=True)).allocated
        for size in (1, 4)
    )
    assert alone == same


@pytest.mark.parametrize(
    ("fields", "shape", "said"),
    [
        ({"size": 3}, {}, "3 ranks do not divide 8 query heads"),
        ({"size": 16}, {}, "16 ranks do not divide 8 query heads"),
        (
            {"size": 2},
            {"num_key_value_heads": 1, "intermediate_size": 1023},
            "2 ranks do not divide 1023 values",
        ),
        ({"size": 2, "style": "dtensor"}, {}, "hint: use `megatron`, or remove it"),
        ({"size": 2, "vocabulary": False}, {}, "Megatron always shards the vocabulary"),
    ],
)
def test_splits_that_cannot_be_are_told(
    fields: dict[str, object], shape: dict[str, int], said: str
) -> None:
    model = build({**SHAPE, **shape}, name="llama")
    with pytest.raises(InputError, match=said):
        program(dataclasses.replace(Strategy(), tp=TP(**fields)), model)  # type: ignore[arg-type]


def test_tokens_that_the_ranks_do_not_divide_are_told() -> None:
    with pytest.raises(InputError, match="8 ranks do not divide 255 tokens"):
        program(Strategy(tp=TP(size=8, sequence=True)), job=dataclasses.replace(JOB, seq=255))


@pytest.mark.parametrize("strategy", [Strategy(fsdp=FSDP(size=4)), Strategy(zero=ZeRO(size=4))])
def test_data_parallelism_of_others_is_told(strategy: Strategy) -> None:
    with pytest.raises(
        InputError, match="megatron has its own data parallelism and does not support"
    ):
        program(strategy)


def test_evaluation_and_longest_batch_are_split_too() -> None:
    """Half of the tokens on each of two ranks, whatever the batch."""
    job = dataclasses.replace(JOB, evaluate=True, longest=512)
    alone, both = (lower(MODEL, job, Strategy(cp=CP(size=size))) for size in (1, 2))
    ids = [
        [event.size for event in tape if type(event) is Alloc and event.part == "inputs"]
        for tape in (alone, both)
    ]
    assert [2 * size for size in ids[1]] == ids[0]


@pytest.mark.parametrize(
    ("size", "checkpointing", "traced"),
    [(2, "none", 116268544), (2, "full", 86810112), (4, "none", 101326336), (4, "full", 79240704)],
)
def test_transformers_own_plan_as_the_trace_has_it(
    size: int, checkpointing: str, traced: int
) -> None:
    """Peaks of the real code (transformers 5.23, torch 2.13, DTensor) under the trace's
    recorder."""
    model = build(
        {**SHAPE, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4},
        name="llama",
    )
    job = Job(batch=2, seq=512, checkpointing=checkpointing)
    short, flat = (
        memory(lower(model, job, Strategy(tp=TP(size=size)), compact=compact))
        for compact in (True, False)
    )
    assert flat.allocated == pytest.approx(traced, rel=5e-4)
    assert short.parts == flat.parts


@pytest.mark.parametrize(
    ("fields", "use", "said"),
    [
        ({}, {"size": 8}, "8 ranks do not divide 4 key/value heads"),
        (
            {"attention": "eager"},
            {"size": 2, "sequence": True},
            "attention with a mask fails with sequence parallelism:",
        ),
        (
            {},
            {"size": 2, "style": "transformers", "sequence": True},
            "tensor parallelism with `sequence` or `parallel_loss`,",
        ),
        ({"method": "lora"}, {"size": 2}, "adapters on layers that are split by rows"),
        (
            {"method": "lora", "targets": "q_proj"},
            {"size": 2, "style": "dtensor"},
            "s layers; PEFT supports transformers",
        ),
        (
            {"method": "qlora", "targets": "q_proj"},
            {"size": 2},
            "hint: use `zero,stage=3` or `fsdp` to shard quantized",
        ),
        ({"versions": "transformers=4.57"}, {"size": 2}, "before 5.17"),
        (
            {"loss": "liger"},
            {"size": 2},
            "s fused loss fails under tensor parallelism, where the head",
        ),
        ({"liger": True}, {"size": 2, "sequence": True}, "hint: remove it, or `sequence`"),
        (
            {"framework": "trl"},
            {"size": 2, "sequence": True},
            "s head fails with sequence parallelism, where the hidden",
        ),
        (
            {"framework": "trl", "versions": "trl=1.6"},
            {"size": 2},
            "TRL before 1",
        ),
        ({"framework": "litgpt"}, {"size": 2}, "not supported yet: tensor parallelism of litgpt"),
    ],
)
def test_what_transformers_plan_is_not_known_for(
    fields: dict[str, str], use: dict[str, int], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        program(Strategy(tp=TP(**use)), job=Job(batch=1, seq=256, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "use", "said"),
    [
        (
            {},
            {"size": 2, "style": "dtensor"},
            "s parallel styles shard the heads, so norms over all heads",
        ),
        (
            {},
            {"size": 2, "parallel_loss": True},
            "s parallel styles shard the heads, so norms over all heads",
        ),
        (
            {"method": "lora", "targets": "q_proj,up_proj"},
            {"size": 2},
            "hint: use `gate_proj` and `up_proj` if the model has them",
        ),
        ({}, {"size": 3}, "3 ranks do not divide 256 values of the heads"),
    ],
)
def test_norms_over_all_heads_stop_what_gives_a_rank_some_of_them(
    fields: dict[str, str], use: dict[str, int], said: str
) -> None:
    model = build(
        {
            **SHAPE,
            "model_type": "olmo2",
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 2,
        }
    )
    with pytest.raises(InputError, match=said):
        lower(model, Job(batch=1, seq=256, **fields), Strategy(tp=TP(**use)))  # type: ignore[arg-type]
