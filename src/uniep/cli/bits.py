"""Evidence that runs agree bit for bit: digests of tensors, and the table that compares them.

A run is described by {(quantity, part): digest}.  A quantity is a column of the printed table ("loss",
"dw13"); its parts are the same pieces whatever the EP size (one shard's rows, one expert's matrix), so
runs at different EP sizes are compared part by part.  Digests see every bit: -0.0 differs from 0.0.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

Part = tuple[str, str]
Digests = dict[Part, str]


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and every byte in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    meta = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(meta + flat.numpy().tobytes()).hexdigest()


def merge(of_rank: Iterable[Digests]) -> Digests:
    """The digests of all ranks in one dictionary.  If two ranks disagree on a part, its digest equals no other."""
    merged: Digests = {}
    for rank, digests in enumerate(of_rank):
        for part, value in digests.items():
            if merged.setdefault(part, value) != value:
                merged[part] = f"differs on rank {rank}"
    return merged


def digest_of(run: Digests) -> str:
    """SHA-256 of all digests of a run."""
    return hashlib.sha256(repr(sorted(run.items())).encode()).hexdigest()


def differences(run: Digests, reference: Digests) -> list[Part]:
    """Parts whose digests differ, or that only one run has, in the reference's order."""
    parts = dict.fromkeys([*reference, *run])
    return [part for part in parts if run.get(part) != reference.get(part)]


NOT_IDENTICAL = "[bold red]NOT identical[/bold red]: a bug; please report it with the output of `uniep doctor`"


def verdict(same: bool, ep_sizes: Iterable[int], backend: str) -> str:
    """The line under a BitTable, in rich's markup."""
    if not same:
        return NOT_IDENTICAL
    sizes = ", ".join(map(str, ep_sizes))
    return f"[bold green]identical[/bold green]: every bit at EP {sizes}, under each schedule above, backend {backend}"


WIDTH = 21
"""Characters of a Schedule's name in a line of a table."""


class BitTable:
    """Compares runs with the first one added, which is EP=1 under the serial schedule."""

    def __init__(self, title: str, quantities: Sequence[str], ranks: str = "EP") -> None:
        """ranks: what the first column says."""
        self.quantities = quantities
        self.reference: Digests = {}
        self.wrong: list[str] = []
        self.title = title
        self._table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        self._table.add_column(ranks, justify="right", no_wrap=True)
        self._table.add_column("schedule", no_wrap=True)
        for quantity in quantities:
            self._table.add_column(quantity, min_width=max(map(len, quantity.split())))

    def add(self, ep_size: int | str, schedule: str, run: Digests) -> None:
        self.reference = self.reference or run
        wrong = differences(run, self.reference)
        of_quantity = Counter(quantity for quantity, _ in wrong)
        total = Counter(quantity for quantity, _ in self.reference)
        cells = [
            f"[red]✗ {of_quantity[q]} of {total[q]}[/red]" if of_quantity[q] else f"[green]✓[/green] {total[q]}"
            for q in self.quantities
        ]
        first, *parts = schedule.split("/")
        lines = [first]
        for part in parts:  # a line ends behind a slash
            if len(lines[-1]) + len(part) < WIDTH:
                lines[-1] += f"/{part}"
            else:
                lines[-1] += "/"
                lines.append(part)
        self._table.add_row(str(ep_size), "\n".join(lines), *cells)
        self.wrong += [f"EP={ep_size} {schedule}: {quantity}, {part}" for quantity, part in wrong]

    def print(self, console: Console, at_most: int = 10) -> None:
        """The table, and the first parts that differ by name."""
        console.print(f"[italic]{self.title}[/italic]")
        console.print(self._table)
        for line in self.wrong[:at_most]:
            console.print(f"[red]differs[/red]  {line}")
        if len(self.wrong) > at_most:
            console.print(f"[red]differs[/red]  and {len(self.wrong) - at_most} more")
