"""The collective backend: ordinary collectives of a process group, on any GPU (NCCL) or on the CPU (gloo).

No peer access, no shared memory, any number of nodes.  Stages run one after another:

    headers -> ids and weights -> plan -> all-to-all of tokens, each once per rank -> the experts of this rank
    -> all-to-all of the rows' results, sorted by (source rank, slot) -> fixed-order sum

With combine groups, the rows of each group are added before they travel, sorted by (source rank, token, group).

Rows, formulas and roundings are those of the other backends.  So the bits equal those of `cpu` on the CPU, and those
of `hopper` where its kernels run.  The host reads counts: a call cannot be captured in a CUDA graph.

A rank that fails inside a call tells the others through the store of torch.distributed; waiting ranks look there.  If
only a GPU stream waits, behind a collective that some rank never joined, the wait ends with the timeout of the process
group.  After such an error the group's collectives may be out of step: a new Workspace needs a new group.

Suffixes: R ranks, T tokens of this rank, M received tokens, K slots, D hidden, F ffn, E experts, e local, N rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
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
from uniep.backends.collective.local_experts import (
    KernelExperts,
    LocalExperts,
    Routed,
    Tokens,
    TorchExperts,
    local_experts,
)
from uniep.backends.pinned import PinnedThreads
from uniep.backends.protocol import (
    OPERATIONS,
    Header,
    agree,
    bad_id_error,
    check_capacity,
    check_layers,
    decoded,
    encoded,
    error_index,
    needs_bits,
    same_forward,
    tag_words,
    wanted_anywhere,
)
from uniep.backends.torch_tiles import Rows
from uniep.config import MoEConfig
from uniep.dimension import COLLECTIVE
from uniep.errors import ClosedError, PeerTimeoutError, UniEPError, UnsupportedError
from uniep.layout import TEXT_BYTES
from uniep.meeting import Notices
from uniep.numerics import fp32_products
from uniep.routing import Parts, RoutingPlan, build_parts, build_plan, token_groups
from uniep.schedule import Schedule, default_schedule, refuse_invalid
from uniep.waiting import Patience, finish
from uniep.way import Way, resolve
from uniep.weights import ExpertWeights

if TYPE_CHECKING:
    from uniep.membership import Membership

_T = TypeVar("_T")
_EAGER_TURNS = 2000  # polls of the device without a pause: some milliseconds


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """How many rows an all-to-all sends to and receives from each rank."""

    sent_R: list[int]
    received_R: list[int]

    def reversed(self) -> _Exchange:
        return _Exchange(self.received_R, self.sent_R)


@dataclasses.dataclass(frozen=True)
class _Routing(Routed):
    """One call's rows, with the host's counts: tokens on their way to experts, and rows of experts by source.

    parts: with combine groups, the sums that return instead of rows."""

    tokens: _Exchange
    rows: _Exchange
    parts: Parts | None

    @classmethod
    def make(cls, plan: RoutingPlan, weight_N: Tensor, rank: int, cfg: MoEConfig, way: Way) -> _Routing:
        num_ranks = plan.send_count_R.shape[0]
        count_RR = plan.counts_RE.view(num_ranks, num_ranks, -1).sum(2)  # by source rank and by the experts' rank
        counts = torch.stack([plan.send_count_R, plan.recv_count_R, count_RR[rank], count_RR[:, rank]])
        sent, received, own_rows, rows = counts.tolist()
        parts = build_parts(plan, rank, cfg) if way.grouped else None
        return cls(plan, weight_N, _Exchange(sent, received), _Exchange(own_rows, rows), parts)


class CollectiveBackend:
    """See the module docstring.  schedule: tiles (where kernels run), `received` and `preactivation`; other fields have
    no effect here."""

    name = "nccl"

    def __init__(self, member: Membership, schedule: Schedule | None) -> None:
        self.cfg, self.rank, self.ep_size = member.cfg, member.rank, member.ep_size
        self.device, self.timeout_s, self._blocks = member.device, member.timeout_s, member.blocks
        self._group = member.group if self.ep_size > 1 else None
        self.schedule = schedule or default_schedule(COLLECTIVE, self.cfg, self.ep_size)
        refuse_invalid(self.schedule, self.cfg, self.ep_size, COLLECTIVE)
        most = self.cfg.max_tokens_per_rank  # nothing here depends on the tokens of a call
        self.way = resolve(self.cfg, self.ep_size, most, self.schedule, backend=COLLECTIVE, operators=member.operators)
        self.transport = _transport(self._group, self.device)
        self.experts, self.because = local_experts(self.cfg, self.rank, self.way, self.device)
        self._threads = PinnedThreads(1) if self.device.type == "cpu" else None
        self._member = member
        self._turn, self._inside = threading.RLock(), False  # whether a call is under way
        self._call = self._forwards = 0
        member.meeting.exchange(None, "first collective")  # may set up connections, which takes a while
        # Names this Workspace in every header: collectives of two Workspaces of one group look alike.
        self._space = int(member.meeting.session[:15] or "0", 16)
        self._notices = Notices(member.meeting)
        try:
            self._all_gather(torch.tensor([self._space], device=self.device), "first collective", "creation")
        except BaseException as cause:  # the Workspace that would tell the others does not exist yet
            self._notices.tell(0, f"{type(cause).__name__}: {cause}", failed=True)
            raise

    # --- the interface of Backend ---

    def route(self, ids_TK: Tensor) -> RoutingPlan:
        with self._settings():
            return self._route("route", ids_TK, torch.zeros(ids_TK.shape, dtype=torch.float32))[0].plan

    def forward(self, inputs: Inputs, save: bool) -> tuple[Tensor, list[Tensor]]:
        cfg, operation = self.cfg, "forward" if save else "forward without gradients"
        with self._settings():
            routing, fingerprint = self._route(operation, inputs.ids_TK, inputs.weights_TK, inputs.x_TD, inputs.layer)
            with self._or_give_up():
                received_MD = self._dispatch(inputs.x_TD, routing, "dispatch")
                tokens = Tokens(inputs.x_TD, received_MD)
                experts = inputs.experts
                stores = save and not self.way.recomputes
                rows_ND, h_NF = self._compute(
                    lambda: self._experts_of(experts).forward(tokens, routing, experts, stores)
                )
                weights_TK = inputs.weights_TK if cfg.weight_at == "output" else None
                y_TD = self._combine(rows_ND, inputs.ids_TK, weights_TK, routing)
            if not save:
                return y_TD, []
            if self.way.again:
                received_MD = received_MD.new_empty(0, cfg.hidden)
            if h_NF is None:
                h_NF = received_MD.new_empty(0, cfg.h_columns)
            name = torch.tensor([fingerprint])
            return y_TD, [received_MD, h_NF, name, routing.weight_N, *routing.plan.tensors()]

    def backward(
        self, dy_TD: Tensor, inputs: Inputs, saved: list[Tensor], needs: Needs, main_grads: MainGrads | None = None,
        blocks: int = 1,
    ) -> ExpertGradients:  # fmt: skip
        received_MD, h_NF, name, weight_N, *plan = saved
        ids_TK, fingerprint = inputs.ids_TK, int(name)
        with self._settings():
            digest = _digest(ids_TK.long(), inputs.weights_TK, inputs.x_TD)  # of the inputs, as backward will get them
            headers = self._enter(
                "backward", len(ids_TK), digest, fingerprint=fingerprint, needs=needs, layer=inputs.layer
            )
            same_forward(self._call, headers, _fingerprint(headers))
            anywhere = wanted_anywhere(headers)
            wanted = dataclasses.replace(needs, x=anywhere.x, weights=anywhere.weights)
            with self._or_give_up():
                routing = _Routing.make(RoutingPlan.from_tensors(plan), weight_N, self.rank, self.cfg, self.way)
                if self.way.again and (anywhere.w13 or self.way.recomputes):
                    received_MD = self._dispatch(inputs.x_TD, routing, "dispatch of x again")
                dy = Tokens(dy_TD, self._dispatch(dy_TD, routing, "dispatch of the gradient"))
                x = Tokens(inputs.x_TD, received_MD)
                experts = inputs.experts
                of_layer = self._experts_of(experts)
                h = None if self.way.recomputes else h_NF
                got = self._compute(lambda: of_layer.backward(dy, x, routing, experts, h, wanted, main_grads, blocks))
                dx_TD = dweights_TK = None
                if got.x_ND is not None:
                    dx_TD = self._combine(got.x_ND, ids_TK, None, routing)
                if got.weights_N is not None:
                    dweights_TK = torch.where(ids_TK >= 0, self._return(got.weights_N, ids_TK, routing), 0.0)
            return ExpertGradients(
                dx_TD if needs.x else None, dweights_TK if needs.weights else None, got.w13, got.w2, got.biases
            )

    def _experts_of(self, experts: ExpertWeights) -> LocalExperts:
        """LoRA runs as torch operations on GPUs, too."""
        return self.experts if experts.lora is None else TorchExperts(self.cfg, self.rank, self.way)

    def refuse(self, error: UniEPError) -> None:
        if self.ep_size > 1:
            with self._settings():
                self._enter("refuse", 0, error=type(error)(f"rank {self.rank}: {error}"))

    def trimmed(self, saved: list[Tensor]) -> list[Tensor]:
        return saved

    def fake_saved(self, num_tokens: int | SymInt, x_TD: Tensor, new_size: Callable[[], SymInt]) -> list[Tensor]:
        cfg, ranks = self.cfg, self.ep_size
        rows, local = new_size(), cfg.experts_per_rank(ranks)
        received: int | SymInt = 0
        if not self.way.again:
            received = new_size() if ranks > 1 else 1
        plan = ((ranks, cfg.num_experts), (local + 1,), (ranks,), (ranks, num_tokens), (ranks,), (rows,), (rows,))
        return [
            x_TD.new_empty(received, cfg.hidden),
            x_TD.new_empty(0 if self.way.recomputes else rows, cfg.h_columns),
            x_TD.new_empty(1, dtype=torch.int64),
            x_TD.new_empty(rows, dtype=torch.float32),
            *(x_TD.new_empty(shape, dtype=torch.int32) for shape in plan),
        ]

    def way_of(self, tokens: int, lora: tuple[str, ...] = ()) -> Way:
        return dataclasses.replace(self.way, num_tokens=tokens, lora=lora)

    def prepare(self) -> None:
        """Makes sure that all ranks are there; compiles the kernels with a call of one token per rank."""
        cfg, tokens = self.cfg, int(isinstance(self.experts, KernelExperts))
        like: dict[str, Any] = {"dtype": cfg.dtype, "device": self.device}
        with self._settings():
            local = cfg.experts_per_rank(self.ep_size)
            experts = ExpertWeights.zeros(cfg, local, **like)
            ids_TK = torch.full((tokens, cfg.top_k), -1)
            ids_TK[:, 0] = self.rank * local
            x_TD = torch.zeros(tokens, cfg.hidden, **like)
            inputs = Inputs(x_TD, ids_TK, torch.zeros(ids_TK.shape, dtype=torch.float32), experts)
            self.forward(inputs, save=False)
            _, saved = self.forward(inputs, save=True)
            self.backward(x_TD, inputs, saved, Needs(), blocks=self._blocks)

    def check(self) -> None:
        """Errors are raised by the call they belong to; nothing is deferred."""

    def look(self) -> None:
        self._notices.look(self._call + 1)

    def waited(self) -> None:
        """Not measured."""

    def report(self) -> dict[str, str]:
        return {
            "backend": f"nccl: rank {self.rank} of {self.ep_size}, {self.transport}, on {self.device}",
            "experts": f"{self.experts.name} ({self.because})",
            "overlap": "not active: collectives run between the GEMMs, not beside them",
            **kept_for_backward(self.schedule),
            "rows": "allocated exactly; counts are read by the host in every call",
            "CUDA graphs": "not possible: the host reads counts",
            "main_grad": MAIN_GRAD,
            "waits": "not measured: a collective's time is waiting and sending in one",
        }

    def close(self) -> None:
        """Waits for a call in another thread to end.  Closing inside a call, as after an error, counts as a failed
        rank."""
        with self._turn:
            if self._group is not None:
                self._notices.tell(self._call, self._member.cause, failed=self._inside)
            self._group = None

    # --- entering a call ---

    def _enter(
        self,
        operation: str,
        num_tokens: int,
        digest: Tensor | None = None,
        fingerprint: int = 0,
        needs: Needs | None = None,
        error: UniEPError | None = None,
        layer: LayerTag = UNKNOWN_LAYER,
    ) -> list[Header]:
        """Exchange headers.  Raises on every rank, before any row moves and with the Workspace still usable:
        the error of the first rank that refuses; UniEPError if ranks are in different calls or layers."""
        self._call += 1
        text = encoded(str(error) if error is not None else "")
        forwards = self._forwards + operation.startswith("forward")
        header = Header(
            self._call, OPERATIONS.index(operation), num_tokens, error_index(error), len(text), 0, fingerprint,
            forwards, needs_bits(needs), *tag_words(layer),
        )  # fmt: skip
        names = ["space", *(f.name for f in dataclasses.fields(Header))]
        mine = torch.tensor([self._space, *dataclasses.astuple(header)])
        if digest is not None:
            mine[names.index("digest")] = digest
        with self._or_give_up():
            table = self._all_gather(mine, "enter", operation).tolist()
        headers = [Header(*values[1:]) for values in table]
        if any(values[0] != self._space for values in table):
            raise UniEPError(
                f"rank {self.rank}, call {self._call} ({operation}): another rank of the group is in a call of another "
                "Workspace; every rank must call the layers of one group in the same order"
            )
        texts = torch.empty(0)
        if any(h.error >= 0 for h in headers):
            raw = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
            raw[: len(text)] = text
            with self._or_give_up():
                texts = self._all_gather(raw, "refusal", operation)
        agree(self._call, headers, lambda r: decoded(texts[r, : headers[r].text_bytes]))
        check_layers(self._call, headers)
        self._forwards = forwards
        return headers

    def _route(
        self,
        operation: str,
        ids_TK: Tensor,
        weights_TK: Tensor,
        x_TD: Tensor | None = None,
        layer: LayerTag = UNKNOWN_LAYER,
    ) -> tuple[_Routing, int]:
        """Enter a call and plan it; the fingerprint names the inputs of all ranks."""
        error = bad_id_error(ids_TK, self.rank, self.cfg.num_experts)
        digest = _digest(*(t for t in (ids_TK.long(), weights_TK, x_TD) if t is not None))
        headers = self._enter(operation, 0 if error else len(ids_TK), digest, error=error, layer=layer)
        cfg, most = self.cfg, max(h.tokens for h in headers) * self.cfg.top_k
        packed = torch.zeros(2, most, dtype=torch.int32)
        packed[0, : ids_TK.numel()] = ids_TK.reshape(-1)
        packed[1, : ids_TK.numel()] = weights_TK.reshape(-1).view(torch.int32)
        with self._or_give_up():
            everyone = self._all_gather(packed, "ids and weights", operation)
            ids, weights = (
                [everyone[r, part, : h.tokens * cfg.top_k].view(-1, cfg.top_k) for r, h in enumerate(headers)]
                for part in (0, 1)
            )
            plan = build_plan(ids, self.rank, cfg)
            rows = Rows.make(self.rank, cfg, plan, [w.view(torch.float32) for w in weights])
            routing = _Routing.make(plan, rows.weight_N1.flatten(), self.rank, cfg, self.way)
        check_capacity(plan.counts_RE, cfg)
        return routing, _fingerprint(headers)

    # --- moving rows ---

    def _dispatch(self, x_TD: Tensor, routing: _Routing, stage: str) -> Tensor:
        """Tokens of other ranks by (source rank, token), each once, then one zero row: (M+1, D)."""
        token = routing.plan.send_token_RT
        received_MD = x_TD.new_empty(sum(routing.tokens.received_R) + 1, self.cfg.hidden)
        received_MD[-1].zero_()
        self._all_to_all(received_MD[:-1], x_TD[token[token >= 0]], routing.tokens, stage)
        return received_MD

    def _return(self, rows_N: Tensor, ids_TK: Tensor, routing: _Routing) -> Tensor:
        """Send rows (N, ...) to the slots of their tokens: (T, K, ...).  Unused slots are undefined.

        Rows travel sorted by (source rank, slot), so a rank receives the rows of each expert rank in slot order.
        """
        back_N = routing.plan.row_return_N
        used = torch.nonzero(back_N >= 0).flatten()
        ordered = rows_N[used[torch.argsort(back_N[used])]]
        owner_TK = self._owner(ids_TK, self.cfg.experts_per_rank(self.ep_size))
        return self._to_slots(ordered, owner_TK, routing.rows.reversed())

    def _owner(self, number_TX: Tensor, of_each: int) -> Tensor:
        """The rank of each expert or group; each rank has `of_each`.  Unused ones sort last."""
        return torch.where(number_TX >= 0, number_TX.long() // of_each, self.ep_size)

    def _to_slots(self, ordered: Tensor, owner_TX: Tensor, exchange: _Exchange) -> Tensor:
        """Send rows, sorted by (source rank, slot), to their tokens' slots (T, X, ...); owner: each slot's sending
        rank."""
        arrived = ordered.new_empty(sum(exchange.received_R), *ordered.shape[1:])
        self._all_to_all(arrived, ordered, exchange, "return")
        slots = ordered.new_empty(owner_TX.numel(), *ordered.shape[1:])
        slots[torch.argsort(owner_TX.flatten(), stable=True)[: arrived.shape[0]]] = arrived
        return slots.view(*owner_TX.shape, *ordered.shape[1:])

    def _combine(self, rows_ND: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, routing: _Routing) -> Tensor:
        """(T, D): the fixed-order sum of the rows' results, or of dX, on the tokens' ranks."""
        parts, cfg = routing.parts, self.cfg
        if parts is None:
            returned_TKD = self._return(rows_ND, ids_TK, routing)
            return self._compute(lambda: self.experts.combine(returned_TKD, ids_TK, weights_TK))
        weight_N = routing.weight_N if weights_TK is not None else None
        sums_PD = self._compute(lambda: self.experts.add_parts(rows_ND, parts.row_PK, weight_N))
        group_TW = token_groups(ids_TK, cfg)
        owner_TW = self._owner(group_TW, cfg.num_experts // cfg.experts_per_group // self.ep_size)
        counts = [torch.bincount(t, minlength=self.ep_size) for t in (parts.source_P, owner_TW[group_TW >= 0])]
        slots_TWD = self._to_slots(sums_PD, owner_TW, _Exchange(*torch.stack(counts).tolist()))
        return self._compute(lambda: self.experts.combine(slots_TWD, group_TW, None))

    # --- collectives ---

    def _all_gather(self, tensor: Tensor, stage: str, operation: str = "") -> Tensor:
        """Every rank's tensor, stacked: (R, ...)."""
        out = tensor.new_empty(self.ep_size, *tensor.shape)
        if self.ep_size == 1 or not tensor.numel():
            return out.copy_(tensor)
        with self._waiting(stage, operation):
            self._wait(dist.all_gather(list(out.unbind(0)), tensor, group=self.group, async_op=True))
            if self.device.type == "cuda":
                self._wait_for_device()  # the host reads the result: here ranks wait for a late one
        return out

    def _all_to_all(self, out: Tensor, rows: Tensor, exchange: _Exchange, stage: str) -> None:
        """rows: sorted by the rank they go to.  out: filled in the order of the ranks they come from."""
        if self.ep_size == 1:
            out.copy_(rows)
            return
        with self._waiting(stage):
            work = dist.all_to_all_single(
                out, rows, exchange.received_R, exchange.sent_R, group=self.group, async_op=True
            )
            self._wait(work)

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:  # None means the group of all processes to torch
            raise ClosedError("this Workspace is closed; make a new one")
        return self._group

    def _wait(self, work: Any) -> None:
        """Wait for a collective on the CPU.  On a GPU the current stream waits, not the host."""
        if self.device.type == "cuda":
            work.wait()
            return
        finish(work, self.timeout_s, lambda: self._notices.look(self._call))

    def _wait_for_device(self) -> None:
        """Wait until the current stream has finished its work."""
        done, patience, turns = torch.cuda.Event(), Patience(self.timeout_s), 0
        done.record()
        while not done.query():
            self._notices.look(self._call)
            if patience.over():
                raise TimeoutError(f"nothing came for {self.timeout_s:g} s")
            turns += 1
            time.sleep(0 if turns < _EAGER_TURNS else 1e-4)

    @contextlib.contextmanager
    def _waiting(self, stage: str, operation: str = "") -> Iterator[None]:
        """torch reports an absent or late peer by errors of several classes; here they are one."""
        try:
            yield
        except (RuntimeError, TimeoutError) as cause:
            if isinstance(cause, torch.OutOfMemoryError):
                raise
            self._notices.look(self._call, now=True)  # a peer that failed may have said why
            during = f" ({operation})" if operation else ""
            raise PeerTimeoutError(
                f"rank {self.rank}, call {self._call}{during}, stage {stage}: a peer did not come within "
                f"{self.timeout_s:g} s or is gone ({cause}). Every rank of the group must make the same calls, idle "
                "ranks with T=0; see that no rank has stopped, or raise timeout_s and the process group's timeout"
            ) from cause

    @contextlib.contextmanager
    def _or_give_up(self, unless: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
        """After an error inside a call, peers would wait for this rank forever: close the Workspace."""
        try:
            yield
        except BaseException as cause:
            if not isinstance(cause, unless):
                self._member.fail(f"{type(cause).__name__}: {cause}")
            raise

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Ordinary tensors on the Workspace's device, no autocast.

        Threads take turns.  If a call is interrupted, its collectives would pair with those of the next call: the
        Workspace closes.
        """
        on_device = fp32_products() if self.device.type == "cpu" else torch.cuda.device(self.device)
        no_autocast = torch.autocast(self.device.type, enabled=False)
        with (
            self._or_give_up(unless=UniEPError), torch.inference_mode(False), torch.no_grad(), no_autocast,
            torch.device(self.device), on_device, self._turn,
        ):  # fmt: skip
            self._inside = True
            try:
                with self._or_give_up(unless=UniEPError):
                    yield
            finally:
                self._inside = False

    def _compute(self, function: Callable[[], _T]) -> _T:
        """Run it; on the CPU with one intra-op thread."""
        return function() if self._threads is None else self._threads.call(function)


def _transport(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Which collectives run on `device`.  Raises UnsupportedError if the group has none."""
    if group is None:
        return "one process, no collectives"
    try:
        return f"collectives of {group._get_backend(device).name()}"
    except RuntimeError as cause:
        raise UnsupportedError(
            f"the process group has no collectives for {device} ({cause}); create it with a backend for it, e.g. "
            "init_process_group('cpu:gloo,cuda:nccl')"
        ) from cause


def _fingerprint(headers: Sequence[Header]) -> int:
    """Fingerprint of the inputs of all ranks."""
    described = repr([(h.tokens, h.digest) for h in headers]).encode()
    return int.from_bytes(hashlib.blake2b(described, digest_size=8).digest(), "little", signed=True)


def _digest(*tensors: Tensor) -> Tensor:
    """A 64-bit digest, on the device, of the contents of `tensors` (T, ...)."""
    total = torch.zeros((), dtype=torch.int64)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors:
        rows = tensor.contiguous().view(integer[tensor.element_size()]).sum(1, dtype=torch.int64)
        odd = 2 * torch.arange(len(rows)) + 1
        total = total * 1_000_003 + (rows * odd * 0x9E3779B97F4A7C1).sum()
    return total
