"""Schedule: one point of the search space.  It decides speed, never results.

Each dimension is declared once, with its field (`DIMENSIONS`): its values, its backends, the conditions on a value,
what a backend starts from, and what it is for.  Validation, parsing, names, defaults and docs/schedule.md are derived
from that.  `uniep.way` resolves how one call runs under a Schedule.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_type_hints

from uniep.config import COLUMN_GROUP, ROW_TILES, MoEConfig
from uniep.dimension import (
    COLLECTIVE,
    CPU,
    GPU,
    MEASURED,
    MEGA,
    Condition,
    Dimension,
    Measured,
    Setting,
    dimension,
    first_of,
    in_domain,
    listed,
)
from uniep.errors import ConfigError


def _mega_needs(only: Any) -> Condition:
    """Condition for calls that are one kernel per direction.  only: the required value, or a function of the
    schedule."""

    def condition(d: Dimension, schedule: Schedule, at: Setting) -> str:
        needed = only(schedule) if callable(only) else only
        value = d.of(schedule)
        if d.name.startswith("weight_gradient.") and schedule.weight_gradient.programs_per_sm > 1:
            return ""  # one kernel takes another tile, see `Way.weight_gradient`
        if not _some_mega(schedule) or value == needed:
            return ""
        return _mega_refused(d.name, value, needed, schedule)

    return condition


def _some_mega(schedule: Schedule) -> bool:
    return schedule.overlap == "mega" or (schedule.overlap != "serial" and schedule.mega_to > 0)


def _mega_refused(name: str, value: Any, needed: Any, schedule: Schedule) -> str:
    way_out = "overlap='fused'" if schedule.overlap == "mega" else "mega_to=0"
    return f"{name} is {value!r}; overlap='mega' needs {needed!r}, or use {way_out}"


def _no_groups(d: Dimension, schedule: Schedule, at: Setting) -> str:
    groups = at.cfg.combine_groups
    if groups is None or not _some_mega(schedule) or (d.name == "overlap") != (schedule.overlap == "mega"):
        return ""
    return _mega_refused("combine_groups", groups, None, schedule)


def _columns(d: Dimension, schedule: Schedule, at: Setting) -> str:
    value = d.of(schedule)
    if value % COLUMN_GROUP == 0:
        return ""
    return f"{d.name} is {value}; it must be a multiple of {COLUMN_GROUP}"


def _one_table(d: Dimension, schedule: Schedule, at: Setting) -> str:
    first, second = schedule.gate_up.rows, schedule.down.rows
    if d.name != "down.rows" or at.backend != GPU or first == second:
        return ""
    return f"gate_up.rows is {first} and down.rows {second}; on GPUs both walk one tile table"


def _whole_steps(d: Dimension, schedule: Schedule, at: Setting) -> str:
    depth, rows = d.of(schedule), schedule.gate_up.rows
    if d.name != "weight_gradient.depth" or at.backend != GPU or rows % depth == 0:
        return ""
    return f"{d.name} is {depth} and gate_up.rows {rows}; segments, multiples of {rows}, are walked in such steps"


MOST_SHARED = 232448
"""Bytes of shared memory that a program can have on Hopper."""

MOST_VALUES = 128
"""Values of a tile per thread; with more, products spill registers."""


def shared_bytes(tile: Tile, itemsize: int) -> int:
    """Bytes of shared memory that a product takes at most: loads in flight with a barrier each, and results on their
    way out: half a tile of 128 rows, or all of one of 64.  itemsize: of the layer's dtype, 2."""
    loads = tile.stages * (tile.rows + tile.columns) * tile.depth * itemsize
    return loads + 8 * tile.stages + max(tile.rows, 128) // 2 * tile.columns * itemsize


def _of_tile(d: Dimension, schedule: Schedule) -> Tile:
    tile: Tile = getattr(schedule, d.name.partition(".")[0])
    return tile


def _fits_shared(d: Dimension, schedule: Schedule, at: Setting) -> str:
    tile = _of_tile(d, schedule)
    needed = shared_bytes(tile, 2)
    if at.backend not in _KERNELS or needed <= MOST_SHARED:
        return ""
    return (
        f"{d.name} is {tile.stages}: tiles of {tile.rows} x {tile.columns}, depth {tile.depth}, then take {needed} "
        f"bytes of shared memory, and a program has {MOST_SHARED}; use fewer stages or smaller tiles"
    )


def _leaves_registers(d: Dimension, schedule: Schedule, at: Setting) -> str:
    tile = _of_tile(d, schedule)
    values = tile.rows * tile.columns // (32 * tile.warps)
    if at.backend not in _KERNELS or values <= MOST_VALUES:
        return ""
    return (
        f"{d.name} is {tile.warps}: each thread then has {values} values of a tile of {tile.rows} x {tile.columns}, "
        f"and spills registers above {MOST_VALUES}; use more warps or smaller tiles"
    )


def _same_sums(d: Dimension, schedule: Schedule, at: Setting) -> str:
    if schedule.group_sum != "beside" or schedule.overlap == "fused":
        return ""
    return f"group_sum='beside' needs overlap='fused', not {schedule.overlap!r}"


def _not_again(d: Dimension, schedule: Schedule, at: Setting) -> str:
    if at.backend != GPU or (schedule.operand, schedule.received) != ("expanded", "again"):
        return ""
    return "operand='expanded' keeps every row's input, so that nothing can be received='again'"


def _whole_chunks(d: Dimension, schedule: Schedule, at: Setting) -> str:
    if at.backend != GPU or at.cfg.receive_block % schedule.chunk_tokens == 0:
        return ""
    return (
        f"chunk_tokens is {schedule.chunk_tokens}; on GPUs it must divide {at.cfg.receive_block}, "
        "the receive slots per peer"
    )


def _sends_lists(d: Dimension, schedule: Schedule, at: Setting) -> str:
    if at.backend != GPU or schedule.send_order == "token" or schedule.transfer != "copy":
        return ""
    return "send_order is 'expert', but transfer='copy' sends all tokens in their order; use 'token', 'push' or 'pull'"


def _leaves_sms(d: Dimension, schedule: Schedule, at: Setting) -> str:
    sms = at.measured.sms
    if at.backend != GPU or sms - schedule.free_sms >= 2:
        return ""
    return f"free_sms is {schedule.free_sms}, but this GPU has {sms} multiprocessors; lower it"


def _leaves_programs(d: Dimension, schedule: Schedule, at: Setting) -> str:
    """Leave at least one program to compute while tokens are pushed or pulled."""
    if at.backend != GPU or at.ep_size == 1 or schedule.transfer == "copy" or _leaves_sms(d, schedule, at):
        return ""
    sms = at.measured.sms - schedule.free_sms
    down = down_sms(schedule, at.cfg, at.cfg.max_tokens_per_rank, sms) if schedule.gate_up_parts == 1 else 0
    programs = (sms - down) * min(schedule.gate_up.programs_per_sm, schedule.down.programs_per_sm)
    if schedule.push_programs < programs:
        return ""
    return (
        f"push_programs is {schedule.push_programs}, but kernels that push or pull have {programs} programs here; "
        "lower it"
    )


def down_sms(schedule: Schedule, cfg: MoEConfig, num_tokens: int, sms: int) -> int:
    """How many of `sms` multiprocessors run the down product beside gate_up; 0: it runs after gate_up."""
    if schedule.overlap != "pipelined" or num_tokens < schedule.pipelined_from:
        return 0
    share = max(sms // (2 + cfg.gated), 1)  # of the operations of both
    return min(schedule.down_sms or share, sms // 2)


def _usual_transfer(d: Dimension, at: Setting) -> str:
    if at.ep_size == 1 or at.cfg.max_tokens_per_rank <= at.measured.few_tokens:
        return "push"
    return "copy" if at.cfg.wanted(at.ep_size) >= at.measured.worth_copying else "push"


def wire_share(cfg: MoEConfig, ep_size: int, measured: Measured) -> float:
    """Time that results take on the wire, divided by the time of the down product."""
    sent_bytes, flop = (1 - 1 / ep_size) * cfg.hidden * cfg.dtype.itemsize, 2 * cfg.hidden * cfg.ffn  # of a row
    return sent_bytes * measured.flop_per_wire_byte / flop


def _usual_sum_warps(d: Dimension, at: Setting) -> int:
    return 4 if at.cfg.hidden > 512 else 2 if at.cfg.hidden > 256 else 1


def _waits_for_wire(at: Setting) -> bool:
    """Whether results take so long on the wire that more should run beside the products whose rows return."""
    cfg, ep_size, measured = at.cfg, at.ep_size, at.measured
    if ep_size == 1 or cfg.max_tokens_per_rank < measured.pipelined_from or cfg.combine_groups is not None:
        return False
    return wire_share(cfg, ep_size, measured) >= measured.worth_pipelining


def _usual_overlap(d: Dimension, at: Setting) -> str:
    return "pipelined" if _waits_for_wire(at) else "fused"


def _usual_gate_up_parts(d: Dimension, at: Setting) -> int:
    return 4 if _waits_for_wire(at) else 1


def _usual_down_sms(d: Dimension, at: Setting) -> int:
    return 0 if _waits_for_wire(at) else 32


def _usual_down_wgrad(d: Dimension, at: Setting) -> str:
    """On two ranks it takes 1 % more (qwen3-next-80b, granite-small-1k)."""
    return "beside" if at.ep_size > 2 and _waits_for_wire(at) and at.cfg.gradient_shards == 1 else "after"


def _usual_activation_gradient(d: Dimension, at: Setting) -> str:
    return "beside" if at.cfg.max_tokens_per_rank >= Schedule().beside_from else "after"


def _usual_pipelined_from(d: Dimension, at: Setting) -> int:
    return at.measured.pipelined_from if _waits_for_wire(at) else 0


def rows_of_expert(cfg: MoEConfig, ep_size: int) -> int:
    """How many rows an expert has in a full call, on average."""
    return cfg.max_tokens_per_rank * ep_size * cfg.top_k // cfg.num_experts


def _usual_tile(d: Dimension, at: Setting) -> int:
    """Where experts have few rows, tiles that compute less padding, and weight gradients that store all the time."""
    name, _, part = d.name.partition(".")
    tile, rows = getattr(Schedule(), name), rows_of_expert(at.cfg, at.ep_size)
    if name == "weight_gradient" and at.cfg.gradient_shards == 1:
        tile = next((of for most, of in FEW_ROWS.items() if rows <= most), tile)
    elif name != "weight_gradient" and at.backend == GPU and rows <= at.measured.half_row_tiles:
        tile = dataclasses.replace(tile, rows=ROW_TILES[0])
    return int(getattr(tile, part))


def _usual_group_rows(d: Dimension, at: Setting) -> int:
    """Of products of rows, all row tiles of an expert: its weights are read from DRAM once; of 17 and more, a part."""
    return Tile().group_rows if d.name.startswith("weight") else 16


_ANY, _KERNELS = (CPU, GPU, COLLECTIVE), (GPU, COLLECTIVE)
_USUAL_TILE = dict.fromkeys(_KERNELS, _usual_tile)
_UNIEP, _HYPER, _COMET, _OWN = "UniEP", "HyperParallel-MoE", "COMET", "own"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """Shape of one GEMM's output tile and how a GPU runs it (the CPU uses rows and columns only)."""

    rows: int = dimension(
        ROW_TILES[-1], ROW_TILES, backends=_ANY, source=_UNIEP,
        doc="Rows of an output tile; on GPUs gate_up and down have the same, of which segments are multiples.",
        helps="64 computes less padding where experts have few rows; 128 reads weights half as often.",
        condition=first_of(in_domain(), _one_table), usual=_USUAL_TILE,
    )  # fmt: skip
    columns: int = dimension(
        256, (64, 128, 256), backends=_ANY, source=_UNIEP,
        doc="Columns of an output tile, a multiple of 64; of gate_up on GPUs, half gate and half up.",
        helps="Fewer give more tiles to share out; more read rows less often.", condition=_columns, usual=_USUAL_TILE,
    )  # fmt: skip
    depth: int = dimension(
        64, (16, 32, 64, 128), backends=_KERNELS, source=_OWN,
        doc="Contraction length of one step of the K loop.",
        helps="A longer step needs fewer barriers and more shared memory; of weight gradients, it reads more padding.",
        condition=first_of(in_domain(), _whole_steps), usual=_USUAL_TILE,
    )  # fmt: skip
    warps: int = dimension(
        8, (4, 8, 16), backends=_KERNELS, source=_UNIEP,
        doc="Warps of a program; the same for all tiles if calls are one kernel per direction.",
        helps="With more warps, each needs fewer registers for a tile.",
        condition=first_of(in_domain(), _mega_needs(lambda schedule: schedule.gate_up.warps), _leaves_registers),
        usual=_USUAL_TILE,
    )  # fmt: skip
    stages: int = dimension(
        3, (2, 3, 4, 5), backends=_KERNELS, source=_OWN,
        doc="Loads in flight.", helps="More hide latency, until shared memory is full.", condition=_fits_shared,
        usual=_USUAL_TILE,
    )  # fmt: skip
    programs_per_sm: int = dimension(
        1, (1, 2, 3, 4), backends=_KERNELS, source=_OWN,
        doc="Programs that a multiprocessor runs at a time, if they fit. If calls are one kernel per direction, "
        "gate_up and down have one, and weight gradients of several take the tile of Schedule().",
        helps="More hide each other's epilogues: in weight gradients of few rows, stores.",
        condition=_mega_needs(1), usual=_USUAL_TILE,
    )  # fmt: skip
    group_rows: int = dimension(
        8, (1, 2, 4, 8, 16, 32, 64), backends=_KERNELS, source=_OWN, most=64,
        doc="Most row tiles of an expert that share a column of weights before the next column starts; of weight "
        "gradients, tiles of a column.",
        helps="Where an expert has no more row tiles, its weights are read from DRAM once.",
        usual=dict.fromkeys(_KERNELS, _usual_group_rows),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How calls are executed.  docs/schedule.md describes each field, as does `uniep.schedule.DIMENSIONS`."""

    overlap: Literal["serial", "fused", "pipelined", "mega"] = dimension(
        "fused", backends=(CPU, GPU), source=f"{_UNIEP}; pipelined: {_COMET}; mega: {_HYPER}, {_UNIEP}",
        doc="What overlaps with what. serial: every stage waits for the one before (the reference). fused: transfers "
        "overlap with the GEMMs that consume or produce them. pipelined: as fused, and the down product runs on "
        "reserved multiprocessors during gate_up, so that rows return from the first tile, or part, on. mega: one "
        "kernel per direction after the plan or the entry; its programs claim tasks from the compiler's lists.",
        helps="fused always; pipelined where results take longer on the wire than the down product; mega for few "
        "tokens.",
        only={"pipelined": (GPU,), "mega": (GPU,)}, condition=_no_groups,
        usual={GPU: _usual_overlap, COLLECTIVE: "serial"},
        shown={value: value for value in ("serial", "fused", "pipelined", "mega")},
    )  # fmt: skip
    tile_order: Literal["natural", "local-first", "chunk-major", "critical-path"] = dimension(
        "local-first", backends=(CPU, GPU),
        source=f"local-first: {_UNIEP}; critical-path: {_HYPER}; chunk-major: {_OWN}",
        doc="natural: tiles in expert order. local-first: tiles with local rows only come first, each part in expert "
        "order. With mega and on the CPU this applies to all experts, else to the first few, enough to last until "
        "peers' tokens have arrived; serial on GPUs, to none. chunk-major: `chunk_experts` experts go through all "
        "GEMMs, one GEMM after the other, while the next ones begin. critical-path: list scheduling: a free worker "
        "takes the task on the longest path to the end; on the CPU tile by tile, with mega once for all routings, for "
        "all tiles of an expert and GEMM together.",
        helps="local-first hides the dispatch of the first tokens; chunk-major returns rows earlier; critical-path "
        "weighs both by measured speeds.",
        only={"chunk-major": (CPU, MEGA), "critical-path": (CPU, MEGA)}, usual={COLLECTIVE: "natural"},
        shown={value: value for value in ("natural", "local-first", "chunk-major", "critical-path")},
    )  # fmt: skip
    arrival_waves: int = dimension(
        0, (0, 1, 2, 4, 8), backends=(GPU,), source=_OWN, least=0, most=8,
        doc="Waves of the first product's tiles by the last rank whose tokens they need, in the order in which copies "
        "arrive; own rows come before. At most one for each rank; 1: no waves, but a few leading experts; 0: for each "
        'call, what a model of arrival says. With tile_order="local-first" and copies, in stages in which the first '
        "product of each direction waits for tokens: not serial, expanded, or with low-rank factors.",
        helps="Waves let a rank multiply what has arrived; each reads the weights again.",
    )  # fmt: skip
    chunk_experts: int = dimension(
        1, (1, 2, 4, 8), backends=(CPU, MEGA), source=_OWN,
        doc='Experts per chunk with tile_order="chunk-major".',
        helps="Fewer return rows earlier, more share weights among tiles for longer.",
    )  # fmt: skip
    transfer: Literal["push", "copy", "pull"] = dimension(
        "push", backends=(GPU,), scope="wire", source=f"push, pull: {_UNIEP}; copy: {_OWN}",
        doc="How tokens travel. push: programs store the deduplicated tokens. copy: copy engines send every "
        "token to every peer; this takes no programs and does not wait for the plan, but also sends tokens that the "
        "peer does not need. pull: programs of the rank that needs the deduplicated tokens fetch them; x is copied to "
        "where peers can read it.",
        helps="copy where a peer needs more than a third of the tokens, if calls are not mega; UniEP found push faster "
        "than pull.",
        usual={GPU: _usual_transfer}, shown={"copy": "copy", "pull": "pull"},
    )  # fmt: skip
    send_order: Literal["token", "expert"] = dimension(
        "token", backends=(CPU, GPU), scope="wire", source=_UNIEP,
        doc="Order in which deduplicated tokens travel to a peer. token: ascending. expert: by the token's lowest "
        "expert there, then ascending, as products need them.",
        helps="expert where the first product waits for its first tiles; token lists are a cheaper plan.",
        condition=_sends_lists, shown={"expert": "by expert"},
    )  # fmt: skip
    peer_order: Literal["natural", "rotated"] = dimension(
        "natural", backends=(CPU, MEGA), source=_UNIEP,
        doc="Order inside an expert. natural: row tiles ascending. rotated: the first GEMM in the order in which "
        "peers' tokens arrive; tiles that return rows start with those of the next rank, so that no two ranks write to "
        "the same peer at the same place of their lists.",
        helps="rotated spreads writes over peers; with two ranks there is nothing to spread.",
        shown={"rotated": "rotated"},
    )  # fmt: skip
    weight_gradient_order: Literal["last", "interleaved"] = dimension(
        "last", backends=(CPU, MEGA), source=_HYPER,
        doc="last: after all other backward work is done or blocked. interleaved: the weight gradients of an expert "
        "directly after the rows that it returns, so that returns are spread over the weight gradients.",
        helps="interleaved where returns outlast the products of their own rows.", shown={"interleaved": "interleaved"},
    )  # fmt: skip
    activation: Literal["fused", "separate"] = dimension(
        "fused", backends=(CPU,), source=_HYPER,
        doc="fused: in the epilogue of the GEMM before it. separate: separate tiles for vector workers.",
        helps="separate where vector workers would idle.", shown={"separate": "activation"},
    )  # fmt: skip
    operand: Literal["gathered", "expanded"] = dimension(
        "gathered", backends=(GPU,), source=f"gathered: {_OWN}; expanded: {_UNIEP}",
        doc="How kernels read the rows of the first GEMM. gathered: in place, so that the dispatch hides under "
        "the GEMM. expanded: from a contiguous copy that the dispatch makes and backward reuses.",
        helps="expanded has the faster GEMM and backward, and takes more memory.",
        condition=first_of(_mega_needs("gathered"), _not_again), shown={"expanded": "expanded"},
    )  # fmt: skip
    gate_up: Tile = dataclasses.field(
        default=Tile(stages=4), metadata={"backends": _ANY, "of": "gate and up; on the CPU also of the backward"}
    )
    down: Tile = dataclasses.field(
        default=Tile(stages=4),
        metadata={"backends": _ANY, "of": "the down product, and of the backward's products of rows"},
    )
    chunk_tokens: int = dimension(
        64, (16, 32, 64, 128), backends=(CPU, GPU), scope="wire", source=f"{_OWN} ({_UNIEP}: one signal a token)",
        doc="Tokens pushed or pulled under one arrival signal; on GPUs a divisor of the receive slots per peer.",
        helps="Fewer let tiles start earlier, more cost fewer signals.", condition=_whole_chunks, usual={GPU: 32},
    )  # fmt: skip
    weight_gradient: Tile = dataclasses.field(
        default=Tile(), metadata={"backends": _KERNELS, "of": "dW13 and dW2, whose rows and columns it tiles"}
    )
    push_programs: int = dimension(
        16, (4, 8, 16, 32, 64), backends=(GPU,), source=_UNIEP,
        doc="Programs that push or pull tokens before they join the other work.",
        helps="More push faster and leave fewer to compute meanwhile.",
        condition=_leaves_programs,
    )  # fmt: skip
    sum_programs: int = dimension(
        16, (4, 8, 16, 32), backends=_KERNELS, source=_UNIEP, most=32,
        doc="Programs per multiprocessor that add a token's slots (not mega).",
        helps="As many as hide the latency of memory; more leave nothing for what runs at the same time.",
    )  # fmt: skip
    sum_warps: int = dimension(
        4, (1, 2, 4, 8), backends=_KERNELS, source=_UNIEP, doc="Warps of such a program.",
        helps="One for 256 columns, of 1024 at most, loads 16 bytes a thread.", condition=in_domain(),
        usual={GPU: _usual_sum_warps, COLLECTIVE: _usual_sum_warps},
    )  # fmt: skip
    pass_programs: int = dimension(
        1, (1, 2, 4), backends=(GPU,), source=_UNIEP, most=32,
        doc="Programs per multiprocessor of passes that dispatch tokens or return rows (serial; dispatches also for "
        "received=again, returns also behind operators of one's own).",
        helps="More have more stores in flight.",
    )  # fmt: skip
    pass_warps: int = dimension(
        8, (4, 8, 16), backends=(GPU,), source=_UNIEP, doc="Warps of such a program.",
        helps="More have more stores in flight, with fewer barriers than more programs.", condition=in_domain(),
    )  # fmt: skip
    down_sms: int = dimension(
        32, (0, 16, 24, 32, 48, 64), backends=(GPU,), source=f"{_COMET} (a split of the blocks)", least=0,
        doc="Multiprocessors of the pipelined down product until gate and up are done; at most half. 0: as large a "
        "share as it has of the operations.",
        helps="More return rows sooner and leave fewer to gate and up.", usual={GPU: _usual_down_sms},
    )  # fmt: skip
    gate_up_parts: int = dimension(
        1, (1, 2, 4), backends=(GPU,), source=_OWN, most=16,
        doc="Launches of the pipelined gate and up, each for one part of the row tiles. The down product of a part "
        "runs on down_sms beside the next part; the first part of gate and up and the last one of down run on all. 1: "
        "a single launch, and the down product claims row tiles when they are counted as done.",
        helps="Parts need no claims and no counters, but a launch each; more return rows sooner.",
        usual={GPU: _usual_gate_up_parts}, shown={2: "2 parts", 4: "4 parts"},
    )  # fmt: skip
    pipelined_from: int = dimension(
        0, (0, 1024, 2048, 4096, 8192, 16384), backends=(GPU,), source=_OWN, least=0, unit=" tokens",
        doc="Tokens of a rank from which its calls are pipelined, and dW2 is beside gate_up_grad; with fewer, fused, "
        "and after it.",
        helps="Sharing multiprocessors costs more than the wire in small calls.", usual={GPU: _usual_pipelined_from},
    )  # fmt: skip
    group_sum: Literal["after", "beside"] = dimension(
        "after", backends=(GPU,), source=f"{_OWN} (DeepEP adds before it returns)",
        doc="When the forward sums the rows of combine groups. after: in a pass after the down product. beside: by "
        "separate programs, as soon as its row tiles are done, peers' tokens first, so that sums travel during the "
        "product. In the backward the sums hide under the weight gradients.",
        helps="after at EP 2 (2x H200); beside is for sums that take long on the wire.", condition=_same_sums,
    )  # fmt: skip
    activation_gradient: Literal["after", "beside"] = dimension(
        "after", backends=(GPU,), source=_OWN,
        doc="When the activation gradient runs. after: in a pass after down_grad. beside: by separate programs during "
        "down_grad, when its row tiles are done and still in L2 (not serial).",
        helps="beside from 2048 tokens of a rank on.", usual={GPU: _usual_activation_gradient},
    )  # fmt: skip
    beside_from: int = dimension(
        2048, (0, 1024, 2048, 4096), backends=(GPU,), source=_OWN, least=0, unit=" tokens",
        doc="Tokens of a rank from which the activation's gradient runs beside; with fewer, after.",
        helps="Programs that wait for row tiles pay off when there are many tiles.",
    )  # fmt: skip
    down_wgrad: Literal["after", "beside"] = dimension(
        "after", backends=(GPU,), source=_OWN,
        doc="When dW2 is computed. after: after gate_up_grad. beside: during gate_up_grad, on other multiprocessors, "
        "so that fewer programs wait for the wire; then dW13 runs on all, with the sum of dX beside it. (Not serial, "
        "nor with low-rank factors or operators of one's own behind gate_up_grad.)",
        helps="beside where results take longer on the wire than the down product, on four ranks and more.",
        usual={GPU: _usual_down_wgrad}, shown={"beside": "dW2 beside"},
    )  # fmt: skip
    mega_to: int = dimension(
        0, (0, 128, 256, 512, 1024, 2048), backends=(GPU,), source=_OWN, least=0, unit=" tokens",
        doc='Tokens of a rank up to which its calls run as overlap="mega" (unless serial); 0: none do.',
        helps="Where the host is slow: one kernel saves launches, but takes longer on the device (2x H200).",
        condition=_no_groups,
    )  # fmt: skip
    free_sms: int = dimension(
        0, (0, 8, 16, 24, 32), backends=(GPU,), source=f"{_OWN} (DeepEP has such a number, too)", least=0,
        doc="Multiprocessors that kernels leave to others, such as the collectives of data parallelism. Where others "
        "hold more than that, a GEMM takes two rounds on what is left.",
        helps="Where collectives run beside the layer.", condition=_leaves_sms,
    )  # fmt: skip
    matrix_workers: int = dimension(
        1, (1, 2, 4, 8), backends=(CPU,), scope="wire", source=_HYPER, most=1024,
        doc="Threads per rank that run GEMM tiles.", helps="As many as the rank has cores, less the vector workers.",
    )  # fmt: skip
    vector_workers: int = dimension(
        1, (1, 2, 4, 8), backends=(CPU,), scope="wire", source=_HYPER, most=1024,
        doc="Threads per rank that run transfers, activations and sums.",
        helps="More if they are busy all the time; `uniep trace` shows it.",
    )  # fmt: skip
    received: Literal["saved", "again"] = dimension(
        "saved", backends=_ANY, scope="wire", source=_OWN,
        doc="What backward reads of other ranks' tokens. saved: a compact copy that forward keeps. again: the tokens "
        "are dispatched again (no memory between forward and backward).",
        helps="again where memory is short.", condition=_mega_needs("saved"), shown={"again": "again"},
    )  # fmt: skip
    preactivation: Literal["saved", "recomputed"] = dimension(
        "saved", backends=_ANY, scope="wire", source=f"{_OWN} (activation recomputation, as in Megatron-LM)",
        doc="Where backward has gate and up from, the input of the activation. saved: forward keeps them. recomputed: "
        "backward runs the first GEMM again, from the tokens that it has for dW13 anyway.",
        helps="recomputed where memory is short: it saves 2F values a row, and computes one more product of six.",
        shown={"recomputed": "recomputed"},
    )  # fmt: skip

    @property
    def name(self) -> str:
        return "/".join(d.shown[value] for d in DIMENSIONS if (value := d.of(self)) in d.shown)


def _dimensions() -> Iterator[Dimension]:
    for outer in dataclasses.fields(Schedule):
        if not isinstance(outer.default, Tile):
            yield _declared(outer.name, outer, outer.default, get_type_hints(Schedule)[outer.name])
            continue
        for part in dataclasses.fields(Tile):
            made = _declared(f"{outer.name}.{part.name}", part, getattr(outer.default, part.name), int)
            backends = tuple(b for b in made.backends if b in outer.metadata["backends"])
            yield dataclasses.replace(made, backends=backends)


def _declared(name: str, field: dataclasses.Field[Any], default: Any, kind: Any) -> Dimension:
    domain = field.metadata["domain"] or get_args(kind)
    return Dimension(name=name, domain=domain, default=default, **field.metadata["about"])


DIMENSIONS = tuple(_dimensions())
"""Every dimension of a Schedule, in the order of its fields."""

DIMENSION = {dimension.name: dimension for dimension in DIMENSIONS}
FEW_ROWS = {
    64: Tile(columns=128, depth=32, warps=4, stages=2, programs_per_sm=3),
    256: Tile(columns=128, depth=32, warps=4, stages=4, programs_per_sm=2),
}
"""Usual tiles of weight gradients where an expert has, on average, up to so many rows; one H200 (docs/log.md)."""

TILES = {field.name: field.metadata["of"] for field in dataclasses.fields(Schedule) if isinstance(field.default, Tile)}
"""The fields that are a Tile, and the products that each one tiles."""


def _with(schedule: Schedule, values: Mapping[str, Any]) -> Schedule:
    for name, value in values.items():
        schedule = DIMENSION[name].put(schedule, value)
    return schedule


DEFAULT_SCHEDULES = {
    backend: _with(
        Schedule(), {d.name: d.usual[backend] for d in DIMENSIONS if not callable(d.usual.get(backend, callable))}
    )
    for backend in (CPU, GPU, COLLECTIVE)
}
"""What each backend starts from, for any shape; see `default_schedule`."""


def default_schedule(backend: str, cfg: MoEConfig, ep_size: int, measured: Measured = MEASURED) -> Schedule:
    """The Schedule that a backend uses by default: the best measured for most shapes, untuned."""
    at = Setting(cfg, ep_size, backend, measured)
    return _with(Schedule(), {d.name: d.start(at) for d in DIMENSIONS if backend in d.usual})


def known_fields(backend: str) -> list[str]:
    """Fields of a Schedule that have an effect on a backend, for some values of the other fields."""
    return list(dict.fromkeys(d.name.partition(".")[0] for d in DIMENSIONS if backend in d.backends))


def num_chunks(cfg: MoEConfig, chunk_tokens: int) -> int:
    """Chunks of one rank's tokens; a send list has at most as many."""
    return -(-cfg.max_tokens_per_rank // chunk_tokens)


def _ill_typed(schedule: Schedule) -> list[str]:
    """Reasons for values that their dimension does not have at all."""
    if not isinstance(schedule, Schedule):
        return [f"it is {schedule!r}, a {type(schedule).__name__}; pass a uniep.Schedule"]
    reasons, tiles = [], {name: getattr(schedule, name) for name in TILES}
    for name, tile in tiles.items():
        if not isinstance(tile, Tile):
            reasons.append(f"{name} is {tile!r}, a {type(tile).__name__}; pass a uniep.Tile")
    sound = (d for d in DIMENSIONS if isinstance(tiles.get(d.name.partition(".")[0], Tile()), Tile))
    return reasons + list(filter(None, (d.refused(d.of(schedule)) for d in sound)))


def is_valid(
    schedule: Schedule, cfg: MoEConfig, ep_size: int = 1, backend: str | None = None, measured: Measured = MEASURED
) -> list[str]:
    """Reasons why `schedule` cannot run `cfg`; an empty list means that it can.

    backend: checked for `ep_size` ranks of it, on that machine; None: only what holds on all backends.
    """
    at = Setting(cfg, ep_size, backend, measured)
    return _ill_typed(schedule) or [*_refused(schedule, at), *(_unknown(schedule, backend) if backend else ())]


def _refused(schedule: Schedule, at: Setting) -> Iterator[str]:
    return filter(None, (d.condition(d, schedule, at) for d in DIMENSIONS))


def _unknown(schedule: Schedule, backend: str) -> Iterator[str]:
    """Reasons for values that have no effect on a backend, unless they are its defaults."""
    default, how = DEFAULT_SCHEDULES[backend], f" with overlap={schedule.overlap!r}" if backend == GPU else ""
    known = known_fields(backend)
    for d in DIMENSIONS:
        name, dot, _ = d.name.partition(".")
        value = getattr(schedule, name)
        if dot and (name in known or not d.name.endswith(".rows")):
            continue  # a Tile, once, as a whole
        values = d.values(schedule, backend)
        if not values:
            values = (getattr(default, name),)
        elif isinstance(d.default, int):
            continue
        if value not in values:
            yield f"Schedule.{name} is {value!r}, but backend {backend!r} knows only {listed(values, 'and')}{how}"


def refuse_invalid(
    schedule: Schedule, cfg: MoEConfig, ep_size: int = 1, backend: str | None = None, measured: Measured = MEASURED
) -> None:
    """Raise ConfigError with all reasons of `is_valid`."""
    if reasons := is_valid(schedule, cfg, ep_size, backend, measured):
        raise ConfigError("this Schedule cannot run this MoEConfig: " + "; ".join(reasons))


def neighbours(schedule: Schedule, at: Setting) -> Iterator[tuple[Dimension, Schedule]]:
    """Valid schedules one step away: another way, or the next number of the domain below and above.

    If a field of one Tile cannot change alone, it changes in all Tiles.
    """
    seen = {schedule}
    for d in DIMENSIONS:
        values, now = d.values(schedule, at.backend or CPU), d.of(schedule)
        if isinstance(d.default, int):
            values = tuple(v for v in values if v < now)[-1:] + tuple(v for v in values if v > now)[:1]
        _, _, part = d.name.partition(".")
        for value in values:
            alone = d.put(schedule, value)
            together = _with(schedule, {f"{tile}.{part}": value for tile in TILES}) if part else alone
            made = next((made for made in (alone, together) if not is_valid(made, *at)), schedule)
            if made not in seen:
                seen.add(made)
                yield d, made


def parse_schedule(text: str, default: Schedule) -> Schedule:
    """ "tile_order=natural,gate_up.columns=128" -> `default` with these values; + separates as well.

    Raises ConfigError for text that is not FIELD=VALUE.  `is_valid` tells whether the result can run.
    """
    for part in filter(None, (p.strip() for p in text.replace("+", ",").split(","))):
        name, _, value = part.partition("=")
        dimension = DIMENSION.get(name)
        try:
            default = dimension.put(default, type(dimension.default)(value))  # type: ignore[union-attr]
        except (AttributeError, ValueError):
            if dimension:
                raise ConfigError(f"{part!r} is not FIELD=VALUE with a number") from None
            raise ConfigError(f"{part!r} is not FIELD=VALUE: Schedule has no field {name!r}; {_near(name)}") from None
    return default


def _near(name: str) -> str:
    """The fields that `name` may have meant, else where all are."""
    within = [known for known in DIMENSION if known.partition(".")[0] == name]
    near = within or difflib.get_close_matches(name, DIMENSION, n=1)
    return f"did you mean {' or '.join(near)}?" if near else "docs/schedule.md has all, for example tile_order=natural"
