"""Counts of a layer's load, their warning, and what `uniep.report` says of them."""

import copy
import dataclasses
import logging
import time

import case
import pytest
import torch
from case import config
from torch.utils.checkpoint import checkpoint

import uniep
from uniep.nn import Load, LoadMonitor, RouterConfig


@pytest.fixture
def workspace():
    with uniep.Workspace(config(), device="cpu") as ws:
        yield ws


def counts(load):
    """It without waits."""
    return dataclasses.replace(load, forward_waits=(), backward_waits=())


def test_counts(workspace, caplog):
    """Slots of experts, calls and unused slots since the last read; recomputed forwards do not count."""
    experts = uniep.nn.Experts(workspace.cfg, workspace=workspace, seed=0)
    logged = []
    monitor = LoadMonitor(experts, on_read=logged.append)
    x, weights = case.leaf(torch.randn(3, 64)), torch.ones(3, 2)
    ids = torch.tensor([[0, 1], [0, -1], [0, 7]])
    experts(x, ids_TK=ids, weights_TK=weights)
    checkpoint(lambda v: experts(v, ids, weights), x, use_reentrant=False).sum().backward()
    (load,) = monitor.read().values()
    assert counts(load) == Load((6, 2, 0, 0, 0, 0, 0, 2), (10,), 2, 2, 0)
    assert load.expert_imbalance == 4.8 and load.rank_imbalance == 1 and load.cost == 0
    assert uniep.report(workspace)["load"] == str(load) and "backend" in uniep.report(workspace)
    assert logged == [{"": load}] and load.scalars()["unused"] == 2
    monitor.read()
    assert sum(logged[1][""].experts) == 0 and logged[1][""].expert_imbalance == 1
    monitor.close()
    experts(x, ids, weights)
    assert len(logged) == 2 and "load" not in uniep.report(workspace) and not caplog.records


def test_a_refused_call_is_not_counted(workspace):
    """And its own error is raised, not one of the count."""
    experts = uniep.nn.Experts(workspace.cfg, workspace=workspace, seed=0)
    monitor = LoadMonitor(experts)
    x, ids, weights = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for odd in (ids.tolist(), ids + 8, ids.to("meta"), None):
        with pytest.raises(uniep.UniEPError, match=r"ids|expert id"):
            experts(x, odd, weights)
    experts(x, ids, weights)
    (load,) = monitor.read().values()
    assert load.experts[0] == 6 and load.calls == 1


def test_another_default_device(workspace):
    """Waits lie where the Workspace is."""
    experts = uniep.nn.Experts(workspace.cfg, workspace=workspace, seed=0)
    monitor = LoadMonitor(experts)
    x, ids, weights = case.leaf(torch.randn(3, 64)), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with torch.device("meta"):
        experts(x, ids, weights).sum().backward()
        (load,) = monitor.read().values()
    assert load.experts[0] == 6 and load.forward_waits[0].entry > 0 and load.backward_waits[0].entry > 0


def test_drops_are_counted(workspace):
    """By the capacity, which is not the same as unused."""
    kit = RouterConfig(capacity_factor=0.5, overflow="drop")
    layer = torch.nn.ModuleDict({"moe": uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=0, router=kit)})
    monitor = LoadMonitor(layer)
    layer["moe"](torch.randn(32, 64))
    load = monitor.read()["moe.experts"]
    assert load.dropped == load.unused > 0 and sum(load.experts) + load.dropped == 64


def test_calls_of_a_deep_copy_do_not_count(workspace):
    """An average or a reference model has the hooks, but is not the model that is watched."""
    kit = RouterConfig(capacity_factor=0.5, overflow="drop")
    layer = uniep.nn.MoE(workspace.cfg, workspace=workspace, seed=0, router=kit)
    x = torch.randn(32, 64)
    monitor = LoadMonitor(layer)
    layer(x).sum().backward()
    want = monitor.read()["experts"]
    layer(x).sum().backward()
    copy.deepcopy(layer)(x[:7]).sum().backward()
    assert counts(monitor.read()["experts"]) == counts(want) and want.dropped > 0


def test_bad_monitors(workspace):
    with pytest.raises(uniep.ConfigError, match=r"warn_above is 1\.5"):
        LoadMonitor(uniep.nn.Experts(workspace.cfg, workspace=workspace), warn_above=1.5)
    with pytest.raises(uniep.ConfigError, match=r"Linear has no uniep\.nn\.Experts"):
        LoadMonitor(torch.nn.Linear(1, 1))


def uneven(world):
    """Three of four slots go to rank 0's experts."""
    with case.workspace(world, config(), 2) as ws, torch.no_grad():
        experts = uniep.nn.Experts(ws.cfg, workspace=ws, seed=0)
        monitor = LoadMonitor(experts, warn_above=0.3)
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("uniep").addHandler(handler)
        for _ in range(3):
            experts(torch.randn(2, 64), torch.tensor([[0, 1], [2, 7]]), torch.ones(2, 2))
            (load,) = monitor.read().values()
        logging.getLogger("uniep").removeHandler(handler)
        return load, [line for line in lines if "imbalance" in line]


def test_all_ranks_and_the_warning(pool):
    """Rank 0 has 1.5 times the mean: a third of the time; said by rank 0, at the first and second read."""
    (load, lines), (other, silent) = pool.run(uneven, ranks=2)
    assert load == other and counts(load) == Load((2, 2, 2, 0, 0, 0, 0, 2), (6, 2), 1, 0, 0)
    assert load.rank_imbalance == 1.5 and abs(load.cost - 1 / 3) < 1e-9
    assert len(lines) == 2 and not silent
    assert "costs 33 % of the experts' time" in lines[0] and "rank 0 has 1.50 times the mean" in lines[0]


def in_trouble(world):
    """(error of a monitor over two EP groups, slots that a read has behind one that failed)."""
    with case.workspace(world, config(), 2) as ws, case.workspace(world, config(), 1) as alone:
        layers = torch.nn.ModuleList(uniep.nn.Experts(ws.cfg, workspace=one, seed=0) for one in (ws, alone))
        error = case.named_error(LoadMonitor, layers)
        monitor = LoadMonitor(layers[0])
        layers[0](torch.randn(2, 64), torch.tensor([[0, 1], [2, 7]]), torch.ones(2, 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uniep.nn.load, "reduce_counts", failing)
            assert case.named_error(monitor.read) == ("PeerTimeoutError", "late")
        return error, sum(monitor.read()[""].experts)


def failing(*args):
    raise uniep.PeerTimeoutError("late")


def test_errors(pool):
    """Layers of other groups would be counted in the first's; a read that fails loses no count."""
    for error, slots in pool.run(in_trouble, ranks=2):
        assert error[0] == "ConfigError" and "the EP group of 1 is of ranks" in error[1]
        assert slots == 8


LATE_S = 0.3


def waited(world, backend):
    """Two layers.  Rank 1 comes late to the second's forward, then to a checkpointed one and to its recomputation."""
    with uniep.Workspace(config(), world.group(2), device="cpu", backend=backend, timeout_s=20) as ws:
        layers = torch.nn.ModuleList(uniep.nn.Experts(ws.cfg, workspace=ws, seed=n) for n in range(2))
        monitor = LoadMonitor(layers)
        x, ids, weights = case.leaf(torch.randn(2, 64)), torch.tensor([[0, 1], [2, 7]]), torch.ones(2, 2)

        def late(value):
            time.sleep(LATE_S * world.rank)
            return value

        layers[0](x, ids, weights)
        monitor.read()
        y = layers[0](x, ids, weights)
        layers[1](late(y), ids, weights).sum().backward()
        first = monitor.read()
        checkpoint(lambda v: layers[0](late(v), ids, weights), x, use_reentrant=False).sum().backward()
        return first, monitor.read()["0"]


def test_waits(pool):
    """The punctual rank's, of the layer and the direction in which it waited; all ranks read the same."""
    (first, again), others = pool.run(waited, "cpu", ranks=2)
    assert (first, again) == others
    waits = {
        (name, kind): getattr(first[name], f"{kind}_waits")[0] for name in "01" for kind in ("forward", "backward")
    }
    assert max(waits, key=lambda at: waits[at].entry) == ("1", "forward"), waits
    assert waits["1", "forward"].entry > 800 * LATE_S > first["1"].forward_waits[1].entry
    assert all(entry > 0 and data > 0 for entry, data in waits.values()), waits
    assert again.forward_waits[0].entry > 800 * LATE_S and again.backward_waits[0].entry > 800 * LATE_S
    text = str(first["1"])
    assert f"waited {first['1'].waited()['forward'].total:.3g} ms in a forward" in text, text
    assert again.scalars()["backward_entry_wait_ms"] == sum(w.entry for w in again.backward_waits) / 2


def test_waits_that_are_not_measured(pool):
    (first, _), _ = pool.run(waited, "nccl", ranks=2)
    assert first["1"].forward_waits == () and "waited" not in str(first["1"]) and first["1"].waited() == {}
