"""Shared memory between processes of one host: named files, unlinked as soon as all ranks have mapped them.

Space is reserved with posix_fallocate, so that a full disk is an error here and not a SIGBUS at some later store.
A file is locked while it has a name: one without a lock was left by a process killed in that moment, and is removed.
torch.distributed serves the rendezvous only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import math
import mmap
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uniep.errors import CapacityError, UniEPError, UnsupportedError
from uniep.memory import Field, packed_bytes

_PREFIX = "uniep-"
_STALE_S = 60.0


class Segment:
    """One rank's shared memory as this process sees it: tensors by name, and int64 words for counters."""

    def __init__(self, memory: mmap.mmap, layout: Mapping[str, Field]) -> None:
        self.words = memoryview(memory).cast("q")
        self.layout = layout
        self._memory = memory

    def tensor(self, name: str) -> Tensor:
        field = self.layout[name]
        count = math.prod(field.shape)
        return torch.frombuffer(self._memory, dtype=field.dtype, count=count, offset=field.offset).view(field.shape)

    def word(self, name: str) -> int:
        """Index of the first word of `name` in `words`."""
        return self.layout[name].offset // 8


def map_segments(layout: Mapping[str, Field], group: Any, rank: int) -> list[Segment]:
    """One zero-filled segment per rank, all mapped here.  Collective over `group`; None: this process alone.

    Raises on every rank: CapacityError where memory is short, UnsupportedError where ranks cannot see each other's
    files.
    """
    size = packed_bytes(layout)
    if group is None:
        try:
            return [Segment(mmap.mmap(-1, size), layout)]
        except OSError as cause:
            raise CapacityError(f"no memory for {size} bytes ({cause.strerror}); lower max_tokens_per_rank") from cause
    made: tuple[str, int] | None = None
    error: UniEPError | None = None
    try:
        made = _create(size)
    except OSError as cause:
        error = CapacityError(f"rank {rank} on {socket.gethostname()}: {cause.strerror}")
    try:
        paths = _agree(made[0] if made else None, error, group)
        segments = []
        try:
            segments = [Segment(_map(p, size), layout) for p in paths]
        except OSError as cause:
            error = UnsupportedError(
                f"rank {rank} on {socket.gethostname()} cannot map the shared memory of its peers ({cause}); all ranks "
                "of backend='cpu' must run on one host and share /dev/shm (containers: --ipc=host), or use "
                "backend='nccl'"
            )
        _agree(None, error, group)
        return segments
    finally:
        if made is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made[0])
            os.close(made[1])


def _agree(value: Any, error: UniEPError | None, group: Any) -> list[Any]:
    """Every rank's value, or the first rank's error on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (value, error), group=group)
    for _, theirs in everyone:
        if theirs is not None:
            raise theirs
    return [v for v, _ in everyone]


def _create(size: int) -> tuple[str, int]:
    """A new file of `size` reserved bytes in /dev/shm, or in the temporary directory if that has no room.

    Returns its path and the descriptor that holds its lock.
    """
    reasons = []
    for folder in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        if not os.path.isdir(folder):
            reasons.append(f"{folder} does not exist")
            continue
        _remove_stale(folder)
        path = os.path.join(folder, f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex}")
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                _reserve(fd, size)
            except OSError:
                os.unlink(path)
                os.close(fd)
                raise
            return path, fd
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror} ({_free(folder)} bytes free)")
    raise OSError(
        errno.ENOSPC,
        f"no room for {size} bytes of shared memory ({'; '.join(reasons)}); enlarge /dev/shm (docker: --shm-size), set "
        "TMPDIR to a disk with room, or lower max_tokens_per_rank",
    )


def _remove_stale(folder: str) -> None:
    """Remove files of dead processes; young ones may not be locked yet."""
    for path in glob.glob(os.path.join(folder, f"{_PREFIX}[0-9]*-*")):
        with contextlib.suppress(OSError):  # somebody else's, locked, or gone
            fd = os.open(path, os.O_RDWR)
            try:
                if time.time() - os.fstat(fd).st_mtime > _STALE_S:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(fd)


def _reserve(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    piece = bytes(1 << 20)  # where there is no fallocate, written zeros reserve space just as well
    for start in range(0, size, len(piece)):
        os.write(fd, piece[: size - start])


def _free(folder: str) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _map(path: str, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
