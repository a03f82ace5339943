"""One rank of a trial: a layer with its own inputs and two Workspaces, one per Schedule, which are timed in turns.

It runs in a child process, since a candidate may crash it (`fleet`).  All ranks time the same call at the same moment;
the slowest rank's time is the time of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.backends.base import Inputs, Needs
from uniep.config import MoEConfig
from uniep.errors import CapacityError, ConfigError, UnsupportedError
from uniep.launch.ahead import Kernel
from uniep.launch.driver import listing
from uniep.nn.bits import part_digests
from uniep.nn.functional import moe
from uniep.schedule import Schedule
from uniep.tuner.tables import digest
from uniep.tuner.timing import drawn, in_turn, timed
from uniep.weights import ExpertWeights
from uniep.workspace import Workspace

WARMUP = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """What is timed: forward and backward of one layer, with uniform random routing.  tokens: per rank."""

    cfg: MoEConfig
    ep_size: int
    backend: str
    device: str
    tokens: int
    timeout_s: float = 60.0
    seed: int = 0

    def made(self, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Trial:
        return Trial(self, rank, group, device)


class Trial:
    """Every method is collective: all ranks call it with the same arguments."""

    def __init__(self, job: Job, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.job, self.group, self.device = job, group, device
        self.incumbent: Workspace | None = None
        self.candidate: Workspace | None = None
        given = drawn(job.cfg, job.ep_size, rank, job.tokens, job.seed, device)
        self.ids_TK, self.dy_TD = given.ids_TK, given.dy_TD
        leaves = given.x_TD, given.weights_TK, given.w13, given.w2, *given.biases
        self.leaves = [leaf.requires_grad_() for leaf in leaves]

    def call(self, workspace: Workspace, backward: bool = True) -> tuple[Tensor, ...]:
        """y and all gradients, or only y."""
        x_TD, weights_TK, w13, w2, *biases = self.leaves
        b13, b2 = biases or (None, None)
        y_TD = moe(x_TD, self.ids_TK, weights_TK, w13, w2, b13=b13, b2=b2, workspace=workspace)
        if not backward:
            return (y_TD.detach(),)
        return y_TD.detach(), *torch.autograd.grad(y_TD, self.leaves, self.dy_TD)

    def prove(self, schedule: Schedule) -> str:
        """Make this Schedule the candidate.  -> hash of this rank's y and gradients, of numbers that their device makes
        of their bits: gradients may have gigabytes."""
        self.drop()
        self.candidate = self.workspace(schedule)
        made = [part_digests(tensor, tensor.shape, (0,) * tensor.ndim) for tensor in self.call(self.candidate)]
        found = torch.cat(made).tolist()
        self.candidate.check()
        return hashlib.sha256(repr(found).encode()).hexdigest()

    def workspace(self, schedule: Schedule) -> Workspace:
        job = self.job
        return Workspace(
            job.cfg, self.group, device=self.device, backend=job.backend, schedule=schedule, timeout_s=job.timeout_s,
            tune="off",
        )  # fmt: skip

    def kernels(self, schedule: Schedule) -> list[Kernel]:
        """What the call of this Schedule launches.  No kernel of the package is launched; with backend "nccl" PyTorch's
        operations and collectives run."""
        self.drop()
        self.candidate = self.workspace(schedule)
        x_TD, weights_TK, w13, w2, *biases = (leaf.detach() for leaf in self.leaves)
        experts = ExpertWeights.parse(w13, w2, self.job.cfg, self.job.ep_size, *biases)
        inputs, backend = Inputs(x_TD, self.ids_TK, weights_TK, experts), self.candidate.backend
        with listing() as launches:
            _, saved = backend.forward(inputs, save=True)
            backend.backward(self.dy_TD, inputs, saved, Needs(), blocks=self.candidate.num_blocks)
        self.drop()
        return list(dict.fromkeys(map(Kernel.of, launches)))

    def take(self) -> None:
        """The candidate becomes the incumbent."""
        if self.incumbent is not None:
            self.incumbent.close()
        self.incumbent, self.candidate = self.candidate, None

    def drop(self) -> None:
        if self.candidate is not None:
            self.candidate.close()
        self.candidate = None

    def time(self, pairs: int, count: int = 0) -> list[tuple[float, float]]:
        """This rank's times in us of the incumbent and the candidate, in turns.  count: of calls back to back; 0: of
        one, as `in_turn` says."""
        assert self.incumbent is not None and self.candidate is not None
        both = (self.incumbent, self.candidate)
        calls = (functools.partial(self.call, both[0]), functools.partial(self.call, both[1]))
        made = in_turn(calls, pairs, WARMUP, self.group, self.device, count)
        for workspace in both:
            workspace.check()
        return made

    def alone(self, schedule: Schedule, calls: int) -> list[tuple[float, float]]:
        """This rank's times in us of forward, and of forward and backward, of `schedule` alone."""
        self.drop()
        self.candidate = self.workspace(schedule)
        made = []
        for number in range(WARMUP + calls):
            forward = self.once(self.candidate, backward=False)
            both = self.once(self.candidate)
            if number >= WARMUP:
                made.append((forward, both))
        self.candidate.check()
        self.drop()
        return made

    def becomes(self, job: Job) -> None:
        """Switch to another shape in the same processes."""
        self.close()
        self.leaves = []  # their memory is that of the next ones
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        rank = self.group.rank() if self.group is not None else 0
        self.__init__(job, rank, self.group, self.device)  # type: ignore[misc]

    def once(self, workspace: Workspace, backward: bool = True) -> float:
        return timed(functools.partial(self.call, workspace, backward), self.group, self.device)

    def close(self) -> None:
        self.drop()
        if self.incumbent is not None:
            self.incumbent.close()
        self.incumbent = None

    def chosen(self, schedule: Schedule) -> str:
        """Hash of this rank's choice."""
        return digest(schedule)


def slowest(of_rank: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """For every pair, the slowest rank's two times."""
    return [tuple(max(times) for times in zip(*pair, strict=True)) for pair in zip(*of_rank, strict=True)]  # type: ignore[misc]


def described(error: BaseException) -> dict[str, Any]:
    """The error for the parent: its kind, and whether all ranks are still in step."""
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError, CapacityError))
    refused = isinstance(error, (ConfigError, UnsupportedError, CapacityError))
    return {
        "reason": "out of memory" if memory else "refused" if refused else "fault",
        "text": f"{type(error).__name__}: {error}".splitlines()[0][:300],
        "in_step": refused,
    }
