"""The CPU executor: the taskflow in real processes, with one-sided writes and event counters in shared memory.

Every call, forward, backward or route, begins with `_enter`: each rank clears its counters of the call's parity,
writes ids, weights and a header into every peer, signals "entered call n" and waits for all others.  That orders all
reuse of shared memory: a rank is at most one call ahead, and the memory of a call exists twice.  No collective runs on
the data path.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import SymInt, Tensor

from uniep.backends.base import (
    MAIN_GRAD,
    UNKNOWN_LAYER,
    ExpertGradients,
    Inputs,
    LayerTag,
    MainGrads,
    Needs,
    kept_for_backward,
)
from uniep.backends.cpu.peers import Peers
from uniep.backends.cpu.run import CheckedQueues, Run
from uniep.backends.pinned import PinnedThreads
from uniep.backends.protocol import (
    OPERATIONS,
    Header,
    agree,
    bad_id_error,
    check_capacity,
    check_layers,
    encoded,
    error_index,
    needs_bits,
    same_forward,
    tag_words,
    wanted_anywhere,
)
from uniep.backends.torch_tiles import Backward, Dispatch, Forward, Gather, Rows, Shared
from uniep.config import MoEConfig
from uniep.dimension import CPU
from uniep.errors import ClosedError, PeerTimeoutError, UniEPError
from uniep.numerics import fp32_products
from uniep.routing import RoutingPlan, build_plan, return_slots
from uniep.schedule import Schedule, default_schedule, refuse_invalid
from uniep.stages import ALL, Flags, stages
from uniep.taskflow.layer import backward_operators, dispatch_operators, forward_operators
from uniep.taskflow.lower import compile_graph, sites
from uniep.taskflow.operators import Operators
from uniep.taskflow.site import Site
from uniep.taskflow.trace import Span
from uniep.waiting import SAME_CALLS
from uniep.way import Way, resolve

if TYPE_CHECKING:
    from uniep.membership import Membership


_T = TypeVar("_T")


def _collective(method: Callable[..., _T]) -> Callable[..., _T]:
    """A call: uses ordinary tensors, because plans outlive a call and worker threads inherit neither inference mode nor
    a default device.  Threads take turns.  An interrupt inside leaves this rank out of step, so the Workspace
    closes."""

    @functools.wraps(method)
    def call(self: CpuBackend, *args: Any, **kwargs: Any) -> _T:
        with (
            self._or_give_up(unless=UniEPError), fp32_products(), torch.inference_mode(False), torch.no_grad(),
            _on_cpu(), self._turn,
        ):  # fmt: skip
            self._inside = True
            try:
                with self._or_give_up(unless=UniEPError):
                    return method(self, *args, **kwargs)
            finally:
                self._inside = False

    return call


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Inside, new tensors are on the CPU.  A context of PyTorch's only where they are not anyway: inside one, each
    operation goes through Python, which takes as long as planning."""
    there = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if there else torch.device("cpu")


_ROUTINGS_KEPT = 16


@dataclasses.dataclass
class _Call:
    """One call's routing and weights; every rank has all of them."""

    number: int
    routing: _Routing
    weights: list[Tensor]
    headers: list[Header]
    fingerprint: int


class _Routing:
    """Plans of all ranks for one set of ids, the slots of parts (with combine groups), and the checked queues."""

    def __init__(self, ids: list[Tensor], cfg: MoEConfig, way: Way) -> None:
        self.tokens = [t.shape[0] for t in ids]
        self.plans = [build_plan(ids, rank, cfg, way.sends_by_expert) for rank in range(len(ids))]
        self.cfg, self.way = cfg, way
        self.part_slots = [return_slots(site.parts, ids, cfg) for site in self.sites if site.parts is not None]
        self._queues: dict[Any, CheckedQueues] = {}

    @functools.cached_property
    def sites(self) -> list[Site]:
        return sites(self.plans, self.tokens, self.cfg, self.way)

    def queues(self, operators: Operators, rank: int, left_out: Sequence[str] = ()) -> CheckedQueues:
        """left_out: operators that do nothing on this rank."""
        key = (*(op.name for op in operators), "left out", *left_out)
        if key not in self._queues:
            graph = compile_graph(operators, self.sites)
            self._queues[key] = CheckedQueues.make(graph, operators, self.way, rank, left_out)
        return self._queues[key]


class CpuBackend:
    """Executes calls of one Workspace with threads of this process and memory shared with its peers.

    trace: set to a list to have `Span`s appended.  forward_operators, backward_operators: the operators of a call; an
    operator registered there, in the same way on every rank, runs with the others.
    """

    name = "cpu"

    def __init__(self, member: Membership, schedule: Schedule | None) -> None:
        self.cfg, self.rank, self.ep_size = member.cfg, member.rank, member.ep_size
        self.schedule = schedule or default_schedule(CPU, self.cfg, self.ep_size)
        refuse_invalid(self.schedule, self.cfg, self.ep_size, CPU)
        most = self.cfg.max_tokens_per_rank  # nothing here depends on the tokens of a call
        self.way = resolve(self.cfg, self.ep_size, most, self.schedule, backend=CPU, operators=member.operators)
        self.trace: list[Span] | None = None
        self.forward_operators = forward_operators(self.way, keep=True)
        self.backward_operators = backward_operators(self.way)
        self._member = member
        self._peers: Peers | None = Peers(self.cfg, self.way, member.meeting)
        self._threads = PinnedThreads(self._peers.workers)
        self._turn, self._inside = threading.RLock(), False  # whether a call is under way
        self._call = 0
        self._waited = [0, 0]  # see Backend.waited
        self._forwards = 0
        self._routings: collections.OrderedDict[bytes, _Routing] = collections.OrderedDict()

    # --- the interface of Backend ---

    @_collective
    def route(self, ids_TK: Tensor) -> RoutingPlan:
        call = self._enter("route", ids_TK, torch.zeros(ids_TK.shape, dtype=torch.float32))
        plan = call.routing.plans[self.rank]
        return RoutingPlan.from_tensors([t.clone() for t in plan.tensors()])

    @_collective
    def forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        operation = "forward" if save else "forward without gradients"
        call = self._enter(operation, inputs.ids_TK, inputs.weights_TK, inputs.x_TD, layer=inputs.layer)
        keep, routing = save and not self.way.again, call.routing
        with self._or_give_up():
            queues = routing.queues(self.forward_operators.without([] if keep else ["keep"]), self.rank)
            bodies = Forward(
                self._rows(call), self._shared(), inputs.x_TD, inputs.ids_TK, inputs.weights_TK, inputs.experts, keep,
                separate=self.way.separate,
            )  # fmt: skip
            self._run(call, operation, queues, bodies)
        if not save:
            return bodies.y_TD, []
        h_NF = bodies.h_NF if not self.way.recomputes else bodies.h_NF.new_empty(0, self.cfg.h_columns)
        return bodies.y_TD, [bodies.received_MD, h_NF, torch.tensor([call.fingerprint])]

    @_collective
    def backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs, main_grads: MainGrads | None = None,
        blocks: int = 1,
    ) -> ExpertGradients:  # fmt: skip
        received_MD, h_NF, fingerprint_1 = saved
        fingerprint = int(fingerprint_1)
        if self.way.again:
            received_MD = self._dispatch_again(inputs, fingerprint)
        call = self._enter(
            "backward", inputs.ids_TK, inputs.weights_TK, inputs.x_TD, fingerprint, needs, layer=inputs.layer
        )
        routing = call.routing
        anywhere = wanted_anywhere(call.headers)
        # All ranks compile what any of them needs: queues that were planned together cannot block each other.
        nowhere = _unneeded(self.way, anywhere)
        here = _unneeded(self.way, dataclasses.replace(needs, x=True, weights=True))
        with self._or_give_up():
            queues = routing.queues(self.backward_operators.without(nowhere), self.rank, here)
            rows = self._rows(call)
            x_rows = Gather(inputs.x_TD, received_MD, rows, compact=True)
            bodies = Backward(
                rows, self._shared(), dy_TD, inputs.ids_TK, inputs.experts, None if self.way.recomputes else h_NF,
                x_rows, needs, main_grads, blocks, separate=self.way.separate_gradient,
            )  # fmt: skip
            self._run(call, "backward", queues, bodies)
        return ExpertGradients(
            bodies.dx_TD if needs.x else None,
            bodies.dweights_TK if needs.weights else None,
            bodies.gradients.w13 if needs.w13 and main_grads is None else None,
            bodies.gradients.w2 if needs.w2 and main_grads is None else None,
            bodies.biases if needs.biases else (),
        )

    def _dispatch_again(self, inputs: Inputs, fingerprint: int) -> Tensor:
        """Dispatch the received tokens of a forward again; compact."""
        call = self._enter("dispatch", inputs.ids_TK, inputs.weights_TK, inputs.x_TD, fingerprint, layer=inputs.layer)
        with self._or_give_up():
            queues = call.routing.queues(dispatch_operators(), self.rank)
            bodies = Dispatch(self._rows(call), self._shared(), inputs.x_TD, inputs.ids_TK, keep=True)
            self._run(call, "dispatch", queues, bodies)
        return bodies.received_MD

    def _shared(self) -> list[Shared]:
        return [Shared(t["receive"], t["returns"], t["dweights"]) for t in self.peers.tensors]

    def _rows(self, call: _Call) -> Rows:
        routing, rank = call.routing, self.rank
        slots = routing.part_slots[rank] if routing.part_slots else None
        of_call = routing.plans[rank], call.weights, routing.sites[rank].parts, slots
        return Rows.make(rank, self.cfg, *of_call, self.way.keeps_results)

    def _run(self, call: _Call, operation: str, queues: CheckedQueues, bodies: object) -> None:
        run = Run(self.peers, self._threads, call.number, operation, queues, bodies, self.trace)
        run.run()
        self._waited[1] += run.exposed.total_ns

    @_collective
    def refuse(self, error: UniEPError) -> None:
        if self.ep_size > 1:
            named = type(error)(f"rank {self.rank}: {error}")
            self._enter("refuse", *self._nothing(), error=named)

    def trimmed(self, saved: list[Tensor]) -> list[Tensor]:
        return saved

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        received = new_size() if not self.way.again and self.ep_size > 1 else 0
        return [
            x_TD.new_empty(received, self.cfg.hidden),
            x_TD.new_empty(0 if self.way.recomputes else new_size(), self.cfg.h_columns),
            x_TD.new_empty(1, dtype=torch.int64),
        ]

    def way_of(self, tokens: int, lora: tuple[str, ...] = ()) -> Way:
        return dataclasses.replace(self.way, num_tokens=tokens, lora=lora)

    @_collective
    def prepare(self) -> None:
        """Nothing to compile; one call makes sure that all ranks are there."""
        self._enter("route", *self._nothing())

    def check(self) -> None:
        """Errors are raised by the call they belong to; nothing is deferred."""

    def look(self) -> None:
        self.peers.raise_if_failed()
        for peer in range(self.ep_size):
            self.peers.has_entered(peer, self._call + 1)

    def waited(self) -> Tensor:
        return torch.tensor(self._waited, device="cpu")

    def report(self) -> dict[str, str]:
        s = self.schedule
        return {
            "backend": f"cpu: {self.ep_size} processes, one-sided writes in shared memory",
            "schedule": s.name,
            "workers": f"{s.matrix_workers} matrix, {s.vector_workers} vector threads per rank",
            "gate_up": f"{s.gate_up.rows} x {s.gate_up.columns} tiles",
            "down": f"{s.down.rows} x {s.down.columns} tiles",
            **kept_for_backward(s),
            "shared memory": f"{self.peers.bytes} bytes per rank",
            "main_grad": MAIN_GRAD,
            "waits": "measured: entries, and times in which no thread works while one waits for peers",
        }

    def close(self) -> None:
        """Waits for a call in another thread to end.  Closing inside a call, such as from a signal handler, counts as a
        failed rank: peers wait for work that it will not do."""
        with self._turn:
            if self._peers is not None:
                tell = self._peers.fail if self._inside else self._peers.leave
                tell(self._member.cause)
            self._peers = None
            self._routings.clear()

    # --- entering a call ---

    def _nothing(self) -> tuple[Tensor, Tensor]:
        ids_TK = torch.zeros(0, self.cfg.top_k, dtype=torch.int32)
        return ids_TK, ids_TK.float()

    def _enter(
        self,
        operation: str,
        ids_TK: Tensor,
        weights_TK: Tensor,
        x_TD: Tensor | None = None,
        fingerprint: int = 0,
        needs: Needs | None = None,
        error: UniEPError | None = None,
        layer: LayerTag = UNKNOWN_LAYER,
    ) -> _Call:
        """Exchange ids, weights and headers; return when every rank has entered.

        Raises on every rank, before any row moves and with the Workspace still usable: the error of the first
        rank that refuses; UniEPError if ranks are in different operations or layers; CapacityError.
        """
        if error is None and (error := bad_id_error(ids_TK, self.rank, self.cfg.num_experts)) is not None:
            ids_TK, weights_TK = self._nothing()
        self._call += 1
        number = self._call
        text = encoded(str(error) if error is not None else "")
        mine = Header(
            number,
            OPERATIONS.index(operation),
            ids_TK.shape[0],
            error_index(error),
            len(text),
            _digest(x_TD) if x_TD is not None else 0,
            fingerprint,
            self._forwards + operation.startswith("forward"),
            needs_bits(needs),
            *tag_words(layer),
        )
        self.peers.enter(
            number, dataclasses.astuple(mine), text, {"exchange_ids": ids_TK, "exchange_weights": weights_TK}
        )
        began_ns = time.perf_counter_ns()
        with self._or_give_up():
            self._await_entered(number, operation)
        self._waited[0] += time.perf_counter_ns() - began_ns
        return self._read(number, operation)

    def _await_entered(self, number: int, operation: str) -> None:
        peers = self.peers
        peers.raise_if_failed()
        for peer in range(self.ep_size):

            def late(peer: int = peer) -> PeerTimeoutError:
                return PeerTimeoutError(
                    f"rank {self.rank} waited {peers.timeout_s:g} s in call {number} ({operation}), stage enter, for "
                    f"rank {peer}: expected call {number}, seen call {peers.entered(peer)}; rank {self.rank} is ahead. "
                    f"{SAME_CALLS}"
                )

            peers.wait(lambda peer=peer: peers.has_entered(peer, number), late)  # type: ignore[misc]

    def _read(self, number: int, operation: str) -> _Call:
        """All ranks' headers, ids and weights of the call; raises what `_enter` promises."""
        peers, length = self.peers, len(dataclasses.fields(Header))
        headers = [Header(*peers.header(number, peer, length)) for peer in range(self.ep_size)]
        agree(number, headers, lambda peer: peers.text(number, peer, headers[peer].text_bytes))
        check_layers(number, headers)
        self._forwards = headers[self.rank].forwards
        ids, weights = (
            [
                peers.exchanged(number, r, name, h.tokens * self.cfg.top_k).view(-1, self.cfg.top_k)
                for r, h in enumerate(headers)
            ]
            for name in ("exchange_ids", "exchange_weights")
        )
        key = b"".join(len(t).to_bytes(4, "little") + _raw(t) for t in ids)
        fingerprint = _digest(*ids, *weights, torch.tensor([h.digest for h in headers]))
        call = _Call(number, self._routing(key, ids), weights, headers, fingerprint)
        if operation in ("backward", "dispatch"):
            same_forward(number, headers, fingerprint)
        check_capacity(call.routing.plans[0].counts_RE, self.cfg)
        return call

    def _routing(self, key: bytes, ids: list[Tensor]) -> _Routing:
        if key not in self._routings:
            self._routings[key] = _Routing(ids, self.cfg, self.way)
            if len(self._routings) > _ROUTINGS_KEPT:
                self._routings.popitem(last=False)
        self._routings.move_to_end(key)
        return self._routings[key]

    @property
    def peers(self) -> Peers:
        if self._peers is None:
            raise ClosedError("this Workspace is closed; make a new one")
        return self._peers

    @contextlib.contextmanager
    def _or_give_up(self, unless: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """Peers wait for this rank inside the block: on an error, tell them and close the Workspace."""
        try:
            yield
        except BaseException as cause:
            if self._peers is not None and not isinstance(cause, unless):
                text = f"{type(cause).__name__}: {cause}"
                self._peers.fail(text)
                self._member.fail(text)
            raise


def _unneeded(way: Way, needs: Needs) -> list[str]:
    """Operators of the backward for other gradients; those of weights make those of biases, too."""
    cfg = way.given[1]
    biases = needs.biases and cfg.bias
    flags = Flags(x=needs.x, weights=needs.weights, w13=needs.w13 or biases, w2=needs.w2 or biases)
    every, needed = ([op for s in stages(cfg, way, "backward", of) for op in s.operators] for of in (ALL, flags))
    return [op for op in every if op not in needed]


def _raw(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor (numpy is not a dependency)."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _digest(*tensors: Tensor) -> int:
    """64 bits that name the contents of `tensors`."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(repr(tensor.shape).encode())
        state.update(_raw(tensor.contiguous()))
    return int.from_bytes(state.digest(), "little", signed=True)
