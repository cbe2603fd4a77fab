"""How long a collective takes among ranks of a cluster: as measured within a node
(collectives.json), by what ports carry between nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import exp, log
from typing import Annotated

from memfit.constants import counted, measured, vendor
from memfit.hardware.cluster import Cluster
from memfit.hardware.link import Link, find_link
from memfit.lazy_dataclass import dataclass

# What a call's size must travel, as a multiple of (ranks - 1) / ranks.
TRAFFIC = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1}
PORT: Annotated[
    float,
    measured(
        "share of its line rate that a port carries",
        "NVIDIA/nccl-tests#290: 46 to 48 of 50 GB/s",
    ),
] = 0.94
PORTS: Annotated[
    Mapping[int, str],
    vendor(
        "the port of each GPU where no network is named, by architecture",
        "NVIDIA's own machines: DGX-1, DGX A100, DGX H100, DGX B200",
    ),
] = {7: "infiniband-edr", 8: "infiniband-hdr", 9: "infiniband-ndr", 10: "infiniband-ndr"}
_TUNING = "NVIDIA/nccl 2.19 to 2.24 src/graph/tuning.cc, ring, protocol Simple"
CALL: Annotated[float, counted("seconds of a call of NCCL", f"{_TUNING}: baseLat")] = 8.4e-6
STEP: Annotated[
    Mapping[str, float], counted("seconds from GPU to GPU of a ring", f"{_TUNING}: hwLat")
] = {"nvlink": 3.4e-6, "pcie": 5.7e-6}
HOP: Annotated[float, counted("seconds from node to node of a ring", f"{_TUNING}: hwLat")] = 14e-6


@dataclass(frozen=True, kw_only=True)
class Group:
    """`size` ranks, `stride` apart, on nodes of `per_node` GPUs."""

    size: int
    stride: int
    per_node: int

    @property
    def near(self) -> int:
        """Of its ranks, those on one node."""
        return min(self.size, max(1, self.per_node // self.stride))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.near)


def seconds(op: str, size: int, group: Group, cluster: Cluster) -> float | None:
    """None where the links are not known. `size`: bytes as the call states them, the whole of what
    is gathered or scattered. Between nodes the ring is as slow as the slower of its links."""
    if group.size < 2:
        return 0.0
    inside = 0.0 if group.near < 2 else within(op, size, group.near, cluster)
    if inside is None or group.nodes == 1:
        return inside
    port = network(cluster)
    if port is None or port.bandwidth is None:
        return None
    traffic = size * (
        1.0
        if op in ("send", "recv", "send_recv")
        else TRAFFIC.get(op, 1) * (group.size - 1) / group.size
    )
    return max(
        inside,
        latency(op, group, cluster, HOP + (port.latency or 0.0))
        + traffic / (PORT * port.bandwidth * group.near),
    )


def latency(op: str, group: Group, cluster: Cluster, hop: float) -> float:
    """The steps of a ring over several nodes, one behind the other, as NCCL itself counts them; an
    all-reduce may climb a tree instead."""
    if op in ("send", "recv", "send_recv"):
        return CALL + hop
    near = step(cluster)
    ring = (group.nodes - 1) * hop + (group.size - group.nodes) * near
    if op != "all_reduce":
        return CALL + ring
    return CALL + 2 * min(ring, (group.nodes - 1).bit_length() * hop + (group.near - 1) * near)


def step(cluster: Cluster) -> float:
    link = cluster.gpu.link
    return STEP.get("" if link is None else link.kind, STEP["pcie"])


def within(op: str, size: int, ranks: int, cluster: Cluster) -> float | None:
    """Bandwidth among GPUs of one node: measured with this many or more GPUs, else that of the
    links."""
    link = cluster.gpu.link
    if link is None:
        return None
    points = op in ("send", "recv", "send_recv")
    known = link.measured.get("all_gather" if points else op) or link.measured.get("all_gather")
    share = 1.0 if points else (ranks - 1) / ranks
    if known:
        count = next((count for count in sorted(known) if count >= ranks), max(known))
        return along(known[count], size * share / ((count - 1) / count))
    rate = wire(link, 2 if points else ranks)
    return (
        None
        if rate is None
        else CALL
        + (ranks - 1) * step(cluster) * TRAFFIC.get(op, 1)
        + size * share * TRAFFIC.get(op, 1) / rate
    )


def wire(link: Link, ranks: int) -> float | None:
    """Bytes/s one way of a GPU among so many: without a switch, the links to those that do not take
    part lie idle. NCCL and RCCL lay rings over all others (two MI300X reach 47.7 GB/s of 64, eight
    312.9 of 448: links.toml)."""
    if link.peer is None:
        return link.bandwidth
    joined = link.peer * (ranks - 1)
    return joined if link.bandwidth is None else min(link.bandwidth, joined)


def along(points: tuple[tuple[int, float], ...], size: float) -> float:
    """Seconds between two measured sizes, evenly on both scales; smaller calls take as long as the
    smallest, larger ones at the last rate."""
    if size <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (size, 0.0)), len(points) - 1)
    (low, quick), (high, slow) = points[at - 1], points[at]
    if size >= high:
        return slow * size / high
    return quick * exp(log(slow / quick) * log(size / low) / log(high / low))


def network(cluster: Cluster) -> Link | None:
    if cluster.network is not None:
        return cluster.network
    name = PORTS.get(cluster.gpu.sm[0]) if cluster.gpu.sm else None
    return None if name is None else find_link(name)


__all__ = ["Group", "network", "seconds"]
