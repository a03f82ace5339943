"""Real text that every machine with Python has: the sources of its standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
HELD_OUT = 0.05
"""Share of the text, whole files, that training never sees."""


class Text:
    """The library's .py files as bytes, in a fixed random order of files; the last ones are held out."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(f for f in root.rglob("*.py") if not SKIPPED & set(f.relative_to(root).parts))
        random.Random(0).shuffle(files)
        self.num_files = len(files)
        data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        cut = int(data.numel() * (1 - HELD_OUT))
        self.train, self.held_out = data[:cut], data[cut:]

    def batch(self, step: int, num_shards: int, sequences: int, length: int, *, held_out: bool = False) -> list[Tensor]:
        """`num_shards` tensors (sequences, length + 1) int64 of random windows, a function of `step` alone."""
        source = self.held_out if held_out else self.train
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(source.numel() - length, (num_shards, sequences, 1), generator=generator)
        return list(source[start + torch.arange(length + 1)].long())
