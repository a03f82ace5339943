"""What a backend knows of the Workspace that it serves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from uniep.config import MoEConfig
from uniep.meeting import Meeting


class Membership:
    """This process in one expert-parallel group.

    group: of `ep_size` ranks, of which this is `rank`; None: EP=1 without a process group.
    timeout_s: longest wait for a peer, in each stage.  cause: why the Workspace has ended, "" until then.
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
    ) -> None:
        """end: a method of the Workspace, which the membership does not keep alive; it ends it for the cause given."""
        self.cfg, self.group, self.rank, self.ep_size = cfg, group, rank, ep_size
        self.device, self.timeout_s = device, timeout_s
        self.cause = ""
        self._meeting: Meeting | None = meeting
        self._end: Callable[[], Any] = weakref.WeakMethod(end)

    @property
    def meeting(self) -> Meeting:
        """Of all ranks, while the Workspace is made."""
        assert self._meeting is not None, "a backend meets its peers while its Workspace is made"
        return self._meeting

    def is_made(self) -> None:
        self._meeting = None

    def fail(self, cause: str) -> None:
        """End the Workspace after an error that leaves peers' memory in doubt: later calls raise ClosedError."""
        if (end := self._end()) is not None:
            end(cause)
