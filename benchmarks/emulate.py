"""An emulated forward, and its backward, at EP 4 or 8 on one GPU, which is rank 0: all times are labelled "emulated".

    python benchmarks/emulate.py --json benchmarks/results/h200x1_emulated.json
    python benchmarks/emulate.py --peers cuda:1 --json benchmarks/results/h200x2_emulated.json

What is real: every kernel of rank 0, its plan of all ranks' ids, rows and tiles.  What is played: peers have entered;
their tokens lie in the receive buffer beforehand (in a backward they stand for dO), and `finished` of one source after
the other, from the rank before this one downwards, is raised when its copy would have come at `--copy-rate` since this
rank entered; `returned` of all peers is raised once this rank's own returns would have been on the wire at `--return-
rate` since the product that returns them began (pipelined: since gate_up began, or its first part ended), for all
ranks do the same.  d(weight) comes with the same flag and takes no time of the wire. Nothing crosses a wire: copies are
left out (on one card they would take multiprocessors), and rows go to memory that stands for the peers'. So contention
on the wire and what incoming bytes take from this card's memory do not show, nor can a push be emulated, whose cost is
the pace of the wire.

With `--peers` a second GPU is all peers.  Their memory lies there, so what this rank returns crosses NVLink.  Their
tokens come from there, one source after the other by a copy engine, and `finished` is raised behind each.  While this
rank returns rows, as many bytes come into memory that nobody reads, and `returned` waits for them, too.

The timetable is kept by the host, which writes words of pinned memory that streams wait for: no multiprocessor is
taken.  Everything, a backward too, is queued before the first kernel begins (`--load window` of moe.py).  Before they
are timed, what each variant leaves (rows at every rank, h, d(weight), gradients) is compared with what the serial one
leaves, bit by bit.

Compiling takes longest.  Processes beside each other do it first, one for each shape and number of ranks; what is
measured then takes seconds.  `--directions fwd` and `--variants ''` shorten both, fewer `--repeats` what is measured;
`--repeats 0` compiles only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from cases import choose_experts, make_case, make_weights, parse_shape
from moe import add_file_options, of_run
from played import (
    ALWAYS,
    ARRIVED,
    BEGAN,
    DIRECTIONS,
    GO,
    RETURNED,
    RETURNING,
    STEPS,
    Emulated,
    enter_as,
    enter_peers,
    rank_0,
    unplayed,
)
from uniep.backends.base import ExpertGradients, Inputs, Needs
from uniep.config import MoEConfig
from uniep.errors import UnsupportedError
from uniep.launch.driver import copy, tensor
from uniep.routing.plan import recv_base
from uniep.schedule import default_schedule, parse_schedule
from uniep.shapes import Shape
from uniep.way import Way, Ways
from uniep.weights import ExpertWeights

PATIENCE_S = 3.0


@dataclasses.dataclass
class Emulation:
    """One shape on `ranks` ranks of `tokens` tokens.  peers: the second GPU, or "".  copy_us: of one source's tokens.
    return_us: of this rank's rows for peers."""

    shape: Shape
    ranks: int
    tokens: int
    copy_rate: float
    return_rate: float
    peers: str = ""
    device: str = "cuda:0"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        shape, ranks, tokens, device = self.shape, self.ranks, self.tokens, torch.device(self.device)
        case = make_case(shape, tokens, "balanced", 0, make_weights(shape, 0, ranks, self.dtype, device))
        generators = [torch.Generator(device).manual_seed(rank) for rank in range(1, ranks)]
        ids = [case.ids_TK, *(choose_experts(tokens, shape, "balanced", g) for g in generators)]
        drawn = (torch.rand(case.weights_TK.shape, device=device, generator=g) for g in generators)
        of_slots = [case.weights_TK, *drawn]
        local = shape.num_experts // ranks
        rows = sum(int((i < local).sum()) for i in ids)
        self.cfg: MoEConfig = shape.config(ranks, tokens, max_rows=rows + rows // 32, dtype=self.dtype)
        usual = default_schedule("hopper", self.cfg, ranks)
        self.schedule = dataclasses.replace(usual, transfer="copy")
        backend = rank_0(self.cfg, ranks, self.schedule, Emulated, self.device, self.peers)
        assert isinstance(backend, Emulated)
        self.backend = backend
        self.received = [
            backend.arena.views["receive"][recv_base(self.cfg, rank, 0) :][:tokens] for rank in range(1, ranks)
        ]
        for received, generator in zip(self.received, generators, strict=True):
            received.copy_(torch.randn(tokens, shape.hidden, device=device, generator=generator))
        enter_peers(backend, ids, of_slots, "forward")
        experts = ExpertWeights((case.w13_e2FD,), (case.w2_eDF,), "stacked")
        self.inputs = Inputs(case.x_TD, case.ids_TK, case.weights_TK, experts)
        self.dy_TD = case.dy_TD
        row_bytes = shape.hidden * self.cfg.dtype.itemsize
        self.copy_us = tokens * row_bytes / self.copy_rate / 1e3
        away = sum(int((i < local).sum()) for i in ids[1:])
        self.return_us = away * row_bytes / self.return_rate / 1e3
        if self.peers:
            self.wire = torch.cuda.Stream(self.peers)
            self.sent = [received.to(self.peers, copy=True) for received in self.received]
            self.rows = [torch.zeros(away, shape.hidden, dtype=self.dtype, device=d) for d in (self.peers, device)]

    def synchronize(self) -> None:
        for device in (self.device, self.peers or self.device):
            torch.cuda.synchronize(device)

    def _behind(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """What is recorded when the second GPU has written that."""
        copy(target, source, self.wire)
        event = torch.cuda.Event()
        event.record(self.wire)
        return event

    def way(self, change: str) -> Way:
        schedule = parse_schedule(change, self.schedule)
        way = Ways(self.cfg, self.ranks, schedule, "hopper", self.backend.ways.measured)[self.tokens]
        if waits := unplayed(self.cfg, way):
            raise UnsupportedError(
                f"variant {change!r} waits for {', '.join(waits)}, which nobody plays on one GPU; leave it out, or use "
                "transfer=copy, received=saved and any overlap but mega"
            )
        return way

    def call(
        self, way: Way, direction: str, *, played: bool = True
    ) -> tuple[dict[str, float], list[Tensor], ExpertGradients | None]:
        """(Milliseconds of each phase, as moe.py names them, and of all as `ms`; what the forward saves; gradients).
        Not played: nothing waits, as in a first call: kernels cannot be loaded, and memory should not be allocated,
        while a stream, or a kernel, waits for the host."""
        backend, timetable, stream = self.backend, self.backend.timetable, torch.cuda.current_stream()
        first, until = backend.planner.calls_made + 1, time.monotonic() + PATIENCE_S
        for number, operation in enumerate(DIRECTIONS[direction], first):
            enter_as(backend, number, operation, first if operation == "backward" else 0)
        returned = backend.arena.flag_view("returned")[1 : self.ranks]
        returned.fill_(backend.planner.calls_made if played else ALWAYS)
        torch.cuda.synchronize()
        backend.phases, gradients = [], None
        watchdog = threading.Timer(PATIENCE_S, timetable.release)  # should the host, which queues, wait for the device
        if played:
            watchdog.start()
        else:
            timetable.release()
        try:
            timetable.wait(stream, GO, first)
            began = torch.cuda.Event(enable_timing=True)
            began.record(stream)
            _, saved = backend.forward(self.inputs, save=True, way=way)
            if played:
                backend.peers_return()
            if direction == "fwd_bwd":
                gradients = backend.backward(self.dy_TD, self.inputs, saved, Needs(), way=way)
                if played:
                    backend.peers_return()
            if played:
                self._play(range(first, backend.planner.calls_made + 1), until)
        finally:
            watchdog.cancel()
            timetable.release()
            self.synchronize()
            timetable.end(backend.planner.calls_made)
        backend.check()
        times, seen, before = dict[str, float](), Counter[str](), began
        for name, event in backend.phases:
            seen[name] += 1
            times[name if seen[name] == 1 else f"{name} {seen[name]}"] = before.elapsed_time(event)
            before = event
        times["ms"] = began.elapsed_time(before)
        return times, saved, gradients

    def _play(self, calls: range, until: float) -> None:
        """The timetable of calls that are queued, kept by this thread."""
        words, clock = self.backend.timetable.words, time.perf_counter_ns
        due: list[tuple[float, int, int, torch.cuda.Event | None]] = []  # when, word, value, behind what
        waiting = {(word, number) for number in calls for word in (BEGAN, RETURNING)}
        words[GO] = calls[0]
        while waiting or due:
            now = clock()
            if time.monotonic() > until:
                raise RuntimeError(
                    f"calls {list(calls)} did not end within {PATIENCE_S:g} s: words {list(words[:80:16])}, "
                    f"waiting for {sorted(waiting)}"
                )
            for word, number in [w for w in waiting if words[w[0]] >= w[1]]:
                waiting.remove((word, number))
                if word == RETURNING:
                    rows = self._behind(*reversed(self.rows)) if self.peers else None
                    due.append((now + 1e3 * self.return_us, RETURNED, number, rows))
                    continue
                for step in range(1, self.ranks):  # the rank before this one is the last of the list
                    tokens = self._behind(self.received[-step], self.sent[-step]) if self.peers else None
                    when = now if self.peers else now + 1e3 * self.copy_us * step
                    due.append((when, ARRIVED, number * STEPS + step, tokens))
            due.sort(key=lambda turn: turn[:3])
            while due and due[0][0] <= clock() and (due[0][3] is None or due[0][3].query()):
                _, word, value, _ = due.pop(0)
                words[word] = value


def results_of(emulation: Emulation, way: Way, direction: str) -> dict[str, Tensor]:
    """What a forward leaves, and a backward, if `direction` has one: what lies at every rank, h of the rows in use,
    gradients."""
    backend, found = emulation.backend, dict[str, Tensor]()
    for turn in DIRECTIONS if direction == "fwd_bwd" else [direction]:
        emulation.call(way, turn, played=False)
        everywhere = {name: backend.arena.everywhere[name] for name in ("returns", "dweights")}
        for t in (*(t for ts in everywhere.values() for t in ts), *(emulation.received if emulation.peers else ())):
            t.zero_()
        emulation.synchronize()
        _, saved, gradients = emulation.call(way, turn)
        for name, ts in everywhere.items():
            found |= {f"{name} of rank {rank}, {turn}": t.clone() for rank, t in enumerate(ts)}
        if not way.recomputes:
            totals = tensor(backend.planner.restore(emulation.tokens, saved[:3]).rows.totals)
            found["h"] = saved[3][:, : int(totals[0])].clone()
        if gradients is not None:
            assert gradients.x is not None and gradients.weights is not None and gradients.w13 and gradients.w2
            found |= {"dx": gradients.x, "d(weight)": gradients.weights, "dw13": gradients.w13[0]}
            found["dw2"] = gradients.w2[0]
    return found


def compile_all(emulation: Emulation, ways: dict[str, Way], direction: str) -> None:
    """Also the serial way, with which bits are compared."""
    for way in (emulation.way("overlap=serial"), *ways.values()):
        emulation.call(way, direction, played=False)


def with_serial_bits(emulation: Emulation, ways: dict[str, Way], direction: str) -> dict[str, Way]:
    """Those whose results are those of the serial way; what is wrong with others is printed."""
    want, right = results_of(emulation, emulation.way("overlap=serial"), direction), dict[str, Way]()
    for name, way in ways.items():
        try:
            got = results_of(emulation, way, direction)
            if wrong := [part for part, t in got.items() if not torch.equal(t, want[part])]:
                raise RuntimeError(f"bits differ from serial: {', '.join(wrong)}")
            right[name] = way
        except Exception as error:  # one variant must not end the others
            print(f"{emulation.shape.name} EP {emulation.ranks} {name or 'default'}: {error!r}"[:400], flush=True)
            emulation.backend.planner.status[0], emulation.backend.planner._words[0] = 0, 0
    return right


def measure(emulation: Emulation, ways: dict[str, Way], direction: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of one direction, all ways in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for way in ways.values():
        emulation.call(way, direction, played=False)
    for repeat in range(repeats):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            found[name].append(emulation.call(ways[name], direction)[0])
    rows = []
    for name, times in found.items():
        median = {phase: round(statistics.median(t[phase] for t in times), 4) for phase in times[0]}
        way = ways[name]
        rows.append({
            "shape": emulation.shape.name, "ranks": emulation.ranks, "tokens": emulation.tokens, "direction": direction,
            "impl": f"uniep@{name}" if name else "uniep",
            "overlap": "serial" if way.gates else "pipelined" if way.down_sms else "fused", "waves": way.waves,
            "emulated": True, "ms": median.pop("ms"), "phases": median, "ms_all": [round(t["ms"], 4) for t in times],
        })  # fmt: skip
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "ms_all"}), flush=True)
    return rows


def compile_beside(cases: list[tuple[str, int]]) -> None:
    """Each case in a process of its own, all at once: what they compile lies in Triton's cache."""
    of_case = (["--shapes", name, "--ranks", str(ranks), "--repeats", "0"] for name, ranks in cases)
    children = [subprocess.Popen([sys.executable, *sys.argv, *more]) for more in of_case]
    try:
        failed = [case for case, child in zip(cases, children, strict=True) if child.wait()]
    finally:
        for child in children:
            child.kill()
    if failed:
        raise RuntimeError(f"compiling failed for {failed}; see above, or run one case at a time")


def parse_directions(text: str) -> list[str]:
    for value in text.split(","):
        if value not in DIRECTIONS:
            raise argparse.ArgumentTypeError(f"{value!r} is unknown; use {', '.join(DIRECTIONS)}")
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b,deepseek-v3")
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--directions", default="fwd,fwd_bwd", type=parse_directions)
    parser.add_argument("--variants", default=";arrival_waves=1;arrival_waves=2;arrival_waves=4;arrival_waves=8",
                        help="what differs from the default, apart by ';'")  # fmt: skip
    parser.add_argument("--copy-rate", type=float, default=361.0, help="GB/s of a copy from peer to peer")
    parser.add_argument("--return-rate", type=float, default=303.0, help="GB/s of rows that return")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--peers", default="", metavar="DEVICE", help="a second GPU that is all peers, such as cuda:1")
    add_file_options(parser)
    args = parser.parse_args()
    meta = of_run("emulate.py", torch.device("cuda"), args.commit, 1) | {"emulated": True}
    meta |= {name: getattr(args, name) for name in ("copy_rate", "return_rate", "repeats", "peers")}
    meta["gpus"] = 2 if args.peers else 1
    cases = [(name, int(ranks)) for name in args.shapes.split(",") for ranks in args.ranks.split(",")]
    rows: list[dict[str, Any]] = []
    most = "fwd_bwd" if "fwd_bwd" in args.directions else "fwd"
    if args.repeats and len(cases) > 1:
        started = time.monotonic()
        compile_beside(cases)
        print(f"compiled in {time.monotonic() - started:.1f} s", flush=True)
    for name, ranks in cases:
        started = time.monotonic()
        emulation = Emulation(parse_shape(name), ranks, args.tokens, args.copy_rate, args.return_rate, args.peers)
        ways = {change: emulation.way(change) for change in args.variants.split(";")}
        if args.repeats:
            ways = with_serial_bits(emulation, ways, most)
            compared = time.monotonic() - started
            for direction in args.directions:
                rows += measure(emulation, ways, direction, args.repeats)
            took = f"{time.monotonic() - started:.1f} s, {compared:.1f} until bits were compared"
        else:
            compile_all(emulation, ways, most)
            took = f"{time.monotonic() - started:.1f} s, compiled only"
        emulation.backend.close()
        del emulation
        torch.cuda.empty_cache()
        print(f"{name} EP {ranks}: {took}", flush=True)
        if args.json and args.repeats:
            args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
