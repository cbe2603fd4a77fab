"""What NCCL takes of a GPU outside torch's allocator: buffers of every communicator that runs a
collective.

Sizes are those of NCCL's sources (2.14 to 2.30: init.cc, transport/p2p.cc, nvls.cc, net.cc); how
many channels a communicator gets is its own search over the machine, so that figures are ranges:
logs of 8 GPUs on NVLink show 16 (H800) and 24 (A100, H100) channels, of PCIe 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from memfit.constants import counted, measured
from memfit.hardware.gpu import GPU
from memfit.hardware.outside import Span
from memfit.units import MIB

_P2P = "NCCL 2.14 to 2.30 transport/p2p.cc, in pages of 2 MiB"
RECEIVE: Annotated[
    int, counted("bytes of a peer on a channel, receiving: LL, LL128 and SIMPLE buffers", _P2P)
] = 10 * MIB
SEND: Annotated[int, counted("bytes of a peer on a channel, sending: a head", _P2P)] = 2 * MIB
READ: Annotated[
    int,
    counted(
        "bytes of each of the two on A100, whose GPUs read from their peers: SIMPLE lies with the "
        "sender",
        "NCCL graph/paths.cc ncclTopoCheckP2p",
    ),
] = 6 * MIB
RING = RECEIVE + SEND
# Within a node a tree is a line of GPUs. Along the ring it adds the way back to the ring's
# connections, which it shares: nothing between two GPUs, one end at either end of the line, both in
# its middle (transport.cc ncclTransportP2pConnect; all 24 trees of nccl-tests#100 lie so). Where
# links join GPUs one by one it may lie elsewhere.
BACK, ELSEWHERE = RING, 2 * RING
EAGER: Annotated[
    tuple[int, int],
    counted(
        "the first version of NCCL that connects trees later than the communicator",
        "NCCL 2.22 init.cc, `Connected all trees`",
    ),
] = (2, 22)
_SHARED = "net.cc sharedBuffersInit: 16 steps a channel of messages over the network, used or not"
SHARED: Annotated[
    Mapping[tuple[int, int], int],
    counted(
        "bytes of a channel's steps, of 512 KiB where NVLink joins all (P2P_NVL_CHUNKSIZE), by "
        "version of NCCL",
        _SHARED,
    ),
] = {
    (2, 16): 8 * MIB,
    (0, 0): 2 * MIB,
}
FAR: Annotated[
    int, counted("bytes of the same across nodes and without NVLink: steps of 128 KiB", _SHARED)
] = 2 * MIB
NET: Annotated[
    int,
    counted(
        "bytes of a channel of GPUDirect RDMA: LL128 and SIMPLE both ways, LL where it receives",
        "NCCL 2.14 to 2.30 transport/net.cc",
    ),
] = 18 * MIB
_LOGS = "logs in NVIDIA/nccl issues 892, 1189, 1259, NVIDIA/nccl-tests issues 100 and 228"
NVLINK_CHANNELS: Annotated[
    tuple[int, int], measured("channels of GPUs on NVLink, fewest and most", _LOGS)
] = (16, 24)
A100_CHANNELS: Annotated[tuple[int, int], measured("channels of A100 on NVLink", _LOGS)] = (24, 24)
PCIE_CHANNELS: Annotated[tuple[int, int], measured("channels of GPUs on PCIe", _LOGS)] = (2, 4)
LINKED: Annotated[
    tuple[int, int], measured("channels of four V100 that six NVLinks each join", _LOGS)
] = (8, 12)
PAIR: Annotated[tuple[int, int], measured("channels of two of them", _LOGS)] = (2, 4)
NVLS: Annotated[
    Mapping[tuple[int, int], int],
    counted(
        "bytes of NVLink SHARP on NVSwitch from compute capability 9.0, 8 GPUs, by version of NCCL",
        "NCCL 2.17 to 2.30 nvls.cc",
    ),
] = {
    (2, 21): 256 * MIB,
    (0, 0): 1024 * MIB,
}
NVLS_GPUS: Annotated[
    int, counted("GPUs from which NVLink SHARP is used", "NCCL 2.17 to 2.30 nvls.cc")
] = 4
BUNDLED: Annotated[
    Mapping[tuple[int, int], tuple[int, int]],
    counted("the version of NCCL that comes with each version of torch", "torch's wheels"),
] = {
    (2, 7): (2, 26),
    (2, 5): (2, 21),
    (2, 3): (2, 20),
    (2, 2): (2, 19),
    (2, 1): (2, 18),
    (0, 0): (2, 14),
}
CITE = (
    "derived: NCCL 2.14 to 2.30 init.cc, transport/p2p.cc, nvls.cc, net.cc; channels as "
    "logs of NVIDIA/nccl issues 892, 1189, 1259 and nccl-tests 100 "
    "and 228 show, groups of two and of four A100 as measured in 964"
)
NONE = Span(0, 0, CITE)


def communicator(gpu: GPU, ranks: int, nodes: int, torch: tuple[int, int]) -> Span:
    """Of one group of `ranks` GPUs over `nodes` nodes, whichever rank."""
    if ranks < 2:
        return NONE
    nvlink = gpu.link is not None and gpu.link.kind == "nvlink"
    if not nvlink and nodes == 1:  # without peer access, buffers are in the host's memory
        return Span(0, PCIE_CHANNELS[1] * (RING + ELSEWHERE), CITE)
    nccl = bundled(torch)
    few, many = channels(gpu, ranks) if nvlink else PCIE_CHANNELS
    least, most = trees(gpu, ranks, nodes)
    low, high = few * RING, many * (RING + most)
    if nccl < EAGER:
        shared = (
            FAR
            if nodes > 1 or not nvlink
            else next(size for since, size in SHARED.items() if nccl >= since)
        )
        low, high = low + few * least + power(few) * shared, high + power(many) * shared
    if nodes > 1:
        high += many * NET
    if nvlink and gpu.sm is not None and gpu.sm >= (9, 0) and ranks // nodes >= NVLS_GPUS:
        size = next(size for since, size in NVLS.items() if nccl >= since)
        low, high = low + size, high + size
    return Span(low, high, CITE)


def bundled(torch: tuple[int, int]) -> tuple[int, int]:
    """The version of NCCL that comes with a version of torch."""
    return next(version for since, version in BUNDLED.items() if torch >= since)


def trees(gpu: GPU, ranks: int, nodes: int) -> tuple[int, int]:
    """What a channel's tree adds to its ring, on the rank where it is least and where it is
    most."""
    if nodes > 1:
        return 0, ELSEWHERE
    if ranks == 2:
        return 0, 0
    return READ if gpu.sm == (8, 0) else SEND, ELSEWHERE if meshed(gpu) else BACK


def meshed(gpu: GPU) -> bool:
    """V100s have no switch."""
    return gpu.link is not None and gpu.link.generation == 2


def power(channels: int) -> int:
    """Messages' channels are a power of two (graph/paths.cc ncclTopoComputeP2pChannels)."""
    return 1 << (channels - 1).bit_length()


def channels(gpu: GPU, ranks: int) -> tuple[int, int]:
    """Over NVLink. Between V100s two for each ring that the links between them make
    (NVIDIA/nccl#713: six rings of four GPUs, which src/graph/connect.cc takes twice; THUDM/GLM#60
    has a log of eight channels)."""
    if meshed(gpu):
        return LINKED if ranks > 2 else PAIR
    return A100_CHANNELS if gpu.sm == (8, 0) else NVLINK_CHANNELS


def communicators(
    gpu: GPU, groups: tuple[tuple[int, int], ...], per_node: int, torch: tuple[int, int]
) -> Span:
    """Of all groups that one rank is in: (ranks, distance between two neighbours in rank numbers).
    Where there are several, the group of all ranks may run a barrier or share metrics, too."""
    found = [
        communicator(gpu, ranks, spanned(ranks, stride, per_node), torch)
        for ranks, stride in groups
        if ranks > 1
    ]
    low, high = sum(one.low for one in found), sum(one.high for one in found)
    world = max((ranks * stride for ranks, stride in groups), default=1)
    if len(found) > 1 and (world, 1) not in groups:
        high += communicator(gpu, world, spanned(world, 1, per_node), torch).high
    return Span(low, high, CITE)


def spanned(ranks: int, stride: int, per_node: int) -> int:
    """The number of nodes that a group spans."""
    return max(1, -(-ranks * stride // per_node)) if stride < per_node else ranks
