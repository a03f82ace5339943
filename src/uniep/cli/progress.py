"""A bar for work that takes seconds; without a terminal, a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

FIRST_S, EVERY_S = 2.0, 15.0
"""Without a terminal: seconds until the first line, and between two."""


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar inside the `with` block; call the yielded function after each step."""
    if not console.is_terminal:
        with _lines(console, what, total) as done:
            yield done
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def _lines(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    steps: list[None] = []
    began, ended = time.monotonic(), threading.Event()

    def say() -> None:
        wait = FIRST_S
        while not ended.wait(wait):
            console.print(f"{what}: {len(steps)} of {total} after {time.monotonic() - began:.0f} s", style="dim")
            wait = EVERY_S

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    try:
        yield lambda: steps.append(None)
    finally:
        ended.set()
        speaker.join()
