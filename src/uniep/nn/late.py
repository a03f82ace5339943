"""Numbers from a device that the host reads once they have arrived, without waiting for the device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class LateReads:
    """A queue of small tensors.  `read` returns those that have arrived: at once on the CPU, some calls later on a
    GPU."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def put(self, tensor: Tensor) -> None:
        if tensor.device.type != "cuda":
            self._waiting.append((tensor.detach().clone(), None))
            return
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((host, event))

    def read(self) -> list:
        """The tensors that have arrived, oldest first, as numbers or lists."""
        found = []
        while self._waiting and ((event := self._waiting[0][1]) is None or event.query()):
            found.append(self._waiting.popleft()[0].tolist())
        return found

    def __deepcopy__(self, memo: dict) -> LateReads:
        return LateReads()
