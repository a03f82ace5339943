"""One kernel for each direction, interpreted as two processes: the bits of serial schedules.

On two ranks, several programs of each run at once.  Alone, programs run one after another, so that the first does
everything and the others find nothing left: one resident program is enough.
"""

import dataclasses

import pytest
import torch
from fused_rank import BEFORE, MEGA_CASES, MEGA_ROUNDS, SCHEDULE, SMALL, run
from hopper_on_host import host_backends
from test_fused import NAMES, run_ranks

from uniep.errors import ConfigError

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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operand": "expanded"}, "Schedule.operand is 'expanded'"),
        ({"received": "again"}, "Schedule.received is 'again'"),
        ({"gemm2": dataclasses.replace(SMALL, warps=4)}, "gemm2.warps is 4, not 8"),
        ({"weight_gradient": dataclasses.replace(SMALL, programs_per_sm=2)}, "weight_gradient.programs_per_sm is 2"),
    ],
)
def test_what_one_kernel_cannot_do_is_refused(changes, words):
    cfg = CASES["fp16"].config(8)
    with pytest.raises(ConfigError, match=words):
        host_backends(cfg, 1, dataclasses.replace(SCHEDULE, overlap="mega", **changes))
    grouped = dataclasses.replace(cfg, combine_groups=2)
    with pytest.raises(ConfigError, match="combine_groups is 2, not None"):
        host_backends(grouped, 1, dataclasses.replace(SCHEDULE, overlap="mega"))


@pytest.mark.parametrize("key", CASES)
def test_main_grad(results, key):
    """As in test_fused.py; these are of the last round's schedule."""
    *rounds, main_grads = results[key]
    for part in ("13", "2"):
        finished = main_grads["w" + part]
        assert finished.dtype == torch.float32
        assert torch.equal(finished.to(CASES[key].dtype), rounds[0]["dw" + part])
        assert torch.equal(main_grads["sum" + part], finished + BEFORE)
