"""What NCCL takes of a GPU outside torch's allocator: buffers of every communicator that runs a collective.

Sizes are those of NCCL's sources (2.17 to 2.30: init.cc, transport/p2p.cc, nvls.cc, net.cc); how many channels a communicator gets is its
own search over the machine, so that every figure is a range: logs of 8 GPUs on NVLink show 16 (H800) and 24 (H100) channels, of PCIe 2.
"""

from __future__ import annotations

from memfit.hardware.gpu import GPU
from memfit.hardware.outside import Span
from memfit.units import MIB

RECEIVE, SEND = 10 * MIB, 2 * MIB  # a peer on a channel: LL, LL128 and SIMPLE buffers, and a head; in pages of 2 MiB
RING = RECEIVE + SEND
TREE = 2 * (RECEIVE + SEND)  # one child and the parent, as within a node; connected when first used
NET = 18 * MIB  # GPUDirect RDMA: LL128 and SIMPLE both ways, LL where it receives
NVLINK_CHANNELS, PCIE_CHANNELS = (16, 24), (2, 4)
LINKED, PAIR = (8, 12), (2, 4)  # four V100 that six NVLinks each join, and two of them
NVLS = {(2, 21): 256 * MIB, (0, 0): 1024 * MIB}  # on NVSwitch from sm_90 on, 8 GPUs; by version of NCCL
NVLS_GPUS = 4  # fewer are left to the ring
BUNDLED = {(2, 5): (2, 21), (0, 0): (2, 20)}  # with torch
CITE = (
    "derived: NCCL 2.17 to 2.30 transport/p2p.cc, nvls.cc, net.cc; channels as logs of NVIDIA/nccl issues 892, 1189, 1259 and nccl-tests 228 show, "
    "one group of A100 as measured in 964"
)
NONE = Span(0, 0, CITE)


def communicator(gpu: GPU, ranks: int, nodes: int, torch: tuple[int, int]) -> Span:
    """Of one group of `ranks` GPUs over `nodes` nodes."""
    if ranks < 2:
        return NONE
    nvlink = gpu.link is not None and gpu.link.kind == "nvlink"
    if not nvlink and nodes == 1:  # without peer access, buffers are in the host's memory
        return Span(0, PCIE_CHANNELS[1] * (RING + TREE), CITE)
    few, many = channels(gpu, ranks) if nvlink else PCIE_CHANNELS
    low, high = few * RING, many * (RING + TREE)
    if nodes > 1:
        high += many * NET
    if nvlink and gpu.sm is not None and gpu.sm >= (9, 0) and ranks // nodes >= NVLS_GPUS:
        nccl = next(version for since, version in BUNDLED.items() if torch >= since)
        shared = next(size for since, size in NVLS.items() if nccl >= since)
        low, high = low + shared, high + shared
    return Span(low, high, CITE)


def channels(gpu: GPU, ranks: int) -> tuple[int, int]:
    """Over NVLink. V100s have no switch: two channels for each ring that the links between them make (NVIDIA/nccl#713: six rings of four GPUs, which
    src/graph/connect.cc takes twice; THUDM/GLM#60 has a log of eight channels)."""
    if gpu.link is None or gpu.link.generation != 2:
        return NVLINK_CHANNELS
    return LINKED if ranks > 2 else PAIR


def communicators(gpu: GPU, groups: tuple[tuple[int, int], ...], per_node: int, torch: tuple[int, int]) -> Span:
    """Of all groups that one rank is in: (ranks, distance between two neighbours in rank numbers). Where there are several, the group of
    all ranks may run a barrier or share metrics, too."""
    found = [communicator(gpu, ranks, spanned(ranks, stride, per_node), torch) for ranks, stride in groups if ranks > 1]
    low, high = sum(one.low for one in found), sum(one.high for one in found)
    world = max((ranks * stride for ranks, stride in groups), default=1)
    if len(found) > 1 and (world, 1) not in groups:
        high += communicator(gpu, world, spanned(world, 1, per_node), torch).high
    return Span(low, high, CITE)


def spanned(ranks: int, stride: int, per_node: int) -> int:
    """Nodes that a group lies on."""
    return max(1, -(-ranks * stride // per_node)) if stride < per_node else ranks
