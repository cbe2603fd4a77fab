"""NCCL's buffers: sums that its sources give, for groups within a node and across."""

import pytest

from memfit.estimate import estimate
from memfit.hardware import parse_cluster
from memfit.hardware.nccl import communicator, communicators, spanned
from memfit.job import Job
from memfit.strategy import strategy_from
from memfit.units import MIB
from memfit.words import Ask, model_of

H100, A100, RTX = (parse_cluster(name).gpu for name in ("h100-sxm", "a100-sxm-80gb", "rtx-4090"))


def test_one_rank_needs_none() -> None:
    assert communicator(H100, 1, 1, (2, 13))[:2] == (0, 0)


def test_rings_are_the_least_and_trees_come_on_top() -> None:
    assert communicator(A100, 8, 1, (2, 13))[:2] == (16 * 12 * MIB, 24 * 36 * MIB)


@pytest.mark.parametrize(("ranks", "measured"), [(2, 544), (4, 688)])
def test_what_was_measured_lies_within(ranks: int, measured: int) -> None:
    """MiB of one group after its first all-reduce, four A100 on NVLink, August 2023 (NVIDIA/nccl issue 964)."""
    low, high, _ = communicator(A100, ranks, 1, (2, 0))
    assert low < measured * MIB < high
    assert (low + high) / 2 == pytest.approx(measured * MIB, rel=0.25)


def test_nvlink_sharp_comes_with_hopper_and_its_size_with_the_version() -> None:
    new, old, few = communicator(H100, 8, 1, (2, 13)), communicator(H100, 8, 1, (2, 4)), communicator(H100, 2, 1, (2, 13))
    assert new.low - few.low == 256 * MIB
    assert old.low - few.low == 1024 * MIB


def test_without_peer_access_the_host_holds_the_buffers() -> None:
    assert communicator(RTX, 2, 1, (2, 13)).low == 0


def test_groups_lie_on_nodes_by_their_distance() -> None:
    assert spanned(8, 1, 8) == 1
    assert spanned(16, 1, 8) == 2
    assert spanned(2, 8, 8) == 2  # replicas of whole nodes
    assert spanned(4, 2, 8) == 1


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
