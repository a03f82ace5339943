"""The whole Hopper backend, interpreted, as two processes over shared memory: serial, fused, and one rank alone.

Kernels that push, signal and wait run as they do on two GPUs: each process maps the other's memory, and each
starts some kernels late.
"""

import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch
from fused_rank import (
    BEFORE,
    CASES,
    OPERAND_OF_BLOCKS,
    SCHEDULE,
    SUITES,
    TIMEOUT_S,
    rounds_of,
    run,
    schedule_of,
    share,
    stacked,
    tensors,
)
from hopper_on_host import host_backends, run_as_ranks

from uniep.backends.base import MainGrads, Needs
from uniep.layout import hopper_arrays, pack, packed_bytes
from uniep.reference import composition
from uniep.way import resolve

NAMES = ("y", "dx", "dweights", "dw13", "dw2")


def names_of(case) -> tuple[str, ...]:
    """What a step of the case gives."""
    return NAMES + ("db13", "db2") * case.bias


def make_memory(folder: Path, number: int, case, schedule) -> None:
    """Zero memory for every rank, NaN where peers will write: a row that is read too early shows."""
    cfg, ranks = case.config(max(case.tokens)), len(case.tokens)
    layout = pack(hopper_arrays(cfg, ranks, resolve(cfg, ranks, 0, schedule)))
    size = packed_bytes(layout)
    for rank in range(ranks):
        memory = torch.from_file(str(folder / f"{number}-{rank}"), shared=True, size=size, dtype=torch.uint8).zero_()
        for name in ("receive", "returns", "dweights"):
            field = layout[name]
            view = memory[field.offset : field.offset + field.bytes].view(field.dtype).view(field.shape)
            (view[:-1] if name == "receive" else view).fill_(float("nan"))  # its last slot is the zero row


def run_ranks(suite: str) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Case -> what all ranks computed in each round, joined: tokens and experts of all ranks; then any main_grads."""
    cases, _ = SUITES[suite]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="uniep-test-") as name:
        folder = Path(name)
        for number, case in enumerate(cases.values()):
            make_memory(folder, number, case, schedule_of(suite))
        run_as_ranks("fused_rank.py", max(len(case.tokens) for case in cases.values()), TIMEOUT_S + 20, name, suite)
        joined = {}
        for number, (key, case) in enumerate(cases.items()):
            of_rank = [torch.load(folder / f"result-{number}-{rank}") for rank in range(len(case.tokens))]
            joined[key] = [
                {n: torch.cat([of[n] for of in turn]) for n in turn[0]} for turn in zip(*of_rank, strict=True)
            ]
        return joined


@pytest.fixture(scope="module")
def results():
    return run_ranks("usual")


@pytest.fixture(scope="module")
def alone():
    """Case -> the same tokens and experts on one rank."""

    def computed(key: str):
        case = CASES[key]
        schedule = dataclasses.replace(SCHEDULE, down_wgrad="beside")
        return run(host_backends(case.config(sum(case.tokens)), 1, schedule)[0], case, 0, 1)

    return {key: computed(key) for key in CASES}


@pytest.mark.parametrize("key", CASES)
def test_fused_equals_serial(results, key):
    """Every round, fused or not, warm or on fresh memory, has the same bits."""
    for turn, how in enumerate(rounds_of("usual", key)):
        for name in names_of(CASES[key]):
            assert torch.equal(results[key][turn][name], results[key][0][name]), f"round {turn}, {how}: {name}"


@pytest.mark.parametrize("key", CASES)
def test_two_ranks_equal_one(results, alone, key):
    for name in names_of(CASES[key]):
        assert torch.equal(results[key][1][name], alone[key][name]), name


def check_main_grads(found, dtype):
    """Overwritten: the fp32 gradient whose one rounding is the usual one.  Accumulated: the sum with it."""
    *rounds, main_grads = found
    for part in ("13", "2"):
        finished = main_grads["w" + part]
        assert finished.dtype == torch.float32
        assert torch.equal(finished.to(dtype), rounds[0]["dw" + part])
        assert torch.equal(main_grads["sum" + part], finished + BEFORE)


@pytest.mark.parametrize("key", CASES)
def test_main_grad(results, key):
    check_main_grads(results[key], CASES[key].dtype)


@pytest.mark.parametrize("key", OPERAND_OF_BLOCKS)
def test_blocks_of_source_ranks(results, key):
    """Each has the bits of a call with its rank's tokens alone; a rank without tokens has zeros."""
    case, found = CASES[key], results[key][-1]
    backend = host_backends(case.config(sum(case.tokens)), 1, SCHEDULE)[0]
    inputs, dy_TD = share(case, 0, 1)
    for block, count in enumerate(case.tokens):
        mine = slice(sum(case.tokens[:block]), sum(case.tokens[:block]) + count)
        of_block = dataclasses.replace(
            inputs, x_TD=inputs.x_TD[mine], ids_TK=inputs.ids_TK[mine], weights_TK=inputs.weights_TK[mine]
        )
        of_experts = inputs.experts.w13, inputs.experts.w2, inputs.experts.biases
        w13, w2, biases = (tuple(torch.empty(t.shape) for t in ts) for ts in of_experts)
        _, saved = backend.forward(of_block, save=True)
        backend.backward(dy_TD[mine], of_block, saved, Needs(), MainGrads(w13, w2, False, biases=biases))
        assert torch.equal(found["apart13"][:, block], stacked(case, w13)), f"block {block}"
        assert torch.equal(found["apart2"][:, block], w2[0]), f"block {block}"
        for name, want in zip(("b13", "b2"), biases, strict=False):
            assert torch.equal(found[f"apart_{name}"][:, block], want), f"block {block}: {name}"
    for part in ("13", "2", *(("_b13", "_b2") if case.bias else ())):
        first, second = found[f"apart{part}"].unbind(1)
        assert torch.equal(found[f"blocks{part}"][:, 0], first + second)


@pytest.mark.parametrize("key", CASES)
def test_error(results, key):
    """Against fp64, at most twice the error of what a PyTorch user would write in the same dtype."""
    case, every = CASES[key], tensors(CASES[key])

    def composed(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [every[n].to(dtype).requires_grad_() for n in ("x", "weights", "w13", "w2", "b13", "b2")]
        x, weights, w13, w2, *biases = leaves
        biases = tuple(biases) if case.bias else None
        given = (w13.flatten(1, 2), w2, case.weight_at, case.activation, case.limit, biases)
        y_TD = composition(x, every["ids"], weights, *given)
        y_TD.backward(every["dy"].to(dtype))
        return dict(zip((*NAMES, "db13", "db2"), (y_TD.detach(), *(t.grad for t in leaves)), strict=True))

    exact, torchs = composed(torch.float64), composed(case.dtype)
    for name in names_of(case):
        used = torch.isfinite(results[key][1][name])
        assert used.all(), name

        def error(value: torch.Tensor, name: str = name) -> float:
            return float((value.double() - exact[name]).norm())

        assert error(results[key][1][name]) <= 2 * error(torchs[name]), name
