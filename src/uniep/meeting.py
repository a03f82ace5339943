"""Where the ranks of a group meet to make a Workspace: over the store of torch.distributed, without collectives.

A collective waits until its group's timeout, ignores Ctrl-C and does not say which rank is missing.  Here every wait
ends after timeout_s, or at once if a rank gave up, with the rank and the stage.

Each rank draws a fresh random number and publishes the numbers it has seen (its `_Hello`).  The ranks have met when all
publish the same numbers.  So leftovers in the store, from an earlier attempt or an earlier group, are never taken for a
live rank.  The numbers together name the session; no one else knows its keys.  A rank writes only its own keys; the
last one to leave a session deletes them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from types import TracebackType
from typing import Any

import torch.distributed as dist

from uniep import version
from uniep.errors import ConfigError, PeerTimeoutError, UniEPError, UnsupportedError
from uniep.waiting import LOOK_S, SAME_CALLS, Patience

_NOTHING = "-"  # what a key without a value reads as; never a real value
_LEAVE_S = 2.0  # for messages to others that no one waits for
_turns: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()  # by group


def has_process_group() -> bool:
    """Whether this process has joined others by torch.distributed."""
    return dist.is_available() and dist.is_initialized()


class Board:
    """Keys and values that all ranks see.  A separate thread asks the store, because the answer may never come: the
    store's host may be gone or suspended."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._errands: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_run_errands, args=(self._errands,), daemon=True).start()
        weakref.finalize(self, self._errands.put, None)

    def submit(self, errand: Callable[[Any], Any]) -> Future:
        """Queue `errand(store)`; it runs after those before it."""
        future, store = Future[Any](), self._store
        self._errands.put((future, lambda: errand(store)))
        return future

    def ask(self, errand: Callable[[Any], Any], timeout_s: float) -> Any:
        """The errand's result.  Raises PeerTimeoutError if the store does not answer or is gone."""
        future, patience = self.submit(errand), Patience(timeout_s)
        while True:
            with contextlib.suppress(NotYetError):
                return self._result(future, patience.look())
            if patience.over():
                raise PeerTimeoutError(
                    f"the store of torch.distributed did not answer within {timeout_s:g} s; see that the process that "
                    "serves it (rank 0, or the launcher) has not stopped"
                )

    def _result(self, future: Future, seconds: float) -> Any:
        try:
            return future.result(seconds)
        except NotYetError:
            raise
        except RuntimeError as cause:  # torch's, also DistNetworkError
            raise PeerTimeoutError(
                f"the store of torch.distributed is gone ({str(cause).splitlines()[0]}); the process that serves it "
                "(rank 0, or the launcher) has ended"
            ) from cause


def _run_errands(errands: queue.SimpleQueue) -> None:
    while (entry := errands.get()) is not None:
        future, errand = entry
        try:
            future.set_result(errand())
        except BaseException as error:
            future.set_exception(error)
        del entry, future, errand  # they hold the store


def read(store: Any, keys: Sequence[str]) -> list[bytes | None]:
    """The keys' values, None for a missing one.  `get` would block on a key that its owner deletes meanwhile."""
    values = [bytes(store.compare_set(key, _NOTHING, _NOTHING)) for key in keys]
    return [None if value == _NOTHING.encode() else value for value in values]


@dataclasses.dataclass(frozen=True)
class _Hello:
    """What a rank publishes until all have met.  seen: each rank's number; `failure`: why this rank gave up."""

    number: str
    seen: tuple[str | None, ...]
    failure: str = ""

    def packed(self) -> bytes:
        return pickle.dumps(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a rank has said in a session: a pickled value for each stage; `failure`: why no more will come."""

    version: str
    values: tuple[bytes, ...] = ()
    failure: str = ""

    def packed(self) -> bytes:
        return pickle.dumps(dataclasses.astuple(self))


class Meeting:
    """The ranks of one group while they make one Workspace: a context manager, collective.

    An exception of any class that leaves the block reaches the others: they raise PeerTimeoutError with its text.
    group: None, or a group of one rank: there is no peer to meet.  In a group, threads of one process meet in turn.
    session: a name that only these ranks have, the same on each; "" before the first exchange and without peers.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.timeout_s = timeout_s
        self.version = version.__version__
        self.session = ""
        self._said = _Part(self.version)
        self._done = 0  # exchanges that this rank has seen complete
        self._hello: _Hello | None = None  # as it stands in the store
        self._turn: threading.Lock | None = None
        self.board: Board | None = None
        if group is not None and self.size > 1:
            if dist.get_backend(group) == "fake":
                raise UnsupportedError(
                    f"the process group is a fake one of {self.size} ranks, of which only this one exists; pass "
                    "group=None, which is EP=1"
                )
            ranks = repr(dist.get_process_group_ranks(group)).encode()
            name = f"uniep/{group.group_name}/{hashlib.blake2b(ranks, digest_size=8).hexdigest()}"
            self.board = Board(dist.distributed_c10d._get_default_store(), name)
            self._turn = _turns.setdefault(group, threading.Lock())

    def __enter__(self) -> Meeting:
        if self._turn is not None and not self._turn.acquire(timeout=self.timeout_s):
            raise PeerTimeoutError(
                f"rank {self.rank}: another thread has been making a Workspace of this group for {self.timeout_s:g} s"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.board is not None:
                failure = f"{kind.__name__}: {value}" if kind is not None else ""
                with contextlib.suppress(PeerTimeoutError):
                    self.board.ask(lambda store: self._leave(store, failure), min(self.timeout_s, _LEAVE_S))
        finally:
            self.board = None
            if self._turn is not None:
                self._turn.release()

    def exchange(self, value: Any, stage: str) -> list[Any]:
        """Every rank's value, by rank.  Returns once all ranks are in the same exchange."""
        if self.board is None:
            return [value]
        if not self.session:
            self._arrive(stage)
        self._said = _Part(self.version, (*self._said.values, pickle.dumps(value)))
        self._ask(lambda store: store.set(self._part(self.rank), self._said.packed()))
        number, keys = len(self._said.values) - 1, [self._part(rank) for rank in range(self.size)]
        wait = self._waiting(stage)
        while True:
            parts = [
                _Part(*pickle.loads(p)) if p else _Part(self.version)
                for p in self._ask(lambda store: read(store, keys))
            ]
            missing = [rank for rank, part in enumerate(parts) if len(part.values) <= number]
            if not missing:
                break
            for rank in missing:
                self._raise_if(parts[rank].failure, rank, stage)
            wait(missing)
        self._done = number + 1
        if self._hello is not None:  # all have seen it
            self._ask(lambda store: store.delete_key(self._greeting(self.rank)))
            self._hello = None
        if len({part.version for part in parts}) > 1:
            listed = ", ".join(f"rank {rank}: {part.version}" for rank, part in enumerate(parts))
            raise ConfigError(f"ranks run different versions of uniep ({listed}); install the same one everywhere")
        return [pickle.loads(part.values[number]) for part in parts]

    def agree(self, value: Any, error: UniEPError | None, stage: str) -> list[Any]:
        """Every rank's value, or the first rank's error on every rank."""
        everyone = self.exchange((value, error), stage)
        for _, theirs in everyone:
            if theirs is not None:
                raise theirs
        return [v for v, _ in everyone]

    def _arrive(self, stage: str) -> None:
        number, ranks = os.urandom(16).hex(), range(self.size)
        keys = [self._greeting(rank) for rank in ranks]
        seen: tuple[str | None, ...] = ()
        wait = self._waiting(stage)
        while True:
            hellos = [_Hello(*pickle.loads(h)) if h else None for h in self._ask(lambda store: read(store, keys))]
            hellos[self.rank] = self._hello or _Hello(number, ())
            for rank, hello in enumerate(hellos):
                if hello is not None and hello.failure:
                    if number in hello.seen:
                        self._raise_if(hello.failure, rank, stage)
                    hellos[rank] = None  # left by an earlier attempt
            now = tuple(hello.number if hello is not None else None for hello in hellos)
            if now != seen:
                seen = now
                hellos[self.rank] = self._hello = mine = _Hello(number, seen)
                self._ask(lambda store, mine=mine: store.set(keys[self.rank], mine.packed()))  # type: ignore[misc]
            if None not in seen and all(hello is not None and hello.seen == seen for hello in hellos):
                break
            missing = [rank for rank, hello in enumerate(hellos) if hello is None or number not in hello.seen]
            wait(missing or [rank for rank, hello in enumerate(hellos) if hello is None or hello.seen != seen])
        self.session = _session(seen)

    def _waiting(self, stage: str) -> Callable[[Sequence[int]], None]:
        """A function to call repeatedly with the ranks that are still missing; each time it waits longer."""
        patience, pause = Patience(self.timeout_s), 5e-4

        def wait(missing: Sequence[int]) -> None:
            nonlocal pause
            if patience.over():
                raise PeerTimeoutError(
                    f"rank {self.rank}, creation of a Workspace, stage {stage}: rank {', '.join(map(str, missing))} "
                    f"did not come within {self.timeout_s:g} s; every rank of the group must make the Workspace; check "
                    "that none has stopped, or raise timeout_s"
                )
            time.sleep(min(patience.look(), pause))
            pause = min(1.3 * pause, LOOK_S)

        return wait

    def _raise_if(self, failure: str, rank: int, stage: str) -> None:
        if failure:
            raise PeerTimeoutError(
                f"rank {self.rank}, creation of a Workspace, stage {stage}: rank {rank} failed with {failure}"
            )

    def _leave(self, store: Any, failure: str) -> None:
        """Withdraw, or leave the failure for ranks that have seen this one; the last one to leave deletes
        everything."""
        if self._hello is not None:
            key, seen = self._greeting(self.rank), self._hello.seen
            if failure and any(number for rank, number in enumerate(seen) if rank != self.rank):
                store.set(key, dataclasses.replace(self._hello, failure=failure).packed())
            else:
                store.delete_key(key)
            if None not in seen:
                self.session = _session(seen)  # others may be in it already
        if self.session:
            if failure:
                # Leaves out the value of an exchange that this rank did not finish: a late rank must not continue
                # alone.
                said = dataclasses.replace(self._said, values=self._said.values[: self._done], failure=failure)
                store.set(self._part(self.rank), said.packed())
            _close_session(store, self.session, self.size, [self._part(rank) for rank in range(self.size)])

    def _ask(self, errand: Callable[[Any], Any]) -> Any:
        assert self.board is not None
        try:
            return self.board.ask(errand, self.timeout_s)
        except PeerTimeoutError as cause:
            raise PeerTimeoutError(f"rank {self.rank}, creation of a Workspace: {cause}") from cause.__cause__

    def _greeting(self, rank: int) -> str:
        return f"hello/{rank}"

    def _part(self, rank: int) -> str:
        return f"{self.session}/{rank}"


def _session(numbers: Sequence[str | None]) -> str:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=16).hexdigest()


def _close_session(store: Any, name: str, size: int, keys: Sequence[str]) -> None:
    """Called by each of `size` ranks when it no longer needs the keys: the last one deletes them."""
    if store.add(f"{name}/left", 1) == size:
        for key in (*keys, f"{name}/left"):
            store.delete_key(key)


class Notices:
    """What a rank tells the others outside collectives: that it failed, or left after some call."""

    def __init__(self, meeting: Meeting, who: str = "rank", what: str = "call", remedy: str = f" {SAME_CALLS}") -> None:
        """Uses the session of `meeting`, after the meeting has ended.  who to remedy: words of the errors."""
        self.rank, self._who, self._what, self._remedy = meeting.rank, who, what, remedy
        self._board, self._name = meeting.board, f"{meeting.session}/notices"
        self._any = f"{self._name}/any"  # exists if a notice of any rank may exist
        self._keys = [f"{self._name}/{rank}" for rank in range(meeting.size)]
        self._looking: Future | None = None
        self._next = Patience(LOOK_S)

    def tell(self, call: int, text: str, *, failed: bool) -> None:
        """failed: this rank failed in call `call`.  Else it has finished all calls up to that one, and makes no
        more."""
        board, self._board = self._board, None
        if board is None:
            return

        def errand(store: Any) -> None:
            store.set(self._keys[self.rank], pickle.dumps((call, text, failed)))
            store.set(self._any, "")
            _close_session(store, self._name, len(self._keys), [*self._keys, self._any])

        with contextlib.suppress(PeerTimeoutError):
            board.ask(errand, _LEAVE_S)

    def look(self, call: int, *, now: bool = False) -> None:
        """Raise PeerTimeoutError if a peer will not come to call `call`.  Looks only from time to time, unless
        `now`."""
        if self._board is None:
            return
        notices: Sequence[bytes | None] = ()
        if now:
            with contextlib.suppress(PeerTimeoutError):
                notices = self._board.ask(self._read, _LEAVE_S)
        elif not self._next.over():
            return
        elif self._looking is None:
            self._looking = self._board.submit(self._read)
        elif self._looking.done():
            looking, self._looking, self._next = self._looking, None, Patience(LOOK_S)
            notices = looking.result() if looking.exception() is None else ()
        self._judge(call, notices)

    def _read(self, store: Any) -> list[bytes | None]:
        return read(store, self._keys) if read(store, [self._any])[0] is not None else []

    def forget(self) -> None:
        """In a forked child, where no thread asks the store."""
        self._board = None

    def _judge(self, call: int, notices: Sequence[bytes | None]) -> None:
        here = f"{self._who} {self.rank}, in {self._what} {call}, cannot go on"
        for rank, notice in enumerate(notices):
            if notice is None or rank == self.rank:
                continue
            last, text, failed = pickle.loads(notice)
            if failed:
                raise PeerTimeoutError(f"{here}: {self._who} {rank} failed with {text}")
            if last < call:
                raise PeerTimeoutError(
                    f"{here}: {self._who} {rank} left after {self._what} {last} ({text}).{self._remedy}"
                )
