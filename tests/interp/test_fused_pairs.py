"""A rank with one token beside a rank with many, interpreted as two processes: the bits of serial schedules."""

import dataclasses

import pytest
import torch
from fused_rank import PAIR_CASES, PAIR_ROUNDS, RANKS, SCHEDULE
from test_fused import names_of, run_ranks

from uniep.way import resolve


@pytest.fixture(scope="module")
def results():
    return run_ranks("pairs")


@pytest.mark.parametrize("key", PAIR_CASES)
def test_ranks_that_go_different_ways(results, key):
    case, met = PAIR_CASES[key], set()
    for turn, how in enumerate(PAIR_ROUNDS[1:], 1):
        schedule = dataclasses.replace(SCHEDULE, **how)
        ways = [resolve(case.config(max(case.tokens)), RANKS, tokens, schedule) for tokens in case.tokens]
        assert ways[0].kernels != ways[1].kernels
        met.add((how["transfer"], frozenset((way.mega, way.down_sms > 0) for way in ways)))
        for name in names_of(case):
            assert torch.equal(results[key][turn][name], results[key][0][name]), f"round {turn}, {how}: {name}"
    assert len(met) == 6, "mega beside fused, mega beside pipelined, fused beside pipelined"
