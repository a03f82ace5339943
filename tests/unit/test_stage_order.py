"""Whatever a stage reads has been written: the order that `Link.walk` makes of streams, beside what stages need."""

import contextlib
import dataclasses
import itertools

import pytest
import torch

from uniep import RowOperator, Schedule
from uniep.backends.hopper.link import Link
from uniep.schedule import is_valid
from uniep.shapes import SHAPES
from uniep.stages import DIRECTIONS, Flags, stages
from uniep.way import resolve

READS = {
    "down": ("gate_up",), "group_sum": ("down", "gate_up_grad"), "push_rows": ("down", "gate_up_grad", "scale"),
    "dweight": ("activation_gradient",), "gate_up_grad": ("activation_gradient",),
    "bias_gradient": ("activation_gradient",), "down_wgrad": ("activation_gradient",),
    "gate_up_wgrad": ("activation_gradient", "dispatch_again"), "keep": ("gate_up",),
    "dispatch_again": ("combine", "down_wgrad", "bias_gradient", "down_grad", "dweight"),
    "scale": ("down", "gate_up", "gate_up_grad", "down_grad"),
}  # fmt: skip
"""Stages, by name, whose results a stage reads or whose inputs it replaces.  An activation's gradient beside its
product counts tiles itself."""


class Streams:
    """What of a walk is done before what.  log: (stage, numbers of those that have ended before it)."""

    walk, _join_phases, phases = Link.walk, Link._join_phases, None

    def __init__(self):
        self._stream, self.side, self.copies, self._forked = "call", "side", "copies", set()
        self.done = {name: set() for name in ("call", "side", "copies")}
        self.current, self.log = "call", []

    def fork(self, stream):
        self.done[stream] |= self.done["call"]
        self._forked.add(stream)

    def join(self):
        while self._forked:
            self.done["call"] |= self.done[self._forked.pop()]

    def mark(self, name):
        pass

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def __getattr__(self, name):
        return self.perform

    def perform(self, stage):
        stream = self.current
        if stage.stream == "copies":
            if stage.name != "send_others":
                self.fork("copies")
            stream = "copies"
        self.log.append((stage, set(self.done[stream])))
        self.done[stream].add(len(self.log) - 1)


def too_early(of_call, monkeypatch):
    """(stage, what it reads) where nothing says that the latter has ended."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    streams.walk(of_call, streams)
    found = []
    for number, (stage, done) in enumerate(streams.log):
        wanted = READS.get(stage.name, ()) if stage.own is None else (stage.own.after,)
        for earlier, (other, _) in enumerate(streams.log[:number]):
            counted = stage.shares_cursor or (stage.part and other.part and other.part > stage.part)
            if other.name in wanted and earlier not in done and not (stage.name == "down" and counted):
                found.append((stage.name, other.name))
    return found


@pytest.mark.parametrize("place", (None, "gate_up", "down", "down_grad", "gate_up_grad"))
def test_nothing_is_read_too_early(place, monkeypatch):
    plain = SHAPES["qwen3-30b"].config(4, 8192)
    operators = [RowOperator(name="scale", after=place, rows=lambda values, valid: values)] if place else []
    choices = (
        (("serial", 1), ("fused", 1), ("pipelined", 1), ("pipelined", 3)), ("push", "copy"), ("saved", "again"),
        ("saved", "recomputed"), ("after", "beside"), ("after", "beside"), (None, 4), (1, 4),
        ((), ("w13",), ("w2",)) if place is None else ((),),
    )  # fmt: skip
    for (overlap, parts), transfer, received, h, gradient, dw2, groups, shards, lora in itertools.product(*choices):
        schedule = Schedule(
            overlap=overlap, gate_up_parts=parts, down_sms=0, transfer=transfer, received=received, preactivation=h,
            activation_gradient=gradient, beside_from=0, down_wgrad=dw2,
        )  # fmt: skip
        cfg = dataclasses.replace(plain, combine_groups=groups, bias=True, gradient_shards=shards)
        if is_valid(schedule, cfg, 4, "hopper"):
            continue
        way = resolve(cfg, 4, 8192, schedule, operators=operators, lora=lora)
        for direction in DIRECTIONS:
            found = too_early(stages(cfg, way, direction, Flags(blocks=shards)), monkeypatch)
            assert not found, (direction, schedule.name, groups, shards, lora, found)
