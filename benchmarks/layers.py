"""uniep's variants as the harness times them.

uniep          sync-free: `max_rows` is set, no host read.
uniep-default  rows allocated exactly, after one host read per call.
uniep-serial   sync-free, every stage waits for the one before.
uniep-nccl     the explicit collective backend.
uniep-checkpoint  sync-free, inside torch.utils.checkpoint: a backward first makes the whole forward again.
uniep-graph    sync-free, captured in a CUDA graph and replayed.
uniep-shards   sync-free, with gradient_shards = the number of ranks (another rounding of dW13 and dW2).
uniep-compute  own kernels with communication removed; needs a backend that offers it.
uniep@FIELD=VALUE+FIELD=VALUE  sync-free with these fields of Schedule, e.g. uniep@gate_up.columns=128.
uniep-groups   sync-free, with combine_groups = the number of ranks (other roundings, fewer rows on the wire);
               uniep-groups8: 8 groups; both take fields of Schedule behind an @, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import timing
import uniep
from cases import Case
from peers import Layer
from uniep.backends.base import Inputs, Needs
from uniep.schedule import default_schedule, parse_schedule
from uniep.weights import ExpertWeights


def parse_groups(impl: str, ranks: int) -> int | None:
    """combine_groups of 'uniep-groups', 'uniep-groups8', either with '@...'; None for other variants."""
    name = impl.partition("@")[0]
    if not name.startswith("uniep-groups"):
        return None
    count = name.removeprefix("uniep-groups")
    if count and not count.isdecimal():
        raise ValueError(f"{name!r} names no number of groups; write uniep-groups, or uniep-groups8")
    return int(count or ranks)


class Workspaces:
    """Makes each Workspace of one configuration once, and closes them together."""

    def __init__(
        self, cfg: uniep.MoEConfig, max_rows: int, group: dist.ProcessGroup, device: torch.device, timeout_s: float
    ) -> None:
        self.cfg, self.max_rows = cfg, max_rows
        self.group, self.device, self.timeout_s = group, device, timeout_s
        self.made: dict[str, uniep.Workspace] = {}

    def get(self, impl: str) -> uniep.Workspace:
        """The Workspace of a variant; some share that of `uniep`."""
        key = "uniep" if impl in ("uniep-compute", "uniep-checkpoint") else impl
        if key not in self.made:
            default = impl in ("uniep-default", "uniep-nccl")
            groups = parse_groups(impl, dist.get_world_size(self.group))
            shards = dist.get_world_size(self.group) if impl == "uniep-shards" else 1
            rows = None if default else self.max_rows
            cfg = dataclasses.replace(self.cfg, max_rows=rows, combine_groups=groups, gradient_shards=shards)
            change = "overlap=serial" if impl == "uniep-serial" else impl.partition("@")[2]
            backend = "hopper" if self.device.type == "cuda" else "cpu"
            usual = default_schedule(backend, cfg, dist.get_world_size(self.group))
            schedule = parse_schedule(change, usual) if change else None
            self.made[key] = uniep.Workspace(
                cfg,
                self.group,
                device=self.device,
                backend="nccl" if impl == "uniep-nccl" else "auto",
                schedule=schedule,
                timeout_s=self.timeout_s,
            )
        return self.made[key]

    def close(self) -> None:
        for workspace in self.made.values():
            workspace.close()
        self.made.clear()


class UniEPLayer(Layer):
    """`uniep.moe` and its autograd."""

    def __init__(self, workspace: uniep.Workspace) -> None:
        self.workspace = workspace

    def prepare(self, case: Case, backward: bool) -> None:
        wanted = (case.x_TD, case.weights_TK, case.w13_e2FD, case.w2_eDF)
        self.leaves = [t.detach().requires_grad_() for t in wanted]

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        x_TD, weights_TK, w13, w2 = self.leaves
        return uniep.moe(x_TD, case.ids_TK, weights_TK, w13, w2, workspace=self.workspace), None

    def forward_backward(self, case: Case) -> tuple[Tensor, ...]:
        y_TD, _ = self.forward(case)
        return y_TD.detach(), *timing.gradients(y_TD, self.leaves, case.dy_TD)

    def check(self) -> None:
        self.workspace.check()

    @property
    def phases(self) -> Any:
        return getattr(self.workspace.backend, "phases", None)

    @phases.setter
    def phases(self, value: Any) -> None:
        backend: Any = self.workspace.backend
        if hasattr(backend, "phases"):
            backend.phases = value


class UniEPCheckpoint(UniEPLayer):
    """The layer, which saves nothing but its inputs."""

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        return checkpoint(lambda: super(UniEPCheckpoint, self).forward(case)[0], use_reentrant=False), None


class UniEPGraph(UniEPLayer):
    """The layer captured once for each direction; results lie where the capture put them."""

    def prepare(self, case: Case, backward: bool) -> None:
        self.layer = UniEPLayer(self.workspace)
        self.layer.prepare(case, backward)
        self.captured: dict[Callable[..., Any], tuple[torch.cuda.CUDAGraph, Any]] = {}

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        return self._replayed(self.layer.forward, case)

    def forward_backward(self, case: Case) -> tuple[Tensor, ...]:
        return self._replayed(self.layer.forward_backward, case)

    def _replayed(self, call: Callable[[Case], Any], case: Case) -> Any:
        if call not in self.captured:
            call(case)  # compiles, and makes what a captured call may not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                got = call(case)
            self.captured[call] = graph, got
        graph, got = self.captured[call]
        graph.replay()
        return got


class UniEPCompute(UniEPLayer):
    """The backend's kernels on rows that an earlier call received."""

    compared = False

    def prepare(self, case: Case, backward: bool) -> None:
        super().prepare(case, backward)
        self.backend: Any = self.workspace.backend
        if not hasattr(self.backend, "compute_only"):
            raise uniep.UnsupportedError(f"backend {self.backend.name!r} has no compute_only; leave out uniep-compute")
        received_TD, _ = super().forward(case)
        if backward:
            torch.autograd.grad(received_TD, self.leaves, case.dy_TD)
        experts = ExpertWeights.parse(case.w13_e2FD, case.w2_eDF, self.workspace.cfg, self.workspace.ep_size)
        self.inputs = Inputs(case.x_TD, case.ids_TK, case.weights_TK, experts)

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        return self.backend.compute_only(self.inputs, True)

    def forward_backward(self, case: Case) -> tuple[Tensor, ...]:
        y_TD, saved = self.forward(case)
        got = self.backend.compute_only_backward(case.dy_TD, self.inputs, saved, Needs())
        return y_TD, got
