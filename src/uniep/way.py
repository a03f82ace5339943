"""Way: how the calls of one rank with a given number of tokens run under a Schedule.  Every choice is made here, once.

Code that launches, measures, traces or simulates a call reads its Way and never its Schedule.  What ranks have to agree
on (dimensions of scope "wire") depends only on the Schedule.  The rest may depend on the tokens of this rank, which
peers do not know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from uniep.config import ROW_ALIGN, ROW_TILES, MoEConfig
from uniep.dimension import COLLECTIVE, GPU, MEASURED, Measured, listed
from uniep.row_operator import PLACES, RowOperator
from uniep.schedule import FEW_ROWS, Schedule, Tile, default_schedule, down_sms, rows_of_expert, wire_share

ADAPTABLE = "w13", "w2"
"""The weights that may have low-rank factors."""
_BEHIND_RESULTS = {"down", "gate_up_grad"}  # products whose rows return


class Choice(NamedTuple):
    """One choice: what was chosen, by which rule, and why."""

    what: str
    value: str
    rule: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One call of one rank.  `explain()` says which rule chose what.

    gates: every stage waits for the one before.  mega: one kernel for each direction.
    down_sms: multiprocessors of the down product beside gate_up; 0: it runs after it.  gate_up_parts: then, launches of
        gate_up, each for a part of the row tiles, whose down product runs beside the next part; 1: it claims what is
        done.
    returns: how results reach their tokens' ranks: from the product's "epilogue", by a "pass" behind it, or as sums of
        combine groups, made "sums after" the product or "sums beside" it.
    gradient_beside: the activation's gradient runs beside the product that feeds it.
    down_wgrad_beside: dW2, if needed, runs beside gate_up_grad.
    transfer: how tokens travel.  copies: by copy engines here.  pulls: they are fetched.  waits: kernels wait for
        tokens on their way.
    sends_by_expert: the order of send lists.
    push_programs: programs of those kernels that push, or pull, first.  push_rounds: turns of the tile loop that this
        lasts, in the forward and the backward.
    sum_programs, sum_warps: programs per multiprocessor that add slots, and their warps.  pass_programs, pass_warps:
        of passes that move rows.
    local_first: whose local tiles run first: of no expert ("none"), of the first few ("leading"), of "all".
    leads: how many these few are, in the forward and the backward; their other tiles come last, or `leads_in_turn`.
        waves: of tiles by arrival, which take their place.
    chunk_experts: experts that go through all GEMMs together; 0: all do.  critical_path: list scheduling, of tiles on
        the CPU, of stretches on a device (`taskflow.stretches`).
    rotated: inside an expert, tiles in the order of peers.  interleaved: weight gradients behind their expert's rows.
    expanded: rows of the first GEMM are read from a contiguous copy.  again: backward dispatches tokens again.
    recomputes: backward makes h again.
    device_tiles: GEMMs are split as GPU kernels do.  separate, separate_gradient: the activation, and its gradient, are
        tiles of their own.
    gate_up, down, weight_gradient: tiles of the products.  One kernel has no place for several programs of the last
        one, and takes a plain tile.
    sms: multiprocessors that kernels take.  matrix_workers, vector_workers: threads.
    operators: of one's own, in the order in which they run behind a product.
    lora: weights, "w13" and "w2", beside which the call has low-rank factors.
    given: what it was resolved from, for `explain` and, of measured values, list scheduling.
    """

    backend: str
    ep_size: int
    num_tokens: int
    gates: bool
    mega: bool
    down_sms: int
    gate_up_parts: int
    returns: Literal["epilogue", "pass", "sums after", "sums beside"]
    gradient_beside: bool
    down_wgrad_beside: bool
    transfer: Literal["push", "copy", "pull"]
    copies: bool
    pulls: bool
    waits: bool
    sends_by_expert: bool
    chunk_tokens: int
    push_programs: int
    push_rounds: tuple[int, int]
    sum_programs: int
    sum_warps: int
    pass_programs: int
    pass_warps: int
    local_first: Literal["none", "leading", "all"]
    leads: tuple[int, int]
    waves: int
    chunk_experts: int
    critical_path: bool
    rotated: bool
    interleaved: bool
    expanded: bool
    again: bool
    recomputes: bool
    device_tiles: bool
    separate: bool
    separate_gradient: bool
    gate_up: Tile
    down: Tile
    weight_gradient: Tile
    sms: int
    matrix_workers: int
    vector_workers: int
    operators: tuple[RowOperator, ...] = ()
    lora: tuple[str, ...] = ()
    given: tuple[Schedule, MoEConfig, Measured] = dataclasses.field(repr=False, compare=False)

    @property
    def grouped(self) -> bool:
        """Whether rows are added by combine groups before they return."""
        return self.returns in ("sums after", "sums beside")

    @property
    def keeps_results(self) -> bool:
        """Whether results are stored by row first, and return behind their product."""
        return self.returns != "epilogue" or self.backend == COLLECTIVE

    @property
    def leads_in_turn(self) -> bool:
        """Whether, in the forward, the other tiles of leading experts come behind their local ones, and not last, where
        so many rows of other ranks would make the last part long."""
        return self.gate_up_parts > 1

    def own(self, after: str) -> list[RowOperator]:
        """Operators of one's own behind this product."""
        return [op for op in self.operators if op.after == after]

    def computes_in_torch(self, direction: str) -> bool:
        """Whether a GPU runs torch functions among its kernels."""
        return any(op.body is None for op in self.operators if op.direction == direction)

    @property
    def forward_tile(self) -> Tile:
        """The first GEMM's tile columns in terms of F: a GPU's tile holds gate and up."""
        tile = self.gate_up
        return dataclasses.replace(tile, columns=tile.columns // 2) if self.device_tiles else tile

    @property
    def align(self) -> int:
        """Segments of rows are multiples of it."""
        return self.gate_up.rows if self.device_tiles else ROW_ALIGN

    @property
    def down_grad_tile(self) -> Tile:
        """Of down_grad."""
        return self.down if self.device_tiles else self.gate_up

    @property
    def gate_up_grad_sms(self) -> int:
        """Multiprocessors of gate_up_grad while dW2 runs on the others: so many that both end together."""
        _, cfg, measured = self.given
        rows, weights = cfg.h_columns, cfg.ffn * measured.weight_gradient_time  # times of a row and a column of x
        return round(self.sms * rows / (rows + weights))

    @property
    def kernels(self) -> tuple[bool, bool, bool]:
        """Equal for ways of one Schedule that launch the same kernels."""
        return self.mega, self.down_sms > 0, self.gradient_beside

    def choices(self) -> list[Choice]:
        """Which rule chose what, and why."""
        s, cfg, measured = self.given
        device = self.backend == GPU
        usual = default_schedule(self.backend, cfg, self.ep_size, measured)
        tokens, by_tokens = f"T={self.num_tokens}", s.mega_to > 0 and s.overlap not in ("serial", "mega")
        leading = f"leading {self.leads}" if self.local_first == "leading" else self.local_first
        leading += ", then their others" * (self.leads_in_turn and self.local_first == "leading")
        if self.waves > 1:
            leading = f"all, then {self.waves} waves by arrival"
        unused = ""
        if device and s.arrival_waves > 1 and self.waves == 1:
            unused = f"; arrival_waves={s.arrival_waves} is for copies for which both first products wait, in stages"
        kind = "one kernel" if self.mega else "one after the other" if self.gates else "stages"
        kernels = Choice(
            "kernels", "one each way" if self.mega else "in stages", "mega_to" if by_tokens else "overlap",
            f"{tokens}, up to {s.mega_to}" if by_tokens else s.overlap,
        )  # fmt: skip
        wanted = f"a peer wants {cfg.wanted(self.ep_size):.2f} of the tokens, copies from {measured.worth_copying} on"
        few = cfg.max_tokens_per_rank <= measured.few_tokens
        travel = wanted
        if s.transfer != usual.transfer:
            travel = "as set"
        elif self.ep_size == 1:
            travel = "there is one rank"
        elif few:
            travel = f"usual for up to {measured.few_tokens} tokens"
        share = f"results take {wire_share(cfg, self.ep_size, measured):.2f} of the down product's time on the wire"
        weighed = device and cfg.max_tokens_per_rank >= measured.pipelined_from and cfg.combine_groups is None

        def by_wire(chosen: str, usually: str, from_here_on: str) -> str:
            weighs = weighed and chosen == usually
            return f"{chosen}; {share}, {from_here_on} from {measured.worth_pipelining} on" if weighs else chosen

        if cfg.gradient_shards > 1:
            why = f"{cfg.gradient_shards}: one kernel would sum an expert's rows in one chain"
            kernels = Choice("kernels", "in stages", "gradient_shards", why)
        if self.operators:
            kernels = Choice("kernels", "in stages", "operators", "one kernel has no place for one's own")
        if self.lora:
            kernels = Choice("kernels", "in stages", "lora", "one kernel has no low-rank terms")
        how = f"beside gate_up on {self.down_sms} SMs" if self.down_sms else "behind gate_up"
        how += f", in {self.gate_up_parts} parts" * (self.gate_up_parts > 1)
        unused_parts = f"; gate_up_parts={s.gate_up_parts} is for pipelined calls"
        unused_parts *= self.gate_up_parts < s.gate_up_parts
        down = Choice(
            "down product", how, "overlap, pipelined_from" + ", gate_up_parts" * (self.gate_up_parts > 1),
            f"{s.overlap}, {tokens}, from {s.pipelined_from} on{unused_parts}",
        )  # fmt: skip
        if "w2" in self.lora:
            down = Choice("down product", "behind gate_up", "lora", "rows are shrunk for w2 in between")
        elif behind := self.own("gate_up"):
            names = listed(tuple(op.name for op in behind), "and")
            down = Choice("down product", "behind gate_up", "operators", f"{names} in between")
        staged = (
            down,
            Choice(
                "activation's gradient", "beside its product" if self.gradient_beside else "behind its product",
                "activation_gradient, beside_from", f"{s.activation_gradient}, {tokens}, from {s.beside_from} on",
            ),
            self._down_wgrad(by_wire(s.down_wgrad, usual.down_wgrad, "beside")),
        )  # fmt: skip
        sent = self.ep_size > 1 and s.transfer != "copy"  # copy engines send every token
        wired = (
            Choice("tokens travel by", s.transfer, "transfer", travel),
            *((Choice("send lists", f"by {s.send_order}", "send_order", "as set"),) if sent else ()),
            Choice("operand", s.operand, "operand", "as set"),
        )
        back = Choice(
            "results return", self.returns, "combine_groups, group_sum, overlap",
            f"{cfg.combine_groups}, {s.group_sum}, {s.overlap}",
        )  # fmt: skip
        if keeping := [op.name for op in self.operators if op.after in _BEHIND_RESULTS]:
            back = Choice("results return", self.returns, "operators", f"behind {listed(tuple(keeping), 'and')}")
        elif "w2" in self.lora and s.group_sum == "beside" and self.grouped:
            back = Choice("results return", self.returns, "lora", "rows are shrunk for w2 in between")
        return [
            *((kernels,) if device else ()),
            *(self._tiles(usual) if device else ()),
            Choice(
                "stages", "one after the other" if self.gates else "beside each other", "overlap",
                by_wire(s.overlap, usual.overlap, "pipelined"),
            ),
            *(staged if device and not self.mega else ()),
            back,
            Choice(
                "local tiles first", leading, "tile_order, arrival_waves" if self.waves > 1 else "tile_order",
                f"{s.tile_order}, {kind} of {self.backend}, {self.ep_size} ranks{unused}",
            ),
            *(wired if device else ()),
            Choice("received tokens", s.received, "received", "as set"),
            Choice("gate and up", s.preactivation, "preactivation", "as set"),
            *(Choice(op.name, f"after {op.after}", "operators", PLACES[op.after].cost) for op in self.operators),
        ]  # fmt: skip

    def _tiles(self, usual: Schedule) -> tuple[Choice, Choice]:
        """Of products of rows, and of weight gradients."""
        s, cfg, measured = self.given
        few = f"an expert has {rows_of_expert(cfg, self.ep_size)} rows on average; "
        rows = few + f"{ROW_TILES[0]} up to {measured.half_row_tiles}"
        weights = few + "others up to " + listed(tuple(FEW_ROWS), "and")
        if cfg.gradient_shards > 1:
            weights = "the same for blocks of any size"
        tile = self.weight_gradient
        shape = f"{tile.rows} x {tile.columns}, {tile.programs_per_sm} for each multiprocessor"
        return (
            Choice(
                "row tiles", f"{self.gate_up.rows} rows", "gate_up.rows",
                rows if s.gate_up.rows == usual.gate_up.rows else "as set",
            ),
            Choice(
                "weight gradients' tiles", shape, "weight_gradient",
                weights if s.weight_gradient == usual.weight_gradient else "as set",
            ),
        )  # fmt: skip

    def _down_wgrad(self, asked: str) -> Choice:
        """Where dW2 runs, and why not as asked."""
        s, cfg, _ = self.given
        value = f"beside gate_up_grad on {self.sms - self.gate_up_grad_sms} SMs"
        why = f"{asked}, T={self.num_tokens}, from {s.pipelined_from} on"
        choice = Choice(
            "dW2", value if self.down_wgrad_beside else "behind gate_up_grad", "down_wgrad, pipelined_from", why
        )
        if s.down_wgrad == "after" or self.down_wgrad_beside:
            return choice
        if self.gates:
            return choice._replace(rule="overlap", why=s.overlap)
        if self.lora:
            return choice._replace(rule="lora", why="gradients of factors are few operations")
        if cfg.gradient_shards > 1:
            return choice._replace(rule="gradient_shards", why=f"{cfg.gradient_shards}: sums of blocks take longer")
        if self.own("down") or self.own("gate_up_grad"):
            return choice._replace(rule="operators", why="rows return by a pass behind gate_up_grad")
        return choice

    def explain(self) -> str:
        """One line per choice: what, by which rule, why."""
        lines = [(c.what, c.value, c.rule, c.why) for c in self.choices()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            [f"{self.backend}, {self.ep_size} ranks, T={self.num_tokens}"]
            + ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        )

    def __str__(self) -> str:
        return self.explain()


def resolve(
    cfg: MoEConfig,
    ep_size: int,
    num_tokens: int,
    schedule: Schedule | None = None,
    *,
    backend: str = GPU,
    measured: Measured = MEASURED,
    operators: Sequence[RowOperator] = (),
    lora: tuple[str, ...] = (),
) -> Way:
    """The way of a call of a rank with `num_tokens` of its own.  schedule: default the backend's own.  operators: of
    one's own; lora: weights with low-rank factors; with one of them, calls run in stages.

    It does not check whether the schedule can run: see `is_valid`.
    """
    s = schedule or default_schedule(backend, cfg, ep_size, measured)
    device, sms, grouped = backend == GPU, measured.sms - s.free_sms, cfg.combine_groups is not None
    gates = s.overlap == "serial"
    wanted = s.overlap == "mega" or (not gates and 0 < s.mega_to >= num_tokens)
    mega = device and wanted and cfg.gradient_shards == 1 and not operators and not lora
    behind = {op.after for op in operators}
    waits, copies = ep_size > 1 and not gates, ep_size > 1 and s.transfer == "copy"
    down = down_sms(s, cfg, num_tokens, sms) if device and not (mega or "w2" in lora or "gate_up" in behind) else 0
    local_first: Literal["none", "leading", "all"] = "none"
    if s.tile_order in ("local-first", "critical-path"):
        local_first = "all" if mega or not device else "leading" if waits else "none"
    kept = bool(behind & _BEHIND_RESULTS)
    returns: Literal["epilogue", "pass", "sums after", "sums beside"]
    if grouped:
        returns = "sums beside" if s.group_sum == "beside" and not kept and "w2" not in lora else "sums after"
    else:
        returns = "pass" if kept or (gates and device) else "epilogue"
    pushes = waits and not copies
    push_us = _push_us(cfg, ep_size, num_tokens, measured)
    rounds = [_rounds(cfg, push_us, tile, measured) if pushes and not mega else 0 for tile in (s.gate_up, s.down)]
    leading, listed_tiles = local_first == "leading", mega or not device  # staged kernels know leads and waves alone
    waves = 1
    if leading and copies and not (s.operand == "expanded" or lora):  # of these, a direction finds all tokens here
        waves = min(s.arrival_waves or _waves(cfg, ep_size, num_tokens, sms, measured), ep_size)
    leads = _leads(cfg, ep_size, num_tokens, copies, sms, measured) if leading and waves == 1 else (0, 0)
    staged = device and not mega and not gates
    beside = staged and s.activation_gradient == "beside" and num_tokens >= s.beside_from
    beside = beside and "down_grad" not in behind
    apart = staged and not (kept or lora) and cfg.gradient_shards == 1
    apart = apart and s.down_wgrad == "beside" and num_tokens >= s.pipelined_from
    weight_gradient = s.weight_gradient
    if mega and weight_gradient.programs_per_sm > 1:
        weight_gradient = dataclasses.replace(Schedule().weight_gradient, warps=s.gate_up.warps)
    gradient_apart = device or s.activation == "separate" or "down_grad" in behind
    return Way(
        backend=backend, ep_size=ep_size, num_tokens=num_tokens, gates=gates, mega=mega, down_sms=down,
        gate_up_parts=s.gate_up_parts if down else 1, returns=returns, gradient_beside=beside, down_wgrad_beside=apart,
        transfer=s.transfer, copies=copies, pulls=device and ep_size > 1 and s.transfer == "pull", waits=waits,
        sends_by_expert=s.send_order == "expert",
        chunk_tokens=s.chunk_tokens, push_programs=s.push_programs if pushes else 0,
        push_rounds=(rounds[0], rounds[1]), sum_programs=s.sum_programs, sum_warps=s.sum_warps,
        pass_programs=s.pass_programs, pass_warps=s.pass_warps, local_first=local_first, leads=leads, waves=waves,
        chunk_experts=s.chunk_experts if listed_tiles and s.tile_order == "chunk-major" else 0,
        critical_path=listed_tiles and s.tile_order == "critical-path",
        rotated=listed_tiles and s.peer_order == "rotated",
        interleaved=listed_tiles and s.weight_gradient_order == "interleaved", expanded=s.operand == "expanded",
        again=s.received == "again", recomputes=s.preactivation == "recomputed", device_tiles=device,
        separate=s.activation == "separate", separate_gradient=gradient_apart, gate_up=s.gate_up, down=s.down,
        weight_gradient=weight_gradient, sms=sms, matrix_workers=s.matrix_workers, vector_workers=s.vector_workers,
        operators=tuple(operators), lora=lora, given=(s, cfg, measured),
    )  # fmt: skip


def _push_us(cfg: MoEConfig, ep_size: int, num_tokens: int, measured: Measured) -> float:
    """How long pushing this rank's tokens takes beside a GEMM, for balanced routing."""
    sent_bytes = (ep_size - 1) * num_tokens * cfg.wanted(ep_size) * cfg.hidden * cfg.dtype.itemsize
    return sent_bytes / measured.push_bytes_per_us


def travel_us(
    cfg: MoEConfig, ep_size: int, num_tokens: int, copies: bool, measured: Measured
) -> tuple[float, float]:  # fmt: skip
    """From the first tile on, until the tokens of the other ranks are here, in the forward and the backward.  Copies of
    x are sent while the forward is planned."""
    if not copies:
        us = _push_us(cfg, ep_size, num_tokens, measured) + measured.push_latency_us
        return us, us
    us = (ep_size - 1) * num_tokens * cfg.hidden * cfg.dtype.itemsize / measured.copy_bytes_per_us
    return us - measured.copy_lead_us, us


def _rounds(cfg: MoEConfig, push_us: float, tile: Tile, measured: Measured) -> int:
    """Turns of the tile loop that a push lasts; pushing programs get that many tiles less."""
    tile_us = 2 * tile.rows * tile.columns * cfg.hidden / measured.sm_flop_per_us
    return math.ceil(push_us / tile_us)


def _leads(
    cfg: MoEConfig, ep_size: int, num_tokens: int, copies: bool, sms: int, measured: Measured
) -> tuple[int, int]:
    """Number of experts whose local tiles run first, in the forward and the backward: enough to compute until the other
    ranks' tokens have arrived."""
    forward_us, backward_us = travel_us(cfg, ep_size, num_tokens, copies, measured)
    flop = 2 * max(num_tokens * cfg.top_k / cfg.num_experts, 1) * cfg.ffn * cfg.hidden  # of an expert's local rows
    expert_us = flop / (measured.sm_flop_per_us * sms)
    forward, backward = math.ceil(forward_us / (2 * expert_us)), math.ceil(backward_us / expert_us)
    return max(forward, 0), max(backward, 0)


def _waves(cfg: MoEConfig, ep_size: int, num_tokens: int, sms: int, measured: Measured) -> int:
    """The number of waves with which the first products of both directions end soonest."""
    of_call = cfg, ep_size, num_tokens, sms, measured
    return min((1, 2, 4, 8), key=lambda waves: sum(_gathered_us(waves, forward, *of_call) for forward in (True, False)))


def _gathered_us(
    waves: int, forward: bool, cfg: MoEConfig, ep_size: int, num_tokens: int, sms: int, measured: Measured
) -> float:
    """Time of gate_up, or of down_grad, if copy engines send the tokens and routing is balanced: sources are multiplied
    as they arrive.  Each wave reads the weights again, of which half hides (2x H200)."""
    columns, lead_us = (cfg.h_columns, measured.copy_lead_us) if forward else (cfg.ffn, 0)
    weights = cfg.experts_per_rank(ep_size) * columns * cfg.hidden
    source_us = 2 * num_tokens * cfg.top_k / ep_size * columns * cfg.hidden / (measured.sm_flop_per_us * sms)
    again_us = weights * cfg.dtype.itemsize / measured.memory_bytes_per_us / 2
    copy_us = num_tokens * cfg.hidden * cfg.dtype.itemsize / measured.copy_bytes_per_us
    others = ep_size - 1
    if waves == 1:  # own rows of leading experts, until all have arrived
        return max(source_us, others * copy_us - lead_us) + others * source_us
    last = {wave_of(arrival, waves, ep_size): arrival for arrival in range(1, ep_size)}
    end_us, arrived = source_us, 0
    for arrival in last.values():
        end_us = max(end_us, arrival * copy_us - lead_us) + (arrival - arrived) * source_us + again_us
        arrived = arrival
    return end_us


def wave_of(arrival: Any, waves: int, ep_size: int) -> Any:
    """The wave of the source that arrives as number `arrival`: 1 to `waves`; 0, own rows."""
    return -(-arrival * waves // ep_size)


class Ways(dict[int, Way]):
    """The ways of a Workspace's calls by the tokens of this rank, each resolved once.  schedule: None: the default."""

    def __init__(
        self, cfg: MoEConfig, ep_size: int, schedule: Schedule | None, backend: str, measured: Measured = MEASURED,
        operators: Sequence[RowOperator] = (), lora: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.cfg, self.ep_size, self.backend, self.measured = cfg, ep_size, backend, measured
        self.schedule = schedule or default_schedule(backend, cfg, ep_size, measured)
        self.operators, self.lora = operators, lora
        self._of_lora: dict[tuple[str, ...], Ways] = {lora: self}

    def __missing__(self, num_tokens: int) -> Way:
        if len(self) >= 1000:  # any number of lengths may come
            self.clear()
        how: Any = {"backend": self.backend, "measured": self.measured, "operators": self.operators}
        way = resolve(self.cfg, self.ep_size, num_tokens, self.schedule, lora=self.lora, **how)
        self[num_tokens] = way
        return way

    def with_lora(self, lora: tuple[str, ...]) -> Ways:
        """Those of calls with low-rank factors beside these weights."""
        if lora not in self._of_lora:
            of_all = self.cfg, self.ep_size, self.schedule, self.backend, self.measured, self.operators
            self._of_lora[lora] = Ways(*of_all, lora)
        return self._of_lora[lora]

    def kinds(self) -> list[Way]:
        """One way for each set of kernels that calls may launch."""
        s, most = self.schedule, self.cfg.max_tokens_per_rank
        turns = sorted({0, s.mega_to + 1, s.pipelined_from, s.beside_from})
        return list({way.kernels: way for way in (self[turn] for turn in turns if turn <= most)}.values())
