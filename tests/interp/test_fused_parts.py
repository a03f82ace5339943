"""gate_up in parts, the down product of each beside the next, interpreted on one, two and four ranks: the bits of
serial schedules."""

import dataclasses

import pytest
import torch
from fused_rank import PARTS_CASES, rounds_of, schedule_of
from test_fused import names_of, run_ranks

from uniep.way import resolve


@pytest.fixture(scope="module")
def results():
    return run_ranks("parts")


@pytest.mark.parametrize("key", PARTS_CASES)
def test_equals_serial(results, key):
    case = PARTS_CASES[key]
    for turn, how in enumerate(rounds_of("parts", key)):
        way = resolve(
            case.config(max(case.tokens)), len(case.tokens), 1, dataclasses.replace(schedule_of("parts"), **how)
        )
        assert way.gate_up_parts == (how["gate_up_parts"] if turn else 1)
        for name in names_of(case):
            assert torch.equal(results[key][turn][name], results[key][0][name]), f"round {turn}, {how}: {name}"
