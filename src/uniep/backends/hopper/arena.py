"""Symmetric memory of the Hopper backend: what peers write into, and where it lies at every rank."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from uniep.errors import UniEPError, UnsupportedError
from uniep.layout import Field, flag_step, packed_bytes
from uniep.memory import MemoryPlan, check_room

if TYPE_CHECKING:
    from uniep.membership import Membership

WAY_OUT = "use backend='nccl' (collectives, any GPU)"
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Seat(NamedTuple):
    """Where one rank sits: host name, the GPU's UUID, its ordinal in the process, CUDA_VISIBLE_DEVICES, free bytes."""

    host: str
    uuid: str
    ordinal: int
    visible: str | None
    free: int = 0


def _free_bytes(device: torch.device, needed: int) -> int:
    """Of the device's memory; what PyTorch only holds for later becomes free where that is too little."""
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
    return free


def _seats(member: Membership, free: int) -> list[Seat]:
    """The seats of all ranks.  Collective."""
    ordinal = member.device.index
    uuid = str(torch.cuda.get_device_properties(ordinal).uuid)
    mine = Seat(socket.gethostname(), uuid, ordinal, os.environ.get("CUDA_VISIBLE_DEVICES"), free)
    return member.meeting.exchange(mine, "places of the GPUs")


def has_atomics(a: int, b: int) -> bool:
    """Whether GPU a's atomic operations on GPU b's memory are atomic there, as over NVLink and not over PCIe."""
    handles, value = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    codes = [
        *(driver.cuDeviceGet(ctypes.byref(handle), ordinal) for handle, ordinal in zip(handles, (a, b), strict=True)),
        driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *handles),
    ]
    if any(codes):
        raise RuntimeError(f"the driver did not report peer access from GPU {a} to GPU {b}: CUDA errors {codes}")
    return bool(value.value)


def check_peers(
    seats: Sequence[Seat], can_access: Callable[[int, int], bool], has_atomics: Callable[[int, int], bool]
) -> None:
    """Raise UnsupportedError, the same on every rank, unless all GPUs of the group can reach each other.

    can_access(a, b): whether GPU a may read GPU b, by ordinal.  has_atomics(a, b): as the function above.
    """
    if len(hosts := sorted({seat.host for seat in seats})) > 1:
        raise UnsupportedError(
            f"the EP group spans {len(hosts)} hosts ({', '.join(hosts)}); the hopper backend is single node only; "
            f"{WAY_OUT}"
        )
    ranks_of: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        ranks_of.setdefault(seat.uuid, []).append(rank)
    if shared := [ranks for ranks in ranks_of.values() if len(ranks) > 1]:
        raise UnsupportedError(
            f"ranks {shared[0]} use the same GPU; give each rank its own, e.g. torch.cuda.set_device(local_rank)"
        )
    if len({seat.ordinal for seat in seats}) < len(seats):
        masks = ", ".join(f"rank {rank}: CUDA_VISIBLE_DEVICES={seat.visible}" for rank, seat in enumerate(seats))
        raise UnsupportedError(
            f"several ranks name their GPU by the same ordinal ({masks}), so that they cannot map each other's memory; "
            f"let every process see all GPUs and call torch.cuda.set_device(local_rank), or {WAY_OUT}"
        )
    pairs = [(a.ordinal, b.ordinal) for a in seats for b in seats if a is not b]
    if blocked := [f"{a} -> {b}" for a, b in pairs if not can_access(a, b)]:
        raise UnsupportedError(
            f"no peer access between GPUs {', '.join(blocked)} (see `nvidia-smi topo -p2p r`; containers need "
            f"--ipc=host and the NVLink devices); {WAY_OUT}"
        )
    if without := [f"{a} -> {b}" for a, b in pairs if not has_atomics(a, b)]:
        raise UnsupportedError(
            f"GPUs {', '.join(without)} have no native atomics between them (see `nvidia-smi topo -p2p a`): they are "
            f"connected by PCIe, but ranks signal each other by atomics, which need NVLink; {WAY_OUT}"
        )


class Arena:
    """This rank's symmetric memory (`views`), every rank's (`everywhere`), and their addresses as device tables.

    describe: what it is, for the error that says that it does not fit.
    """

    def __init__(self, layout: dict[str, Field], member: Membership, describe: Callable[[], MemoryPlan]) -> None:
        device, ranks, self._describe = member.device, member.ep_size, describe
        self.memories = self._allocate(packed_bytes(layout), member)
        self.views: dict[str, Tensor] = {}
        self.everywhere: dict[str, list[Tensor]] = {}
        self.tables: dict[str, Tensor] = {}
        for name, field in layout.items():
            flat = [memory[field.offset : field.offset + field.bytes] for memory in self.memories]
            self.everywhere[name] = [bytes_.view(field.dtype).view(field.shape) for bytes_ in flat]
            self.views[name] = self.everywhere[name][member.rank]
            addresses = [bytes_.data_ptr() for bytes_ in flat]
            self.tables[name] = torch.tensor(addresses, dtype=torch.int64, device=device)
        step = flag_step(ranks)
        self._flag_offsets = {"entered": 0, "finished": step, "returned": 2 * step, "arrived": 3 * step}
        self._flag_views = {name: self.views["flags"][offset:] for name, offset in self._flag_offsets.items()}

    def _allocate(self, size: int, member: Membership) -> list[Tensor]:
        """The zeroed memory of every rank.  Collective."""
        device = member.device
        free = _free_bytes(device, size)
        if member.group is None or member.ep_size == 1:
            check_room(self._describe(), size, [free])
            return [torch.zeros(size, dtype=torch.uint8, device=device)]
        import torch.distributed._symmetric_memory as symmetric

        seats = _seats(member, free)
        check_peers(seats, torch.cuda.can_device_access_peer, has_atomics)
        check_room(self._describe(), size, [seat.free for seat in seats])
        if (kind := symmetric.get_backend(device)) != "CUDA":
            raise UnsupportedError(
                f"torch's symmetric memory uses its {kind} backend in this process; uniep needs 'CUDA', which is "
                f"the default: do not call set_backend, or {WAY_OUT}"
            )
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        meeting = member.meeting
        meeting.exchange(None, "memory allocated")  # torch's rendezvous waits without timeout_s
        try:
            handle = symmetric.rendezvous(memory, member.group)
        except RuntimeError as cause:
            raise UniEPError(
                f"rank {member.rank}, creation of a Workspace: torch's rendezvous of symmetric memory failed "
                f"({str(cause).splitlines()[0]}); see that no rank has ended"
            ) from cause
        meeting.exchange(None, "memory mapped")
        peers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(member.ep_size)]
        peers[member.rank] = memory  # which owns it
        return peers

    def flag_offset(self, name: str) -> int:
        """First word of a flag array: entered, finished, returned (one per rank), arrived (one per chunk of slots)."""
        return self._flag_offsets[name]

    def flag_view(self, name: str) -> Tensor:
        """This rank's flags from that word on."""
        return self._flag_views[name]
