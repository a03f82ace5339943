"""What a command says about itself and its machine: in result files, and in the lines that end in an issue."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import typer

import uniep


def commit() -> str:
    """The commit of the clone that this runs in; the version if there is no clone."""
    try:
        made = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )  # fmt: skip
    except OSError:
        return uniep.__version__
    return made.stdout.strip() or uniep.__version__


def command_line() -> str:
    return shlex.join(["uniep", *sys.argv[1:]])


def processor() -> str:
    """Name of the processor, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> dict[str, str]:
    """Versions, and what computes: {name: text}."""
    cards = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "uniep": uniep.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if has_triton else "none",
        "python": platform.python_version(),
        "device": ", ".join(f"{count}x {name}" for name, count in cards.items()) or f"{cores} cores of {processor()}",
    }


def say(lines: Sequence[str]) -> None:
    """Print a summary that Markdown shows as it is: the command, these lines, the versions and the machine."""
    made = machine()
    of = f" ({made['commit']})" if made["commit"] != made["uniep"] else ""
    typer.echo("\nFor an issue:\n")
    for line in (
        "$ " + command_line(),
        *lines,
        f"uniep {made['uniep']}{of}, PyTorch {made['torch']}, Triton {made['triton']}, "
        f"Python {made['python']}, {made['device']}",
    ):
        typer.echo("    " + line)
