"""Shared memory between processes of one host: files without a name (O_TMPFILE), which peers open by /proc/PID/fd.

They vanish with the last process that maps them, even if it is killed.  Where /proc does not show the peers, as in
containers that share only /dev/shm, files have names and are unlinked as soon as all ranks have mapped them.  A named
file is locked while it exists.  One without a lock was left by a killed process, and the next Workspace removes it.

Space is reserved with posix_fallocate, so that a full disk is an error here and not a SIGBUS at some later store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import re
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from uniep.errors import CapacityError, UniEPError, UnsupportedError
from uniep.layout import Field, packed_bytes
from uniep.meeting import Meeting

_PREFIX = "uniep-"
_OUR_NAME = re.compile(_PREFIX + r"[0-9]{1,10}-[0-9a-f]{32}")
_STALE_S = 60.0
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR)  # a file system or kernel without nameless files
_TOKEN_BYTES = 16  # at the end of the file: identifies it
_SHORT = {
    errno.EMFILE: "raise the limit of open files of this process (ulimit -n)",
    errno.ENFILE: "raise the limit of open files of this host (fs.file-max)",
    errno.ENOMEM: "lower max_tokens_per_rank",
}


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


def map_segments(layout: Mapping[str, Field], meeting: Meeting) -> list[Segment]:
    """One zero-filled segment per rank, all mapped here.  Collective.

    Raises on every rank: CapacityError where memory or descriptors are short, UnsupportedError where ranks cannot reach
    each other's files.
    """
    size = packed_bytes(layout)
    if meeting.size == 1:
        try:
            return [Segment(mmap.mmap(-1, size), layout)]
        except OSError as cause:
            raise CapacityError(f"no memory for {size} bytes ({cause.strerror}); lower max_tokens_per_rank") from cause
    memories = _offer_and_map(_create, size, meeting) or _offer_and_map(_create_named, size, meeting, last=True)
    assert memories is not None
    return [Segment(memory, layout) for memory in memories]


class File(NamedTuple):
    """Shared memory that this process made.  Peers find it as long as the descriptor is open."""

    path: str
    fd: int

    def drop(self) -> None:
        """The memory itself lives as long as it is mapped."""
        if not self.path.startswith("/proc/"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        os.close(self.fd)


def _offer_and_map(
    create: Callable[[int], File], size: int, meeting: Meeting, last: bool = False
) -> list[mmap.mmap] | None:
    """Every rank's memory.  None if a rank does not reach another's; with `last`, an error on every rank."""
    where = f"rank {meeting.rank} on {socket.gethostname()}"
    token, made = os.urandom(_TOKEN_BYTES), None
    error: UniEPError | None = None
    try:
        made = create(size + _TOKEN_BYTES)
        os.pwrite(made.fd, token, size)
    except OSError as cause:
        error = CapacityError(f"{where}: {cause.strerror}")
    try:
        offers = meeting.agree((made.path if made is not None else "", token), error, "allocation")
        memories, unreachable = [], ""
        try:
            memories = [_map(path, size, theirs) for path, theirs in offers]
        except OSError as cause:
            if cause.errno in _SHORT:
                error = CapacityError(f"{where} cannot map {size} bytes: {cause.strerror}; {_SHORT[cause.errno]}")
            elif last:
                error = UnsupportedError(
                    f"{where} cannot map the shared memory of its peers ({cause}); all ranks of backend='cpu' must run "
                    "on one host and share /dev/shm (containers: --ipc=host), or use backend='nccl'"
                )
            else:
                unreachable = str(cause)
        return memories if not any(meeting.agree(unreachable, error, "mapping")) else None
    finally:
        if made is not None:
            made.drop()


def _create(size: int) -> File:
    """A new file of `size` reserved bytes in /dev/shm, or in the temporary directory if that has no room.

    The file has no name where the system allows that.
    """
    if not hasattr(os, "O_TMPFILE"):
        return _create_named(size)

    def make(folder: str) -> File:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        return File(f"/proc/{os.getpid()}/fd/{fd}", fd)

    try:
        return _first_with_room(make, size)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
        return _create_named(size)


def _create_named(size: int) -> File:
    """As `_create`, but with a name; locked as long as it has the name."""

    def make(folder: str) -> File:
        _remove_stale(folder)
        path = os.path.join(folder, f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex}")
        made = File(path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        fcntl.flock(made.fd, fcntl.LOCK_EX)
        return made

    return _first_with_room(make, size)


def _first_with_room(make: Callable[[str], File], size: int) -> File:
    """The result of `make` in the first folder that has room.  Raises OSError with the reason of each folder."""
    reasons = []
    for folder in _folders():
        if not os.path.isdir(folder):
            reasons.append(f"{folder} does not exist")
            continue
        try:
            made = make(folder)
            try:
                _reserve(made.fd, size)
                return made
            except BaseException:
                made.drop()
                raise
        except OSError as error:
            if error.errno in _SHORT:
                raise OSError(error.errno, f"{error.strerror}; {_SHORT[error.errno]}") from error
            if error.errno in _NO_NAMELESS:
                raise
            reasons.append(f"{folder}: {error.strerror} ({_free(folder)} bytes free)")
    raise OSError(
        errno.ENOSPC,
        f"no room for {size} bytes of shared memory ({'; '.join(reasons)}); enlarge /dev/shm (docker: --shm-size), set "
        "TMPDIR to a disk with room, or lower max_tokens_per_rank",
    )


def _folders() -> Iterator[str]:
    """/dev/shm, and, for who goes on, the temporary directory: nobody else needs one that can be written."""
    yield "/dev/shm"
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        return
    if temporary != "/dev/shm":
        yield temporary


def _remove_stale(folder: str) -> None:
    """Remove named files that killed processes left.  Young files are kept: they may not be locked yet."""
    for entry in os.scandir(folder):
        if not _OUR_NAME.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError):  # another user's, locked, a link, or gone
            if not _is_ours(os.lstat(entry.path)):
                continue
            fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if _is_ours(found) and time.time() - found.st_mtime > _STALE_S:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(found, os.lstat(entry.path)):
                        os.unlink(entry.path)
            finally:
                os.close(fd)


def _is_ours(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


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


def _map(path: str, size: int, token: bytes) -> mmap.mmap:
    """The file of a peer.  In another namespace its process number may be another process's: the token tells."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FileNotFoundError(errno.ENOENT, "it is not a file", path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, _TOKEN_BYTES, size) != token:
            raise FileNotFoundError(errno.ENOENT, "it is another process's", path)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
