"""An emulated forward at EP 4 or 8 on one GPU, which is rank 0: all times are labelled "emulated".

    python benchmarks/emulate.py --json benchmarks/results/h200x1_emulated.json

What is real: every kernel of rank 0, its plan of all ranks' ids, rows and tiles.  What is played: peers have entered;
their tokens lie in the receive buffer beforehand, and `finished` of one source after the other, from the rank before
this one downwards, is raised when its copy would have come at `--copy-rate`; `returned` of all peers is raised once
this rank's own returns would have been on the wire at `--return-rate` since the down product began (pipelined: since
gate_up began, or its first part ended), for all ranks do the same.  Nothing crosses a wire: copies are left out (on one
card they would take multiprocessors), and rows go to memory that stands for the peers'.  So contention on the wire and
what incoming bytes take from this card's memory do not show, nor can a push be emulated, whose cost is the pace of the
wire.

The timetable is kept by the host, which writes words of pinned memory that streams wait for: no multiprocessor is
taken.  Everything is queued before the first kernel begins (`--load window` of moe.py).  Before they are timed, the
rows that leave and h of every variant are compared with those of the serial one, bit by bit.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from cases import choose_experts, make_case, make_weights, parse_shape
from moe import add_file_options, of_run
from played import ALWAYS, enter_peers, rank_0
from uniep.backends.base import Inputs
from uniep.backends.hopper.backend import HopperBackend
from uniep.config import MoEConfig
from uniep.launch.driver import tensor
from uniep.routing.plan import recv_base
from uniep.schedule import default_schedule, parse_schedule
from uniep.shapes import Shape
from uniep.way import Way, Ways
from uniep.weights import ExpertWeights

GO, BEGAN, ARRIVED, RETURNING, RETURNED = range(0, 80, 16)  # words, 64 bytes apart
STEPS = 64  # values of ARRIVED that a call has
PATIENCE_NS = 3_000_000_000


class Timetable:
    """Words of pinned memory that streams wait for, or write, and the host as well."""

    def __init__(self) -> None:
        self._pinned = torch.zeros(96, dtype=torch.int32).pin_memory()
        self.words = (ctypes.c_int32 * 96).from_address(self._pinned.data_ptr())
        self._driver = ctypes.CDLL("libcuda.so.1")

    def _queue(self, name: str, stream: torch.cuda.Stream, address: int, value: int) -> None:
        words = ctypes.c_uint32(value), ctypes.c_uint(0)
        given = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), *words
        if code := getattr(self._driver, name)(*given):
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def wait(self, stream: torch.cuda.Stream, word: int, value: int) -> None:
        """`stream` goes on when the word is `value` or more."""
        self._queue("cuStreamWaitValue32_v2", stream, self._pinned.data_ptr() + 4 * word, value)

    def tell(self, stream: torch.cuda.Stream, word: int, value: int) -> None:
        self.write(stream, self._pinned.data_ptr() + 4 * word, value)

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        self._queue("cuStreamWriteValue32_v2", stream, address, value)

    def release(self) -> None:
        """Whatever waits goes on."""
        for word in (GO, ARRIVED, RETURNED):
            self.words[word] = 2**30


class Emulated(HopperBackend):
    """Rank 0, whose peers play."""

    timetable: Timetable
    number = 0  # of the call

    def send(self, x_TD: Tensor, first: int = 1, last: int | None = None) -> None:
        """The flags behind the peers' copies, which take as long as this rank's own."""
        if first == 1:
            self.fork(self.copies)
            self.timetable.tell(self.copies, BEGAN, self.number)
        for step in range(first, last or self.num_ranks):
            self.timetable.wait(self.copies, ARRIVED, self.number * STEPS + step)
            self.raise_flag("finished", (self.rank - step) % self.num_ranks, self.copies)

    def raise_flag(self, name: str, source: int, stream: torch.cuda.Stream) -> None:
        flag = self.arena.flag_view(name)[source:]
        self.timetable.write(stream, flag.data_ptr(), self.planner.calls_made)

    def mark(self, name: str) -> None:
        super().mark(name)
        if name == ("plan" if self.way.down_sms and self.way.gate_up_parts == 1 else "gate_up"):
            self.timetable.tell(self._stream, RETURNING, self.number)


@dataclasses.dataclass
class Emulation:
    """One shape on `ranks` ranks of `tokens` tokens.  copy_us: of one source's tokens.  return_us: of this rank's rows
    for peers."""

    shape: Shape
    ranks: int
    tokens: int
    copy_rate: float
    return_rate: float
    device: str = "cuda:0"

    def __post_init__(self) -> None:
        shape, ranks, tokens, device = self.shape, self.ranks, self.tokens, torch.device(self.device)
        weights = make_weights(shape, 0, ranks, torch.bfloat16, device)
        case = make_case(shape, tokens, "balanced", 0, weights)
        generators = [torch.Generator(device).manual_seed(rank) for rank in range(1, ranks)]
        ids = [case.ids_TK, *(choose_experts(tokens, shape, "balanced", g) for g in generators)]
        drawn = (torch.rand(case.weights_TK.shape, device=device, generator=g) for g in generators)
        of_slots = [case.weights_TK, *drawn]
        local = shape.num_experts // ranks
        rows = sum(int((i < local).sum()) for i in ids)
        self.cfg: MoEConfig = shape.config(ranks, tokens, max_rows=rows + rows // 32)
        usual = default_schedule("hopper", self.cfg, ranks)
        self.schedule = dataclasses.replace(usual, transfer="copy")
        backend = rank_0(self.cfg, ranks, self.schedule, Emulated, self.device)
        assert isinstance(backend, Emulated)
        self.backend, self.table = backend, Timetable()
        backend.timetable = self.table
        for source, generator in enumerate(generators, 1):
            x_TD = torch.randn(tokens, shape.hidden, device=device, generator=generator)
            backend.arena.views["receive"][recv_base(self.cfg, source, 0) :][:tokens] = x_TD
        enter_peers(backend, ids, of_slots, "forward")
        experts = ExpertWeights((case.w13_e2FD,), (case.w2_eDF,), "stacked")
        self.inputs = Inputs(case.x_TD, case.ids_TK, case.weights_TK, experts)
        row_bytes = shape.hidden * self.cfg.dtype.itemsize
        self.copy_us = tokens * row_bytes / self.copy_rate / 1e3
        away = sum(int((i < local).sum()) for i in ids[1:])
        self.return_us = away * row_bytes / self.return_rate / 1e3
        self.returned_stream = torch.cuda.Stream()

    def way(self, change: str) -> Way:
        schedule = parse_schedule(change, self.schedule)
        return Ways(self.cfg, self.ranks, schedule, "hopper", self.backend.ways.measured)[self.tokens]

    def call(self, way: Way, *, played: bool = True) -> tuple[dict[str, float], list[Tensor]]:
        """(Milliseconds of each phase, of the call as `ms`; what the call saves).  Not played: nothing waits, as in a
        first call, since kernels cannot be loaded while a stream, or a kernel, waits for the host."""
        backend, table = self.backend, self.table
        backend.number += 1
        n, stream = backend.number, torch.cuda.current_stream()
        torch.cuda.synchronize()
        for flag in ("finished", "returned"):  # as the call before has left them
            backend.arena.flag_view(flag)[1 : self.ranks] = backend.planner.calls_made if played else ALWAYS
        backend.phases = []
        if not played:
            table.release()
        try:
            table.wait(stream, GO, n)
            began = torch.cuda.Event(enable_timing=True)
            began.record(stream)
            _, saved = backend.forward(self.inputs, save=True, way=way)
            table.wait(self.returned_stream, RETURNED, n)
            if played:
                for rank in range(1, self.ranks):
                    backend.raise_flag("returned", rank, self.returned_stream)
                self._play(n)
        finally:
            table.release()
            torch.cuda.synchronize()
            for word in (GO, ARRIVED, RETURNED):
                table.words[word] = n * (STEPS if word == ARRIVED else 1)
        backend.check()
        times, before = dict[str, float](), began
        for name, event in backend.phases:
            times[name], before = times.get(name, 0.0) + before.elapsed_time(event), event
        times["ms"] = began.elapsed_time(before)
        return times, saved

    def _play(self, n: int) -> None:
        """The timetable of call `n`, kept by this thread."""
        words, clock = self.table.words, time.perf_counter_ns
        due: list[tuple[float, int, int]] = []  # when, word, value
        steps = range(1, self.ranks)
        words[GO], started = n, clock()
        waiting = {BEGAN: n, RETURNING: n}
        while waiting or due:
            now = clock()
            if now - started > PATIENCE_NS:
                raise RuntimeError(f"call {n}: words {list(self.table.words[:80:16])}, waiting for {list(waiting)}")
            for word in [w for w in waiting if words[w] == n]:
                del waiting[word]
                if word == RETURNING:
                    due.append((now + 1e3 * self.return_us, RETURNED, n))
                    continue
                due += [(now + 1e3 * self.copy_us * step, ARRIVED, n * STEPS + step) for step in steps]
            while due and min(due)[0] <= clock():
                _, word, value = due.pop(due.index(min(due)))
                words[word] = value


def result_of(emulation: Emulation, way: Way) -> list[Tensor]:
    """What a forward leaves: the rows at every rank, and h of the rows in use."""
    backend = emulation.backend
    emulation.call(way, played=False)
    for returns in backend.arena.everywhere["returns"]:
        returns.zero_()
    saved = emulation.call(way)[1]
    totals = tensor(backend.planner.restore(emulation.tokens, saved[:2]).rows.totals)
    return [*(t.clone() for t in backend.arena.everywhere["returns"]), saved[2][:, : int(totals[0])].clone()]


def measure(emulation: Emulation, variants: list[str], repeats: int) -> list[dict[str, Any]]:
    """Interleaved, after their bits; with 0 repeats kernels are only compiled."""
    ways = {name: emulation.way(name) for name in variants}
    if repeats == 0:
        for way in (emulation.way("overlap=serial"), *ways.values()):
            emulation.call(way, played=False)
        return []
    want = result_of(emulation, emulation.way("overlap=serial"))
    found: dict[str, list[dict[str, float]]] = {}
    for name, way in list(ways.items()):
        try:
            got = result_of(emulation, way)
            wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]
            if wrong:
                raise RuntimeError(f"bits differ from serial: parts {wrong}")
            found[name] = []
        except Exception as error:  # one variant must not end the others
            print(f"{emulation.shape.name} EP {emulation.ranks} {name or 'default'}: {error!r}"[:400], flush=True)
            del ways[name]
            emulation.backend.planner.status[0], emulation.backend.planner._words[0] = 0, 0
    del want
    for repeat in range(repeats):
        for name in list(ways)[:: 1 if repeat % 2 else -1]:
            found[name].append(emulation.call(ways[name])[0])
    rows = []
    for name, times in found.items():
        median = {phase: round(statistics.median(t[phase] for t in times), 4) for phase in times[0]}
        way = ways[name]
        rows.append({
            "shape": emulation.shape.name, "ranks": emulation.ranks, "tokens": emulation.tokens, "direction": "fwd",
            "impl": f"uniep@{name}" if name else "uniep", "overlap": "pipelined" if way.down_sms else "fused",
            "waves": way.waves, "emulated": True, "ms": median.pop("ms"), "phases": median,
            "ms_all": [round(t["ms"], 4) for t in times],
        })  # fmt: skip
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "ms_all"}), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b,deepseek-v3")
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--variants", default=";arrival_waves=1;arrival_waves=2;arrival_waves=4;arrival_waves=8",
                        help="what differs from the default, apart by ';'")  # fmt: skip
    parser.add_argument("--copy-rate", type=float, default=361.0, help="GB/s of a copy from peer to peer")
    parser.add_argument("--return-rate", type=float, default=303.0, help="GB/s of rows that return")
    parser.add_argument("--repeats", type=int, default=11)
    add_file_options(parser)
    args = parser.parse_args()
    meta = of_run("emulate.py", torch.device("cuda"), args.commit, 1) | {"emulated": True}
    meta |= {name: getattr(args, name) for name in ("copy_rate", "return_rate", "repeats")}
    rows = []
    for name in args.shapes.split(","):
        for ranks in map(int, args.ranks.split(",")):
            started = time.monotonic()
            emulation = Emulation(parse_shape(name), ranks, args.tokens, args.copy_rate, args.return_rate)
            rows += measure(emulation, args.variants.split(";"), args.repeats)
            emulation.backend.close()
            del emulation
            torch.cuda.empty_cache()
            print(f"{name} EP {ranks}: {time.monotonic() - started:.1f} s", flush=True)
            if args.json:
                args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
