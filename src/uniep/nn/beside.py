"""Work of a layer that runs beside its expert-parallel call, on another stream of the GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["start_beside"]


def start_beside(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Launch `function(x)` on the device's side stream, behind what the current stream has been given so far.

    Returns a function that makes the current stream wait for the result, and returns it.  Backwards of what `function`
    recorded run on the side stream, too: autograd takes the stream of the forward, and waits between streams.

    Memory: x is used on the side stream as long as autograd keeps it, the result on the stream that waits.  The
    allocator is told both, so that neither is given away before the other stream is done with it.
    """
    device = x.device
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    x.record_stream(side)
    with torch.cuda.stream(side):
        result = function(x)

    def joined() -> Tensor:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        result.record_stream(current)
        return result

    return joined


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers of a device."""
    return torch.cuda.Stream(device)
