"""One kernel for each direction, interpreted as two processes: the bits of serial schedules.

On two ranks, several programs of each run at once.  Alone, programs run one after another, so that the first does
everything and the others find nothing left: one resident program is enough.
"""

import dataclasses

import pytest
import torch
from fused_rank import MEGA_CASES, SCHEDULE, rounds_of, run
from hopper_on_host import host_backends, use
from test_fused import check_main_grads, names_of, run_ranks

from uniep.backends.hopper import calls as hopper_calls
from uniep.backends.hopper import planner
from uniep.errors import ConfigError
from uniep.launch import groups as launch_groups
from uniep.launch import mega as launch_mega
from uniep.launch import staged as launchers

CASES = MEGA_CASES


@pytest.fixture(scope="module")
def results():
    return run_ranks("mega")


@pytest.mark.parametrize("key", CASES)
def test_equals_serial(results, key):
    for turn, how in enumerate(rounds_of("mega", key)):
        for name in names_of(CASES[key]):
            assert torch.equal(results[key][turn][name], results[key][0][name]), f"round {turn}, {how}: {name}"


def test_prepare_launches_all_that_calls_do(monkeypatch):
    """Kernels with their constants: of calls of few tokens, of more, and of many."""
    case = dataclasses.replace(CASES["fp16"], tokens=(8, 0))
    schedule = dataclasses.replace(SCHEDULE, activation_gradient="beside", beside_from=24, mega_to=16)
    backend = host_backends(case.config(40), 1, schedule)[0]
    launched = set()
    for module in (launchers, launch_groups, launch_mega, planner, hopper_calls):
        real = module.launch

        def launch(kernel, programs, args, constants, real=real, **options):
            launched.add((kernel.__name__, *constants.items()))
            real(kernel, programs, args, constants, **options)

        monkeypatch.setattr(module, "launch", launch)
    usual = backend.schedule
    backend.prepare()
    assert backend.schedule is usual
    prepared = set(launched)
    kernels = {8: "backward_kernel", 20: "activation_gradient_kernel", 40: "claimed_activation_gradient_kernel"}
    for tokens, kernel in kernels.items():
        launched.clear()
        run(backend, dataclasses.replace(case, tokens=(tokens, 0)), 0, 1)
        assert any(name == kernel for name, *_ in launched)
        assert launched <= prepared, tokens


def test_prepare_launches_gradients_by_blocks(monkeypatch):
    backend = host_backends(dataclasses.replace(CASES["fp16"].config(40), gradient_shards=2), 2, SCHEDULE)[0]
    asked = []
    monkeypatch.setattr(backend, "forward", lambda *_, **__: (None, []))
    monkeypatch.setattr(backend, "backward", lambda *_, blocks, **__: asked.append(blocks))
    backend.prepare()
    assert asked and set(asked) == {2}


@pytest.mark.parametrize("key", CASES)
def test_one_rank(results, key):
    case = CASES[key]
    backend = host_backends(case.config(sum(case.tokens)), 1, SCHEDULE)[0]
    use(backend, dataclasses.replace(SCHEDULE, overlap="mega"))
    found = run(backend, case, 0, 1)
    for name in names_of(CASES[key]):
        assert torch.equal(found[name], results[key][0][name]), name


@pytest.mark.parametrize("key", CASES)
def test_main_grad(results, key):
    """These are of the last round's schedule."""
    check_main_grads(results[key], CASES[key].dtype)


def test_an_order_is_made_once_and_not_in_a_capture(monkeypatch):
    """Of calls of up to twice as many tokens, each direction; a capture would keep the host's memory."""
    schedule = dataclasses.replace(SCHEDULE, overlap="mega", tile_order="critical-path")
    backend = host_backends(CASES["fp16"].config(40), 1, schedule)[0]
    backend.way = backend.ways[40]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        ConfigError, match=r"no order yet for a backward of 40 tokens.*one such call before the capture"
    ):
        backend.order_of(backward=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = backend.order_of(backward=True)
    backend.way = backend.ways[33]
    assert backend.order_of(backward=True) is made and made.shape == (4, 2, 4)
    backend.way = backend.ways[32]
    assert backend.order_of(backward=True) is not made and backend.order_of(backward=False) is not made
    assert sum(t is made for t in backend.lasting()) == 1, "recorded calls must know it"
    use(backend, dataclasses.replace(schedule, tile_order="natural"))
    assert backend.order_of(backward=False) is None
