"""One rank of a trial: a layer with inputs of its own, whose Workspaces of two Schedules are timed in turn.

It runs in a child process, since a candidate may end it (`fleet`).  All ranks time the same call at the same moment;
the slowest one's time is the call's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.config import MoEConfig
from uniep.nn.functional import moe
from uniep.schedule import Schedule
from uniep.tuner.tables import digest
from uniep.workspace import Workspace

SLEEP_CYCLES = 4_000_000
"""The device sleeps for about 2 ms, so that the host is ahead when a call begins."""

WARMUP = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """What is timed: forward and backward of one layer, every token any experts.  tokens: of each rank."""

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
    """Collective, every method: all ranks call it with the same arguments."""

    def __init__(self, job: Job, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.job, self.group, self.device = job, group, device
        self.incumbent: Workspace | None = None
        self.candidate: Workspace | None = None
        cfg, drawn = job.cfg, torch.Generator().manual_seed(job.seed * 1000 + rank)
        local = cfg.experts_per_rank(job.ep_size)

        def normal(*shape: int, fan_in: int = 1) -> Tensor:
            return (torch.randn(*shape, generator=drawn) * fan_in**-0.5).to(device, cfg.dtype)

        score_TE = torch.rand(job.tokens, cfg.num_experts, generator=drawn)
        self.ids_TK = score_TE.topk(cfg.top_k, dim=1).indices.to(device)
        share_TK = torch.rand(job.tokens, cfg.top_k, generator=drawn).add(0.1).to(device)
        self.dy_TD = normal(job.tokens, cfg.hidden)
        leaves = (
            normal(job.tokens, cfg.hidden), share_TK / share_TK.sum(1, keepdim=True),
            normal(local, 2 * cfg.ffn, cfg.hidden, fan_in=cfg.hidden),
            normal(local, cfg.hidden, cfg.ffn, fan_in=cfg.ffn),
        )  # fmt: skip
        self.leaves = [leaf.requires_grad_() for leaf in leaves]

    def call(self, workspace: Workspace, backward: bool = True) -> tuple[Tensor, ...]:
        """y and all gradients, or y alone."""
        x_TD, weights_TK, w13, w2 = self.leaves
        y_TD = moe(x_TD, self.ids_TK, weights_TK, w13, w2, workspace=workspace)
        if not backward:
            return (y_TD.detach(),)
        return y_TD.detach(), *torch.autograd.grad(y_TD, self.leaves, self.dy_TD)

    def prove(self, schedule: Schedule) -> str:
        """It becomes the candidate.  -> hash of this rank's y and gradients."""
        self.drop()
        self.candidate = self.workspace(schedule)
        found = hashlib.sha256()
        for tensor in self.call(self.candidate):
            found.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self.candidate.check()
        return found.hexdigest()

    def workspace(self, schedule: Schedule) -> Workspace:
        job = self.job
        return Workspace(
            job.cfg, self.group, device=self.device, backend=job.backend, schedule=schedule, timeout_s=job.timeout_s,
            tune="off",
        )  # fmt: skip

    def take(self) -> None:
        """The candidate becomes the incumbent."""
        if self.incumbent is not None:
            self.incumbent.close()
        self.incumbent, self.candidate = self.candidate, None

    def drop(self) -> None:
        if self.candidate is not None:
            self.candidate.close()
        self.candidate = None

    def time(self, pairs: int) -> list[tuple[float, float]]:
        """us of the incumbent and the candidate, in turn, this rank's."""
        assert self.incumbent is not None and self.candidate is not None
        both = (self.incumbent, self.candidate)
        for workspace in both:
            for _ in range(WARMUP):
                self.call(workspace)
        made = []
        for number in range(pairs):
            first = number % 2  # whoever comes second finds warm caches
            of = {i: self.once(both[i]) for i in (first, 1 - first)}
            made.append((of[0], of[1]))
        for workspace in both:
            workspace.check()
        return made

    def alone(self, schedule: Schedule, calls: int) -> list[tuple[float, float]]:
        """us of the forward, and of forward and backward, of `schedule` without a rival, this rank's."""
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
        """Of another shape, in the same processes."""
        self.close()
        rank = self.group.rank() if self.group is not None else 0
        self.__init__(job, rank, self.group, self.device)  # type: ignore[misc]

    def once(self, workspace: Workspace, backward: bool = True) -> float:
        if self.device.type != "cuda":
            if self.group is not None:
                dist.barrier(self.group)
            began = time.perf_counter()
            self.call(workspace, backward)
            return (time.perf_counter() - began) * 1e6
        torch.cuda._sleep(SLEEP_CYCLES)
        if self.group is not None:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.call(workspace, backward)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def close(self) -> None:
        self.drop()
        if self.incumbent is not None:
            self.incumbent.close()
        self.incumbent = None

    def chosen(self, schedule: Schedule) -> str:
        """Hash of the choice as this rank has it."""
        return digest(schedule)


def slowest(of_rank: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Of every pair, the slowest rank's two times."""
    return [tuple(max(times) for times in zip(*pair, strict=True)) for pair in zip(*of_rank, strict=True)]  # type: ignore[misc]


def over_ranks(
    mine: list[tuple[float, float]], group: dist.ProcessGroup | None, device: torch.device
) -> list[tuple[float, float]]:
    """As `slowest`, inside the ranks.  Collective."""
    pairs = torch.tensor(mine, dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(pairs, op=dist.ReduceOp.MAX, group=group)
    return [(a, b) for a, b in pairs.tolist()]


def described(error: BaseException) -> dict[str, Any]:
    """For the parent: what it was, and whether all ranks are still in step."""
    from uniep.errors import CapacityError, ConfigError, UnsupportedError

    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError, CapacityError))
    refused = isinstance(error, (ConfigError, UnsupportedError, CapacityError))
    return {
        "reason": "out of memory" if memory else "refused" if refused else "fault",
        "text": f"{type(error).__name__}: {error}".splitlines()[0][:300],
        "in_step": refused,
    }
