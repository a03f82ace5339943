"""Ranks for commands that need several: those of torchrun if there are some, else torchrun is started here.

Numbers that commands compare must not depend on how many threads PyTorch uses inside an operator, so
every rank uses one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from uniep.errors import ConfigError
from uniep.workspace import choose_backend, choose_timeout

# Ctrl-C reaches every process of a terminal: ranks end silently, and the process that started them prints.
_RANK = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
from uniep.cli.main import app
app(prog_name="uniep")
"""


@dataclasses.dataclass(frozen=True)
class World:
    """All ranks of a command.  `console` prints on rank 0 only; `control` is a gloo group of all ranks."""

    rank: int
    size: int
    device: torch.device
    console: Console
    control: dist.ProcessGroup

    def first(self, count: int) -> dist.ProcessGroup | None:
        """A group of ranks 0 .. count-1, None for one rank.  Every rank of the world calls it."""
        return dist.new_group(list(range(count))) if count > 1 else None

    def split(
        self, ep: int, copies: int
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """This rank's EP group, all ranks of the EP groups, and those with copies of its experts; None for one rank.

        The EP groups are ranks 0 .. ep-1, ep .. 2ep-1, ...  Every rank of the world calls it."""
        group = over = None
        for copy in range(copies if ep > 1 else 0):
            made = dist.new_group(list(range(copy * ep, (copy + 1) * ep)))
            group = made if self.rank // ep == copy else group
        for place in range(ep if copies > 1 else 0):
            made = dist.new_group(list(range(place, ep * copies, ep)))
            over = made if self.rank % ep == place else over
        return group, self.first(ep * copies), over

    def mesh(self, count: int) -> DeviceMesh | None:
        """Ranks 0 .. count-1 as a mesh of one dimension, None on the others.  Every rank of the world calls it."""
        group = dist.new_group(list(range(count)))
        return DeviceMesh.from_group(group, self.device.type) if self.rank < count else None

    @contextlib.contextmanager
    def folder(self) -> Iterator[str]:
        """A folder of all ranks, on this machine, until the block ends."""
        with tempfile.TemporaryDirectory(prefix="uniep-") as mine:
            yield self.gather(mine)[0]
            self.gather(None)  # others may still read it

    @property
    def shortage(self) -> str:
        """Why larger EP sizes are left out."""
        each = ", one per GPU" if self.device.type == "cuda" else ""
        return f"this run has only {self.size} rank{'s' * (self.size > 1)}{each}"

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, on every rank."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.control)
        except RuntimeError as error:  # a peer is gone; it has printed the reason, and more text would hide it
            raise typer.Exit(1) from error
        return values


def backend(given: str = "auto") -> str:
    """Name of the backend that ranks will use.  Raises what each rank would raise, before any rank is started."""
    choose_timeout(None)
    return choose_backend(given, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun started.

    Raises ConfigError if the environment says so but lacks the rank, the number of ranks or their address.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    size = _number("WORLD_SIZE", 1, 2**31 - 1)
    _number("RANK", 0, size - 1)
    _number("LOCAL_RANK", 0, size - 1, needed=False)
    _number("MASTER_PORT", 0, 2**16 - 1)
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(f"MASTER_ADDR is not set; {_AS_A_RANK}")
    return True


_AS_A_RANK = (
    "RANK and WORLD_SIZE are, so that this process is one of torchrun's ranks; start it with torchrun, or unset both"
)


def _number(name: str, least: int, most: int, needed: bool = True) -> int:
    """The number in the environment variable of this name."""
    value = os.environ.get(name)
    if value is None:
        if not needed:
            return least
        raise ConfigError(f"{name} is not set; {_AS_A_RANK}")
    if not value.isascii() or not value.isdecimal() or len(value) > 10 or not least <= int(value) <= most:
        raise ConfigError(f"{name} is {value!r}; it must be a number from {least} to {most}: {_AS_A_RANK}")
    return int(value)


def most_ranks(wanted: int) -> int:
    """`wanted`, or the number of GPUs if that is smaller and not 0: one rank per GPU."""
    return min(wanted, torch.cuda.device_count()) if torch.cuda.is_available() else wanted


def run_again(num_ranks: int) -> NoReturn:
    """Run this command line as `num_ranks` torchrun processes and exit with their status."""
    torchrun(num_ranks, ["--no-python", sys.executable, "-u", "-c", _RANK, *sys.argv[1:]])


def torchrun(num_ranks: int, command: Sequence[str]) -> NoReturn:
    """Run torchrun on this machine only and exit with its status; prints nothing but which rank a signal killed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A rank that fails has printed why; torchrun's own report would only push that off the screen.
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="uniep-") as logs:
        local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}", f"--log-dir={logs}"]
        try:
            run.main([*local, *command])
        except ChildFailedError as error:
            # The others end by torchrun's SIGTERM, or because this rank is gone.
            for rank, failure in error.failures.items():
                if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                    typer.echo(f"rank {rank} died by signal {-failure.exitcode} ({failure.signal_name()})", err=True)
            raise typer.Exit(max(1, error.get_first_failure()[1].exitcode)) from None
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise typer.Exit(128 + stop.sigval) from None
        finally:
            logging.disable(logging.NOTSET)
    raise typer.Exit(0)


def _only_deterministic_operators() -> None:
    """On GPUs some of PyTorch's own operators (such as attention's backward) add in an order that varies."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@contextlib.contextmanager
def ranks(cpu: bool = False) -> Iterator[World]:
    """Join torchrun's process group: gloo, and NCCL where there are GPUs, unless `cpu`."""
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available() and not cpu
    device = torch.device("cpu")
    if cuda:
        count = torch.cuda.device_count()
        device = torch.device("cuda", _number("LOCAL_RANK", 0, count - 1, needed=False))
        torch.cuda.set_device(device)
        _only_deterministic_operators()
    # Ranks outside a small group wait for the others as long as a whole training run takes.
    patience = datetime.timedelta(hours=2)
    try:
        # Ranks that never come are reported after the same time that a Workspace waits.
        store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=choose_timeout(None))))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=patience
        )
    except (dist.DistError, OSError, RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} cannot meet the others at {where} "
            f"(MASTER_ADDR, MASTER_PORT): {reason}; start all ranks with torchrun, or unset RANK and WORLD_SIZE"
        ) from error
    rank = dist.get_rank()
    console = Console(quiet=rank != 0, highlight=False)
    if not console.is_terminal:
        console.width = 120
    try:
        control = dist.new_group(backend="gloo", timeout=patience)
        yield World(rank, dist.get_world_size(), device, console, control)
    finally:
        dist.destroy_process_group()
