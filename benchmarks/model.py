"""How far off the tuner's model is: calibrated on half of the committed measurements, judged on the other half.

    python benchmarks/model.py --calibrate --json benchmarks/results/model.json

A call (card, shape, tokens, ranks) is calibrated on, or held out, with all its directions, routings and
implementations: of the calls of a card with up to 2048 tokens, and of those with more, every second one in the order of
the hash of its name.  The rule was committed before anything was predicted.  `--calibrate` writes the card files from the
calibrated halves alone; without it constants are read.  Both halves are predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from uniep.config import MoEConfig
from uniep.schedule import Schedule, default_schedule
from uniep.shapes import SHAPES
from uniep.sim import Problem
from uniep.tuner import calibrate
from uniep.tuner.model import Card, Load, load_card, predict, uncalibrated
from uniep.sim.machine import load_machine
from uniep.tuner.space import Points, replaced

RESULTS = Path(__file__).parent / "results"
FILES = (
    "h200x2_layer", "h200x2_tokens", "h200x2_4096", "h200x2_zipf", "h200x2_groups", "h200x4_layer", "h200x4_groups",
    "h100x2_layer",
)  # fmt: skip
FEW = 2048
"""Tokens of a rank up to which a call shows the host's time."""

OLD = {
    "c9b6eff": {"overlap": "fused", "activation_gradient": "after", "mega_to": 0},
    "53e79f2": {"overlap": "fused", "activation_gradient": "after", "mega_to": 0},
    "14c4c29": {"mega_to": 0},
}
"""Defaults of a commit, where they are not today's."""


@dataclasses.dataclass(frozen=True)
class Row:
    file: str
    card: str
    commit: str
    ep: int
    shape: str
    tokens: int
    routing: str
    direction: str
    impl: str
    ms: float
    ms_min: float
    ms_max: float

    @property
    def call(self) -> tuple[str, str, int, int]:
        return self.card, self.shape, self.tokens, self.ep


def measured() -> Iterator[Row]:
    """Every row of uniep under the window of one call."""
    for name in FILES:
        document = json.loads((RESULTS / f"{name}.json").read_text())
        meta = document["meta"]
        card = "h100" if "H100" in meta["card"] else "h200"
        for row in document["rows"]:
            if row["impl"].startswith("uniep") and row["load"] == "window":
                of_row = (row[k] for k in ("shape", "tokens", "routing", "direction", "impl", "ms", "ms_min", "ms_max"))
                yield Row(name, card, meta["commit"], meta["ep"], *of_row)


def held_out(rows: Sequence[Row]) -> set[tuple[str, str, int, int]]:
    """The calls that nothing is calibrated on."""
    out = set()
    for card in sorted({row.card for row in rows}):
        for few in (True, False):
            calls = {row.call for row in rows if row.card == card and (row.tokens <= FEW) == few}
            by_hash = sorted(calls, key=lambda call: hashlib.sha256(repr(call).encode()).hexdigest())
            out |= set(by_hash[1::2])
    return out
