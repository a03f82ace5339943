"""114: PyTorch's counter of FLOPs sees the layer's GEMMs, forward and backward, whatever is frozen."""

import subprocess
import sys

import pytest
import torch
from case import config, random_batch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import uniep

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
