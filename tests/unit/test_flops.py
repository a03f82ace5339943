"""114: PyTorch's counter of FLOPs sees the layer's GEMMs, forward and backward, whatever is frozen."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from case import config, random_batch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import uniep
from uniep.schedule import default_schedule
from uniep.weights import Lora

ROWS = 11 * 2 - 3
"""Slots in use of 11 tokens."""


@pytest.fixture
def workspace():
    with uniep.Workspace(config(), device="cpu") as ws:
        yield ws


def inputs(cfg, *needed):
    batch = random_batch(cfg, (11,))
    ids = batch.ids.clone()
    ids[:3, 1] = -1
    tensors = {"x": batch.x, "weights": batch.weights, "w13": batch.w13, "w2": batch.w2}
    tensors = {name: t.clone().requires_grad_(name in needed) for name, t in tensors.items()}
    return {"x_TD": tensors["x"], "ids_TK": ids, "weights_TK": tensors["weights"], **dict(list(tensors.items())[2:])}


def gemms(cfg, count: int, rows: int = ROWS) -> int:
    return count * 2 * rows * cfg.hidden * cfg.ffn


ALL = ("x", "weights", "w13", "w2")


@pytest.mark.parametrize(
    ("needed", "count"),
    [(ALL, 6), (("x",), 3), (("weights",), 1), (("w13",), 3), (("w2",), 1), (("weights", "w2"), 2), (("w13", "w2"), 4)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_counted(workspace, needed, count):
    cfg = workspace.cfg
    with FlopCounterMode(display=False) as forward:
        y = uniep.moe(**inputs(cfg, *needed), workspace=workspace)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (gemms(cfg, 3), gemms(cfg, count))


def test_counted_with_main_grad(workspace):
    given = inputs(workspace.cfg, *ALL)
    for name in ("w13", "w2"):
        given[name].main_grad = torch.zeros_like(given[name])
    with FlopCounterMode(display=False) as counter:
        uniep.moe(**given, workspace=workspace, main_grad="accumulate").sum().backward()
    assert counter.get_total_flops() == gemms(workspace.cfg, 9)


def test_counted_when_recomputed(workspace):
    """gate and up once more, in the backward."""
    schedule = uniep.Schedule(preactivation="recomputed")
    with uniep.Workspace(workspace.cfg, device="cpu", schedule=schedule) as ws:
        with FlopCounterMode(display=False) as forward:
            y = uniep.moe(**inputs(ws.cfg, "w2"), workspace=ws)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == (gemms(ws.cfg, 3), gemms(ws.cfg, 1 + 2))


D, F, R, S = 64, 40, 3, 5
"""hidden, ffn, and the ranks of the factors of w13 and w2."""
FORWARD = {"h": (D, 2 * F), "y": (F, D), "u13": (D, R), "u13 B": (R, 2 * F), "u2": (F, S), "u2 B": (S, D)}
THROUGH_W2 = {"dO W2": (D, F), "v2": (D, S), "v2 A": (S, F)}
DX = {"dh W13": (2 * F, D), "v13": (2 * F, R), "v13 A": (R, D)}
D13 = {"v13": (2 * F, R), "dA13": (R, D), "dB13": (R, 2 * F)}
D2 = {"v2": (D, S), "dA2": (S, F), "u2 of w act": (F, S), "dB2": (S, D)}
AGAIN = {"h": (D, 2 * F), "u13 B": (R, 2 * F)}


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
@pytest.mark.parametrize("preactivation", ["saved", "recomputed"])
@pytest.mark.parametrize(("needed", "parts"), [
    (ALL, (THROUGH_W2, DX, D13, D2)), (("x",), (THROUGH_W2, DX)), (("weights",), (THROUGH_W2,)),
    (("w13",), (THROUGH_W2, D13)), (("w2",), (D2,)),
], ids=lambda value: "-".join(map(str, value)) if isinstance(value[0], str) else "")  # fmt: skip
def test_counted_with_factors(needed, parts, preactivation, backend):
    """Each product of a row once; counted by hand.  nccl: in the calling thread, as on GPUs."""
    cfg = config(hidden=D, ffn=F)
    given, e = inputs(cfg, *{"x", "weights"} & {*needed}), cfg.num_experts
    shapes = {"w13": ((e, R, D), (e, 2 * F, R)), "w2": ((e, S, F), (e, D, S))}
    pairs = [tuple(torch.zeros(s, requires_grad=name in needed) for s in both) for name, both in shapes.items()]
    expected = {name: size for part in parts for name, size in part.items()}
    again = AGAIN if preactivation == "recomputed" else {}
    schedule = dataclasses.replace(default_schedule(backend, cfg, 1), preactivation=preactivation)
    with uniep.Workspace(cfg, device="cpu", backend=backend, schedule=schedule) as ws:
        if backend == "nccl":
            ws.backend._threads = None
        with FlopCounterMode(display=False) as forward:
            y = uniep.moe(**given, workspace=ws, lora=Lora(*pairs, 1.0))
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        with FlopCounterMode(display=False) as alone, torch.no_grad():
            uniep.moe(**given, workspace=ws, lora=Lora(pairs[0], None, 1.0))
    h, y, u13, up, *_ = FORWARD.values()
    for counter, sizes in (
        (forward, FORWARD.values()), (backward, (*expected.values(), *again.values())), (alone, (h, y, u13, up)),
    ):  # fmt: skip
        assert counter.get_total_flops() == sum(2 * ROWS * k * n for k, n in sizes)


def test_counted_when_nothing_is_computed(workspace):
    """Slots of fake ids count as used."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(t) for name, t in inputs(workspace.cfg).items()}
        with FlopCounterMode(display=False) as counter:
            uniep.moe(**fakes, workspace=workspace)
    assert counter.get_total_flops() == gemms(workspace.cfg, 3, rows=22)


@pytest.mark.slow
def test_counted_by_whoever_comes_first():
    """The counter is made, and its module loaded, before and after uniep."""
    code = """
import torch
{first}
{second}
cfg = uniep.MoEConfig(hidden=8, ffn=4, num_experts=2, top_k=1, max_tokens_per_rank=4, dtype=torch.float32)
counter = FlopCounterMode(display=False)
with counter, uniep.Workspace(cfg, device="cpu") as workspace:
    layer = uniep.nn.Experts(cfg, workspace=workspace)
    layer(torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
assert counter.get_total_flops() == 3 * 2 * 4 * 8 * 4, counter.get_total_flops()
"""
    lines = ["import uniep", "from torch.utils.flop_counter import FlopCounterMode"]
    for first, second in (lines, lines[::-1]):
        subprocess.run([sys.executable, "-c", code.format(first=first, second=second)], check=True, timeout=120)


def test_router_and_shared_experts(workspace):
    """T D E of the router and 3 T D F of the shared experts, twice that backward (x needs a gradient)."""
    cfg = workspace.cfg
    layer = uniep.nn.MoE(cfg, workspace=workspace, seed=0, router=uniep.nn.RouterConfig(), shared_ffn=24)
    x = torch.randn(11, cfg.hidden, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    dense = 2 * 11 * cfg.hidden * (cfg.num_experts + 3 * 24)
    assert forward.get_total_flops() == dense + gemms(cfg, 3, 22)
    assert backward.get_total_flops() == 2 * dense + gemms(cfg, 6, 22)
