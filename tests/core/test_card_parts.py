"""The card by hand, over a model whose memory is a formula: which row is the best of its group,
batches and lengths, the smallest and the cheapest GPU, and what a shelf of models says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.hardware import Cluster, find_gpu, nvidia_cards, parse_cluster, usable
from memfit.hardware.prices import price
from memfit.job import Job
from memfit.plan import card, shelf
from memfit.plan.card import USES, Asking, Row, Served, Use
from memfit.strategy import ONE, TP, Strategy, even_split
from memfit.units import GIB

SHORT = Job(seq=50, new_tokens=0)
T4 = Cluster(gpu=find_gpu("t4"))
ANSWERS = {use.key: use for use in USES if use.answers and not use.served}
TUNES = {use.key: use for use in USES if not use.answers}


def shaped(layers: int = 32, positions: int = 8192, name: str = "m") -> Any:
    return SimpleNamespace(
        layers=[None] * layers,
        positions=positions,
        encodes=False,
        name=name,
        parameters=7,
        config={},
    )


def job_of(model: Any, use: Use, strategy: Strategy, gpu: Any) -> Job:
    return Job(**{"batch": 4, "seq": 512, **use.options})


class Formula:
    """`estimate` and its parts: so much for the weights of a use, and some for each sequence; a
    layout divides the weights. What needs a quantization that is not supported is refused."""

    def __init__(self, base: dict[str, int], each: int, refused: tuple[str, ...] = ()) -> None:
        self.base, self.each, self.refused = base, each, refused

    def needs(self, job: Job, strategy: Strategy) -> int:
        kind = job.quant if job.task == "inference" else job.method
        if kind in self.refused:
            raise InputError.one(f"{kind} is not supported", where="job")
        return self.base[kind] // strategy.ranks + self.each * job.batch

    def estimate(
        self, model: Any, job: Job, cluster: Any = None, strategy: Strategy = ONE, **_: Any
    ) -> Any:
        size = self.needs(job, strategy)
        verdict = "" if cluster is None else "fits" if size <= usable(cluster.gpu) else "no"
        time = SimpleNamespace(tokens_per_second=100.0 * job.batch)
        return SimpleNamespace(device=size, reach=size, verdict=verdict, time=time, generation=None)

    def shortfall(self, model: Any, job: Job, cluster: Cluster, strategy: Strategy) -> int:
        return self.needs(job, strategy) - usable(cluster.gpu)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Formula:
    made = Formula(
        {"none": 16 * GIB, "int8": 8 * GIB, "nf4": 4 * GIB, "full": 60 * GIB, "lora": 12 * GIB}
        | {"qlora": 6 * GIB},
        GIB,
    )

    class Line:
        def __init__(self, model: Any, cluster: Cluster, strategy: Strategy) -> None:
            self.model, self.cluster, self.strategy = model, cluster, strategy

        def short(self, job: Job) -> int:
            return made.shortfall(None, job, self.cluster, self.strategy)

    def furthest(look: Line, job: Job, name: str, top: int, step: int) -> int:
        """By trying all of them; of lengths only whether one fits."""
        if name == "seq":
            return top if look.short(job) <= 0 else 0
        assert (top, step) == (4096, 1)
        return max(
            (one for one in range(1, 200) if look.short(job.replace(batch=one)) <= 0), default=0
        )

    for part in (card, shelf):
        monkeypatch.setattr(part, "estimate", made.estimate)
    monkeypatch.setattr(shelf, "shortfall", made.shortfall)
    monkeypatch.setattr(card, "Look", Line)
    monkeypatch.setattr(card, "furthest", furthest)
    monkeypatch.setattr(card, "unquantized", lambda *_: "")
    monkeypatch.setattr(card, "stored_as", lambda _: "")
    return made


def look() -> Any:
    return card.Look(shaped(), T4, ONE)


def no_server(*_: Any, **__: Any) -> Served | None:
    return None


def test_a_row_has_the_largest_batch_and_its_speed(formula: Formula) -> None:
    """A T4 offers 14.5 GiB and some: 8 in 8 bits, and one for each sequence."""
    room = usable(T4.gpu)
    found = card.batch_row(look(), ANSWERS["8-bit"], job_of)
    assert (found.fits, found.most, found.job.batch) == (True, (room - 8 * GIB) // GIB, 1)
    assert (found.device, found.tokens_per_second) == (9 * GIB, 100.0)
    tuned = card.batch_row(look(), TUNES["qlora"], job_of)
    assert (tuned.fits, tuned.job.batch, tuned.device) == (True, 4, 10 * GIB)
    few = card.batch_row(look(), TUNES["lora"], job_of)
    assert (few.most, few.job.batch) == ((room - 12 * GIB) // GIB,) * 2
    none = card.batch_row(look(), TUNES["full"], job_of)
    assert (none.fits, none.most, none.job.batch, none.device) == (False, 0, 1, 0)
    formula.refused = ("int8",)
    refused = card.batch_row(look(), ANSWERS["8-bit"], job_of)
    assert refused.refused == "int8 is not supported"
    whole = card.row(shaped(), ANSWERS["8-bit"], T4, ONE, job_of)
    assert whole.refused == "int8 is not supported"


def test_the_usual_batch_counts_where_it_fits_and_a_smaller_one_does_not(
    formula: Formula, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator's gaps are no line."""
    monkeypatch.setattr(card, "furthest", lambda *_: 3)
    found = card.batch_row(look(), TUNES["qlora"], job_of)
    assert (found.fits, found.most, found.job.batch) == (True, 4, 4)
    too_large = card.batch_row(look(), TUNES["lora"], job_of)
    assert (too_large.most, too_large.job.batch) == (3, 3)


def test_the_first_layout_that_is_supported_and_fits(formula: Formula) -> None:
    four = parse_cluster("4xt4")
    found, strategy = card.supported_row(shaped(), ANSWERS["16-bit"], four, job_of)
    assert (found.fits, strategy) == (True, Strategy(tp=TP(size=4)))
    assert found.device == 5 * GIB

    def no_tensors(job: Job, strategy: Strategy) -> int:
        if strategy.size("tp") > 1:
            raise InputError.one("no tensor parallelism", where="use")
        ranks = 1 if strategy.size("ddp") > 1 else strategy.ranks
        return 16 * GIB // ranks + GIB * job.batch

    formula.needs = no_tensors  # type: ignore[method-assign]
    found, strategy = card.supported_row(shaped(), ANSWERS["16-bit"], four, job_of)
    assert (found.fits, strategy.split) == (True, even_split(32, 4))
    large = parse_cluster("4xa100-sxm-40gb")
    found, strategy = card.supported_row(shaped(), ANSWERS["16-bit"], large, job_of)
    assert (found.fits, strategy.size("ddp")) == (True, 4)
    assert found.most == 4 * ((usable(large.gpu) - 16 * GIB) // GIB)  # of all copies
    formula.refused = ("none",)
    formula.needs = Formula.needs.__get__(formula)  # type: ignore[method-assign]
    found, strategy = card.supported_row(shaped(), ANSWERS["16-bit"], four, job_of)
    assert (found.refused, strategy) == ("none is not supported", Strategy(tp=TP(size=4)))


def rows(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, Row], split: tuple[str, ...] = ()
) -> Callable[[Cluster], card.Card]:
    """A card of these rows; those of `split` have their layers one after the other."""
    uses = tuple(row.use for row in known.values())
    monkeypatch.setattr(card, "with_servers", lambda *_: uses)

    def row_of(model: Any, cluster: Any, job_of: Any, serve: Any, use: Use) -> Any:
        return known[use.key], Strategy(split=even_split(32, 2)) if use.key in split else ONE

    monkeypatch.setattr(card, "row_of", row_of)
    asking = Asking(job_of=job_of, serve=no_server)
    return lambda cluster: card.card(shaped(), cluster, asking)


def test_the_first_row_of_each_group_that_fits_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = {"8-bit", "4-bit", "lora"}
    known = {
        use.key: Row(use=use, job=SHORT, fits=use.key in fits)
        for use in (*ANSWERS.values(), *TUNES.values())
    }
    found = rows(monkeypatch, known)(T4)
    assert [row.use.key for row in found.rows if row.best] == ["8-bit", "lora"]
    assert [row.use.key for row in found.rows] == list(known)
    assert found.fits
    halved = rows(monkeypatch, known, split=("8-bit",))(parse_cluster("2xt4"))
    assert [row.use.key for row in halved.rows if row.best] == ["4-bit", "lora"]
    every = rows(monkeypatch, known, split=("8-bit", "4-bit"))(parse_cluster("2xt4"))
    assert [row.use.key for row in every.rows if row.best] == ["8-bit", "lora"]
    nothing = {key: Row(use=row.use) for key, row in known.items()}
    none = rows(monkeypatch, nothing)(T4)
    assert not none.fits
    assert not any(row.best for row in none.rows)


def test_a_server_that_refuses_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Use(key="s", title="s", options={}, server="own")
    gguf = next(use for use in USES if use.gguf)
    known = {
        "s": Row(use=server, refused="no"),
        gguf.key: Row(use=gguf, refused="no"),
        "8-bit": Row(use=ANSWERS["8-bit"], refused="no"),
    }
    found = rows(monkeypatch, known)(T4)
    assert [row.use.key for row in found.rows] == [gguf.key, "8-bit"]


def test_the_smallest_and_the_cheapest_gpu(formula: Formula) -> None:
    """Of all cards with room the one with the least, and the one that costs least."""
    asking = Asking(job_of=job_of, serve=no_server)
    found = {row.use.key: row for row in shelf.smallest(shaped(), asking).rows}
    assert set(found) == set(ANSWERS) | set(TUNES)  # a file's GPU is another question
    for key, base, batch in (("16-bit", 16, 4), ("lora", 12, 4), ("full", 60, 4)):
        size = (base + batch) * GIB
        enough = [one for one in nvidia_cards() if usable(one) >= size]
        row = found[key]
        assert row.gpu is not None
        assert row.cheapest is not None
        assert usable(row.gpu) == min(map(usable, enough))
        costs = [known.dollars for one in enough if (known := price(one)) is not None]
        assert row.dollars == min(costs)
        known = price(row.cheapest)
        assert known is not None
        assert (known.dollars, row.needs) == (row.dollars, size)
    formula.base["full"] = 900 * GIB
    formula.refused = ("int8",)
    found = {row.use.key: row for row in shelf.smallest(shaped(), asking).rows}
    assert (found["full"].gpu, found["full"].cheapest) == (None, None)
    assert (found["full"].dollars, found["full"].needs) == (None, 904 * GIB)
    assert found["8-bit"].refused == "int8 is not supported"


def test_a_shelf_has_the_best_use_of_each_group(formula: Formula) -> None:
    def line(serve: Any = no_server) -> Any:
        asking = Asking(job_of=job_of, serve=serve)
        (found,) = shelf.shelf([shaped()], T4, asking).lines
        return found

    def key(use: Use | None) -> str:
        return "" if use is None else use.key

    found = line()  # 16 + 4 and 8 + 4 GiB for four sequences
    assert (key(found.answer), found.answer_bytes) == ("8-bit", 12 * GIB)
    assert (key(found.tune), found.tune_bytes) == ("lora", 13 * GIB)  # one at a time: 12 + 1
    formula.base |= {"lora": 11 * GIB - GIB // 2}
    assert line().tune_bytes == 14 * GIB + GIB // 2  # its four fit at once
    formula.base |= {"int8": 30 * GIB, "nf4": 20 * GIB, "lora": 40 * GIB, "qlora": 30 * GIB}
    none = line()
    assert (none.answer, none.tune) == (None, None)
    # what the smallest needs with one sequence, for an answer with a file that is its file
    assert (none.answer_bytes, none.tune_bytes) == (21 * GIB, 31 * GIB)
    formula.refused = ("qlora",)
    assert line().tune_bytes == 41 * GIB
    formula.refused = ("qlora", "lora", "full")
    assert line().tune_bytes == 0

    def file(model: Any, quant: str, cluster: Any, context: int, *, whole: bool = True) -> Served:
        assert context == 4096
        size = {"Q8_0": 9 * GIB, "Q4_K_M": 5 * GIB}[quant]
        return Served(device=size, host=0, fits=quant in fitting)

    fitting = ("Q8_0", "Q4_K_M")
    served = line(file)
    assert (key(served.answer), served.answer_bytes) == ("Q8_0", 9 * GIB)
    fitting = ("Q4_K_M",)
    assert key(line(file).answer) == "Q4_K_M"
    fitting = ()
    assert (line(file).answer, line(file).answer_bytes) == (None, 5 * GIB)
    assert (line().name, line().parameters) == ("m", 7)


def test_a_row_of_a_card_has_its_longest_sequence_and_what_would_make_it_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering, tuning = ANSWERS["8-bit"], TUNES["lora"]
    monkeypatch.setattr(card, "Look", lambda *_: None)
    monkeypatch.setattr(card, "batch_row", lambda look, use, _: Row(use=use, most=5))
    monkeypatch.setattr(card, "longest_row", lambda look, use, _: Row(use=use, longest=6))
    alone = card.row(shaped(), tuning, T4, ONE, job_of)
    assert (alone.most, alone.longest) == (5, 6)
    layout = Strategy(tp=TP(size=2))
    monkeypatch.setattr(card, "supported_row", lambda _, use, *__: (Row(use=use, most=7), layout))
    monkeypatch.setattr(
        card, "with_way", lambda model, one, *_: Row(use=one.use, most=one.most, device=1)
    )
    monkeypatch.setattr(card, "served_row", lambda model, use, *_: Row(use=use, most=8))
    monkeypatch.setattr(card, "server_row", lambda model, use, *_: Row(use=use, most=9))

    def asked(use: Use, gpus: str) -> tuple[int, int, Strategy]:
        one, strategy = card.row_of(shaped(), parse_cluster(gpus), job_of, no_server, use)
        return one.most, one.device, strategy

    for use in (answering, tuning):
        assert asked(use, "2xt4") == (7, 1, layout)
    gguf = next(use for use in USES if use.gguf)
    server = Use(key="s", title="s", options={}, server="own")
    assert asked(gguf, "t4") == (8, 0, ONE)
    assert asked(server, "2xt4")[:2] == (9, 0)
    for row in (Row(use=tuning, fits=True), Row(use=tuning, refused="no")):
        monkeypatch.setattr(card, "supported_row", lambda *_, row=row: (row, ONE))
        assert asked(tuning, "t4")[1] == 0  # no way is looked for


def test_a_server_stands_behind_the_weights_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [use.key for use in USES]
    for known, behind in (
        (("own", "fp8"), {"16-bit": "own", "8-bit": "fp8"}),
        (("own",), {"16-bit": "own"}),
        ((), {}),
    ):
        monkeypatch.setattr(card, "weights_for", lambda *_, known=known: known)
        monkeypatch.setattr(card, "stored_as", lambda _: "")
        found = card.with_servers(shaped(), T4)
        assert [use.key for use in found if not use.server] == whole
        servers = {before.key: use.server for before, use in pairwise(found) if use.server}
        assert servers == behind


@pytest.mark.parametrize("users", [0, 1, 5])
def test_a_server_s_row_is_what_it_says(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(device=7, users=users, tokens_per_second=9.0, longest=11)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(card, "server_on", lambda *words: asked.append(words) or said)
    server = Use(key="s", title="s", options={}, server="own")
    found = card.server_row(shaped(), server, T4)
    assert (found.fits, found.most, found.longest, found.device) == (users > 0, users, 11, 7)
    assert (found.job.seq, found.job.new_tokens) == (4096 - 128, 128)
    assert [words[1:] for words in asked] == [("own", T4, 4096, 128)]
    small = card.server_row(shaped(positions=100), server, T4)
    assert (small.job.seq, small.job.new_tokens) == (50, 50)
    monkeypatch.setattr(card, "server_on", lambda *_: None)
    assert "does not support" in card.server_row(shaped(), server, T4).refused
