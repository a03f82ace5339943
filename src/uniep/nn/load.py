"""Load of MoE layers: how many slots went to which expert and rank, what the imbalance costs, what was dropped, and how
long ranks waited for each other.

Counting is a few operators on the device, without a host read; `LoadMonitor.read` adds up all ranks in one exchange of
integers.  uniep itself drops nothing: `dropped` counts slots that a router's capacity left out.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from uniep.errors import ConfigError, check_kind
from uniep.nn.late import LateReads
from uniep.nn.modules import Experts, MoE
from uniep.nn.router import Router, Routing
from uniep.nn.router_ops import count_slots, is_recomputing, reduce_counts
from uniep.workspace import Workspace

log = logging.getLogger("uniep")

_monitors: weakref.WeakSet[LoadMonitor] = weakref.WeakSet()


class Waits(NamedTuple):
    """Milliseconds that a rank waited in a layer's calls, all calls together: for ranks that had not entered, and for
    their tokens and results.  A wait at the entry began before the layer."""

    entry: float
    data: float

    @property
    def total(self) -> float:
        return self.entry + self.data


@dataclasses.dataclass(frozen=True)
class Load:
    """One layer since the last read, all ranks together.

    experts, ranks: slots of each.  calls: forwards of one rank.  unused: slots with id -1, including those `dropped`
    by a capacity.
    forward_waits, backward_waits: of each rank; () where the backend does not measure them (nccl).  Forwards that
    activation checkpointing runs again are part of the backward.
    """

    experts: tuple[int, ...]
    ranks: tuple[int, ...]
    calls: int
    unused: int
    dropped: int
    forward_waits: tuple[Waits, ...] = ()
    backward_waits: tuple[Waits, ...] = ()

    @property
    def expert_imbalance(self) -> float:
        """Slots of the fullest expert divided by the mean; 1 is even."""
        return _imbalance(self.experts)

    @property
    def rank_imbalance(self) -> float:
        """Slots of the fullest rank divided by the mean; 1 is even."""
        return _imbalance(self.ranks)

    @property
    def cost(self) -> float:
        """Share of the experts' time in which ranks wait for the fullest one: 1 - 1 / rank_imbalance.  Assumes that
        time is proportional to slots, and that every call has the same imbalance."""
        return 1 - 1 / self.rank_imbalance

    def waited(self) -> dict[str, Waits]:
        """Of one call, on average over ranks and calls: "forward" and "backward"; empty where not measured."""
        share = max(self.calls, 1) * len(self.ranks)
        each = ("forward", self.forward_waits), ("backward", self.backward_waits)
        return {name: Waits(*(sum(of) / share for of in zip(*ranks, strict=True))) for name, ranks in each if ranks}

    def scalars(self) -> dict[str, float]:
        """The numbers as a dictionary, for a logger."""
        waits = self.waited().items()
        return {f"{name}_{part}_wait_ms": ms for name, of in waits for part, ms in of._asdict().items()} | {
            "expert_imbalance": self.expert_imbalance,
            "rank_imbalance": self.rank_imbalance,
            "cost": self.cost,
            "unused": self.unused,
            "dropped": self.dropped,
        }

    def __str__(self) -> str:
        waits = " and ".join(
            f"{of.total:.3g} ms in a {name} ({of.entry:.3g} at its entry)" for name, of in self.waited().items()
        )
        return (
            f"{sum(self.experts)} slots in {self.calls} calls, fullest expert {self.expert_imbalance:.2f} and rank "
            f"{self.rank_imbalance:.2f} of the mean, {self.unused} unused, {self.dropped} dropped"
            f"{f'; ranks waited {waits}' if waits else ''}"
        )


def _imbalance(counts: tuple[int, ...]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 1.0


class LoadMonitor:
    """Counts the calls of every `uniep.nn.Experts` of a model, and how long ranks waited in them, until `close`.

    model: the model that contains the experts; all of them share one EP group.
    warn_above: `read` warns of layers whose `Load.cost` is more than this share; None: never.
    on_read: called with {name: Load} by every `read` that has results: a hook for loggers.

    Forwards recomputed by activation checkpointing do not count, nor do those of deep copies, such as averages.  The
    layers may be compiled, but graphs break at the counts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        warn_above: float | None = 0.25,
        on_read: Callable[[Mapping[str, Load]], Any] | None = None,
    ) -> None:
        if warn_above is not None and not 0 <= warn_above < 1:
            raise ConfigError(f"warn_above is {warn_above}; it must be a share from 0 to below 1, or None")
        self.experts = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
        if not self.experts:
            raise ConfigError(f"{type(model).__name__} has no uniep.nn.Experts, so no load to count")
        self.warn_above, self.on_read = warn_above, on_read
        self.last: dict[str, Load] = {}
        self._names = list(self.experts)
        self._workspace = next(iter(self.experts.values())).workspace
        for name, experts in self.experts.items():
            if experts.workspace.ranks != self._workspace.ranks:
                raise ConfigError(
                    f"the EP group of {name} is of ranks {experts.workspace.ranks}, that of {self._names[0]} of "
                    f"{self._workspace.ranks}, and a read adds up one group; make a LoadMonitor for each"
                )
        # Made here, not at the first call, which may be captured in a CUDA graph.
        like: dict[str, Any] = {"dtype": torch.int64, "device": self._workspace.device}
        self._counts = {name: torch.zeros(m.cfg.num_experts + 3, **like) for name, m in self.experts.items()}
        """(E + 3,): slots of each expert, calls, unused slots, dropped slots of all ranks."""
        self._waits = {name: torch.zeros(2, 2, **like) for name in self.experts}
        """ns: forward and backward; entry and data."""
        self._reads = LateReads()
        self._warned = 0
        self._hooks = [
            module.register_forward_hook(self._counter(name), with_kwargs=True)  # not of a call that is refused
            for name, module in self.experts.items()
        ]
        if self._workspace.backend.waited() is not None:
            for name, module in self.experts.items():
                before, after = self._wait_counter(name)
                self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
                self._hooks.append(module.register_forward_hook(after))
        for layer in (m for m in model.modules() if isinstance(m, MoE)):
            inside = [name for name, module in self.experts.items() if any(module is m for m in layer.modules())]
            if isinstance(layer.router, Router) and inside:
                self._hooks.append(layer.router.register_forward_hook(self._drop_counter(inside[0], layer.router)))
        _monitors.add(self)

    def _counter(self, name: str) -> Callable[..., None]:
        @_disable_dynamo
        @torch.no_grad()
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y_TD: Tensor) -> None:
            if is_recomputing() or module is not self.experts[name]:
                return
            ids_TK = args[1] if len(args) > 1 else kwargs["ids_TK"]
            totals = self._counts[name]
            num_experts = len(totals) - 3
            totals[:num_experts] += count_slots(ids_TK, num_experts)
            totals[num_experts] += 1
            totals[num_experts + 1] += (ids_TK < 0).sum()

        return count

    def _wait_counter(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks before and after a forward; the latter brings hooks before and after its backward along."""

        @torch.no_grad()
        def waited() -> Tensor:
            found = self.experts[name].workspace.backend.waited()
            assert found is not None
            return found.clone()

        def measured(direction: int, since: list[Tensor]) -> None:
            """since: emptied; nothing where a hook came without the one before it."""
            with torch.no_grad():
                if since:
                    self._waits[name][direction] += waited() - since.pop()

        began: list[Tensor] = []

        @_disable_dynamo
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module is self.experts[name]:
                began[:] = [waited()]

        @_disable_dynamo
        def after(module: nn.Module, args: tuple[Any, ...], y_TD: Tensor) -> None:
            measured(int(is_recomputing()), began)
            if y_TD.grad_fn is not None and module is self.experts[name]:
                since: list[Tensor] = []
                y_TD.grad_fn.register_prehook(lambda _: since.append(waited()))
                y_TD.grad_fn.register_hook(lambda *_: measured(1, since))

        return before, after

    def _drop_counter(self, name: str, router: Router) -> Callable[..., None]:
        @_disable_dynamo
        @torch.no_grad()
        def count(module: nn.Module, args: tuple[Any, ...], routing: Routing) -> None:
            if not is_recomputing() and module is router:
                self._counts[name][-1] += routing.dropped

        return count

    @torch.no_grad()
    def read(self) -> dict[str, Load]:
        """The load of every layer since the last read.  Collective over the EP group.

        It does not wait for a device: on GPUs the numbers are those of an earlier read, and at first there are none.
        """
        device = self._workspace.device
        rank, ranks, rows = self._workspace.rank, self._workspace.ep_size, []
        for name in self._names:
            waits_R22 = torch.zeros(ranks, 2, 2, dtype=torch.int64, device=device)
            waits_R22[rank] = self._waits[name]
            rows.append(torch.cat([self._counts[name], waits_R22.flatten()]))
        flat = torch.cat(rows)
        if self._workspace.group is not None:
            reduce_counts(flat, self._workspace.group, self._workspace.timeout_s, "LoadMonitor.read")
        for totals in (*self._counts.values(), *self._waits.values()):
            totals.zero_()
        self._reads.put(flat)
        found = self._reads.read()
        if not found:
            return {}
        flat_numbers = [sum(numbers) for numbers in zip(*found, strict=True)]
        loads, start = {}, 0
        for name, row in zip(self._names, rows, strict=True):
            loads[name] = self._load(flat_numbers[start : start + len(row)])
            start += len(row)
        self.last = loads
        self._warn(loads)
        if self.on_read is not None:
            self.on_read(loads)
        return loads

    def _load(self, numbers: list[int]) -> Load:
        ranks = self._workspace.ep_size
        *experts, calls, unused, dropped = numbers[: -4 * ranks]
        local = len(experts) // ranks
        of_rank = tuple(sum(experts[rank * local : (rank + 1) * local]) for rank in range(ranks))
        ms = [ns / 1e6 for ns in numbers[-4 * ranks :]]
        waits = [tuple(Waits(*ms[i : i + 2]) for i in range(first, len(ms), 4)) for first in (0, 2)]
        if self._workspace.backend.waited() is None:
            waits = [(), ()]
        return Load(tuple(experts), of_rank, calls // ranks, unused, dropped // ranks, *waits)

    def _warn(self, loads: Mapping[str, Load]) -> None:
        if self.warn_above is None or self._workspace.rank != 0:
            return
        worst = max(loads, key=lambda name: loads[name].cost)
        if loads[worst].cost <= self.warn_above:
            return
        self._warned += 1
        if self._warned & self._warned - 1 == 0:
            above = sum(load.cost > self.warn_above for load in loads.values())
            log.warning(
                "imbalance costs %.0f %% of the experts' time in %s (rank %d has %.2f times the mean; %d of %d layers "
                "are above %.0f %%); consider RouterConfig(selection_bias=True) or aux_loss (said again after 1, 2, "
                "4 ... such reads)",
                100 * loads[worst].cost,
                worst,
                loads[worst].ranks.index(max(loads[worst].ranks)),
                loads[worst].rank_imbalance,
                above,
                len(loads),
                100 * self.warn_above,
            )

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _monitors.discard(self)


def report(workspace: Workspace) -> dict[str, str]:
    """Which backend and which features are active, and why the others are not.  Also the load of this Workspace's
    layers, as last read by a `uniep.nn.LoadMonitor`."""
    check_kind("workspace", workspace, Workspace)
    lines = workspace.backend.report()
    for monitor in _monitors:
        for name, load in monitor.last.items():
            if monitor.experts[name].workspace is workspace:
                lines[f"load of {name}" if name else "load"] = str(load)
    return lines
