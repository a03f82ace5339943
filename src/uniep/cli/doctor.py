"""`uniep doctor`: what this machine can run, and why not more."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Iterator

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import uniep
from uniep.cli.options import JsonFile, check_file, write_json
from uniep.tuner import choose, tables

Rows = Iterator[tuple[str, str]]

FAILS = "auto fails"

ENVIRONMENT = {
    "UNIEP_BACKEND": "backend of Workspaces made with backend='auto'",
    "UNIEP_TIMEOUT_S": "seconds to wait for a peer before PeerTimeoutError",
    "UNIEP_TUNE": "off, cached or online: how Workspaces without a Schedule get one; default: cached",
    "UNIEP_TUNE_DIR": "where uniep tune writes tables and Workspaces look first",
    "OMP_NUM_THREADS": "PyTorch's threads per rank; torchrun sets 1",
    "CUDA_VISIBLE_DEVICES": "GPUs that processes see; a different mask per rank prevents peer access",
    "PYTORCH_ALLOC_CONF": "PyTorch's allocators; replaces PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF": "PyTorch's CUDA allocator",
}


def doctor(json_file: JsonFile = None) -> None:
    """Show what this machine can run, which backend `auto` takes, and why.

    The exit status is 1 if that backend cannot run.
    """
    console = Console(highlight=False)
    check_file(json_file, "--json")
    with console.status("a Workspace is made"):
        backend = _backend()
    sections = {
        "Software": list(_software()),
        "Processor and limits": list(_limits()),
        "GPUs": list(_gpus()),
        "Environment": list(_environment()),
        "Backend": backend,
        "Tuning": list(_tuning()),
    }
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, width=min(console.width, 110))
        table.add_column(width=26)
        table.add_column(ratio=1, overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
    write_json(json_file, {title: dict(rows) for title, rows in sections.items()})
    if backend[0][0] == FAILS:
        raise typer.Exit(1)


def _software() -> Rows:
    yield "uniep", uniep.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", torch.__version__
    has_triton = importlib.util.find_spec("triton") is not None
    yield "triton", importlib.metadata.version("triton") if has_triton else "not installed (the CPU backend needs none)"
    yield "torch.distributed", "gloo" if dist.is_gloo_available() else "no gloo: only EP=1 runs on the CPU"


def _limits() -> Rows:
    yield (
        "cores",
        f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
        if hasattr(os, "sched_getaffinity")
        else str(os.cpu_count()),
    )
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        yield "shared memory (/dev/shm)", f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"
    else:
        yield "shared memory (/dev/shm)", "none"
    yield "open files", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _gpus() -> Rows:
    count = torch.cuda.device_count()
    if not count:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        yield "none", built
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        yield f"cuda:{index}", f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    yield "peer access", f"missing: {', '.join(without)}" if without else f"all {len(pairs)} pairs"
    yield "allocator", torch.cuda.get_allocator_backend()


def _environment() -> Rows:
    for name, meaning in ENVIRONMENT.items():
        value = os.environ.get(name)
        yield name, f"{value}  ({meaning})" if value is not None else f"not set  ({meaning})"


def _tuning() -> Rows:
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    try:
        yield "Schedules", {"off": "defaults", "cached": "of tables, else defaults"}.get(how := choose.mode(None), how)
    except uniep.ConfigError as error:
        yield "Schedules", str(error)
    rows = choose.report(device)
    yield (
        "tables",
        "\n".join(f"{path}: {what}" for path, what in rows)
        or (f"none for this card in {tables.folder()} or the package: defaults serve"),
    )


def _backend() -> list[tuple[str, str]]:
    """What a Workspace made in this process, for one rank, would do."""
    cfg = uniep.MoEConfig(hidden=128, ffn=128, num_experts=2, top_k=1, max_tokens_per_rank=128)
    try:
        with uniep.Workspace(cfg) as workspace:
            where = "the current CUDA device" if workspace.device.type == "cuda" else "no CUDA device is usable"
            why = "UNIEP_BACKEND" if "UNIEP_BACKEND" in os.environ else where
            return [("auto takes", f"{workspace.backend.name}  ({why})"), *uniep.report(workspace).items()]
    except (uniep.UniEPError, ImportError) as error:
        return [(FAILS, f"{type(error).__name__}: {error}")]
