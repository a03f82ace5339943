"""Start-up checks of the Hopper backend: FIELD 84 and 85, on made-up machines."""

import pytest

from uniep import UnsupportedError
from uniep.backends.hopper.arena import Seat, check_peers

YES = (lambda a, b: True,) * 2


def node(count: int) -> list[Seat]:
    return [Seat("node0", f"GPU-{i}", i, None) for i in range(count)]


def test_all_reach_each_other():
    check_peers(node(4), *YES)


def test_84_no_pair_reaches():
    with pytest.raises(UnsupportedError, match=r"0 -> 1, 1 -> 0.*backend='nccl'"):
        check_peers(node(2), lambda a, b: False, lambda a, b: False)


def test_84_one_pair_does_not_reach():
    with pytest.raises(UnsupportedError, match=r"between GPUs 1 -> 3 \(see"):
        check_peers(node(4), lambda a, b: (a, b) != (1, 3), YES[1])


def test_85_each_process_sees_its_own_gpu_as_zero():
    seats = [Seat("node0", f"GPU-{i}", 0, str(i)) for i in range(2)]
    with pytest.raises(UnsupportedError, match=r"rank 1: CUDA_VISIBLE_DEVICES=1.*set_device"):
        check_peers(seats, *YES)


def test_85_two_hosts():
    seats = [*node(1), Seat("node1", "GPU-9", 1, None)]
    with pytest.raises(UnsupportedError, match=r"node0, node1.*single node only"):
        check_peers(seats, *YES)


def test_two_ranks_on_one_gpu():
    seats = [Seat("node0", "GPU-0", 0, None), Seat("node0", "GPU-0", 0, None)]
    with pytest.raises(UnsupportedError, match=r"ranks \[0, 1\] use the same GPU"):
        check_peers(seats, *YES)


def test_a_pair_on_pcie():
    """They reach each other's memory, but flags are set by atomics."""
    with pytest.raises(UnsupportedError, match=r"GPUs 0 -> 2, 2 -> 0 have no native atomics.*PCIe.*backend='nccl'"):
        check_peers(node(3), YES[0], lambda a, b: {a, b} != {0, 2})
