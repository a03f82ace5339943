"""Tokens that are fetched, and send lists by expert, interpreted on two and four ranks: the bits of serial pushes."""

import pytest
import torch
from fused_rank import PULL_CASES, rounds_of
from test_fused import names_of, run_ranks


@pytest.fixture(scope="module")
def results():
    return run_ranks("pull")


@pytest.mark.parametrize("key", PULL_CASES)
def test_equals_serial_push(results, key):
    for turn, how in enumerate(rounds_of("pull", key)):
        for name in names_of(PULL_CASES[key]):
            assert torch.equal(results[key][turn][name], results[key][0][name]), f"round {turn}, {how}: {name}"
