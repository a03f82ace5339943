"""Entering calls of the Hopper backend, what ranks conclude there, and what a failure left, here or at a peer.

Kernels note failures in this rank's status and in pinned memory, which the host reads without synchronising
(`kernels/sync.py`).  A rank that cannot go on says so in its peers' symmetric memory: all that waits there ends.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from uniep.backends.base import UNKNOWN_LAYER, LayerTag
from uniep.backends.hopper.arena import Arena
from uniep.backends.protocol import (
    OPERATIONS,
    Header,
    agree,
    bad_id_error,
    decoded,
    encoded,
    error_index,
    error_of,
    refuse_copies,
    same_draw,
    same_forward,
    same_layer,
)
from uniep.errors import CapacityError, InputError, PeerTimeoutError, UniEPError, UnsupportedError
from uniep.kernels import header, sync
from uniep.launch.driver import Memory, Varying, copy, launch
from uniep.launch.records import VARYING
from uniep.layout import EXCHANGE_HEADER, LOST_SLOT, STATUS_RECORD
from uniep.waiting import SAME_CALLS

if TYPE_CHECKING:
    from uniep.membership import Membership

log = logging.getLogger("uniep")

EXCHANGE_PROGRAMS = 32
STAGE_OF_FLAG = {
    "entered": sync.STAGE_ENTRY.value, "finished": sync.STAGE_DISPATCH.value, "returned": sync.STAGE_COMBINE.value,
}  # fmt: skip
STAGES = {  # of peers
    sync.STAGE_ENTRY.value: "entry of the call",
    sync.STAGE_DISPATCH.value: "arrival of tokens",
    sync.STAGE_COMBINE.value: "return of results",
}
OWN_STAGES = {  # of this rank's own programs
    sync.STAGE_DISPATCH.value: "pulls of its peers' tokens",
    sync.STAGE_COMBINE.value: "results for all ranks",
    sync.STAGE_ROWS.value: "rows of gate and up",
    sync.STAGE_SUM.value: "rows of the down product",
    sync.STAGE_RAW.value: "rows of dO @ W2",
    sync.STAGE_ACTIVATED.value: "rows of the activation's gradient",
}
TIMEOUT, BAD_ID, TOO_MANY_ROWS, REFUSED, OTHER_CALL, LOST = (
    c.value for c in (sync.TIMEOUT, sync.BAD_ID, sync.TOO_MANY_ROWS, sync.REFUSED, sync.OTHER_CALL, sync.LOST)
)
GAVE_UP, FAILED, LEFT = header.GAVE_UP.value, header.FAILED.value, header.LEFT.value
OPERATION, ERROR, TEXT = header.OPERATION.value, header.ERROR.value, header.TEXT.value
LOST_TEXT = header.LOST_TEXT.value
PLANNED = [OPERATIONS.index(name) for name in ("route", "forward", "forward without gradients", "refuse")]
"""Operations whose outcome the host reads at once where it reads totals."""
_NUMBER_OF = {name: number for number, name in enumerate(OPERATIONS)}
assert _NUMBER_OF["refuse"] == header.IS_REFUSED.value, "kernels/header.py names this operation by its number"

_made: collections.Counter[str] = collections.Counter()  # Workspaces of this process, by group


class Order:
    """The calls of all Workspaces of one device: one at a time, in the order of the host, whatever streams they are on.

    Kernels of two Workspaces that run beside each other could each hold the multiprocessors that the other's peers wait
    for.  A graph is in this order where it is replayed: once a call was captured, all wait for `done`, an event that
    graphs wait for and record as well.
    """

    def __init__(self, device: torch.device) -> None:
        self.turn = threading.RLock()
        self.stream = torch.cuda.current_stream(device)  # of the last call that was not captured
        self.done = torch.cuda.Event(external=True)
        self.done.record(self.stream)
        self.is_captured = False
        self.calls: weakref.WeakSet[Calls] = weakref.WeakSet()

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Let `stream`, which is current, go on when the last call has ended."""
        if torch.cuda.is_current_stream_capturing():
            self.is_captured = True
            stream.wait_event(self.done)
            return
        if self.is_captured:
            stream.wait_event(self.done)
        elif stream != self.stream:
            stream.wait_stream(self.stream)
        self.stream = stream

    def end(self, stream: torch.cuda.Stream) -> None:
        if self.is_captured:
            self.done.record(stream)


_orders: dict[torch.device, Order] = {}


def order_of(device: torch.device) -> Order:
    """The one of this process's device."""
    if device not in _orders:
        _orders[device] = Order(device)
    return _orders[device]


def wrapped(number: int) -> int:
    """As int32 counts: past 2**31 - 1 comes -2**31."""
    return (number + 2**31) % 2**32 - 2**31


def identity(layer: LayerTag) -> tuple[int, int, int]:
    """The values of `VARYING`."""
    return layer.number, wrapped(layer.draw), wrapped(layer.draw >> 32)


class Calls:
    """One rank's call counter, status, and what it tells and is told.

    calls_made: by this host.  Replays of a graph count on the device only, by `call`; what goes by the host's count
    reads totals, and cannot be captured.  number: of the Workspace, in the order in which its group made them.
    allocate: rows of the next call.  is_inside: between the entry of a call and its return.
    """

    def __init__(self, member: Membership, arena: Arena) -> None:
        self.member, self.cfg, self.device, self.arena = member, member.cfg, member.device, arena
        self.rank, self.num_ranks = member.rank, member.ep_size
        self.slots = self.cfg.max_tokens_per_rank * self.cfg.top_k
        self.timeout_ns = int(member.timeout_s * 1e9)
        group = member.group.group_name if member.group is not None else ""
        _made[group] += 1
        self.number = _made[group]
        self.order = order_of(self.device)
        self.order.calls.add(self)
        self.calls_made, self.is_inside, self._has_told = 0, False, False
        self.allocate = 0
        self.aside = torch.cuda.Stream(self.device)  # for small copies, whatever waits on other streams
        # The number of the last call, and how many had ids, as did the last one or did not.
        self._counters = torch.zeros(4, dtype=torch.int32, device=self.device)
        self.call, self._has_ids = self._counters[:1], False
        self.ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._waits = torch.zeros(2, 2, dtype=torch.int64, device=self.device)  # 16 bytes apart, as launches want
        self.waited = self._waits[:, 0]  # see Backend.waited
        self._waited = {flag: self._waits[min(index, 1)] for index, flag in enumerate(STAGE_OF_FLAG)}
        # Pinned memory that kernels write and the host reads without synchronising.
        self._parts = header.HostRecord(self.num_ranks)
        self._host = torch.zeros(self._parts.words, dtype=torch.int32).pin_memory()
        self._words = (ctypes.c_int32 * self._parts.words).from_address(self._host.data_ptr())
        self._host_totals = torch.zeros(4, dtype=torch.int32).pin_memory()
        self._totals_words = (ctypes.c_int32 * 4).from_address(self._host_totals.data_ptr())
        self._fence = threading.Lock()
        self.status = arena.views["status"][:STATUS_RECORD]
        address = torch.tensor([self._host.data_ptr()], dtype=torch.int64)
        first = header.STATUS_HOST.value
        self.status[first : first + 2] = address.view(torch.int32).to(self.device)
        # What this rank will tell: a lost slot, and the word that goes into a status.
        self._said = torch.zeros(LOST_SLOT + 4, dtype=torch.int32).pin_memory()
        self._saying = torch.zeros(LOST_SLOT + 4, dtype=torch.int32, device=self.device)
        self._digests_of = 0  # the call whose digests are not judged yet
        self._entry_constants: dict[str, Any] = {
            "K": self.cfg.top_k, "SLOTS": self.slots, "NUM_RANKS": self.num_ranks, "BLOCK": 1024,
        }  # fmt: skip
        self._wait_constants: dict[tuple[str, bool, bool], dict[str, Any]] = {}

    def lasting(self) -> list[Tensor]:
        """Memory that kernels use, but for the arena's."""
        return [self._counters, self.ticket, self._host_totals, self._waits]

    # --- entering ---

    def enter(
        self, ids_TK: Tensor | None, weights_TK: Tensor | None, num_tokens: int, operation: str,
        layer: LayerTag = UNKNOWN_LAYER, forward: Memory | None = None, refusal: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Enter the next call: publish ids and weights (None: nothing but the entry), or a refusal, to every peer.

        forward (1,): with ids, takes this call's number; without, the call that planned.
        """
        from uniep.kernels.entry import exchange_kernel

        digests = self.begin(layer, ids_TK is not None)
        launch(
            exchange_kernel,
            EXCHANGE_PROGRAMS,
            (
                self.call, self.ticket, ids_TK, weights_TK, refusal,
                # That there are digests is no constant, since the code for it would come late: any memory serves.
                digests.view(torch.int32) if digests is not None else self.call,
                forward, num_tokens, self.allocate, _NUMBER_OF[operation],
                *map(Varying, VARYING, identity(layer)), int(digests is not None),
                self.arena.tables["exchange"], self.arena.tables["flags"], self.arena.flag_offset("entered"), self.rank,
            ),
            self._entry_constants,
            num_warps=4, maxnreg=64,  # left to itself, ptxas spills to use fewer
        )  # fmt: skip

    def begin(self, layer: LayerTag, has_ids: bool) -> Tensor | None:
        """What the host does before it enters a call.  Returns the digests that go with it."""
        self.check()
        if self.cfg.max_rows is None and self._is_captured():
            raise UnsupportedError(
                "this call is being captured in a CUDA graph, but max_rows is None, so that the host has to read the "
                "number of rows; set MoEConfig.max_rows"
            )
        digests = layer.digests if self.num_ranks > 1 else None
        if digests is not None and self._is_captured():
            digests = None
        if digests is not None:
            self.judge_digests(self.timeout_ns / 1e9)
            self._words[self._parts.digests_here] = 0
            self._digests_of = wrapped(self.calls_made + 1) or 1
        self.calls_made = wrapped(self.calls_made + 1)
        self.is_inside, self._has_ids = True, has_ids
        return digests

    def refuse(self, error: UniEPError) -> None:
        """Enter the call that the peers make, with nothing but the reason why this rank does not."""
        words = torch.zeros(EXCHANGE_HEADER, dtype=torch.int32)
        words[ERROR] = error_index(error)
        text = encoded(str(error), 4 * (EXCHANGE_HEADER - TEXT) - 1)
        words[TEXT:].view(torch.uint8)[: len(text)] = text
        self.enter(None, None, 0, "refuse", UNKNOWN_LAYER, None, words.to(self.device))
        self.wait("entered")

    def wait_entered(self, copies: bool = False) -> None:
        """Wait until every rank has entered this call.  copies: copy engines send behind it."""
        self.wait("entered", judge=True, copies=copies)

    def wait(self, flag: str, judge: bool = False, copies: bool = False, exposed: bool = True) -> None:
        """Make the stream wait until `flag` of every other rank has reached this call.  One program waits, where
        kernels that come after it would hold all multiprocessors.  exposed: nothing runs beside it, so that the time
        counts as `Backend.waited`."""
        if self.num_ranks == 1:
            return
        from uniep.kernels.entry import barrier_kernel

        args = (
            self.arena.flag_view(flag), self.arena.views["exchange"], self.call, self.status,
            self.arena.tables["status"], self._waited[flag] if exposed else None, self.timeout_ns,
            self.rank,
        )  # fmt: skip
        constants = self._wait_constants.get((flag, judge, copies))
        if constants is None:
            constants = self._wait_constants[flag, judge, copies] = {
                "SLOTS": self.slots, "NUM_RANKS": self.num_ranks, "STAGE": STAGE_OF_FLAG[flag], "JUDGE": judge,
                "COPIES": copies,
            }  # fmt: skip
        launch(barrier_kernel, 1, args, constants, num_warps=1)

    def _is_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # --- what the device has said ---

    def check(self) -> None:
        """Raise what the device recorded.  Reads pinned memory; does not synchronise."""
        code = self._words[0]
        if code == 0:
            return
        error = self._failure()
        # Who refused has not failed, and waits for this rank in calls that were entered since.
        awaited = code == REFUSED and self._words[3] != self.calls_made
        self.fail(str(error), GAVE_UP if code == TIMEOUT else FAILED if awaited else None)
        raise error

    def check_all(self) -> None:
        """`check`, and what peers have told, and what digests say, when no call is there to notice it."""
        if self.num_ranks > 1 and self._words[0] == 0 and not self._is_captured():
            code = int(self._look(self.status[:1]))
            if code > sync.LOST_RANK.value:
                self._words[1], self._words[0] = code // sync.LOST_RANK.value - 1, LOST
        self.check()
        self.judge_digests(0, keep=True)

    def _failure(self) -> UniEPError:
        """The error that the host's record stands for."""
        self._acquire()
        code, a, b, c, d = self._words[:5]
        if code == TIMEOUT and b == self.rank:
            wanted = f"signal {c}" if a in STAGES else f"{c} tiles beside each other"
            return PeerTimeoutError(
                f"rank {self.rank}, call {self.calls_made}: its own {OWN_STAGES[a]} were not there within "
                f"{self.member.timeout_s:g} s (Workspace {self.number}; expected {wanted}, seen {d}). "
                "Other work may hold this GPU, or its kernels wait for a peer; otherwise raise timeout_s"
            )
        if code == TIMEOUT:
            return PeerTimeoutError(
                f"rank {self.rank}, call {c}: rank {b} did not come within {self.member.timeout_s:g} s (Workspace "
                f"{self.number}, stage: {STAGES[a]}; expected signal {c}, seen {d}). {self._elsewhere(b)}Every rank "
                "must make the same calls; see that no rank has stopped, or raise timeout_s"
            )
        if code == TOO_MANY_ROWS:
            return CapacityError(
                f"rank {a} was routed {c} rows but max_rows={self.cfg.max_rows} leaves room for {d} with alignment; "
                "raise max_rows, or pass max_rows=None to allocate exactly"
            )
        if code == BAD_ID:
            return InputError(f"routing ids outside -1 .. {self.cfg.num_experts - 1} came from rank {a}, entry {b}")
        if code == OTHER_CALL:
            return self._disagreement()
        if code == REFUSED:
            return _refusal(self._host[self._parts.refusal : self._parts.refusal + EXCHANGE_HEADER])
        return self._lost(a)

    def _disagreement(self) -> UniEPError:
        """The error of ranks that have entered different calls."""
        number, first, step = self._words[3], self._parts.agreed, header.HOST_AGREED_WORDS.value
        headers = []
        for rank in range(self.num_ranks):
            words = self._words[first + step * rank : first + step * (rank + 1)]
            operation, layer, forward, forwards, low, high = words
            draw = high << 32 | low & 0xFFFFFFFF
            headers.append(Header(number, operation, fingerprint=forward, forwards=forwards, layer=layer, draw=draw))
        try:
            agree(number, headers, str)
            same_layer(number, [h.layer for h in headers])
            same_draw(number, [h.draw for h in headers])
            same_forward(number, headers, headers[self.rank].fingerprint)
        except UniEPError as error:
            return error
        raise AssertionError("ranks disagree, but their headers do not")

    def _lost(self, peer: int) -> UniEPError:
        """The error of a rank whose peer has gone."""
        first = STATUS_RECORD + peer * LOST_SLOT
        slot = self._look(self.arena.views["status"][first : first + LOST_SLOT])
        reason, call, length = slot[:3].tolist()
        text = decoded(slot[LOST_TEXT:].view(torch.uint8)[:length])
        if reason == LEFT:
            return PeerTimeoutError(
                f"rank {self.rank}, in call {self.calls_made}, cannot go on: rank {peer} left after call {call} "
                f"({text}). {SAME_CALLS}"
            )
        return PeerTimeoutError(
            f"rank {self.rank} cannot go on: rank {peer} failed with "
            f"{text or f'PeerTimeoutError: it waited in vain in call {call}'}"
        )

    def _elsewhere(self, peer: int) -> str:
        """Whether that rank waits for this one in another Workspace of the group."""
        for other in self.order.calls:
            if other is self or other.arena is None or other.member.group is not self.member.group:
                continue
            entered, own = (int(other._look(t)) for t in (other.arena.flag_view("entered")[peer], other.call))
            if wrapped(entered - own) > 0:
                return (
                    f"Rank {peer} is in call {entered} of Workspace {other.number}, of which rank {self.rank} has made "
                    f"{own} (Workspaces of the group are numbered as it made them; all ranks need the same order). "
                )
        return ""

    def _look(self, memory: Tensor) -> Tensor:
        """Values now, whatever the streams of calls wait for."""
        if not memory.is_cuda:
            return memory.clone()
        with torch.cuda.stream(self.aside):
            return memory.cpu()

    def _acquire(self) -> None:
        """What a kernel stored before the word that was just read is read after it, on hosts that reorder loads, too: a
        lock is taken once the branch on that word is decided, and no load moves before that."""
        with self._fence:
            pass

    # --- what the host reads in a call ---

    def raise_agreed(self) -> NoReturn:
        """Some rank's ids are bad, or it refused its inputs, or ranks are in different calls: all know.  Forget the
        failure, raise the same on every rank."""
        torch.cuda.synchronize(self.device)
        error = self._disagreement() if self._words[0] == OTHER_CALL else self._first_refusal()
        if self._words[0] == REFUSED and self._has_ids:  # who refused counted no forward
            self._counters[1] -= 1
        self.status[: header.STATUS_HOST.value] = 0
        for word in range(8):
            self._words[word] = 0
        torch.cuda.synchronize(self.device)
        self.is_inside = False
        slots = self._look(self.arena.views["status"][STATUS_RECORD:]).view(-1, LOST_SLOT)
        for peer, reason in enumerate(slots[:, header.LOST_REASON.value].tolist()):
            if reason in (GAVE_UP, FAILED):  # and found the status taken
                lost = self._lost(peer)
                self.fail(str(lost))
                raise lost
        raise error

    def can_agree(self) -> bool:
        """Whether the failure that is recorded is one that every rank reads in this call."""
        code = self._words[0]
        if code == BAD_ID:
            return True
        self._acquire()
        if code == REFUSED:  # by a rank in this call, and not in a backward before it
            return self._words[3] == self.calls_made
        if code != OTHER_CALL:
            return False
        first, step = self._parts.agreed, header.HOST_AGREED_WORDS.value
        return all(self._words[first + step * rank] in PLANNED for rank in range(self.num_ranks))

    def _first_refusal(self) -> UniEPError:
        """Of the first rank that refuses or has bad ids."""
        exchange = self.arena.views["exchange"][self.calls_made & 1].cpu()
        for source in range(self.num_ranks):
            words = exchange[source, :EXCHANGE_HEADER]
            if words[OPERATION] == header.IS_REFUSED.value:
                return _refusal(words)
            count = int(words[header.TOKENS.value]) * self.cfg.top_k
            ids_TK = exchange[source, EXCHANGE_HEADER : EXCHANGE_HEADER + count].view(-1, self.cfg.top_k)
            if (error := bad_id_error(ids_TK, source, self.cfg.num_experts)) is not None:
                return error
        raise AssertionError("the plan reported bad inputs, but no rank's are bad")

    def judge_digests(self, patience_s: float, *, keep: bool = False) -> None:
        """Raise UniEPError if the digests of the last call that had any tell of experts taken for copies.

        patience_s: how long to wait for them.  keep: all ranks judge later, again.
        """
        if not self._digests_of:
            return
        until = time.monotonic() + patience_s
        while not self._words[self._parts.digests_here]:
            if self._words[0] or time.monotonic() >= until:
                return  # the call has failed, or will
        self._acquire()
        step, found = header.HOST_DIGEST_WORDS.value, []
        for rank in range(self.num_ranks):
            first = self._parts.digests + step * rank
            digest = self._host[first + 1 : first + 1 + header.DIGEST_WORDS.value].clone().view(torch.int64)
            found.append(digest.tolist() if self._words[first] else [])
        number = self._digests_of
        if not keep:
            self._digests_of = 0
        refuse_copies(number, found)
        self._digests_of = 0

    # --- failing ---

    def fail(self, message: str, reason: int | None = None) -> None:
        """This Workspace is dead.  reason: why its peers are to stop in the middle of what they do; None: they find out
        by themselves, or at the entry of another call."""
        self.is_inside = False
        if reason is not None:
            self.tell(message, reason)
        self.member.fail(message)

    def give_up(self, cause: BaseException) -> None:
        """After an exception: between the entry of a call and its return, peers wait for what will not come."""
        if self.is_inside and self.arena is not None and not self._is_captured():
            self.fail(f"{type(cause).__name__}: {cause}", FAILED)
        self.is_inside = False

    def tell(self, text: str, reason: int) -> None:
        """Say at every peer why this rank is gone; the first time stays.  LEFT: behind its last call; else now, and all
        that waits or is read in this call is lost, there and here.

        By small copies on a stream of their own: kernels that wait may hold all multiprocessors.
        """
        if self._has_told or self.num_ranks == 1 or self.arena is None:
            return
        self._has_told = True
        raw = encoded(text, 4 * (LOST_SLOT - LOST_TEXT))
        said = self._said
        said[:3] = torch.tensor([reason, self.calls_made, len(raw)], dtype=torch.int32)
        said[LOST_TEXT:].view(torch.uint8)[: len(raw)] = raw
        said[LOST_SLOT] = LOST + sync.LOST_RANK.value * (self.rank + 1)
        slot, word = self._saying[:LOST_SLOT], self._saying[LOST_SLOT : LOST_SLOT + 1]
        own_slot = STATUS_RECORD + self.rank * LOST_SLOT
        try:
            if reason == LEFT:
                self.aside.wait_stream(self.order.stream)
                self.aside.wait_event(self.order.done)
            with torch.cuda.stream(self.aside):
                self._saying.copy_(said, non_blocking=True)
            for step in range(1, self.num_ranks + 1):
                status = self.arena.everywhere["status"][(self.rank + step) % self.num_ranks]
                if step < self.num_ranks:
                    copy(status[own_slot:], slot, self.aside)
                if reason != LEFT:
                    copy(status, word, self.aside)
            if word.is_cuda:
                self._saying.record_stream(self.aside)
        except RuntimeError as error:  # a device in a state that nothing can be done with
            log.warning("rank %d could not tell its peers that it is gone (%s): %s", self.rank, text, error)

    def leave(self, cause: str) -> None:
        """Before the memory goes."""
        self.tell(cause, FAILED if self.is_inside else LEFT)
        with contextlib.suppress(RuntimeError):
            self.aside.synchronize()
        self.arena = self.status = None  # type: ignore[assignment]


def _refusal(words: Tensor) -> UniEPError:
    """The error in a header."""
    return error_of(int(words[ERROR]))(decoded(words[TEXT:].view(torch.uint8)).rstrip("\0"))
