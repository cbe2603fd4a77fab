"""The same published case in several tables of its publisher: what docs/log.md and the causes say
of it, from the figures themselves."""

import pytest

from memfit import band
from memfit.truth import Case, read
from memfit.truth.repeats import METRIC, Repeat, apart, middle, nearest, repeats

GIB, MIB = 2**30, 2**20
RESIDUALS = {
    one.id: one for one in map(band.Residual._make, band.residuals()) if one.metric == METRIC
}
CASES = {
    case.id: case
    for case in read()
    if isinstance(case, Case) and case.metric == METRIC and repeats(case)
}


def of(name: str, commit: str) -> int:
    return next(one.bytes for one in repeats(CASES[name]) if one.commit == commit)


def test_each_row_stands_among_its_repeats() -> None:
    assert len(CASES) > 70
    for case in CASES.values():
        some = repeats(case)
        assert any(abs(one.bytes - case.value) <= MIB for one in some), case.id
        assert [one.date for one in some] == sorted(one.date for one in some)
        assert len({one.commit for one in some}) == len(some) > 1


def test_another_counter_has_no_repeats() -> None:
    assert not any(
        repeats(case) for case in read() if isinstance(case, Case) and case.metric != METRIC
    )


@pytest.mark.parametrize("name", ["fms-0547", "fms-0550", "fms-0571", "fms-0574"])
def test_tables_lie_one_block_of_logits_apart(name: str) -> None:
    """Unsloth's loss on one GPU, July against November 2024: exactly the fp32 logits of a batch
    over Mistral's 32,000 words."""
    job = CASES[name].job
    assert (
        abs(of(name, "9239802") - of(name, "b6c1455") - job.batch * job.seq * 32_000 * 4)
        <= 12 * MIB
    )
    assert abs(RESIDUALS[name].predicted / of(name, "b6c1455") - 1) < 0.03


def test_the_last_table_is_a_constant_above_the_others() -> None:
    rises = [
        of(name, "24bdadb") - of(name, "9239802")
        for name, case in CASES.items()
        if one_gpu(case) and both(case)
    ]
    assert len(rises) >= 10
    assert all(1.1 * GIB < one < 1.4 * GIB for one in rises)


def one_gpu(case: Case) -> bool:
    """Those that do not run into the end of the memory, and hold the same in every run (experts get
    unequal shares of the tokens)."""
    return case.strategy.ranks == 1 and case.value < 60 * GIB and "Mixtral" not in case.model


def both(case: Case) -> bool:
    return {"24bdadb", "9239802"} <= {one.commit for one in repeats(case)}


def test_rows_far_off_are_met_by_another_table() -> None:
    """All but two, whose cache was given back for want of room."""
    far = [
        one
        for one in RESIDUALS.values()
        if one.id in CASES and abs(one.predicted / one.measured - 1) > 0.10
    ]
    missed = {one.id for one in far if abs(nearest(one.predicted, repeats(CASES[one.id]))) > 0.10}
    assert len(far) > 20
    assert missed == {"fms-0045", "fms-0512"}


def test_words() -> None:
    some = [
        Repeat("a", "2024-01-01", 100),
        Repeat("b", "2024-02-01", 100),
        Repeat("c", "2024-03-01", 120),
        Repeat("d", "2024-04-01", 150),
    ]
    assert (apart(some), nearest(126, some), middle(132, some)) == (
        0.5,
        pytest.approx(0.05),
        pytest.approx(0.1),
    )
