"""Steps, hours, energy and cost of a whole run, from the time of one step and the size of the
dataset."""

from __future__ import annotations

from memfit.hardware import Cluster
from memfit.lazy_dataclass import dataclass
from memfit.simulate.time import Duration


@dataclass(frozen=True, kw_only=True)
class Bill:
    """`tokens` are those of all steps, the last one full. None: the board's power, or the price, is
    not known."""

    steps: int
    tokens: int
    hours: float
    gpu_hours: float
    energy: (
        float | None
    )  # kWh, the boards at their power limit: fans, hosts and cooling come on top
    money: float | None


def spent(hours: float, cluster: Cluster, price: float | None) -> tuple[float | None, float | None]:
    """kWh, the boards at their power limit, and money. All GPUs of the cluster are paid for, used
    or not."""
    each, power = hours * cluster.gpus, cluster.gpu.power
    return None if power is None else each * power / 1e3, None if price is None else each * price


def bill(time: Duration, cluster: Cluster, tokens: int, *, price: float | None = None) -> Bill:
    """Of so many tokens; `price` is that of a GPU for an hour."""
    steps = -(-tokens // time.tokens)
    hours = steps * time.seconds / 3600
    energy, money = spent(hours, cluster, price)
    return Bill(
        steps=steps,
        tokens=steps * time.tokens,
        hours=hours,
        gpu_hours=hours * cluster.gpus,
        energy=energy,
        money=money,
    )


__all__ = ["Bill", "bill", "spent"]
