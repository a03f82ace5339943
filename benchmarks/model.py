"""How far off the tuner's model is: calibrated on half of the committed measurements, judged on the other half.

    python benchmarks/model.py --json benchmarks/results/model.json

A call (shape, tokens, ranks) is calibrated on, or held out, by the hash of its name (`held_out`), with all its
directions, routings and implementations; the rule was committed before anything was predicted.  `--calibrate` writes
the card file from the calibrated half alone; without it constants are read, and both halves are predicted.
"""

from __future__ import annotations

import zlib
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
FILES = (
    "h200x2_layer", "h200x2_tokens", "h200x2_4096", "h200x2_zipf", "h200x2_groups", "h200x4_layer", "h200x4_groups",
    "h100x2_layer",
)  # fmt: skip


def held_out(shape: str, tokens: int, ep: int) -> bool:
    """Of every second hash."""
    return zlib.crc32(f"{shape}/{tokens}/{ep}".encode()) % 2 == 1
