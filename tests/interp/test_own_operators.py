"""Operators of one's own, interpreted as two processes, serial, fused, pipelined, by pushes and copies: the bits of the
cpu backend and of the collective one, where all numbers are exact."""

import pytest
import torch
from fused_rank import OWN_CASES, OWN_ROUNDS, RANKS, SCHEDULE, run, share
from hopper_on_host import host_backends
from own_operators import double, operators
from test_fused import NAMES, run_ranks

import uniep
from uniep.backends.base import Needs
from uniep.backends.collective.local_experts import KernelExperts
from uniep.config import ROW_TILES
from uniep.kernels.arguments import Rows
from uniep.launch.driver import Bundle
from uniep.launch.staged import launch_row_operator
from uniep.way import resolve

CASE = OWN_CASES["exact"]
CFG = CASE.config(sum(CASE.tokens))


@pytest.fixture(scope="module")
def results():
    return run_ranks("own")["exact"]


def by_workspace(backend, kind, kernels=False):
    """{name: result} of one rank.  kernels: those of the hopper backend."""
    own = [op for op in operators(kind) if op.rows is not None]
    with uniep.Workspace(CFG, device="cpu", backend=backend, operators=own) as ws:
        if kernels:
            way = resolve(CFG, 1, 0, SCHEDULE, backend="nccl", operators=own)
            ws.backend.experts = KernelExperts(CFG, 0, way, torch.device("cpu"))
        inputs, dy = share(CASE, 0, 1)
        y, saved = ws.backend.forward(inputs, True)
        got = ws.backend.backward(dy, inputs, saved, Needs())
        w13 = got.w13[0].view(CASE.num_experts, 1, CASE.ffn, CASE.hidden)
        return dict(zip(NAMES, (y, got.x, got.weights, w13, got.w2[0]), strict=True))


def test_every_way_has_the_bits_of_the_cpu_backend(results):
    want = {kind: by_workspace("cpu", kind) for kind in ("torch", "returning")}
    plain = run(host_backends(CFG, 1, SCHEDULE)[0], CASE, 0, 1)
    for turn, how in enumerate(OWN_ROUNDS):
        of_kind = want["returning" if how["operators"] == "returning" else "torch"]
        for name in NAMES:
            assert torch.equal(results[turn][name], of_kind[name]), f"{how}: {name}"
    changed = {name for name in NAMES if not torch.equal(want["torch"][name], plain[name])}
    assert changed == {"y", "dx", "dweights", "dw13"}, "dW2 is of dO and the saved h, which no operator changes"


def test_the_collective_backend_has_them_too():
    want = by_workspace("cpu", "torch")
    for kernels in (False, True):
        got = by_workspace("nccl", "torch", kernels)
        assert not [name for name in NAMES if not torch.equal(got[name], want[name])], kernels


@pytest.mark.parametrize("tile_rows", ROW_TILES)
@pytest.mark.parametrize("width", [8, 72])
def test_every_row_of_a_token_is_changed(width, tile_rows):
    """Also of narrow rows, of which a program takes many at once, and of an odd number of tiles."""
    return_N = torch.arange(3 * tile_rows, dtype=torch.int32)
    return_N[-5:] = -1
    values_NX = torch.ones(len(return_N), width)
    totals = torch.tensor([len(return_N), 3], dtype=torch.int32)
    rows = Bundle(Rows(**dict.fromkeys(Rows._fields) | {"return_N": return_N, "totals": totals}))
    launch_row_operator(double, values_NX, rows, 1)
    assert torch.equal(values_NX, torch.where(return_N >= 0, 2.0, 1.0)[:, None].expand(-1, width))


def test_ways():
    """One kernel has no place for them; behind gate_up, down no longer runs beside it."""
    ways = [
        resolve(CFG, RANKS, 24, uniep.Schedule(**{k: v for k, v in how.items() if k != "operators"}), operators=own)
        for how in OWN_ROUNDS
        for own in [operators(how["operators"])]
    ]
    assert not any(way.mega for way in ways)
    assert {way.returns for way in ways} == {"pass"} and [way.down_sms > 0 for way in ways] == [False] * 3 + [True]
    text = ways[2].explain()
    assert "one kernel has no place for one's own" in text and "own_gate_up" in text
