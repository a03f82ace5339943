"""What the ranks of a CPU Workspace write into each other's memory: entries into calls, signals, failures.

Every word has one writer.  CPython stores and loads an aligned int64 of a memoryview as one access; a lock taken and
released around it is the memory fence.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from uniep.backends.cpu.shm import Segment, map_segments
from uniep.backends.protocol import decoded, utf8
from uniep.config import MoEConfig
from uniep.errors import ClosedError, PeerTimeoutError
from uniep.layout import HEADER_WORDS, cpu_arrays, pack, packed_bytes
from uniep.meeting import Meeting
from uniep.schedule import num_chunks
from uniep.taskflow.graph import Event
from uniep.waiting import SAME_CALLS, Patience
from uniep.way import Way


class Peers:
    """All ranks' shared memory as one rank sees it.  Making it is collective.

    tensors: per rank, its arrays by name (`layout.cpu_arrays`).  Exchange slots and event counters exist twice,
    for calls of even and odd number; a counter has a column per worker thread of every rank.
    """

    def __init__(self, cfg: MoEConfig, way: Way, meeting: Meeting) -> None:
        self.rank, self.ep_size, self.timeout_s = meeting.rank, meeting.size, meeting.timeout_s
        ep_size = self.ep_size
        self.workers = way.matrix_workers + way.vector_workers
        chunks = num_chunks(cfg, way.chunk_tokens)
        self._first_event = {"arrived": 0, "returned": ep_size * chunks, "weights returned": (ep_size + 1) * chunks}
        arrays = cpu_arrays(cfg, ep_size, way)
        _, self._num_events, self._columns = arrays["flags"][0]
        layout = pack(arrays)
        self.bytes = packed_bytes(layout)
        self._segments = map_segments(layout, meeting)
        self.tensors = [{name: segment.tensor(name) for name in layout} for segment in self._segments]
        self._fence = threading.Lock()
        weakref.finalize(self, _leave_silently, self._segments[self.rank], os.getpid())

    # --- entering a call ---

    def enter(self, number: int, header: Sequence[int], text: Tensor, arrays: dict[str, Tensor]) -> None:
        """Clear this rank's counters, write header, text and arrays into every rank, then say "entered `number`"."""
        parity = number % 2
        self.tensors[self.rank]["flags"][parity].zero_()
        for segment, tensors in zip(self._segments, self.tensors, strict=True):
            first = segment.word("exchange_header") + (parity * self.ep_size + self.rank) * HEADER_WORDS
            for offset, value in enumerate(header):
                segment.words[first + offset] = value
            for name, tensor in arrays.items():
                tensors[name][parity, self.rank, : tensor.numel()] = tensor.reshape(-1)
            tensors["exchange_text"][parity, self.rank, : len(text)] = text
        self._order()
        for segment in self._segments:
            segment.words[segment.word("entered") + self.rank] = number

    def entered(self, peer: int) -> int:
        """The last call that `peer` has entered."""
        segment = self._segments[self.rank]
        return segment.words[segment.word("entered") + peer]

    def header(self, number: int, peer: int, length: int) -> list[int]:
        segment = self._segments[self.rank]
        first = segment.word("exchange_header") + (number % 2 * self.ep_size + peer) * HEADER_WORDS
        return list(segment.words[first : first + length])

    def text(self, number: int, peer: int, length: int) -> str:
        return decoded(self.tensors[self.rank]["exchange_text"][number % 2, peer, :length])

    def exchanged(self, number: int, peer: int, name: str, count: int) -> Tensor:
        """A copy of the first `count` values that `peer` wrote into array `name`."""
        return self.tensors[self.rank][name][number % 2, peer, :count].clone()

    # --- events ---

    def _first_word(self, event: Event, number: int) -> int:
        index = number % 2 * self._num_events + self._first_event[event.stage] + event.number
        return self._segments[event.rank].word("flags") + index * self._columns

    def signal(self, event: Event, number: int, column: int) -> None:
        """Add one to the event's counter of call `number`, in the calling worker's own column."""
        self._order()
        self._segments[event.rank].words[self._first_word(event, number) + column] += 1

    def seen(self, event: Event, number: int) -> list[int]:
        """Signals of the event so far, per column."""
        first = self._first_word(event, number)
        return list(self._segments[event.rank].words[first : first + self._columns])

    # --- waiting and failing ---

    def wait(self, ready: Callable[[], bool], late: Callable[[], PeerTimeoutError] | None) -> None:
        """Return once `ready()` is true; raise `late()` after the timeout, or at once if a peer failed.  None: no
        limit."""
        patience, pause = Patience(self.timeout_s), 0.0
        while not ready():
            if late is not None:
                self.raise_if_failed()
                if patience.over():
                    raise late()
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)
        self._order()

    def fail(self, text: str) -> None:
        """Tell all ranks that this one has failed and will not arrive."""
        self._tell(text, 1)

    def leave(self, text: str) -> None:
        """Tell all ranks that this one has finished its part of all calls it entered, and will enter no more."""
        if not self._told(self.rank):
            self._tell(text, -1)

    def _tell(self, text: str, sign: int) -> None:
        _write(self._segments[self.rank], text, sign)

    def _told(self, peer: int) -> int:
        """The word that `peer` wrote: its size is the number of bytes of text; positive if it failed, negative if it
        left."""
        segment = self._segments[peer]
        return segment.words[segment.word("failed")]

    def _reason(self, peer: int) -> str:
        segment = self._segments[peer]
        text = segment.words[segment.word("failed") + 1 :].cast("B")[: abs(self._told(peer))]
        return bytes(text).decode(errors="replace")

    def raise_if_failed(self) -> None:
        """PeerTimeoutError with the reason of a peer that called `fail`; ClosedError if this rank did, as in a signal
        handler: peers that it told may have failed since."""
        if self._told(self.rank) > 0:
            raise ClosedError(f"this Workspace is closed ({self._reason(self.rank)}); make a new one")
        for peer in range(self.ep_size):
            if peer != self.rank and self._told(peer) > 0:
                raise PeerTimeoutError(f"rank {self.rank} cannot go on: rank {peer} failed with {self._reason(peer)}")

    def has_entered(self, peer: int, number: int) -> bool:
        """Whether `peer` is in call `number`.  PeerTimeoutError if it never will be."""
        left = self._told(peer) < 0  # read first: it may enter and leave meanwhile
        if self.entered(peer) >= number:
            return True
        if left:
            raise PeerTimeoutError(
                f"rank {self.rank}, in call {number}, cannot go on: rank {peer} left after call {self.entered(peer)} "
                f"({self._reason(peer)}). {SAME_CALLS}"
            )
        return False

    def _order(self) -> None:
        """Memory fence: writes before it are visible before writes after it."""
        with self._fence:
            pass


def _write(segment: Segment, text: str, sign: int) -> None:
    """Why this rank comes to no more calls; sign: as of `Peers._told`."""
    raw, first = utf8(text), segment.word("failed")
    # Without PyTorch: garbage is collected anywhere, also under fake tensors or a device context.
    segment.words[first + 1 :].cast("B")[: len(raw)] = raw
    with threading.Lock():  # a memory fence
        pass
    segment.words[first] = sign * len(raw)


def _leave_silently(segment: Segment, process: int) -> None:
    """Called when `Peers` are dropped, or their process ends, such as by an error of its program: others need not wait.

    Not in a forked child, whose memory is its parent's."""
    if os.getpid() == process and segment.words[segment.word("failed")] == 0:
        _write(segment, "its Workspace was dropped, or its process ended, without close()", -1)
