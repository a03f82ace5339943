"""One kernel for each direction, interpreted as two processes: the bits of serial schedules.

On two ranks, several programs of each run at once.  Alone, programs run one after another, so that the first does
everything and the others find nothing left: one resident program is enough.
"""

import dataclasses

import pytest
import torch
from fused_rank import BEFORE, MEGA_CASES, MEGA_ROUNDS, SCHEDULE, run
from hopper_on_host import host_backends
from test_fused import NAMES, run_ranks

CASES = MEGA_CASES


@pytest.fixture(scope="module")
def results():
    return run_ranks("mega")


@pytest.mark.parametrize("key", CASES)
def test_equals_serial(results, key):
    for turn, how in enumerate(MEGA_ROUNDS):
        for name in NAMES:
            assert torch.equal(results[key][turn][name], results[key][0][name]), f"round {turn}, {how}: {name}"


@pytest.mark.parametrize("key", CASES)
def test_one_rank(results, key):
    case = CASES[key]
    backend = host_backends(case.config(sum(case.tokens)), 1, SCHEDULE)[0]
    backend.schedule = dataclasses.replace(SCHEDULE, overlap="mega")
    found = run(backend, case, 0, 1)
    for name in NAMES:
        assert torch.equal(found[name], results[key][0][name]), name


@pytest.mark.parametrize("key", CASES)
def test_main_grad(results, key):
    """As in test_fused.py; these are of the last round's schedule."""
    *rounds, main_grads = results[key]
    for part in ("13", "2"):
        finished = main_grads["w" + part]
        assert finished.dtype == torch.float32
        assert torch.equal(finished.to(CASES[key].dtype), rounds[0]["dw" + part])
        assert torch.equal(main_grads["sum" + part], finished + BEFORE)
