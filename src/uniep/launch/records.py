"""Recorded calls: what a call has launched, made again in one go.

`driver.launch` looks at every argument of every kernel, which takes the host longer than the device needs for a call of
few tokens.  But a call with as many tokens and rows as an earlier one launches the same, at other addresses.  So a
`Recording` notes each launch, copy, fill and wait between streams while a call runs, and which memory each address
belongs to: what the call was given, its results, temporary memory, or memory that stays.  It becomes a `RecordedCall`,
in which only addresses and the few integers of `driver.Varying` are left open.  To run that is to allocate the results,
and a slab for all temporary memory, and to walk the steps: by walk.c, built once with the compiler that Triton needs,
or, where there is none, by `walk_in_python`, which does the same.

Addresses that belong to nothing that is known spoil a recording, and so does what PyTorch computes by itself: such
calls stay as they are.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import itertools
import logging
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from uniep.launch.driver import (
    L2_PROMOTION_128B,
    Block,
    Compiled,
    LaunchConfig,
    MapShape,
    Varying,
    in_context,
    libcuda,
    map_aligned,
    map_shape,
)

log = logging.getLogger("uniep")

VARYING = "layer", "draw, low half", "draw, high half"
"""Names of the integers that differ between calls which launch the same (`driver.Varying`), in the order of a run."""

SLAB_ALIGN = 256
LAUNCH, COPY, FILL, FOLLOW = range(4)


class Place(ctypes.Structure):
    """values[slot] + offset; without a slot (-1) the offset alone."""

    _fields_ = (("slot", ctypes.c_int64), ("offset", ctypes.c_int64))

    def find(self, values: Sequence[int]) -> int:
        return (values[self.slot] if self.slot >= 0 else 0) + self.offset


class _Patch(ctypes.Structure):
    """A parameter that is written before a launch: 4 or 8 bytes."""

    _fields_ = (("where", ctypes.c_void_p), ("place", Place), ("bytes", ctypes.c_int64))


class _Map(ctypes.Structure):
    """A tensor map that is made before a launch if its memory is elsewhere now.  encoded: the address in it, or 0."""

    _fields_ = (
        ("where", ctypes.c_void_p), ("place", Place), ("encoded", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 5), ("strides", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5), ("steps", ctypes.c_uint32 * 5),
        ("type", ctypes.c_uint32), ("rank", ctypes.c_uint32), ("swizzle", ctypes.c_uint32),
        ("promotion", ctypes.c_uint32),
    )  # fmt: skip


class _Step(ctypes.Structure):
    """kind LAUNCH: a kernel on `stream`.  COPY: `size` bytes from source to target.  FILL: `size` words of target =
    source.offset.  FOLLOW: the stream `target` goes on when `stream` has come to here; `event` marks the point."""

    _fields_ = (
        ("kind", ctypes.c_int64), ("stream", Place),
        ("config", ctypes.c_void_p), ("function", ctypes.c_void_p), ("parameters", ctypes.c_void_p),
        ("patches", ctypes.POINTER(_Patch)), ("maps", ctypes.POINTER(_Map)),
        ("num_patches", ctypes.c_int64), ("num_maps", ctypes.c_int64),
        ("target", Place), ("source", Place), ("size", ctypes.c_int64), ("event", ctypes.c_void_p),
    )  # fmt: skip


_INT, _WORD, _LONG, _POINTER = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_launch = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, _POINTER, _POINTER)
_copy = ctypes.CFUNCTYPE(_INT, _LONG, _LONG, ctypes.c_size_t, _POINTER)
_fill = ctypes.CFUNCTYPE(_INT, _LONG, _WORD, ctypes.c_size_t, _POINTER)
_record = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER)
_wait = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, _WORD)
_encode = ctypes.CFUNCTYPE(
    _INT, _POINTER, _WORD, _WORD, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _WORD, _WORD, _WORD, _WORD
)


class Driver(ctypes.Structure):
    """The driver's functions that a walk calls."""

    _fields_ = (
        ("launch", _launch), ("copy", _copy), ("fill", _fill), ("record", _record), ("wait", _wait),
        ("encode", _encode),
    )  # fmt: skip

    @classmethod
    @functools.cache
    def of_library(cls) -> Driver:
        library = libcuda()
        names = (
            "cuLaunchKernelEx", "cuMemcpyDtoDAsync_v2", "cuMemsetD32Async", "cuEventRecord", "cuStreamWaitEvent",
            "cuTensorMapEncodeTiled",
        )  # fmt: skip
        kinds = (kind for _, kind in cls._fields_)
        return cls(*(ctypes.cast(getattr(library, name), kind) for name, kind in zip(names, kinds, strict=True)))


# ------------------------------------------------------------------------------------------------------- recording


class _Range(NamedTuple):
    """Memory.  base: what its address belongs to, or None if it stays where it is; offset: inside of that."""

    start: int
    end: int
    base: tuple[str, int] | None
    offset: int


def _range(tensor: Tensor, base: tuple[str, int] | None, offset: int = 0) -> _Range:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (reach + 1) * tensor.element_size() if tensor.numel() else 0
    return _Range(tensor.data_ptr(), tensor.data_ptr() + size, base, offset)


class _Owner(NamedTuple):
    """What an address belongs to, and how far behind its begin it lies; base None: the address itself."""

    base: tuple[str, int] | None
    offset: int


class Recording:
    """Notes of one call while it runs, see `driver.Watcher`.  given: tensors that differ from call to call, always in
    this order.  lasting: memory that stays.  streams: handles of those that the call uses, the current one first.

    results: memory that the call has allocated and may return, in order.  returned: of these, what it does return.
    slabs: bytes of temporary memory, and of that which was released.  kept_results: those made before that.
    """

    def __init__(self, given: Sequence[Tensor], lasting: Sequence[Tensor], streams: Sequence[int]) -> None:
        self.num_given, self.streams = len(given), streams
        self.results: list[Tensor] = []
        self.returned: list[int | None] | None = None
        self.slabs = {"temporary": 0, "brief": 0}
        self._alive: dict[str, list[Tensor]] = {"temporary": [], "brief": []}
        self.results_before_release: int | None = None
        self.why_not = ""
        self.notes: list[tuple[Any, ...]] = []
        known = [_range(t, None, t.data_ptr()) for t in lasting]
        known += [_range(t, ("given", number)) for number, t in enumerate(given)]
        self._ranges = [r for r in known if r.end > r.start]

    def spoil(self, why: str) -> None:
        self.why_not = self.why_not or why

    def returns(self, outputs: Sequence[Tensor | None]) -> None:
        """The call is over.  Memory that is not new spoils the recording."""
        place = {id(t): number for number, t in enumerate(self.results)}
        if any(t is not None and id(t) not in place for t in outputs):
            self.spoil("it returns memory that is not new")
        self.returned = [None if t is None else place.get(id(t)) for t in outputs]

    def allocated(self, memory: Tensor, what: str) -> None:
        if what == "result":
            made = _range(memory, ("result", len(self.results)))
            self.results.append(memory)
        else:
            made = _range(memory, (what, 0), self.slabs[what])
            self.slabs[what] += -(-memory.nbytes // SLAB_ALIGN) * SLAB_ALIGN
            self._alive[what].append(memory)  # or else a later allocation may take its place
        if made.end > made.start:
            if any(r.start < made.end and made.start < r.end for r in self._ranges):
                self.spoil("memory was freed that it may use")
            self._ranges.append(made)

    def released(self) -> None:
        self.results_before_release = len(self.results)
        self._alive["brief"].clear()
        self._ranges = [r for r in self._ranges if r.base is None or r.base[0] != "brief"]

    def launched(
        self, known: Compiled, programs: int, values: Sequence[Any], blocks: Sequence[tuple[int, Block]]
    ) -> None:
        name = known.compiled.metadata.name
        maps = {first: map_shape(block, known.map_facts[first]) for first, block in blocks}  # blocks keep memory alive
        owners = {first: self._owner(block.base.data_ptr(), name) for first, block in blocks}
        owners |= {index: self._owner(values[index], name) for index in known.pointers}
        varying = {index: value.name for index, value in enumerate(values) if isinstance(value, Varying)}
        owners |= {index: _Owner(("varying", VARYING.index(name)), 0) for index, name in varying.items()}
        stream = torch._C._cuda_getCurrentRawStream(known.device)
        self.notes.append((LAUNCH, known, programs, values, maps, owners, self._stream(stream, name)))

    def copied(self, target: int, source: int, size: int, stream: int) -> None:
        owners = self._owner(target, "copy"), self._owner(source, "copy")
        self.notes.append((COPY, *owners, size, self._stream(stream, "copy")))

    def filled(self, target: int, word: int, words: int, stream: int) -> None:
        self.notes.append((FILL, self._owner(target, "fill"), word, words, self._stream(stream, "fill")))

    def followed(self, later: int, earlier: int, point: torch.cuda.Event) -> None:
        streams = self._stream(later, "follow"), self._stream(earlier, "follow")
        self.notes.append((FOLLOW, *streams, point))

    def _owner(self, address: int, user: str) -> _Owner:
        """Of what holds an address; if several do, as halves of one tensor, of what begins nearest to it."""
        if address == 0:  # of an empty tensor
            return _Owner(None, 0)
        holding = sorted((r for r in self._ranges if r.start <= address < r.end), key=lambda r: r.start)
        if not holding:
            self.spoil(f"{user} uses memory at {address:#x}, which is neither given nor lasting")
            return _Owner(None, address)
        found = {_Owner(r.base, r.offset + address - r.start) for r in holding if r.start == holding[-1].start}
        if len(found) > 1:
            self.spoil(f"{user} uses memory that was given twice")
        return found.pop()

    def _stream(self, handle: int, user: str) -> int:
        if handle not in self.streams:
            self.spoil(f"{user} runs on a stream that the call does not have")
            return 0
        return list(self.streams).index(handle)


class NothingElse(TorchDispatchMode):
    """Spoils a recording if PyTorch computes anything by itself: that would be missing when the call is made again."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks.  What it does by default imports torch._dynamo, which takes seconds."""
        return False

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            self.recording.spoil(f"PyTorch runs {func}")
        return func(*args, **(kwargs or {}))


class RecordedCall:
    """A call that can be made again: see the module's docstring.  labels: of the steps.

    The values of a walk: handles of streams, addresses of both slabs, of what is given and of the results, `VARYING`.
    """

    def __init__(self, recording: Recording) -> None:
        if recording.why_not:
            raise ValueError(recording.why_not)
        self.slabs = recording.slabs
        self._results = [(t.shape, t.dtype) for t in recording.results]
        self._returned = recording.returned if recording.returned is not None else list(range(len(self._results)))
        before = recording.results_before_release
        self._before = len(self._results) if before is None else before
        counts = {
            "stream": len(recording.streams), "temporary": 1, "brief": 1, "given": recording.num_given,
            "result": len(self._results), "varying": len(VARYING),
        }  # fmt: skip
        ends = itertools.accumulate(counts.values(), initial=0)
        self._slot = dict(zip(counts, ends, strict=False))
        self._values = (ctypes.c_int64 * sum(counts.values()))()
        self._format = f"<{len(self._values)}q"
        self._kept: list[Any] = []  # what steps point to
        self.labels: list[str] = []
        make: dict[int, Callable[..., _Step]] = {
            LAUNCH: self._launch,
            COPY: self._copy,
            FILL: self._fill,
            FOLLOW: self._follow,
        }
        made = [make[kind](*note) for kind, *note in recording.notes]
        self.steps = (_Step * len(made))(*made)

    # --- making steps ---

    def _place(self, owner: _Owner) -> Place:
        return Place(-1 if owner.base is None else self._slot[owner.base[0]] + owner.base[1], owner.offset)

    def _launch(
        self, known: Compiled, programs: int, values: Sequence[Any], map_shapes: dict[int, MapShape],
        owners: dict[int, _Owner], stream: int,
    ) -> _Step:  # fmt: skip
        self.labels.append(known.compiled.metadata.name)
        memory, offset = map_aligned(known.size)
        struct.pack_into(known.format, memory, offset, *values, 0, 0)
        base = ctypes.addressof(memory) + offset
        parameters = (ctypes.c_void_p * len(known.places))(*(base + place for place in known.places))
        config = LaunchConfig.from_buffer_copy(known.config)
        config.programs = programs
        maps = [
            _Map(
                base + known.places[index], self._place(owners[index]), 0, shape.dims, shape.strides, shape.box,
                (1,) * len(shape.dims), shape.type, len(shape.dims), shape.swizzle, L2_PROMOTION_128B,
            )
            for index, shape in map_shapes.items()
        ]  # fmt: skip
        patches = [
            _Patch(base + known.places[index], self._place(owner), known.sizes[index])
            for index, owner in owners.items()
            if index not in map_shapes and owner.base is not None
        ]
        own_patches, own_maps = (_Patch * len(patches))(*patches), (_Map * len(maps))(*maps)
        self._kept += [known, memory, parameters, config, own_patches, own_maps]
        return _Step(
            LAUNCH, Place(stream, 0), ctypes.addressof(config), known.function, ctypes.addressof(parameters),
            own_patches, own_maps, len(patches), len(maps),
        )  # fmt: skip

    def _copy(self, target: _Owner, source: _Owner, size: int, stream: int) -> _Step:
        self.labels.append("copy")
        return _Step(COPY, Place(stream, 0), target=self._place(target), source=self._place(source), size=size)

    def _fill(self, target: _Owner, word: int, words: int, stream: int) -> _Step:
        self.labels.append("fill")
        return _Step(FILL, Place(stream, 0), target=self._place(target), source=Place(-1, word), size=words)

    def _follow(self, later: int, earlier: int, point: torch.cuda.Event) -> _Step:
        self.labels.append("follow")
        self._kept.append(point)
        return _Step(FOLLOW, Place(earlier, 0), target=Place(later, 0), event=point.cuda_event)

    # --- running ---

    def run(
        self, streams: Sequence[int], given: Sequence[int], varying: Sequence[int], device: torch.device
    ) -> list[Tensor | None]:
        """What the call returns.  given: addresses, as in the recording, all multiples of 16."""
        like: dict[str, Any] = {"dtype": torch.uint8, "device": device}
        temporary, brief = torch.empty(self.slabs["temporary"], **like), torch.empty(self.slabs["brief"], **like)
        slabs = temporary.data_ptr(), brief.data_ptr()
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._results[: self._before]]
        if self._before < len(self._results):
            del brief  # for results that are written when nothing in it is read any more
        results += [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._results[self._before :]]
        made = [t.data_ptr() for t in results]
        struct.pack_into(self._format, self._values, 0, *streams, *slabs, *given, *made, *varying)
        self.walk(device.index, Driver.of_library())
        return [None if number is None else results[number] for number in self._returned]

    def walk(self, device: int, driver: Driver) -> None:
        """All steps, with the values that are set."""
        count, first = len(self.steps), 0
        walk = compiled_walk() or walk_in_python

        def go_on() -> int:
            nonlocal first
            failed = walk(driver, self.steps, first, count, self._values)
            first = failed >> 32
            return failed & 0xFFFFFFFF

        if code := in_context(device, go_on):
            raise RuntimeError(f"{self.labels[first]}, step {first} of a recorded call, failed with CUDA error {code}")


def walk_in_python(driver: Driver, steps: Any, first: int, count: int, values: Any) -> int:
    """As uniep_walk of walk.c: the number of the step that fails in the upper 32 bits, and its code; 0 if none does."""
    for number in range(first, count):
        if code := _run(driver, steps[number], values):
            return number << 32 | code
    return 0


def _run(driver: Driver, step: _Step, values: Any) -> int:
    stream = step.stream.find(values)
    if step.kind == COPY:
        return driver.copy(step.target.find(values), step.source.find(values), step.size, stream)
    if step.kind == FILL:
        return driver.fill(step.target.find(values), step.source.offset, step.size, stream)
    if step.kind == FOLLOW:
        return driver.record(step.event, stream) or driver.wait(step.target.find(values), step.event, 0)
    for patch in step.patches[: step.num_patches]:
        value = patch.place.find(values).to_bytes(8, "little", signed=True)
        ctypes.memmove(patch.where, value, patch.bytes)
    for made in step.maps[: step.num_maps]:
        base = made.place.find(values)
        if base == made.encoded:
            continue
        code = driver.encode(
            made.where, made.type, made.rank, base, made.dims, made.strides, made.box, made.steps, 0, made.swizzle,
            made.promotion, 0,
        )  # fmt: skip
        if code:
            return code
        made.encoded = base
    LaunchConfig.from_address(step.config).stream = stream
    return driver.launch(step.config, step.function, step.parameters, None)


@functools.cache
def compiled_walk() -> Callable[..., int] | None:
    """uniep_walk of walk.c; None if there is no C compiler, which is logged.  It is built once and kept beside Triton's
    kernels."""
    from triton.runtime.cache import get_cache_manager

    source = importlib.resources.files("uniep.launch").joinpath("walk.c").read_text()
    cache = get_cache_manager(hashlib.sha256(f"{source}{os.uname().machine}".encode()).hexdigest())
    path = cache.get_file("walk.so")
    if path is None:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
        try:
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder)
                (made / "walk.c").write_text(source)
                command = [compiler or "cc", "-O2", "-shared", "-fPIC", "walk.c", "-o", "walk.so"]
                subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
                path = cache.put((made / "walk.so").read_bytes(), "walk.so", binary=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            log.warning("no C compiler, so calls cost more host time; set CC (%s)", said.strip().splitlines()[-1])
            return None
    walk = ctypes.CDLL(path).uniep_walk
    walk.restype, walk.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 2, _POINTER]
    return lambda driver, steps, first, count, values: walk(ctypes.addressof(driver), steps, first, count, values)
