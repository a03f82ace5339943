"""Which Schedule a Workspace runs with: by UNIEP_TUNE and tables.

off: the backend's default.  cached: the choice of a table of this card, shape and kernels; the default without a table.
online: as cached, but the points of that table's entry that were as fast as its choice (or as the default that stays),
within the measured variation, are timed once more on this machine, when the Workspace is made, on their own tensors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from uniep.backends import registry
from uniep.backends.base import Inputs, Needs
from uniep.config import MoEConfig
from uniep.errors import ConfigError
from uniep.meeting import Meeting
from uniep.membership import Membership
from uniep.schedule import Schedule, default_schedule
from uniep.tuner import tables
from uniep.tuner.space import refusals
from uniep.tuner.timing import Drawn, drawn, in_turn, over_ranks
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("uniep")

MODES = ("off", "cached", "online")
CLOSE = 1.05
"""`online` times a point again if its score is at most this many times the best score."""

MOST, PAIRS, WARMUP, BACK_TO_BACK = 3, 5, 2, 4
"""Points that `online` times beside the table's choice; pairs, each of so many calls back to back, and calls before."""


def mode(given: str | None) -> str:
    """The mode: the Workspace's argument, or the environment variable, or "cached".  Raises ConfigError."""
    name, value = ("tune", given) if given is not None else ("UNIEP_TUNE", os.environ.get("UNIEP_TUNE", "cached"))
    if value not in MODES:
        raise ConfigError(f"{name} is {value!r}; it must be {', '.join(MODES[:-1])} or {MODES[-1]}")
    return value


def proposals(cfg: MoEConfig, ep_size: int, backend: str, device: torch.device, how: str) -> list[Schedule]:
    """Schedules to choose from, the table's choice first; all ranks use rank 0's list.  Empty: the default."""
    if how == "off":
        return []
    found = tables.find(cfg, ep_size, backend, tables.card_name(device))
    if found.file is None:
        log.debug("default Schedule: %s", found.why)
        return []
    log.info("Schedule of %s: %s", found.file, found.why)
    if how == "cached":
        return [found.schedule] if found.schedule is not None else []
    close = [found.schedule or default_schedule(backend, cfg, ep_size)]
    timed = [(of["score"], point) for point, of in tables.tried(found.entry) if of["status"] == "timed"]
    limit = CLOSE * min((score for score, _ in timed), default=0.0)
    for score, point in sorted(timed, key=lambda pair: pair[0]):
        if score <= limit and point not in close and not refusals(point, cfg, ep_size, backend):
            close.append(point)
    return close[: MOST + 1]


class _Served:
    """A backend of one Schedule, made as a Workspace makes its own."""

    def __init__(
        self, cfg: MoEConfig, group: dist.ProcessGroup | None, backend: str, device: torch.device, schedule: Schedule,
        timeout_s: float, copies: int,
    ) -> None:  # fmt: skip
        self.schedule, self.meeting = schedule, Meeting(group, timeout_s)
        with self.meeting:
            self.member = Membership(
                cfg, group, self.meeting.rank, self.meeting.size, device, timeout_s, self.meeting, self.end, copies
            )
            self.backend = registry.make(backend, self.member, schedule)
            self.meeting.exchange(None, "ready")
            self.member.is_made()

    def call(self, given: Drawn) -> None:
        """Forward and backward."""
        cfg, ep_size = self.member.cfg, self.member.ep_size
        experts = ExpertWeights.parse(given.w13, given.w2, cfg, ep_size, *given.biases)
        inputs = Inputs(given.x_TD, given.ids_TK, given.weights_TK, experts)
        _, saved = self.backend.forward(inputs, save=True)
        self.backend.backward(given.dy_TD, inputs, saved, Needs(), blocks=self.member.blocks)

    def end(self, cause: str) -> None:
        self.member.cause = cause
        self.backend.close()


def fastest(
    cfg: MoEConfig, group: dist.ProcessGroup | None, backend: str, device: torch.device, schedules: Sequence[Schedule],
    timeout_s: float, copies: int = 1,
) -> Schedule:  # fmt: skip
    """The fastest of points that were verified elsewhere; the first one where a rank has no memory for inputs to time
    them with.  Collective; all ranks get the same.  copies: as of `Membership`."""
    with contextlib.ExitStack() as opened:

        def made(schedule: Schedule) -> _Served:
            served = _Served(cfg, group, backend, device, schedule, timeout_s, copies)
            opened.callback(served.end, "it was timed")  # after an error, too
            return served

        best = made(schedules[0])
        rank, given, lacks = best.member.rank, None, ""
        with Meeting(group, timeout_s) as meeting:  # which tells the others of any other error
            try:
                given = drawn(cfg, best.member.ep_size, rank, cfg.max_tokens_per_rank, 0, device)
            except torch.OutOfMemoryError as error:
                lacks = f"rank {rank} has no memory for inputs: {str(error).splitlines()[0]}"
            told = meeting.exchange(lacks, "inputs to time with")
        if given is None or any(told):
            log.warning("nothing was tuned online, the table's choice runs: %s", "; ".join(filter(None, told)))
            return best.schedule
        for schedule in schedules[1:]:
            other = made(schedule)
            calls = (functools.partial(best.call, given), functools.partial(other.call, given))
            pairs = over_ranks(in_turn(calls, PAIRS, WARMUP, group, device, BACK_TO_BACK), group, device)
            if statistics.median(b / a for a, b in pairs) < 1:
                best, other = other, best
            other.end("it was slower")
        return best.schedule


def report(device: torch.device) -> list[tuple[str, str]]:
    """Of all tables of this card: (paths, what they serve, or why they cannot be used).  Tables of which the same is to
    be said have one row."""
    card, rows = tables.card_name(device), []
    for folder in (tables.own_folder(), tables.shipped()):
        serving, refused = defaultdict[str, list[Path]](list), defaultdict[str, list[Path]](list)
        entries = defaultdict[str, dict[str, Any]](dict)
        for path in sorted(folder.glob(f"{card}-*-ep*.json")) if folder is not None else ():
            backend = path.name.removeprefix(f"{card}-").rsplit("-ep", 1)[0]
            if backend not in registry.NAMES:
                continue
            try:
                setup = path.name.rsplit("-", 1)[0]
                entries[setup] |= tables.valid(path, backend)["entries"]
                serving[setup].append(path)
            except ConfigError as error:
                refused[str(error).replace(f"{path} ", "")].append(path)
        rows += [(_named(paths), tables.served(entries[setup])) for setup, paths in serving.items()]
        rows += [(_named(paths), f"does not serve: {why}") for why, paths in refused.items()]
    return rows


def _named(paths: Sequence[Path]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
