"""What a backend knows about its Workspace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from uniep.config import MoEConfig
from uniep.meeting import Meeting
from uniep.row_operator import RowOperator


class Membership:
    """This process in one expert-parallel group.

    group: process group of `ep_size` ranks, in which this is `rank`; None: EP=1 without a process group.
    timeout_s: longest wait for a peer, in each stage.  copies: EP groups with the same experts.  cause: why the
    Workspace was closed, "" while it is open.  operators: of one's own, in its calls.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        group: dist.ProcessGroup | None,
        rank: int,
        ep_size: int,
        device: torch.device,
        timeout_s: float,
        meeting: Meeting,
        end: Callable[[str], None],
        copies: int = 1,
        operators: Sequence[RowOperator] = (),
    ) -> None:
        """end: method of the Workspace that closes it for the given cause.  It does not keep the Workspace alive."""
        self.cfg, self.group, self.rank, self.ep_size = cfg, group, rank, ep_size
        self.device, self.timeout_s, self.copies = device, timeout_s, copies
        self.cause, self.operators = "", operators
        self._meeting: Meeting | None = meeting
        self._end: Callable[[], Any] = weakref.WeakMethod(end)

    @property
    def meeting(self) -> Meeting:
        """The meeting of all ranks, while the Workspace is made."""
        assert self._meeting is not None, "a backend meets its peers while its Workspace is made"
        return self._meeting

    @property
    def blocks(self) -> int:
        """Blocks of source ranks that the EP group has, of `MoEConfig.gradient_shards`."""
        return self.cfg.gradient_shards // self.copies

    def is_made(self) -> None:
        self._meeting = None

    def fail(self, cause: str) -> None:
        """Close the Workspace after an error that may have left bad data in peers' memory: later calls raise
        ClosedError."""
        if (end := self._end()) is not None:
            end(cause)
