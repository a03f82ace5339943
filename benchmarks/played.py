"""Rank 0 of several, alone on one GPU.  The memory of all ranks lies there, or that of its peers on a second GPU.  What
peers would write at the entry of a call has been written beforehand.  `Emulated` is a rank 0 whose peers also raise the
flags that come later in a call, by a timetable.  For benchmarks."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import torch
from torch import Tensor

from uniep.backends.hopper import link
from uniep.backends.hopper.backend import HopperBackend
from uniep.backends.protocol import OPERATIONS
from uniep.config import MoEConfig
from uniep.kernels import header
from uniep.launch.driver import libcuda
from uniep.layout import EXCHANGE_HEADER
from uniep.schedule import Schedule
from uniep.stages import Direction, stages
from uniep.way import Way

ALWAYS = 2**30  # a flag that no call waits for
TIMEOUT_S = 5.0
GO, BEGAN, ARRIVED, RETURNING, RETURNED = range(0, 80, 16)  # words, 64 bytes apart; numbers of calls
STEPS = 64  # values of ARRIVED that a call has
DIRECTIONS: dict[str, tuple[Direction, ...]] = {"fwd": ("forward",), "fwd_bwd": ("forward", "backward")}


class PlayedArena(link.Arena):
    """`Arena` whose peers' memories all lie on one GPU."""

    def _allocate(self, size: int, member: Any) -> list[Tensor]:
        devices = [member.device, *[member.peers] * (member.ep_size - 1)]
        return [torch.zeros(size, dtype=torch.uint8, device=device) for device in devices]


def _fail(cause: str) -> None:
    raise RuntimeError(cause)


def rank_0(
    cfg: MoEConfig, ranks: int, schedule: Schedule | None = None, kind: type[HopperBackend] = HopperBackend,
    device: str = "cuda:0", peers: str = "",
) -> HopperBackend:  # fmt: skip
    """Its backend, whose waits end after TIMEOUT_S.  peers: the GPU on which their memory lies; "": on this one."""
    here, there = torch.device(device), torch.device(peers or device)
    for a, b in ((here, there), (there, here)):
        torch.zeros(1, device=a).to(b)  # PyTorch lets GPUs reach each other at the first copy
    member: Any = types.SimpleNamespace(
        cfg=cfg, rank=0, ep_size=ranks, device=here, peers=there, group=None, timeout_s=TIMEOUT_S,
        copies=1, blocks=1, cause="", operators=(), fail=_fail,
    )  # fmt: skip
    usual, link.Arena = link.Arena, PlayedArena  # type: ignore[misc]
    try:
        return kind(member, schedule)
    finally:
        link.Arena = usual  # type: ignore[misc]


def enter_peers(backend: HopperBackend, ids: list[Tensor], weights: list[Tensor], operation: str) -> None:
    """Every peer enters every call, as `operation`, with these ids and weights.  ids, weights: of all ranks, (T, K)."""
    exchange = backend.arena.views["exchange"]
    for source, (ids_TK, weights_TK) in enumerate(zip(ids, weights, strict=True)):
        if source == 0:
            continue
        words = exchange[:, source]
        words.zero_()
        words[:, header.TOKENS.value] = len(ids_TK)
        words[:, header.CAPACITY.value] = backend.planner.capacity
        slots, count = backend.slots, ids_TK.numel()
        words[:, EXCHANGE_HEADER : EXCHANGE_HEADER + count] = ids_TK.flatten().int()
        first = EXCHANGE_HEADER + slots
        words[:, first : first + count] = weights_TK.flatten().float().view(torch.int32)
    for number in (0, 1):
        enter_as(backend, number, operation)
    backend.arena.flag_view("entered")[1 : backend.num_ranks] = ALWAYS


def enter_as(backend: HopperBackend, number: int, operation: str, forward: int = 0) -> None:
    """Every peer enters call `number`, and all that are as even or odd, as `operation`.  forward: of a backward, the
    call that its forward was."""
    words = backend.arena.views["exchange"][number & 1, 1:]
    words[:, header.OPERATION.value] = OPERATIONS.index(operation)
    words[:, header.FORWARD.value] = forward


class Timetable:
    """Words of pinned memory that streams wait for, or write, and the host as well."""

    def __init__(self) -> None:
        self._pinned = torch.zeros(96, dtype=torch.int32).pin_memory()
        self.words = (ctypes.c_int32 * 96).from_address(self._pinned.data_ptr())

    def _queue(self, name: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
        words = ctypes.c_uint32(value), ctypes.c_uint(0)
        given = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), *words
        if code := getattr(libcuda(), name)(*given):
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def wait(self, stream: torch.cuda.Stream, word: int, value: int) -> None:
        """`stream` goes on when the word is `value` or more."""
        self._queue("cuStreamWaitValue32_v2", stream, self._pinned.data_ptr() + 4 * word, value)

    def tell(self, stream: torch.cuda.Stream, word: int, value: int) -> None:
        self.write(stream, self._pinned.data_ptr() + 4 * word, value)

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._queue("cuStreamWriteValue32_v2", stream, address, value)

    def release(self) -> None:
        """Whatever waits goes on."""
        for word in (GO, ARRIVED, RETURNED):
            self.words[word] = 2**30

    def end(self, number: int) -> None:
        """Call `number` and those before it have ended; later ones wait."""
        for word in (GO, ARRIVED, RETURNED):
            self.words[word] = number * (STEPS if word == ARRIVED else 1)


class Emulated(HopperBackend):
    """Rank 0, whose peers play."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.timetable, self.returning = Timetable(), torch.cuda.Stream(self.device)

    def send(self, x_TD: Tensor, first: int = 1, last: int | None = None) -> None:
        """The flags behind the peers' copies, which take as long as this rank's own."""
        number = self.planner.calls_made
        if first == 1:
            self.fork(self.copies)
            self.timetable.tell(self.copies, BEGAN, number)
        for step in range(first, last or self.num_ranks):
            self.timetable.wait(self.copies, ARRIVED, number * STEPS + step)
            self.raise_flag("finished", (self.rank - step) % self.num_ranks, self.copies)

    def raise_flag(self, name: str, source: int, stream: torch.cuda.Stream) -> None:
        flag = self.arena.flag_view(name)[source:]
        self.timetable.write(stream, flag.data_ptr(), self.planner.calls_made)

    def mark(self, name: str) -> None:
        super().mark(name)
        if name in returns_behind(self.way):
            self.timetable.tell(self._stream, RETURNING, self.planner.calls_made)

    def peers_return(self) -> None:
        """The flags behind what peers return.  For behind the call: a stream that waits may hold back what is queued
        later on others."""
        self.timetable.wait(self.returning, RETURNED, self.planner.calls_made)
        for source in range(1, self.num_ranks):
            self.raise_flag("returned", source, self.returning)


def returns_behind(way: Way) -> tuple[str, str]:
    """The stages at whose ends the products begin that return rows, of a forward and a backward."""
    return "plan" if way.down_sms and way.gate_up_parts == 1 else "gate_up", "dweight"


def unplayed(cfg: MoEConfig, way: Way) -> list[str]:
    """What calls of this way wait for that nobody plays."""
    found = []
    for operation in DIRECTIONS["fwd_bwd"]:
        listed = stages(cfg, way, operation)
        names = {stage.name for stage in listed}
        for stage in listed:
            played = {
                "entered": stage.name == "enter", "finished": "send" in names,
                "returned": not names.isdisjoint(returns_behind(way)),
            }  # fmt: skip
            found += [f"{flag} in {stage.name} of the {operation}" for flag in stage.waits if not played.get(flag)]
    return found
