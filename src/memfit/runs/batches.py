"""Which texts form a batch at each step: the seeded samplers of trainers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Annotated

from memfit.constants import counted
from memfit.lazy_dataclass import dataclass
from memfit.units import round_up

ORDERS = ("shuffled", "as-is", "sorted", "grouped", "bucketed")
MEGA_BATCH: Annotated[
    int,
    counted(
        "steps of a mega-batch, which is sorted by length",
        "transformers 5.23 trainer_pt_utils.py get_length_grouped_indices",
    ),
] = 50


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How batches are made of texts: `batch` texts each, cut at `limit` tokens, padded to the
    longest and to a multiple; `ranks` GPUs with `accumulate` of them each make a step."""

    batch: int
    limit: int
    accumulate: int = 1
    ranks: int = 1
    order: str = "shuffled"
    multiple: int = 1
    packing: bool = False


@dataclass(frozen=True, kw_only=True)
class Batches:
    """`steps`: the padded lengths of the first rank's micro-batches in each step; `longest`: the
    longest of all ranks in each. `texts`: indices of the longest text of each step's longest
    batch. `real` tokens of `padded` ones are no padding, over all ranks."""

    steps: tuple[tuple[int, ...], ...]
    longest: tuple[int, ...]
    texts: tuple[int, ...]
    real: int
    padded: int

    @property
    def padding(self) -> float:
        return 1 - self.real / self.padded


def epoch_steps(tokens: Sequence[int], how: Sampling, total: int = 0) -> int:
    """Optimizer steps of one epoch; `total`: texts of which `tokens` are a sample."""
    rows = total = total or len(tokens)
    if how.packing:
        real = sum(min(one, how.limit) for one in tokens) * total / len(tokens)
        rows = max(1, round(real / how.limit))
    return max(1, rows // (how.batch * how.accumulate * how.ranks))


def batches(tokens: Sequence[int], how: Sampling, steps: int, seed: int) -> Batches:
    """The batches of `steps` steps; a new epoch is shuffled anew."""
    each = how.accumulate * how.ranks
    if how.packing:
        shape = (how.limit,) * how.accumulate
        total = steps * each * how.batch * how.limit
        return Batches(
            steps=(shape,) * steps,
            longest=(how.limit,) * steps,
            texts=(-1,) * steps,
            real=total,
            padded=total,
        )
    stream = grouped(tokens, how, random.Random(seed), steps * each)
    made: list[tuple[int, ...]] = []
    longest: list[int] = []
    texts: list[int] = []
    real = padded = 0
    for _ in range(steps):
        sizes, firsts = [], []
        for _ in range(each):
            chosen = next(stream)
            first = max(chosen, key=tokens.__getitem__)
            size = round_up(min(tokens[first], how.limit), how.multiple)
            size = min(size, round_up(how.limit, how.multiple))
            sizes.append(size)
            firsts.append(first)
            real += sum(min(tokens[one], how.limit) for one in chosen)
            padded += size * len(chosen)
        made.append(tuple(sizes[:: how.ranks]))  # accelerate deals batches out in turn
        top = max(range(each), key=sizes.__getitem__)
        longest.append(sizes[top])
        texts.append(firsts[top])
    return Batches(
        steps=tuple(made), longest=tuple(longest), texts=tuple(texts), real=real, padded=padded
    )


def grouped(
    tokens: Sequence[int], how: Sampling, rng: random.Random, needed: int
) -> Iterator[Sequence[int]]:
    """Indices of the texts of each micro-batch, without end; texts that fill no batch are left
    out."""
    size, texts = how.batch, range(len(tokens))
    if len(texts) < size:  # a small file: its texts come several times in a batch
        texts = range(len(tokens))
        while True:
            yield [rng.choice(texts) for _ in range(size)]
    while True:
        order = ordered(tokens, how, rng, needed)
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def ordered(tokens: Sequence[int], how: Sampling, rng: random.Random, needed: int) -> Sequence[int]:
    """Texts in the order of one epoch. Of a shuffled one, only what is needed is drawn."""
    texts = range(len(tokens))
    if how.order == "as-is":
        return texts
    if how.order == "sorted":
        return sorted(texts, key=tokens.__getitem__)
    if how.order == "bucketed":
        return bucketed(tokens, how, rng)
    if how.order == "shuffled":
        return rng.sample(texts, min(len(texts), needed * how.batch))
    order = rng.sample(texts, len(texts))
    # What a process has in a step is sorted as one (transformers 5.23 trainer.py
    # _get_train_sampler); the longest text of all comes first
    step = how.batch * how.accumulate
    mega = min(len(texts) // (step * 4) or 1, MEGA_BATCH) * step
    pieces = [
        sorted(order[start : start + mega], key=tokens.__getitem__, reverse=True)
        for start in range(0, len(order), mega)
    ]
    first = max(range(len(pieces)), key=lambda place: tokens[pieces[place][0]])
    pieces[0][0], pieces[first][0] = pieces[first][0], pieces[0][0]
    return [one for piece in pieces for one in piece]


def bucketed(tokens: Sequence[int], how: Sampling, rng: random.Random) -> list[int]:
    """Batches of texts of similar lengths, up to the same power of two, in random order; the texts
    that are left form batches by length."""
    buckets: dict[int, list[int]] = {}
    for one in rng.sample(range(len(tokens)), len(tokens)):
        buckets.setdefault(min(tokens[one], how.limit).bit_length(), []).append(one)
    size = how.batch
    made = [
        some[start : start + size]
        for some in buckets.values()
        for start in range(0, len(some) - size + 1, size)
    ]
    rest = [one for some in buckets.values() for one in some[len(some) // size * size :]]
    rest.sort(key=tokens.__getitem__)
    made += [rest[start : start + size] for start in range(0, len(rest) - size + 1, size)]
    rng.shuffle(made)
    return [one for batch in made for one in batch]


def longest_batches(tokens: Sequence[int], how: Sampling, steps: int, seed: int) -> Sequence[int]:
    """The longest padded batch of each step, over all ranks: as `batches` has it."""
    if how.order != "shuffled" or how.packing or len(tokens) < how.batch:
        return batches(tokens, how, steps, seed).longest
    each = how.batch * how.accumulate * how.ranks
    rng, chosen = random.Random(seed), list[int]()
    while len(chosen) < each * steps:
        order = ordered(tokens, how, rng, steps * how.accumulate * how.ranks)
        chosen += order[: len(order) // how.batch * how.batch]
    sizes = [tokens[one] for one in chosen[: each * steps]]
    top = round_up(how.limit, how.multiple)
    return [
        min(top, round_up(min(how.limit, max(sizes[at : at + each])), how.multiple))
        for at in range(0, len(sizes), each)
    ]
