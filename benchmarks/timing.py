"""How the harness measures: the two loads, and the process group that carries its own decisions.

window: one call on an idle card.  The device sleeps 2 ms so that the host runs ahead, a tiny all-reduce
    aligns the ranks on the device, CUDA events bracket the call.  Cards are at boost clock.
sustained: calls back to back for a while, mean.  Cards reach their power limit, as in training.

On CPU the same functions use the host's clock and a barrier.
"""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

SLEEP_CYCLES = 4_000_000  # about 2 ms at boost clock

_control: dist.ProcessGroup | None = None
_device = torch.device("cpu")
_one = torch.zeros(1)


def setup(device: torch.device, control: dist.ProcessGroup | None) -> None:
    """control: a gloo group over all ranks, so that decisions never queue behind a device's work; None: one rank."""
    global _control, _device, _one
    _control, _device, _one = control, device, torch.zeros(1, device=device)


class HostEvent:
    """The part of torch.cuda.Event that timing needs, on the host's clock."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.seconds - self.seconds) * 1e3


def start_ranks(kind: str, timeout_s: float) -> tuple[torch.device, dist.ProcessGroup]:
    """This process's device, "cuda" or "cpu", and the gloo group given to `setup`; the default process group is made.

    Without torchrun it is the only rank.
    """
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29531"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = datetime.timedelta(seconds=timeout_s)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=patience)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=patience)
    control = dist.new_group(backend="gloo", timeout=patience)
    setup(device, control)
    return device, control


def gradients(outputs: Any, leaves: Sequence[torch.Tensor], grads: Any) -> tuple[torch.Tensor, ...]:
    """`torch.autograd.grad` in the calling thread.  Autograd hands each backward to a thread of its own: once a step in
    a model, but once a layer where a lone layer is timed (`host.py` has both)."""
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad(outputs, leaves, grads)


def record_event() -> Any:
    if _device.type != "cuda":
        return HostEvent()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait_event(event: Any) -> None:
    if _device.type == "cuda":
        event.synchronize()


def synchronize() -> None:
    if _device.type == "cuda":
        torch.cuda.synchronize()


def aligned() -> Any:
    """An event recorded when all ranks have come here, with the host ahead of the device."""
    if _device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(_one)
    elif _control is not None:
        dist.barrier(_control)
    return record_event()


def window(call: Callable[[], object]) -> float:
    """Milliseconds of one call, this rank's."""
    start = aligned()
    call()
    end = record_event()
    wait_event(end)
    return start.elapsed_time(end)


def in_turn(
    calls: Mapping[str, Callable[[], object]], samples: int,
    measure: Callable[[Callable[[], object]], float] = window,
) -> dict[str, list[float]]:  # fmt: skip
    """Milliseconds of `samples` samples of each call, the slowest rank's; in turn, from another one on each time.
    measure: takes a sample."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(samples):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            taken[name].append(measure(calls[name]))
    return {name: max_over_ranks(times) for name, times in taken.items()}


SAMPLES = 9
"""Parts of a sustained time that is taken in turn."""


def sustained_in_turn(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of `SAMPLES` samples of each call, `seconds` together: all meet the same temperatures."""
    return in_turn(calls, SAMPLES, lambda call: sustained(call, seconds / SAMPLES))


def sustained(call: Callable[[], object], seconds: float) -> float:
    """Mean milliseconds of calls back to back for about `seconds`; every rank makes equally many."""

    def repeat(count: int) -> float:
        start = aligned()
        for _ in range(count):
            call()
        end = record_event()
        wait_event(end)
        return start.elapsed_time(end) / count

    estimate = max(max_over_ranks([repeat(3)])[0], 1e-3)
    return repeat(max(3, math.ceil(seconds * 1e3 / estimate)))


def max_over_ranks(values: list[float]) -> list[float]:
    """Element-wise maximum over ranks."""
    if _control is None or not values:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_control)
    return tensor.tolist()


def any_rank(flag: bool) -> bool:
    """Whether any rank says so."""
    return max_over_ranks([float(flag)])[0] > 0
