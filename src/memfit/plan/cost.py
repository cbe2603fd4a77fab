"""What work costs on a cluster: hours, money and energy of a dataset, or of a million tokens where
none is named."""

from __future__ import annotations

from memfit.hardware import Cluster
from memfit.hardware.prices import price
from memfit.lazy_dataclass import dataclass
from memfit.simulate.bill import bill, spent
from memfit.simulate.time import Duration

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Paid:
    """Dollars of an hour of one GPU, None where nobody says; and who says so."""

    dollars: float | None
    origin: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of `tokens` tokens. Energy is that of the boards at their power limit: hosts, switches and
    cooling come on top."""

    tokens: float
    hours: float
    dollars: float | None
    kilowatt_hours: float | None


def paid(cluster: Cluster, dollars: float | None) -> Paid:
    known = price(cluster.gpu)
    if dollars is not None:
        return Paid(dollars=dollars, origin="price given by the user")
    if known is None:
        return Paid(dollars=None, origin="price unknown (pass `--price`)")
    return Paid(
        dollars=known.dollars,
        origin=f"${known.dollars:g} per GPU-hour on {known.date}: {known.cite}",
    )


def cost(time: Duration, cluster: Cluster, each: Paid, tokens: float) -> Cost:
    """Of a dataset in whole steps; of a million tokens as a share of one step's bill."""
    whole = bill(time, cluster, int(tokens or time.tokens), price=each.dollars)
    share = 1.0 if tokens else MILLION / time.tokens
    return Cost(
        tokens=tokens or MILLION,
        hours=share * whole.hours,
        dollars=None if whole.money is None else share * whole.money,
        kilowatt_hours=None if whole.energy is None else share * whole.energy,
    )


def served(tokens_per_second: float, cluster: Cluster, each: Paid, tokens: float) -> Cost:
    """The cost of generating a number of tokens."""
    hours = tokens / tokens_per_second / 3600
    energy, money = spent(hours, cluster, each.dollars)
    return Cost(tokens=tokens, hours=hours, dollars=money, kilowatt_hours=energy)


__all__ = ["MILLION", "Cost", "Paid", "cost", "paid", "served"]
