"""LoRA on experts, interpreted as two processes: bits over schedules and EP sizes, errors against fp64."""

import dataclasses

import pytest
import torch
from fused_rank import BEFORE, LORA_CASES, LORA_ROUNDS, RANKS, SCALE, SCHEDULE, factors, rounds_of, run, share, tensors
from hopper_on_host import host_backends
from test_fused import run_ranks

from uniep.backends.base import Needs
from uniep.reference import composition
from uniep.schedule import Schedule
from uniep.stages import stages
from uniep.way import resolve

FACTORS = ("a13", "f13", "a2", "f2")


def names_of(case):
    return "y", "dx", "dweights", *(name for name in FACTORS if f"w{name[1:]}" in case.adapted)


@pytest.fixture(scope="module")
def results():
    return run_ranks("lora")


@pytest.fixture(scope="module")
def alone():
    """Case -> the same tokens and experts on one rank."""
    return {key: on_one_rank(case) for key, case in LORA_CASES.items()}


def on_one_rank(case):
    return run(host_backends(case.config(sum(case.tokens)), 1, SCHEDULE)[0], case, 0, 1)


@pytest.mark.parametrize("key", LORA_CASES)
def test_bits_over_schedules_and_ep_sizes(results, alone, key):
    for name in names_of(LORA_CASES[key]):
        for turn, how in enumerate(rounds_of("lora", key)):
            assert torch.equal(results[key][turn][name], alone[key][name]), f"round {turn}, {how}: {name}"


@pytest.mark.parametrize("key", LORA_CASES)
def test_errors_of_the_dense_composition(alone, key):
    """Against fp64, at most twice the error of W + scale B A multiplied out in the layer's dtype."""
    case = LORA_CASES[key]
    exact, plain = dense(case, torch.float64), dense(case, case.dtype)
    for name in names_of(case):
        error, bound = (float((t.double() - exact[name]).norm()) for t in (alone[key][name], plain[name]))
        assert error <= 2 * bound, f"{name}: off by {error:.3g}, the composition by {bound:.3g}"


def dense(case, dtype):
    leaves = {name: t.to(dtype).requires_grad_() for name, t in tensors(case).items() if t.is_floating_point()}
    w13, w2 = leaves["w13"].flatten(1, 2), leaves["w2"]
    w13 = w13 + SCALE * leaves["f13"] @ leaves["a13"] if "w13" in case.adapted else w13
    w2 = w2 + SCALE * leaves["f2"] @ leaves["a2"] if "w2" in case.adapted else w2
    biases = (leaves["b13"], leaves["b2"]) if case.bias else None
    how = case.weight_at, case.activation, case.limit, biases
    y = composition(leaves["x"], tensors(case)["ids"], leaves["weights"], w13, w2, *how)
    y.backward(leaves["dy"].detach())
    names = {"dx": "x", "dweights": "weights", **{name: name for name in FACTORS}}
    return {"y": y.detach(), **{name: leaves[leaf].grad for name, leaf in names.items()}}


@pytest.mark.parametrize("key", LORA_CASES)
def test_blocks_of_source_ranks(results, key):
    """Each block has the bits of a call with its rank's tokens alone; they are added, and then to what was there."""
    case, turns = LORA_CASES[key], len(rounds_of("lora", key))
    added, *apart = results[key][turns:]
    names = [name for name in names_of(case) if name in FACTORS]
    assert len(apart) == RANKS and names
    for name in names:
        assert torch.equal(added[name], BEFORE + (apart[0][name] + apart[1][name])), name
        if case.dtype == torch.float32:
            backend = host_backends(case.config(sum(case.tokens)), 1, SCHEDULE)[0]
            inputs, dy_TD = share(case, 0, 1)
            first = slice(case.tokens[0])
            of_first = dataclasses.replace(
                inputs, x_TD=inputs.x_TD[first], ids_TK=inputs.ids_TK[first], weights_TK=inputs.weights_TK[first]
            )
            _, saved = backend.forward(of_first, save=True)
            got = backend.backward(dy_TD[first], of_first, saved, Needs(biases=False))
            want = factors(got)
            assert torch.equal(apart[0][name], want[name]), name


def test_zero_factors_leave_y():
    """With B = 0 y has the bits of the layer without factors."""
    case = LORA_CASES["fp16"]
    backend = host_backends(case.config(sum(case.tokens)), 1, SCHEDULE)[0]
    inputs, _ = share(case, 0, 1)
    for factor in inputs.experts.factors[1::2]:
        factor.zero_()
    plain = dataclasses.replace(inputs, experts=dataclasses.replace(inputs.experts, lora=None))
    assert torch.equal(backend.forward(inputs, save=False)[0], backend.forward(plain, save=False)[0])


def test_ways():
    """One kernel each way has no low-rank terms; down cannot begin before all rows are shrunk; `explain` says so."""
    cfg = LORA_CASES["fp16"].config(64)
    for how in LORA_ROUNDS:
        fields = how if isinstance(how, dict) else dict(zip(("overlap", "operand", "transfer"), how, strict=False))
        way = resolve(cfg, RANKS, 64, Schedule(**fields), lora=("w13", "w2"))
        assert not way.mega and way.down_sms == 0
        assert "one kernel has no low-rank terms" in str(way) and "rows are shrunk for w2 in between" in str(way)


def test_a_call_with_factors_is_explained_as_it_runs():
    """In stages, where one without would be one kernel."""
    case = next(iter(LORA_CASES.values()))
    backend = host_backends(case.config(sum(case.tokens)), 1, Schedule(overlap="mega"))[0]
    ways = [backend.way_of(1, lora) for lora in ((), ("w13", "w2"))]
    assert [way.mega for way in ways] == [True, False] and "one kernel has no low-rank terms" in ways[1].explain()
    made = [s.name for s in stages(backend.cfg, ways[1], "forward")]
    assert "gate_up_shrink" in made and "down_shrink" in made
