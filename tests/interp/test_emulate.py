"""What benchmarks/emulate.py plays, interpreted.  Streams do at once what they are told, and wait for nothing; so peers
have returned their results as soon as they may begin."""

import ctypes
import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from hopper_on_host import Nothing

import emulate
import played
from uniep.errors import UnsupportedError
from uniep.schedule import Schedule, Tile
from uniep.shapes import Shape
from uniep.stages import stages

RANKS = 4
SMALL = Tile(rows=64, columns=128, depth=64)
VARIANTS = {
    "": "fused",
    "overlap=pipelined,pipelined_from=0,activation_gradient=after": "pipelined",
    "operand=expanded,arrival_waves=2": "expanded",
    "preactivation=recomputed": "recomputed",
}


class Moment(Nothing):
    """An event; the next is a millisecond later."""

    def elapsed_time(self, later):
        return 1.0


class OnHost(emulate.Emulation):
    def __init__(self, *given):
        super().__init__(*given, device="cpu", dtype=torch.float16)
        self.backend.timetable.returned = self.backend.arena.flag_view("returned")[1 : self.ranks]


@pytest.fixture(scope="module")
def streams():
    """What was queued: (waits or writes, address, value)."""
    queued = []

    def queue(table, name, stream, address, value):
        is_write = name == "cuStreamWriteValue32_v2"
        assert is_write or name == "cuStreamWaitValue32_v2"
        if is_write:
            ctypes.c_int32.from_address(address).value = value
        queued.append((is_write, address, value))
        if address == table._pinned.data_ptr() + 4 * played.RETURNING:
            table.returned.fill_(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(played.Timetable, "_queue", queue)
        patch.setattr(emulate, "PATIENCE_S", 300.0)
        patch.setattr(torch.cuda, "Event", Moment)
        small = Schedule(gate_up=SMALL, down=SMALL, weight_gradient=SMALL, push_programs=2, beside_from=0)
        patch.setattr(emulate, "default_schedule", lambda *_: small)
        yield queued


@pytest.fixture(scope="module")
def emulation(streams):
    return OnHost(Shape("small", 64, 128, 8, 2), RANKS, 40, 361.0, 303.0)


@pytest.fixture(scope="module")
def serial(emulation):
    return emulate.results_of(emulation, emulation.way("overlap=serial"), "fwd_bwd")


@pytest.mark.parametrize("change", VARIANTS)
def test_bits_are_those_of_the_serial_variant(emulation, serial, change):
    """Of all that a forward and a backward leave; every part is something."""
    found = emulate.results_of(emulation, emulation.way(change), "fwd_bwd")
    assert found.keys() == serial.keys() - ({"h"} if "recomputed" in change else set())
    assert {"dx", "d(weight)", "dw13", "dw2", "returns of rank 3, fwd", "dweights of rank 3, fwd_bwd"} < found.keys()
    assert [part for part, t in found.items() if not torch.equal(t, serial[part])] == []
    assert all(t.isfinite().all() for t in found.values())
    assert [part for part, t in found.items() if not t.any()] == [f"dweights of rank {r}, fwd" for r in range(RANKS)]


@pytest.mark.parametrize("change", ["overlap=serial", *VARIANTS])
def test_both_calls_reach_every_stage(emulation, change):
    way = emulation.way(change)
    times, _, gradients = emulation.call(way, "fwd_bwd")
    names = [s.name for d in played.DIRECTIONS["fwd_bwd"] for s in stages(emulation.cfg, way, d)]
    assert sum(times.values()) == times["ms"] * (len(names) + 1)
    assert set(names) <= times.keys() and {"enter 2", "combine 2", "send 2"} <= times.keys()
    assert gradients is not None


def test_peers_come_by_the_timetable(emulation, streams):
    """Each flag is raised to the number of its call, behind its own wait."""
    streams.clear()
    emulation.call(emulation.way(""), "fwd_bwd")
    backend, table = emulation.backend, emulation.backend.timetable
    last, arena = backend.planner.calls_made, backend.arena
    word = {table._pinned.data_ptr() + 4 * at: at for at in range(96)}
    names = {
        arena.flag_view(name)[rank:].data_ptr(): (name, rank) for name in ("finished", "returned") for rank in range(4)
    }
    found = [(word.get(address, names.get(address)), value) for _, address, value in streams]
    wanted = [(played.GO, last - 1)]
    for call in (last - 1, last):
        wanted.append((played.BEGAN, call))
        for step in (1, 2, 3):
            wanted += [(played.ARRIVED, 64 * call + step), (("finished", 4 - step), call)]
        wanted += [(played.RETURNING, call), (played.RETURNED, call)]  # the wait for which is queued last
        wanted += [(("returned", rank), call) for rank in (1, 2, 3)]
    assert found == wanted


def test_one_call_at_a_time_and_each_when_it_is_due(emulation, monkeypatch):
    """The timetable of two calls: what their streams would tell is told in turn."""
    table, told = emulation.backend.timetable, []
    monkeypatch.setattr(emulation, "copy_us", 2000.0)
    monkeypatch.setattr(emulation, "return_us", 3000.0)

    class Words(list):
        def __setitem__(self, word, value):
            told.append((word, value, time.perf_counter_ns() / 1e6))
            super().__setitem__(word, value)
            if word == played.GO:
                super().__setitem__(played.BEGAN, 7)
            if (word, value) == (played.ARRIVED, 7 * 64 + 3):
                super().__setitem__(played.RETURNING, 7)
            if (word, value) == (played.RETURNED, 7):
                super().__setitem__(played.BEGAN, 8)
                super().__setitem__(played.RETURNING, 8)

    monkeypatch.setattr(table, "words", Words([0] * 96))
    emulation._play(range(7, 9), time.monotonic() + 60)
    of_7 = [(played.ARRIVED, 7 * 64 + step) for step in (1, 2, 3)]
    of_8 = [(played.ARRIVED, 8 * 64 + step) for step in (1, 2, 3)]
    turns = [(word, value) for word, value, _ in told]
    assert turns == [(played.GO, 7), *of_7, (played.RETURNED, 7), of_8[0], (played.RETURNED, 8), *of_8[1:]]
    at = dict(zip(turns, (ms for *_, ms in told), strict=True))
    assert at[of_7[0]] - at[played.GO, 7] >= 2 and at[played.RETURNED, 7] - at[of_7[2]] >= 3
    with pytest.raises(RuntimeError, match=r"calls \[9\] did not end within .* waiting for \[\(16, 9\), \(48, 9\)\]"):
        emulation._play(range(9, 10), time.monotonic())


def test_a_second_gpu_sends_what_peers_send(emulation, streams, monkeypatch):
    """Their memory is its own; a flag is raised when what it tells of has come, and in time; tokens come where the
    sources before this rank, one after the other, put them."""
    events, told = [], []

    class Event(Nothing):
        def __init__(self, *given, **how):
            events.append(self)

        def query(self):
            return len(told) >= events.index(self)  # when all before it have come

    backed = emulate.Emulation(emulation.shape, RANKS, 40, 361.0, 303.0, "cpu", "cpu", torch.float16)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(backed, "return_us", 3000.0)
    wanted = [t.clone() for t in backed.received]
    assert all(t.any() for t in wanted)
    for t in (*backed.received, backed.rows[1]):
        t.zero_()
    backed.rows[0].fill_(1)

    class Words(list):
        def __setitem__(self, word, value):
            told.append((word, value))
            super().__setitem__(word, value)
            if word == played.GO:
                super().__setitem__(played.BEGAN, 7)
                super().__setitem__(played.RETURNING, 7)

    monkeypatch.setattr(backed.backend.timetable, "words", Words([0] * 96))
    backed._play(range(7, 8), time.monotonic() + 60)
    arrived = [(played.ARRIVED, 7 * 64 + step) for step in (1, 2, 3)]
    assert sorted(told) == sorted([(played.GO, 7), *arrived, (played.RETURNED, 7)]) and told[-1] == (played.RETURNED, 7)
    assert [step for step in told if step in arrived] == arrived
    assert all(torch.equal(*pair) for pair in zip(backed.received, wanted, strict=True)) and backed.rows[1].all()
    memories = {t.data_ptr() for name in ("returns", "receive") for t in backed.backend.arena.everywhere[name]}
    assert len(memories) == 2 * RANKS
    backed.backend.close()


def test_a_host_that_waits_for_the_device_is_let_go(emulation, monkeypatch):
    backend = emulation.backend
    usual, words = backend.forward, backend.timetable.words

    def loads_a_kernel(*given, **how):
        while words[played.GO] < 2**30:
            time.sleep(0.01)
        return usual(*given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(emulate, "PATIENCE_S", 0.1)
        patch.setattr(backend, "forward", loads_a_kernel)
        with pytest.raises(RuntimeError, match=r"did not end within 0\.1 s: words \["):
            emulation.call(emulation.way(""), "fwd")
    assert emulation.call(emulation.way(""), "fwd")[0]["ms"] == 1.0


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ("transfer=push", "arrived in gate_up of the forward, arrived in down_grad of the backward"),
        ("transfer=push,overlap=serial", "finished in dispatch of the forward, finished in dispatch of the backward"),
        ("received=again", "entered in dispatch_again of the backward"),
        ("overlap=mega", "returned in forward of the forward, returned in backward of the backward"),
    ],
)
def test_what_nobody_plays_is_refused(emulation, change, flags):
    with pytest.raises(UnsupportedError, match=f"{change}.* waits for {flags}, which nobody plays"):
        emulation.way(change)


def test_a_variant_with_other_bits_is_left_out(emulation, monkeypatch, capsys):
    usual = emulate.results_of

    def of_fused_wrong(emulation, way, direction):
        found = usual(emulation, way, direction)
        return {name: t + (way.waits and not way.recomputes) for name, t in found.items()}

    monkeypatch.setattr(emulate, "results_of", of_fused_wrong)
    ways = {change: emulation.way(change) for change in ("", "preactivation=recomputed")}
    assert list(emulate.with_serial_bits(emulation, ways, "fwd")) == ["preactivation=recomputed"]
    assert "bits differ from serial: returns of rank 0, fwd" in capsys.readouterr().out


def test_a_run_from_its_arguments_to_its_file(streams, monkeypatch, tmp_path):
    file = tmp_path / "rows.json"
    of_run = ["--shapes", "64x128x8x2", "--tokens", "40", "--variants", ";overlap=serial", "--json", str(file)]
    monkeypatch.setattr(emulate, "Emulation", OnHost)
    monkeypatch.setattr(sys, "argv", ["emulate.py", *of_run, "--ranks", "4", "--repeats", "1"])
    emulate.main()
    rows = json.loads(file.read_text())["rows"]
    assert [(row["direction"], row["impl"], row["overlap"], row["ms"], row["ms_all"]) for row in rows] == [
        (direction, impl, overlap, 1.0, [1.0])
        for direction in ("fwd", "fwd_bwd")
        for impl, overlap in (("uniep", "fused"), ("uniep@overlap=serial", "serial"))
    ]
    monkeypatch.setattr(sys, "argv", ["emulate.py", "--directions", "fwd,bwd"])
    with pytest.raises(SystemExit):
        emulate.main()


def test_processes_compile_first(monkeypatch, tmp_path):
    """Each its shape and ranks, with the other arguments of the run; one that fails ends it."""
    script = tmp_path / "told.py"
    script.write_text("import sys; open(f'{sys.argv[5]}.txt', 'w').write(' '.join(sys.argv[1:])); "
                      "sys.exit(sys.argv[5] == '8')")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--tokens=40"])
    with pytest.raises(RuntimeError, match=r"compiling failed for \[\('large', 8\)\]"):
        emulate.compile_beside([("small", 4), ("large", 8)])
    assert (tmp_path / "4.txt").read_text() == "--tokens=40 --shapes small --ranks 4 --repeats 0"
