"""What an hour of a GPU costs, by public price lists of a day (prices.toml)."""

from __future__ import annotations

from memfit.hardware.gpu import GPU
from memfit.hardware.own import own_prices
from memfit.hardware.tables import table
from memfit.lazy_dataclass import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Dollars of an hour of one GPU on demand, on a `date`."""

    dollars: float
    date: str
    cite: str


def price(gpu: GPU) -> Price | None:
    own = own_prices().get(gpu.id)
    if own is not None:
        return Price(dollars=own, date="", cite="given in your gpus.toml")
    known = table("prices")
    if gpu.id not in known["dollars"]:
        return None
    dollars, date, source = known["dollars"][gpu.id].split(" ", 2)
    return Price(dollars=float(dollars), date=date, cite=known["sources"][source])


def priced() -> tuple[str, ...]:
    return tuple(table("prices")["dollars"])


__all__ = ["Price", "price", "priced"]
