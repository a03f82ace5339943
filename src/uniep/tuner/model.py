"""How long a call takes, in closed form: tiles and waves, links, cache and memory, launches, the host.

The formulas evaluate all points of the space at once.  A machine's numbers are those of the simulator (`sim/machines`),
and a card file (`tuner/cards`) has the constants calibrated for these formulas.  Effects outside the formulas cost
nothing: stages, group_rows and the order of tasks inside one kernel tie, and only timing tells them apart.

Times are us, rates bytes or operations per us.  Column suffix: N points.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from uniep.config import MoEConfig
from uniep.dimension import MEASURED
from uniep.errors import ConfigError
from uniep.schedule import Schedule
from uniep.sim.machine import Machine, load_machine
from uniep.tuner.space import Points
from uniep.tuner.tables import card_file


class Constant(NamedTuple):
    """unit; value without calibration, None: the machine's key of that name; low and high: range; about."""

    unit: str
    default: float | None
    low: float
    high: float
    about: str


CONSTANTS = {
    "matrix_tflops": Constant("TFLOP/s", None, 0.001, 1e5, "rate of products, all workers, at full clock"),
    "boost_ms": Constant("ms", None, 0, 1e6, "time of products at that rate until the card reaches its power limit"),
    "sustained_share": Constant("", None, 0.1, 1, "share of that rate at the power limit"),
    "tile_us": Constant("us", None, 0, 1000, "overhead of a tile"),
    "gather_us": Constant("us", None, 0, 1000, "extra time of a tile that gathers its rows"),
    "store_gbps": Constant("GB/s", None, 0.01, 1e5, "rate of a worker's stores beyond one result"),
    "hbm_efficiency": Constant("", None, 0.01, 1, "share of the memory rate that passes over memory achieve"),
    "weight_share": Constant("", 0.8, 0.01, 1, "share of the memory rate that weights and their gradients have"),
    "crowded_share": Constant("", 0.8, 0.01, 1, "share of that rate that two products at the same time have"),
    "step_us": Constant("us", 1.0, 0, 100, "time from a load to its use in a weight gradient"),
    "link_efficiency": Constant("", None, 0.01, 1, "share of the link rate that stores to peers achieve"),
    "worker_link_gbps": Constant("GB/s", None, 0.01, 1e5, "push rate of one program beside a product"),
    "plan_us": Constant("us", None, 0, 1e5, "time in a forward before tiles may begin"),
    "entry_us": Constant("us", 20, 0, 1e5, "time in a backward before tiles may begin"),
    "launch_us": Constant("us", 4, 0, 1e4, "gap between two kernels"),
    "together": Constant("", 3, 1, 20, "p: two things at the same time take (a^p + b^p)^(1/p)"),
    "beside_share": Constant("", 0.5, 0, 1, "share of the activation's gradient that still costs time beside one"),
    "pipelined_work": Constant("", 1.4, 1, 4, "multiprocessor time of a pipelined product, relative to one alone"),
    "mega_tile_us": Constant("us", 0.8, 0, 100, "extra time of a tile that a program claims in one kernel"),
    "host_us": Constant("us", 1500, 0, 1e6, "host time for the rest of a forward and its backward, after a read"),
    "host_call_us": Constant("us", 2900, 0, 1e6, "host time for a forward and its backward"),
}  # fmt: skip
"""The calibrated constants of a card.  host_*: for one process on one core."""


@dataclasses.dataclass(frozen=True)
class Card:
    """name: of its file.  machine: its numbers.  constants: all of CONSTANTS."""

    name: str
    machine: Machine
    constants: Mapping[str, float | Tensor]

    def replaced(self, constants: Mapping[str, float | Tensor]) -> Card:
        return dataclasses.replace(self, constants={**self.constants, **constants})


def cards() -> list[str]:
    """Names of the card files of the package."""
    folder = resources.files("uniep.tuner") / "cards"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def uncalibrated(machine: Machine, name: str = "") -> Card:
    values = {key: getattr(machine, key) if c.default is None else c.default for key, c in CONSTANTS.items()}
    return Card(name or machine.name, machine, values)


def load_card(name: str) -> Card:
    """A card of the package by name, or your own by the path of its file: `machine`, a name or path, and constants.

    Raises ConfigError that names every bad key with its unit and range.
    """
    path = Path(name)
    try:
        if name in cards():
            text = (resources.files("uniep.tuner") / "cards" / f"{name}.toml").read_text()
        elif path.suffix == ".toml" or path.exists():
            text, name = path.read_text(), path.stem
        else:
            raise ConfigError(
                f"card {name!r} is unknown; use {', '.join(cards())}, or the path of a card file (uniep tune "
                "--calibrate writes that of this machine)"
            )
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"card file {path}: {error}; name a TOML file, or one of {', '.join(cards())}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"card {name}: not TOML: {error}") from None
    return checked(name, values)


def find_card(given: str | None, card: str) -> Card | None:
    """The card file `given`, else that of the GPU model `card`; None if that has none.

    Raises ConfigError for a bad one.
    """
    if given is not None:
        return load_card(card_file(given))
    file = card_file(card)
    return load_card(file) if file != card or card in cards() else None


def card_text(card: Card, about: str, machine: str = "") -> str:
    """The text of a card file.  about: its first lines, without "#".  machine: another name or path of the machine."""
    lines = [f"# {line}" for line in about.splitlines()] + ["", f'machine = "{machine or card.machine.name}"']
    for key, known in CONSTANTS.items():
        lines.append(
            f"{key} = {float(card.constants[key]):.6g}  # {known.unit + ': ' if known.unit else ''}{known.about}"
        )
    return "\n".join(lines) + "\n"


def checked(name: str, values: Mapping[str, object]) -> Card:
    bad, machine = [], values.get("machine")
    if not isinstance(machine, str):
        raise ConfigError(
            f"card {name}: machine is {machine!r}; name one of uniep simulate's, or the path of a TOML file"
        )
    constants: dict[str, float] = {}
    for key, value in values.items():
        if key == "machine":
            continue
        if key not in CONSTANTS:
            bad.append(f"{key} is not a constant of the model; the constants are {', '.join(CONSTANTS)}")
            continue
        known = CONSTANTS[key]
        wanted = f"a number of {known.low:g} to {known.high:g} {known.unit}".rstrip()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not known.low <= value <= known.high:
            bad.append(f"{key} is {value!r}; it must be {wanted} ({known.about})")
        else:
            constants[key] = float(value)
    if bad:
        raise ConfigError(f"card {name}: " + "; ".join(bad))
    return uncalibrated(load_machine(machine), name).replaced(constants)


@dataclasses.dataclass(frozen=True)
class Load:
    """The work of the busiest rank of a call: numbers, or (N,) tensors if points belong to several calls.

    rows: rows routed to it.  tiles: row tiles of 128, 64 and 32 rows.  away: rows that return to peers.  sent,
    received: tokens, each once per rank.  lines: sums that return with combine groups, 0 without.  synced: the host
    reads the number of rows.
    """

    ep_size: float | Tensor
    tokens: float | Tensor
    slots: float | Tensor
    hidden: float | Tensor
    ffn: float | Tensor
    local: float | Tensor
    bytes: float | Tensor
    rows: float | Tensor
    tiles: tuple[float | Tensor, ...]
    away: float | Tensor
    sent: float | Tensor
    received: float | Tensor
    lines: float | Tensor = 0.0
    wire: float | Tensor = 1.0
    synced: float | Tensor = 0.0

    @classmethod
    def uniform(cls, cfg: MoEConfig, ep_size: int, tokens: int | None = None) -> Load:
        """The load of uniform random routing."""
        tokens = cfg.max_tokens_per_rank if tokens is None else tokens
        local = cfg.experts_per_rank(ep_size)
        each = tokens * ep_size * cfg.top_k / cfg.num_experts
        spread = each**0.5
        counts_e = each + spread * torch.erfinv((2 * torch.arange(local) + 1) / local - 1).double() * 2**0.5
        to_peers = tokens * cfg.wanted(ep_size) * (ep_size - 1)
        return cls.of_counts(cfg, ep_size, tokens, counts_e.clamp(min=0), each * local * (1 - 1 / ep_size), to_peers,
                             to_peers)  # fmt: skip

    @classmethod
    def of_ids(cls, cfg: MoEConfig, ids: list[Tensor]) -> Load:
        """ids: (T, K) of every rank."""
        ep_size, local = len(ids), cfg.experts_per_rank(len(ids))
        counts_RE = torch.stack([torch.bincount(of.flatten(), minlength=cfg.num_experts) for of in ids])
        by_rank_RR = counts_RE.view(ep_size, ep_size, local).sum(2)
        rank = int(by_rank_RR.sum(0).argmax())
        wants_RR = torch.stack([_wanted(of // local, ep_size) for of in ids])
        here = slice(rank * local, (rank + 1) * local)
        away = int(by_rank_RR[:, rank].sum() - by_rank_RR[rank, rank])
        sent = int(wants_RR[rank].sum() - wants_RR[rank, rank])
        received = int(wants_RR[:, rank].sum() - wants_RR[rank, rank])
        return cls.of_counts(cfg, ep_size, len(ids[rank]), counts_RE[:, here].sum(0).double(), away, sent, received)

    @classmethod
    def of_counts(cls, cfg: MoEConfig, ep_size: int, tokens: int, counts_e: Tensor, away: float, sent: float,
                  received: float) -> Load:  # fmt: skip
        """counts_e: rows of each of the rank's experts."""
        tiles = tuple(float((counts_e / rows).ceil().sum()) for rows in (128, 64, 32))
        lines = 0.0
        if cfg.combine_groups is not None:  # uniform routing: number of a rank's groups that a token on it uses
            groups = cfg.combine_groups // ep_size
            each = float(counts_e.sum()) / max(received / max(ep_size - 1, 1) * ep_size, 1.0)
            lines = (received or tokens) * groups * (1 - (1 - 1 / groups) ** each)
        return cls(
            ep_size=ep_size, tokens=tokens, slots=cfg.return_slots, hidden=cfg.hidden, ffn=cfg.ffn,
            local=cfg.experts_per_rank(ep_size), bytes=cfg.dtype.itemsize, rows=float(counts_e.sum()),
            tiles=tiles, away=away, sent=sent, received=received, lines=lines,
            synced=float(cfg.max_rows is None),
        )  # fmt: skip


def _wanted(rank_TK: Tensor, ep_size: int) -> Tensor:
    """(R,): tokens that each rank receives."""
    return torch.zeros(len(rank_TK), ep_size, dtype=torch.bool).scatter_(1, rank_TK, True).sum(0)


PART = 65536
"""Points whose columns are made together by `times`, so that they stay in caches."""


PLAIN = Schedule().weight_gradient
"""The tile of weight gradients that one kernel takes in place of several programs."""


class Predicted(NamedTuple):
    """Times in us, (N,).  parts: of both directions, by stage, each taken alone.  host: time that the host needs."""

    fwd: Tensor
    bwd: Tensor
    both: Tensor
    parts: dict[str, Tensor]


def times(load: Load, points: Points, card: Card) -> Tensor:
    """(N,): us of a forward and backward of every point."""
    return torch.cat([predict(load, part, card).both for part in points.parts(PART)])


def predict(load: Load, points: Points, card: Card) -> Predicted:
    """Times of every point: forward, backward, and both in a window of one call."""
    c, machine = card.constants, card.machine
    is_in, column = points.is_in, points.column
    size, width, ffn = load.bytes, load.hidden, load.ffn
    sms = machine.matrix_workers - column("free_sms")
    rate = c["matrix_tflops"] * 1e6 / machine.matrix_workers  # operations per us of one worker
    memory, weights = (machine.hbm_gbps * c[share] * 1e3 for share in ("hbm_efficiency", "weight_share"))
    cache = machine.l2_gbps * 1e3 / machine.matrix_workers
    link = machine.link_gbps * c["link_efficiency"] * 1e3 / load.wire
    p = c["together"]
    peers = load.ep_size - 1

    serial, pipelined = is_in("overlap", "serial"), is_in("overlap", "pipelined")
    mega = is_in("overlap", "mega") | (~serial & (column("mega_to") > 0) & (column("mega_to") >= load.tokens))
    pipelined = pipelined & ~mega & (column("pipelined_from") <= load.tokens)
    num_parts = column("gate_up_parts")
    copy, expanded = is_in("transfer", "copy"), is_in("operand", "expanded")
    beside = is_in("activation_gradient", "beside") & ~serial & ~mega & (column("beside_from") <= load.tokens)
    grouped = torch.as_tensor(load.lines) > 0

    def row_tiles(tile: str):  # type: ignore[no-untyped-def]
        return torch.where(column(f"{tile}.rows") == 128, load.tiles[0], load.tiles[1])

    def turns(tile: str, columns, workers=sms):  # type: ignore[no-untyped-def]
        """Tiles of a product that follow each other."""
        return _waves(row_tiles(tile) * torch.ceil(columns / column(f"{tile}.columns")), workers)

    def product(tile: str, depth, columns, extra_us, workers=sms):  # type: ignore[no-untyped-def]
        """us of a product over all row tiles; extra_us: added per tile."""
        rows, wide = column(f"{tile}.rows"), column(f"{tile}.columns")
        once = 2 * rows * wide * depth / rate
        fed = (rows + wide) * depth * size / cache
        one = torch.maximum(once, fed) + c["tile_us"] + extra_us + mega * c["mega_tile_us"]
        read = torch.as_tensor(load.local * depth * columns * size / weights)
        return torch.maximum(one * turns(tile, columns, workers), read)

    def weight_gradient(out, of, workers=sms):  # type: ignore[no-untyped-def]
        """Programs of a multiprocessor share its rates, and hide each other's times of tiles and of loads."""
        one_kernel = mega & (column("weight_gradient.programs_per_sm") > 1)  # takes a plain tile
        rows, wide, depth, programs, stages = (
            torch.where(one_kernel, float(getattr(PLAIN, part)), column(f"weight_gradient.{part}"))
            for part in ("rows", "columns", "depth", "programs_per_sm", "stages")
        )
        tiles = load.local * torch.ceil(out / rows) * torch.ceil(of / wide)
        deep = torch.where(depth == 32, 32 * load.tiles[2], 64 * load.tiles[1]) / load.local  # of each tile
        once = torch.maximum(2 * rows * wide * deep / rate, (rows + wide) * deep * size / cache)
        waits = deep / depth * c["step_us"] / (stages - 1)  # a program's, for the loads of its steps
        one = torch.maximum(programs * once + c["gather_us"], waits) + c["tile_us"] + mega * c["mega_tile_us"]
        return torch.maximum(one * _waves(tiles, workers * programs), tiles * rows * wide * size / weights)

    def stored(tile: str, results):  # type: ignore[no-untyped-def]
        """us of a tile's stores beyond one result."""
        return column(f"{tile}.rows") * column(f"{tile}.columns") * results * size / (c["store_gbps"] * 1e3)

    def together(a, b):  # type: ignore[no-untyped-def]
        """Time of two things that run at the same time."""
        return (a**p + b**p) ** (1 / p)

    gather = torch.where(expanded, 0.0, torch.as_tensor(c["gather_us"]))
    # --- the wire ---
    everything = load.tokens * peers * width * size
    wanted = torch.maximum(torch.as_tensor(load.sent), torch.as_tensor(load.received)) * width * size
    alone = wanted / link
    pushed = wanted / torch.minimum(column("push_programs") * c["worker_link_gbps"] * 1e3 / load.wire,
                                    torch.as_tensor(link))  # fmt: skip
    copied = everything / link
    results = torch.where(grouped, load.lines, torch.as_tensor(load.away)) * width * size / link
    expand = torch.where(expanded, 2 * load.rows * width * size / memory, 0.0)
    own_share = torch.as_tensor(load.away / torch.as_tensor(load.rows).clamp(min=1))

    def fed_product(alone_us, plan_us):  # type: ignore[no-untyped-def]
        """Time of a product, from its plan on, whose tokens are sent meanwhile."""
        busy = column("push_programs") / sms * pushed  # time that pushing takes from the product
        by_push = torch.maximum(alone_us + busy, together(alone_us * own_share, pushed))
        came = (copied - plan_us).clamp(min=0)
        by_copy = torch.maximum(alone_us, together(alone_us * own_share, came))
        fused = torch.where(copy, by_copy, by_push)
        return torch.where(serial | expanded, alone_us + torch.where(copy, came, alone) + expand, fused)

    # --- forward ---
    recomputes = is_in("preactivation", "recomputed")
    gate_up = product("gate_up", width, 2 * ffn, gather + stored("gate_up", 1.0 - 1.0 * recomputes))  # h beside act
    down = product("down", ffn, width, 0.0)
    slots = load.tokens * load.slots * width * size
    combine = (slots + load.tokens * width * size) / memory
    sums = torch.where(grouped, (load.rows + load.lines) * width * size / memory, 0.0)
    fetched = is_in("transfer", "pull") & (torch.as_tensor(peers) > 0)
    published = torch.where(fetched, 2 * load.tokens * width * size / memory, 0.0)
    plan = c["plan_us"] + published
    first = fed_product(gate_up, plan)
    groups_beside = is_in("group_sum", "beside") & grouped
    slower = torch.where(groups_beside, torch.as_tensor(c["pipelined_work"]), 1.0)
    second = torch.where(
        grouped, down * slower + results + sums, torch.where(serial, down + results, together(down, results))
    )
    launches_fwd = torch.where(mega, 1.0, torch.where(serial, 5.0, 3.0)) + 1.0 * grouped
    # pipelined: both products share the multiprocessors, and rows are sent from the second one's first tiles on
    work = first + down * c["pipelined_work"]
    begins = gate_up * 0.2
    claimed = torch.maximum(work, together(work, begins + results))
    # in parts: gate_up of the first on all multiprocessors; then both products on their own; then down's last on all
    share = torch.where(column("down_sms") > 0, column("down_sms") / sms, 1 / 3).clamp(max=0.5)
    shared = (num_parts - 1) / num_parts * torch.maximum(first / (1 - share), down / share)
    sent = torch.where(grouped, 0.0, results)
    last = together(down / num_parts, sent / num_parts)
    in_parts = first / num_parts + torch.maximum(shared + last, sent)
    between = gate_up / turns("gate_up", 2 * ffn) / 2 + c["launch_us"]
    in_parts = in_parts + (num_parts - 1) * between + torch.where(grouped, results + sums, 0.0)
    both_products = torch.where(pipelined, torch.where(num_parts > 1, in_parts, claimed), first + second)
    products_fwd = gate_up + down
    slow_fwd = _slow(products_fwd, 0.0, c)
    fwd = plan + both_products * slow_fwd + combine + launches_fwd * c["launch_us"]
    # --- backward ---
    entry = c["entry_us"] + published
    down_grad = product("down", width, ffn, gather + stored("down", 1.0))
    gradient = row_tiles("down") * column("down.rows") * ffn * (4 + 5 * size) / memory
    gate_up_grad = product("down", 2 * ffn, width, 0.0)
    dw2, dw13 = weight_gradient(width, ffn), weight_gradient(2 * ffn, width)
    wgrad = dw2 + dw13
    again = is_in("received", "again") * (torch.where(copy, copied, alone) + published)
    outgoing = results + again * ~recomputes
    tail = torch.where(
        serial, gate_up_grad + outgoing + wgrad, torch.maximum(together(gate_up_grad, outgoing) + wgrad, outgoing)
    )
    # dW2 beside gate_up_grad, each on its multiprocessors; then dW13 beside the sum
    apart = is_in("down_wgrad", "beside") & ~serial & ~mega & (column("pipelined_from") <= load.tokens)
    rows_sms = torch.round(sms * 2 / (2 + MEASURED.weight_gradient_time))
    rows_us = together(product("down", 2 * ffn, width, 0.0, rows_sms), outgoing)
    moved_us = torch.as_tensor(load.local * 3 * width * ffn * size / weights / c["crowded_share"])  # W13, and dW2
    behind_us = torch.maximum(torch.maximum(rows_us, weight_gradient(width, ffn, sms - rows_sms)), moved_us) + dw13
    tail = torch.where(apart, torch.maximum(rows_us + combine, behind_us), tail)
    tail = tail + sums
    middle = gradient * torch.where(beside, torch.as_tensor(c["beside_share"]), 1.0)
    recomputed = recomputes * product("gate_up", width, 2 * ffn, gather + stored("gate_up", 0.5))  # h in place of act
    products_bwd = recomputed + down_grad + gate_up_grad + wgrad
    slow_bwd = _slow(products_bwd, products_fwd, c)
    launches_bwd = torch.where(mega, 1.0, torch.where(serial, 8.0, 6.0)) + 1.0 * recomputes
    fed = fed_product(down_grad, entry + recomputed) + recomputed
    bwd = again * recomputes + entry + (fed + tail) * slow_bwd + middle + launches_bwd * c["launch_us"]
    # --- the host ---
    behind = torch.as_tensor(c["host_us"]) + plan + wgrad * slow_bwd
    ahead = torch.as_tensor(c["host_call_us"]) - AHEAD_US
    both = torch.maximum(fwd + bwd, torch.where(torch.as_tensor(load.synced) > 0, behind, ahead))
    parts = {
        "plan, entry": plan + entry, "gate and up": gate_up * slow_fwd + recomputed * slow_bwd,
        "down": down * slow_fwd, "combine": combine,
        "gradients of rows": (down_grad + gate_up_grad) * slow_bwd, "activation": middle,
        "weight gradients": wgrad * slow_bwd,
        "tokens on the wire": 2 * torch.where(copy, copied, pushed) + again, "results on the wire": 2 * results,
        "launches": (launches_fwd + launches_bwd) * c["launch_us"],
    }  # fmt: skip
    count = len(points)
    of_parts = {name: _full(us, count) for name, us in parts.items()}
    return Predicted(_full(fwd, count), _full(bwd, count), _full(both, count), of_parts)


AHEAD_US = 2000.0
"""How far the host is ahead of the device when a window begins (benchmarks/timing.py)."""


def _full(value: Tensor, count: int) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).expand(count)


def _waves(tiles: Tensor, workers: Tensor | float) -> Tensor:
    return (tiles / workers + 0.5).clamp(min=1)


def _slow(products: Tensor, before: Tensor | float, c: Mapping[str, float | Tensor]) -> Tensor:
    """Factor by which products take longer on average: a card runs `boost_ms` of them at full rate."""
    left = (c["boost_ms"] * 1e3 - before).clamp(min=0) if isinstance(before, Tensor) else c["boost_ms"] * 1e3 - before
    late = (1 - left / products.clamp(min=1)).clamp(min=0)
    return 1 + late * (1 / c["sustained_share"] - 1)
