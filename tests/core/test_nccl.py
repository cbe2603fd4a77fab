"""NCCL's buffers: sums that its sources give, for groups within a node and across."""

import pytest

from memfit.estimate import estimate
from memfit.hardware import parse_cluster
from memfit.hardware.nccl import bundled, communicator, communicators, spanned
from memfit.job import Job
from memfit.units import MIB
from memfit.uses import strategy_from
from memfit.words.models import model_of
from memfit.words.options import Ask

H100, A100, V100, RTX = (
    parse_cluster(name).gpu for name in ("h100-sxm", "a100-sxm-80gb", "v100-sxm2-16gb", "rtx-4090")
)


def test_one_rank_needs_none() -> None:
    assert communicator(H100, 1, 1, (2, 13))[:2] == (0, 0)


def test_rings_are_the_least_and_trees_come_on_top() -> None:
    assert communicator(A100, 8, 1, (2, 13))[:2] == (24 * 12 * MIB, 24 * 24 * MIB)
    assert communicator(H100, 2, 1, (2, 13))[:2] == (16 * 12 * MIB, 24 * 12 * MIB)


@pytest.mark.parametrize(("ranks", "measured", "most"), [(2, 544, 544), (4, 688, 832)])
def test_what_was_measured(ranks: int, measured: int, most: int) -> None:
    """MiB of one group after its first all-reduce on rank 0 of four A100 on NVLink, August 2023
    (NVIDIA/nccl issue 964): 24 channels of a ring and 32 x 8 MiB of shared buffers, and in a group
    of four the end of the trees; ranks in their middle hold the other end, too."""
    assert communicator(A100, ranks, 1, (2, 1))[:2] == (measured * MIB, most * MIB)


def test_old_versions_connect_trees_and_share_buffers_at_once() -> None:
    """Four V100 under torch 2.0 (NCCL 2.14): 8 to 12 channels, of messages 8 to 16 with 2 MiB each;
    two of them: 2 to 4."""
    assert communicator(V100, 4, 1, (2, 0))[:2] == (
        (8 * 14 + 8 * 2) * MIB,
        (12 * 36 + 16 * 2) * MIB,
    )
    assert communicator(V100, 2, 1, (2, 0))[:2] == ((2 * 12 + 2 * 2) * MIB, (4 * 12 + 4 * 2) * MIB)
    new, old, older = (communicator(H100, 8, 1, torch).low for torch in ((2, 7), (2, 6), (2, 4)))
    assert (old - new, older - old) == (16 * (2 + 8) * MIB, 768 * MIB)  # and NVLink SHARP
    assert communicator(A100, 16, 2, (2, 4)).low == (24 * 12 + 32 * 2) * MIB


def test_nvlink_sharp_comes_with_hopper_and_its_size_with_the_version() -> None:
    new, old = (
        communicator(H100, 8, 1, torch).low - communicator(H100, 2, 1, torch).low
        for torch in ((2, 13), (2, 4))
    )
    assert new == 256 * MIB
    assert old == (1024 + 16 * 2) * MIB  # and the end of the trees


def test_without_peer_access_the_host_holds_the_buffers() -> None:
    assert communicator(RTX, 2, 1, (2, 13)).low == 0


def test_groups_lie_on_nodes_by_their_distance() -> None:
    assert spanned(8, 1, 8) == 1
    assert spanned(16, 1, 8) == 2
    assert spanned(2, 8, 8) == 2  # replicas of whole nodes
    assert spanned(4, 2, 8) == 1
    assert spanned(4, 8, 8) == 4  # each of its ranks on another node
    assert spanned(9, 1, 8) == 2


def test_a_group_of_one_has_none() -> None:
    """It adds nothing, beside no other group and beside one; and all ranks are a group already
    where one of them spans all."""
    eight = communicators(H100, ((8, 1),), 8, (2, 8))
    alone, none = (communicators(H100, groups, 8, (2, 8)) for groups in (((1, 1),), ()))
    assert (alone.low, alone.high, none.low, none.high) == (0, 0, 0, 0)
    assert communicators(H100, ((8, 1), (1, 8)), 8, (2, 8)) == eight


def test_every_group_has_its_own() -> None:
    one = communicators(H100, ((8, 1),), 8, (2, 13))
    two = communicators(H100, ((8, 1), (2, 8)), 8, (2, 13))
    assert two.low > one.low
    assert two.high > one.high + communicator(H100, 2, 2, (2, 13)).high  # and a barrier of all


def test_an_estimate_holds_them_as_a_part() -> None:
    cluster = parse_cluster("8xh100-sxm")
    _, model = model_of("qwen/qwen2.5-0.5b", Ask(offline=True))
    found = estimate(model, Job(seq=64), cluster, strategy_from([], 8), precise=False)
    assert found.parts["nccl"] == (found.nccl.low + found.nccl.high) // 2 > 0
    assert sum(found.parts.values()) == found.device
    assert [(one.rank, one.alike) for one in found.ranks] == [(0, 8)]


def test_every_channel_has_network_buffers_across_nodes() -> None:
    """24 channels on A100: a ring, a tree that may lie elsewhere, and GPUDirect RDMA's 18 MiB."""
    assert communicator(A100, 16, 2, (2, 13)).high == 24 * (12 + 24 + 18) * MIB
    assert communicator(A100, 16, 2, (2, 13)).low == 24 * 12 * MIB


def test_nvlink_sharp_adds_to_both_ends() -> None:
    """From four GPUs a node; three are left to the ring."""
    eight, three = (communicator(H100, ranks, 1, (2, 13)) for ranks in (8, 3))
    assert eight[:2] == ((16 * 12 + 256) * MIB, (24 * (12 + 12) + 256) * MIB)
    assert three[:2] == (16 * 12 * MIB, 24 * (12 + 12) * MIB)
    assert communicator(H100, 4, 1, (2, 13)).low == (16 * 12 + 256) * MIB


@pytest.mark.parametrize(
    ("torch", "pinned"),
    [
        ("2.0", "2.14.3"),
        ("2.1", "2.18.1"),
        ("2.2", "2.19.3"),
        ("2.3", "2.20.5"),
        ("2.4", "2.20.5"),
        ("2.5", "2.21.5"),
        ("2.6", "2.21.5"),
        ("2.7", "2.26.2"),
    ],
)
def test_each_torch_brings_its_nccl(torch: str, pinned: str) -> None:
    """As the wheels on PyPI require `nvidia-nccl-cu11` (torch 2.0.0) or `nvidia-nccl-cu12`."""
    major, minor, *_ = map(int, pinned.split("."))
    release, number = map(int, torch.split("."))
    assert bundled((release, number)) == (major, minor)
