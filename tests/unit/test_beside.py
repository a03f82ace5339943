"""Work on another stream: what waits for what, without a GPU; a layer's option on CPUs."""

import contextlib
import types

import pytest
import torch
from case import config

import uniep
from uniep.nn import beside


def test_streams_and_memory(monkeypatch):
    """The side stream waits for what was given to the current one, the current one for the result; the allocator knows
    both."""
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            done.append(f"{self.name} waits for {other.name}")

    def memory(name):
        return types.SimpleNamespace(
            device="cuda:0", record_stream=lambda stream: done.append(f"{name} is used on {stream.name}")
        )

    @contextlib.contextmanager
    def on(stream):
        done.append(f"on {stream.name}")
        yield
        done.append("back")

    first, later = Stream("current"), Stream("later")
    now = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(beside, "_side_stream", lambda device: Stream("side"))
    joined = beside.start_beside(lambda x: done.append("function") or memory("y"), memory("x"))
    done.append("experts")
    now[0] = later
    joined()
    assert done == [
        "side waits for current", "x is used on side", "on side", "function", "back", "experts", "later waits for side",
        "y is used on later",
    ]  # fmt: skip


def test_one_behind_the_other_on_cpus():
    with uniep.Workspace(config(), device="cpu") as ws:
        after, side = (uniep.nn.MoE(ws.cfg, workspace=ws, seed=0, shared_ffn=24, shared_beside=s) for s in (0, 1))
        x = torch.randn(5, 64)
        assert torch.equal(after(x), side(x))
        with pytest.raises(uniep.ConfigError, match="shared_beside is True but shared_ffn is None; set the width"):
            uniep.nn.MoE(ws.cfg, workspace=ws, shared_beside=True)
