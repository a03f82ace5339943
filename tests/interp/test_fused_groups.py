"""Combine groups on the Hopper backend, interpreted: two ranks as processes, every way to add, and one rank alone."""

import dataclasses

import pytest
import torch
from fused_rank import GROUPED_CASES, SCHEDULE, rounds_of, run
from hopper_on_host import host_backends
from test_fused import names_of, run_ranks


@pytest.fixture(scope="module")
def results():
    return run_ranks("grouped")


def alone(case):
    """The same tokens and experts on one rank."""
    return run(host_backends(case.config(sum(case.tokens)), 1, SCHEDULE)[0], case, 0, 1)


@pytest.mark.parametrize("key", GROUPED_CASES)
def test_bits(results, key):
    """Every round and one rank alone have the same bits; without groups y and dx are others, and nothing else is."""
    case = GROUPED_CASES[key]
    want, plain = alone(case), alone(dataclasses.replace(case, combine_groups=None))
    for name in names_of(case):
        for turn, how in enumerate(rounds_of("grouped", key)):
            assert torch.equal(results[key][turn][name], want[name]), f"round {turn}, {how}: {name}"
        assert torch.equal(plain[name], want[name]) == (name not in ("y", "dx")), name
