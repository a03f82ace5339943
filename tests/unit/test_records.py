"""Recorded calls: both walks make the calls that the recording noted, with the addresses of the run.

No GPU: the driver's functions are stubs that write down what they are given.
"""

import ctypes
import itertools
import struct
import types

import pytest
import torch

from uniep.launch import driver, records
from uniep.launch.driver import Block, LaunchConfig, Varying
from uniep.launch.records import Driver, RecordedCall, Recording

STREAMS = (11, 22)
FACTS = {"elem_size": 2, "elem_type": 7, "block_size": [8, 16], "swizzle": 3}


class Stub:
    """A driver that writes down its calls.  fails: the number of the call that returns an error, and the error."""

    def __init__(self, fails=(-1, 0)):
        self.calls, self.fails = [], fails
        self.driver = Driver(*(kind(getattr(self, name)) for name, kind in Driver._fields_))

    def note(self, *what):
        self.calls.append(what)
        return self.fails[1] if len(self.calls) - 1 == self.fails[0] else 0

    def launch(self, config, function, parameters, extra):
        given = LaunchConfig.from_address(config)
        pointers = (ctypes.c_void_p * 7).from_address(parameters)
        memory = [ctypes.string_at(p, size) for p, size in zip(pointers, SIZES, strict=True)]
        return self.note("launch", given.programs, given.threads, given.stream, function, memory, extra)

    def copy(self, target, source, size, stream):
        return self.note("copy", target, source, size, stream)

    def fill(self, target, word, words, stream):
        return self.note("fill", target, word, words, stream)

    def record(self, event, stream):
        return self.note("record", event, stream)

    def wait(self, stream, event, flags):
        return self.note("wait", stream, event, flags)

    def encode(self, where, dtype, rank, base, dims, strides, box, steps, *rest):
        longs, words = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        lists = [list(kind.from_address(p)) for kind, p in ((longs, dims), (words, box), (words, steps))]
        ctypes.memmove(where, struct.pack("<q", base) * 16, 128)
        return self.note("encode", dtype, rank, base, *lists, ctypes.c_uint64.from_address(strides).value, rest)


SIZES = [8, 4, 128, 4, 4, 8, 8]  # memory, an integer, a map of two extents, and their strides


class Kernel:
    """What `driver.Compiled` shows of a kernel with a pointer, a varying integer and a map."""

    def __init__(self):
        self.compiled = types.SimpleNamespace(metadata=types.SimpleNamespace(name="a_kernel"))
        self.sizes = [*SIZES, 8, 8]
        self.function, self.device, self.map_facts, self.pointers = 99, 0, {2: FACTS}, {0}
        self.config = LaunchConfig(1, 1, 1, 128, 1, 1, 0, None, None, 0)
        self.format, self.places, end = "<", [], 0
        for size in self.sizes:
            start = -(-end // min(size, 64)) * min(size, 64)
            self.format += f"{start - end}x" + {128: "128s", 8: "q", 4: "i"}[size]
            self.places.append(start)
            end = start + size
        self.size = end


def recorded(monkeypatch, given, lasting, address=None):
    """A recording of a call: a launch, a fill, a wait of the second stream, a copy on it; behind a release, a copy from
    a second result."""
    kernel, cpu = Kernel(), torch.device("cpu")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAMS[0], raising=False)
    recording = Recording(given, lasting, STREAMS)
    block, rest = Block(given[1], (4, 16), (16, 1), (8, 16)), (4, 16, 16, 1)
    with driver.watching(recording):
        slab = [driver.temporary(n, dtype=torch.int64, device=cpu) for n in (3, 70)]
        brief = driver.temporary(9, dtype=torch.int64, device=cpu, briefly=True)
        out = driver.result(5, dtype=torch.float32, device=cpu)
    values = [slab[1].data_ptr() + 16, Varying("layer", 5), b"m" * 128, *rest]
    recording.launched(kernel, 7, values, [(2, block)])
    recording.filled(brief.data_ptr() + 8, 0xFFFFFFFF, 5, STREAMS[0])
    recording.followed(STREAMS[1], STREAMS[0], types.SimpleNamespace(cuda_event=77))
    recording.copied(lasting[0].data_ptr() + 4, address or given[0].data_ptr(), 12, STREAMS[1])
    with driver.watching(recording):
        driver.release()
        later = driver.result(2, dtype=torch.float32, device=cpu)
    recording.copied(out.data_ptr(), later.data_ptr(), 8, STREAMS[0])
    return recording


def inputs():
    return [torch.zeros(3), torch.zeros(4, 16, dtype=torch.float16)], [torch.zeros(8)]


def set_values(program, given, layer):
    addresses = 0x5000, 0x6000, *(t.data_ptr() for t in given), 0x7000, 0x8000
    struct.pack_into(program._format, program._values, 0, *STREAMS, *addresses, layer, 0, 0)


def walked(program, walk, given, layer, stub):
    """What a run hands to the driver, with slabs and results at made-up addresses."""
    set_values(program, given, layer)
    return walk(stub.driver, program.steps, 0, len(program.steps), program._values)


WALKS = {"python": records.walk_in_python, "c": records.compiled_walk()}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_a_run_has_the_addresses_of_the_run(monkeypatch, walk):
    given, lasting = inputs()
    program = RecordedCall(recorded(monkeypatch, given, lasting))
    assert program.slabs == {"temporary": 256 + 768, "brief": 256}
    others, stub = inputs()[0], Stub()
    assert walked(program, walk, others, -3, stub) == 0
    x, matrix = (t.data_ptr() for t in others)
    encoded = ("encode", 7, 2, matrix, [16, 4], [16, 8], [1, 1], 32, (0, 3, driver.L2_PROMOTION_128B, 0))
    packed = [
        struct.pack("<q", 0x5000 + 256 + 16), struct.pack("<i", -3), struct.pack("<q", matrix) * 16,
        struct.pack("<i", 4), struct.pack("<i", 16), struct.pack("<q", 16), struct.pack("<q", 1),
    ]  # fmt: skip
    rest = [
        ("launch", 7, 128, STREAMS[0], 99, packed, None), ("fill", 0x6008, 0xFFFFFFFF, 5, STREAMS[0]),
        ("record", 77, STREAMS[0]), ("wait", STREAMS[1], 77, 0),
        ("copy", lasting[0].data_ptr() + 4, x, 12, STREAMS[1]), ("copy", 0x7000, 0x8000, 8, STREAMS[0]),
    ]  # fmt: skip
    assert stub.calls == [encoded, *rest]
    stub.calls.clear()
    assert walked(program, walk, others, -3, stub) == 0
    assert stub.calls == rest, "a map is made only if its memory is elsewhere"


def test_memory_of_a_run_does_not_overlap(monkeypatch):
    """But for results behind the release, which may take the place of what was released."""
    given, lasting = inputs()
    program = RecordedCall(recorded(monkeypatch, given, lasting))
    monkeypatch.setattr(program, "walk", lambda *_: None)
    monkeypatch.setattr(Driver, "of_library", lambda: None)
    addresses = [t.data_ptr() for t in given]
    first, later = program.run(STREAMS, addresses, (1, 2, 3), torch.device("cpu"))
    slab, brief, *rest = list(program._values)[len(STREAMS) :]
    assert rest == [*addresses, first.data_ptr(), later.data_ptr(), 1, 2, 3]
    sizes = {slab: 1024, brief: 256, first.data_ptr(): first.nbytes}
    ends = sorted((start, start + size) for start, size in sizes.items())
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
    assert not slab - later.nbytes < later.data_ptr() < slab + 1024


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_the_step_that_fails_is_named(monkeypatch, walk):
    given, lasting = inputs()
    program = RecordedCall(recorded(monkeypatch, given, lasting))
    for call, step in enumerate((0, 0, 1, 2, 2, 3, 4)):
        for made in program.steps[0].maps[:1]:
            made.encoded = 0
        stub = Stub((call, 700))
        assert walked(program, walk, given, 1, stub) == step << 32 | 700
        assert len(stub.calls) == call + 1


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_a_thread_without_a_context_goes_on_where_it_stopped(monkeypatch, walk):
    given, lasting = inputs()
    program = RecordedCall(recorded(monkeypatch, given, lasting))
    stub = Stub((2, driver.NO_CONTEXT))
    library = types.SimpleNamespace(cuDevicePrimaryCtxRetain=lambda *_: 0, cuCtxSetCurrent=lambda *_: 0)
    monkeypatch.setattr(driver, "libcuda", lambda: library)
    monkeypatch.setattr(records, "compiled_walk", lambda: walk)
    set_values(program, given, 1)
    program.walk(0, stub.driver)
    assert [c[0] for c in stub.calls] == ["encode", "launch", "fill", "fill", "record", "wait", "copy", "copy"]
    stub.fails = len(stub.calls) + 1, 700
    with pytest.raises(RuntimeError, match="fill, step 1 of a recorded call, failed with CUDA error 700"):
        program.walk(0, stub.driver)


def test_unknown_memory_spoils_a_recording(monkeypatch):
    given, lasting = inputs()
    elsewhere = torch.zeros(3)
    recording = recorded(monkeypatch, given, lasting, elsewhere.data_ptr())
    assert "copy uses memory at" in recording.why_not


def test_memory_given_twice_spoils_a_recording(monkeypatch):
    given, lasting = inputs()
    recording = recorded(monkeypatch, [*given, given[0]], lasting)
    assert "given twice" in recording.why_not


def test_temporary_memory_stays_until_the_end(monkeypatch):
    """Or else a second allocation in its place would be taken for it."""
    given, lasting = inputs()
    recording, made = Recording(given, lasting, STREAMS), []
    with driver.watching(recording):
        for _ in range(3):
            made.append(driver.temporary(1000, dtype=torch.int64, device=torch.device("cpu")).data_ptr())
    assert len(set(made)) == 3
    recording.allocated(lasting[0], "temporary")
    assert "was freed" in recording.why_not


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda t: t[1:].view(-1).unbind(), ""),
        (lambda t: torch.empty(3, dtype=t.dtype), ""),
        (lambda t: t.detach()[::2].as_strided((1,), (1,)), ""),
        (lambda t: torch.zeros(3), "PyTorch runs aten.zeros"),
        (lambda t: t.fill_(1), "PyTorch runs aten.fill_"),
        (lambda t: t.clone(), "PyTorch runs aten.clone"),
    ],
)
def test_what_torch_computes_spoils_a_recording(compute, said):
    recording, given = Recording([], [], STREAMS), torch.ones(4)
    with records.NothingElse(recording):
        compute(given)
    assert recording.why_not.startswith(said)
    assert bool(recording.why_not) == bool(said)


def test_a_recording_imports_no_compiler():
    """PyTorch would wrap the method in one of its own, which imports torch._dynamo."""
    assert records.NothingElse.__torch_dispatch__.__code__.co_filename == records.__file__


def test_halves_of_one_tensor_are_told_apart(monkeypatch):
    """w1 and w3 as views of one w13: the second begins inside the first."""
    whole, lasting = torch.zeros(2, 4, 16, dtype=torch.float16), [torch.zeros(8)]
    given = [whole[:, 2:].view(torch.float32)[..., :8], whole[:, :2]]
    program = RecordedCall(recorded(monkeypatch, given, lasting))
    other, stub = torch.zeros_like(whole), Stub()
    again = [other[:, 2:].view(torch.float32)[..., :8], other[:, :2]]
    walked(program, records.walk_in_python, again, 1, stub)
    assert stub.calls[0][3] == other.data_ptr()
    assert stub.calls[-2][2] == other[:, 2:].data_ptr()


def test_released_memory_may_be_a_result(monkeypatch):
    """Its range is forgotten, so that a result in its place is not taken for it."""
    given, lasting = inputs()
    recording = recorded(monkeypatch, given, lasting)
    assert {r.base for r in recording._ranges} == {
        None, ("given", 0), ("given", 1), ("temporary", 0), ("result", 0), ("result", 1)
    }  # fmt: skip
