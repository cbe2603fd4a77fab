"""One rank of several under torch's fake process group: what its own wrappers gather, reduce and
keep, to the byte.

The figures were recorded at torch 2.13's dispatcher with real CPU tensors under the fake group,
without memfit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memfit.tape import Alloc, Comm, Free, Mark, Sync, Tape, check
from memfit.uses import strategy_from

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
B, R, LAYERS, WORLD = 8_390_656, 16_384_000, 6, 8  # parameters of a block, of embedding and head


def plain_model(width: int = 1024, vocabulary: int = 8000, dtype: Any = torch.float32) -> Any:
    """A model that is nothing but its parameters: the recorded one."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = (
                nn.Linear(width, 4 * width, bias=False),
                nn.Linear(4 * width, width, bias=False),
            )

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.relu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x).float().sum()

        def get_input_embeddings(self) -> Any:
            return self.embed

        def get_output_embeddings(self) -> Any:
            return self.head

    with torch.device("meta"):
        return Model().to(dtype)


def traced(use: str, model: Any = None, *, micro_batches: int = 1, count: int = 2) -> Tape:
    """The tape of a few steps of AdamW."""
    from memfit.trace import cuda, kernels_of, ranks, steps
    from memfit.trace.recorder import Recorder
    from memfit.trace.spread import Spread

    strategy = strategy_from(use.split(), None)
    device = cuda.Device()
    kernels_of.install(device)
    recorder = Recorder(device)
    model = plain_model() if model is None else model
    with (
        cuda.pretended(device),
        ranks.group(strategy, "cuda") as mesh,
        ranks.followed(recorder, mesh),
    ):
        spread = Spread(strategy, mesh)
        with Recorder(device):
            model = spread.cut(model)
        with recorder:
            steps.load(recorder, model)
            model = spread.wrapped(model)
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(count):
                for index in range(micro_batches):
                    recorder.mark("forward", step=step)
                    with spread.micro_batch(model, index + 1 == micro_batches):
                        loss = model(torch.zeros(2, 8, dtype=torch.long, device="cuda"))
                        recorder.mark("backward")
                        loss.backward()
                    steps.own(
                        recorder,
                        "gradients",
                        (one.grad for one in model.parameters() if one.grad is not None),
                    )
                recorder.mark("step")
                optimizer.step()
                steps.states(recorder, optimizer, {})
                optimizer.zero_grad()
    tape = Tape(events=recorder.finished(), source="trace")
    check(tape)
    return tape


def peaks(tape: Tape, meant: Callable[[Alloc], bool]) -> dict[tuple[str, int], int]:
    """The highest sum of the blocks that are meant, by phase and step."""
    found: dict[tuple[str, int], int] = {}
    live: dict[int, int] = {}
    now, phase = 0, ("load", 0)
    for event in tape:
        if isinstance(event, Mark):
            phase = (event.phase, event.step)
        elif isinstance(event, Alloc) and meant(event):
            live[event.id] = event.size
            now += event.size
        elif isinstance(event, Free):
            now -= live.pop(event.id, 0)
        found[phase] = max(found.get(phase, 0), now)
    return found


def passing(one: Alloc) -> bool:
    """What is gathered and reduced, and the shards of gradients that come of it on a stream of
    their own."""
    return one.part == "communication" or (one.part == "gradients" and one.stream != 0)


BF16, SUM32 = "param_dtype=bf16", "reduce_dtype=fp32"
FIGURES = [
    ("fsdp=8", 198_197_248, 187_200_512),
    (f"fsdp=8,{BF16},{SUM32}", 99_098_624, 120_869_888),
    (f"fsdp=8,{BF16}", 99_098_624, 104_088_576),
    (f"fsdp=8,{BF16},reduce_dtype=bf16", 99_098_624, 104_088_576),
    (f"fsdp=8,{BF16},{SUM32},reshard=no", 167_018_496, 154_432_512),
    (f"fsdp=4,{BF16},{SUM32} ddp=2", 99_098_624, 141_846_528),
    (f"fsdp=4,{BF16},reduce_dtype=bf16 ddp=2", 99_098_624, 146_041_856),
    (f"fsdp=8,{BF16},{SUM32},prefetch=2", 101_990_912, 133_455_872),
    (f"fsdp=8,{BF16},{SUM32},wrap=ends", 50_343_936, 95_598_592),
]


@pytest.mark.parametrize(("use", "forward", "backward"), FIGURES)
def test_what_fsdp_gathers_and_reduces(use: str, forward: int, backward: int) -> None:
    found = peaks(traced(use), passing)
    assert (found["forward", 1], found["backward", 1]) == (forward, backward)


def test_gradients_of_an_accumulation_stay_whole_until_the_last_micro_batch() -> None:
    tape = traced(f"fsdp=8,{BF16},{SUM32},sync=no", micro_batches=2)
    assert peaks(tape, passing)["forward", 1] == 99_098_624
    whole = peaks(tape, lambda one: one.part == "gradients")
    assert whole["forward", 1] == 266_911_744  # every parameter in fp32, what they are reduced in
    shards = peaks(
        traced(f"fsdp=8,{BF16},{SUM32}", micro_batches=2), lambda one: one.part == "gradients"
    )
    assert shards["forward", 1] == 33_363_968


def test_rows_that_ranks_do_not_divide_are_padded() -> None:
    found = peaks(
        traced(f"fsdp=8,{BF16},{SUM32}", plain_model(width=1000, vocabulary=7999)), passing
    )
    assert (found["forward", 1], found["backward", 1]) == (96_008_000, 116_021_000)


def test_frozen_weights_are_gathered_and_not_reduced() -> None:
    model = plain_model(dtype=torch.bfloat16)
    for name, one in model.named_parameters():
        one.requires_grad_("norm" in name)
    sent = [(event.op, event.size) for event in traced("fsdp=8", model) if isinstance(event, Comm)]
    assert set(sent) == {
        ("allgather_base", 2 * B),
        ("allgather_base", 2 * R),
        ("reduce_scatter_base", 2 * 2048),
    }


def test_streams_and_groups_are_told() -> None:
    tape = traced(f"fsdp=4,{BF16},{SUM32} ddp=2")
    sent = {
        (event.op, event.group, event.ranks, event.stream)
        for event in tape
        if isinstance(event, Comm)
    }
    assert {one[:3] for one in sent} == {
        ("allgather_base", "fsdp", 4),
        ("reduce_scatter_base", "fsdp", 4),
        ("allreduce", "ddp", 2),
    }
    assert (
        len({one[3] for one in sent} | {0}) == 4
    )  # FSDP2's gather, reduction and all-reduction each have a stream of their own
    gathered = {
        event.stream
        for event in tape
        if isinstance(event, Alloc) and event.op == "empty.memory_format" and event.stream
    }
    waits = {(event.stream, event.waits_for) for event in tape if isinstance(event, Sync)}
    assert gathered
    assert any(waits_for in gathered for _, waits_for in waits)


P = 4 * (R + 6 * B)


def buckets(tape: Tape, step: int) -> list[int]:
    """Sizes of the communication blocks alive when the backward of `step` begins."""
    live: dict[int, int] = {}
    for event in tape:
        if isinstance(event, Mark) and (event.phase, event.step) == ("backward", step):
            break
        if isinstance(event, Alloc) and event.part in ("communication", "gradients"):
            live[event.id] = event.size
        elif isinstance(event, Free):
            live.pop(event.id, None)
    return list(live.values())


@pytest.mark.parametrize(
    ("use", "first", "rebuilt"),
    [
        ("ddp=8", 1, True),
        ("ddp=8,bucket_mb=25", 1, True),
        ("ddp=8,static_graph=yes", 1, False),
        ("ddp=8,find_unused=yes", 0, False),
    ],
)
def test_buckets_of_ddp(use: str, first: int, rebuilt: bool) -> None:
    """One of all parameters until the order of the gradients is known; then each is closed by the
    parameter that fills it."""
    tape = traced(use, count=3)
    start, later = buckets(tape, 0), buckets(tape, 1 if rebuilt else 2)
    assert sum(start) - P in (0, 26 * 4)  # `find_unused` keeps a number for each parameter
    assert (len(start) == 1) == bool(first)
    assert sum(later) - P in (0, 26 * 4)
    cap = 25 * 2**20
    filled = sorted(later)[2:] if not first else later[1:-1]
    assert len(later) > 4
    assert all(size >= cap for size in filled)
    assert (
        peaks(tape, lambda one: one.part in ("communication", "gradients"))["backward", 1] >= 2 * P
    )


def test_gradients_that_are_views_of_the_buckets_cost_nothing() -> None:
    def held(use: str) -> int:
        return peaks(
            traced(use, count=2), lambda one: one.part in ("weights", "communication", "gradients")
        )["backward", 1]

    assert (held("ddp=8"), held("ddp=8,bucket_view=yes")) == (3 * P, 2 * P)
