"""The pool itself: values, tracebacks, hung and dead ranks, and that it works again afterwards."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import MAX_GROUPS, Pool, WorkerError, WorkerHungError


def rank_sum(world, ep_size, value):
    total = torch.tensor([world.rank + value])
    if ep_size > 1:
        dist.all_reduce(total, group=world.group(ep_size))
    return int(total), torch.get_num_threads()


def misbehave(world, how):
    if world.rank == 1 and how == "raise":
        raise KeyError("on purpose")
    if world.rank == 1 and how == "die":
        os._exit(3)
    if world.rank == 1 and how == "hang":
        time.sleep(60)
    return world.rank


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_values_come_back_in_rank_order(pool, ep_size):
    ranks = list(range(ep_size))
    expected = sum(ranks) + 10 * ep_size if ep_size > 1 else 10
    assert pool.run(rank_sum, ep_size, 10, ranks=ep_size) == [(expected, 1)] * ep_size


@pytest.mark.slow
def test_failures_name_each_rank_and_the_pool_goes_on():
    small = Pool(2)
    try:
        with pytest.raises(WorkerError, match=r"raised on 1 of 2 ranks[\s\S]*rank 1[\s\S]*KeyError: 'on purpose'"):
            small.run(misbehave, "raise")
        with pytest.raises(WorkerHungError, match=r"rank 1 died[\s\S]*exit code 3"):
            small.run(misbehave, "die")
        with pytest.raises(
            WorkerHungError, match=r"no answer within 1 s[\s\S]*rank 1: still running[\s\S]*in misbehave"
        ):
            small.run(misbehave, "hang", timeout=1)
        assert small.run(misbehave, "") == [0, 1]
    finally:
        small.close()


def leave_groups(world, count):
    for _ in range(count):
        dist.new_group(range(world.size))
    return os.getpid()


@pytest.mark.slow
def test_many_groups_end_with_their_processes():
    small = Pool(2)
    try:
        first = small.run(leave_groups, 1)
        assert small.run(leave_groups, MAX_GROUPS) == first
        assert not set(small.run(leave_groups, 0)) & set(first)
    finally:
        small.close()
