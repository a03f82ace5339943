"""Launching compiled kernels in a few microseconds.

Triton's own launch looks at every argument anew: its type, its alignment, its tensor map.  That takes 40 to 90 us here,
several times a call.  What it finds is the same every time, so `launch` lets Triton compile and launch once for each
kernel, constants and types, and from then on hands the arguments to the driver itself; at a bundle that many launches
take it looks once.  Where that cannot work (the interpreter, no GPU, a kernel whose parameters are not as expected,
misaligned memory) Triton launches.

A call that is made again and again need not be looked at at all: see `uniep.launch.records`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger("uniep")

MAP_BYTES, MAP_ALIGN = 128, 64  # of a CUtensorMap
COMPILED_S = 0.1  # a launch that takes longer has compiled
L2_PROMOTION_128B = 2
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MOST_MAPS = 256  # kept per kernel; activations come and go
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\b[^,\[\])]*(?:\[(\d+)\])?")


class Part(NamedTuple):
    """A contiguous part of a contiguous tensor: for kernels what a view is, made in a tenth of the time."""

    base: Tensor
    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.base.get_device()


Memory = Tensor | Part


def tensor(memory: Memory) -> Tensor:
    """What a Part stands for."""
    if isinstance(memory, Tensor):
        return memory
    size = math.prod(memory.shape) * memory.dtype.itemsize
    offset = memory.address - memory.base.data_ptr()
    own = memory.base.view(-1).view(torch.uint8)[offset : offset + size]
    return own.view(memory.dtype).view(memory.shape)


def unbind(whole: Tensor) -> list[Part]:
    """A contiguous tensor along its first dimension."""
    dtype, shape, step = whole.dtype, whole.shape[1:], whole.stride(0) * whole.dtype.itemsize
    first = whole.data_ptr()
    return [Part(whole, first + index * step, dtype, shape) for index in range(whole.shape[0])]


class Block(NamedTuple):
    """A matrix or more whose blocks a kernel loads and stores as a whole (a TMA descriptor): shape, strides, block."""

    base: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class Varying(int):
    """An integer argument that may differ when a recorded call is made again.  name: by which the caller gives it."""

    name: str

    def __new__(cls, name: str, value: int) -> Varying:
        made = super().__new__(cls, value)
        made.name = name
        return made


T = TypeVar("T", bound=tuple[Any, ...])


class Bundle(Generic[T]):
    """A NamedTuple of memory, looked at once, for many launches.  fields: see `uniep.kernels.arguments`.

    kind: a number that bundles of the same types share.
    """

    __slots__ = ("addresses", "bits", "device", "fields", "kind")

    def __init__(self, fields: T) -> None:
        self.fields = fields
        self.device: int = next(f for f in fields if f is not None).get_device()
        self.addresses: list[int] = []
        kinds: list[Any] = []
        self.bits = _look(fields, self.addresses, kinds, [])
        self.kind = _bundle_kinds.setdefault(tuple(kinds), len(_bundle_kinds))


_bundle_kinds: dict[tuple[Any, ...], int] = {}


Argument = Memory | int | Block | Bundle[Any] | tuple[Any, ...] | None
"""Of a kernel.  A tuple: a bundle for this launch.  None: not used; there is no parameter for it."""


def launch(kernel: Any, programs: int, args: Sequence[Argument], constants: dict[str, Any], **options: Any) -> None:
    """Run `programs` programs of a kernel.  args: its run-time parameters, in order; integers not specialized.

    options: of Triton, such as num_warps.
    """
    if (only_listed := listed()) is not None:
        only_listed.append(Launch(kernel, args, constants, options))
        return
    values: list[Any] = []  # of the parameters; a Block's first one, its tensor map, comes later
    kinds: list[Any] = []  # what the code depends on
    blocks: list[tuple[int, Block]] = []
    misaligned = _look(args, values, kinds, blocks) & 15
    device = _device(args[0])
    key = (kernel.fn, device, *kinds, *constants.values(), *options.values())
    known, watcher = _known.get(key), current_watcher()
    if known is not None and not misaligned:
        known.run(programs, values, blocks)
        if watcher is not None:
            watcher.launched(known, programs, values, blocks)
        return
    if watcher is not None:
        watcher.spoil(f"Triton launches {kernel.fn.__name__}")
    started = time.monotonic()
    settle(kernel, *constants.values())
    compiled = kernel[(programs,)](*map(_for_triton, args), **constants, **options)
    if (seconds := time.monotonic() - started) > COMPILED_S:
        log.info("compiled %s in %.1f s, once for this machine", kernel.fn.__name__, seconds)
    if key not in _known and not misaligned:
        sizes = parameter_sizes(kernel, compiled, args) if device >= 0 else None
        _known[key] = Compiled(compiled, args, device, sizes) if sizes else None


def settle(*functions: Any) -> None:
    """Give all that kernels call their keys, then the kernels.

    Triton names what it has compiled by a kernel's key, which is made of the keys of callees, but takes over their
    globals only if they have one by then: left alone, a process that launches in another order compiles anew.
    """
    with _settling:
        for function in functions:
            _settle(function, set())


_settled: dict[int, Any] = {}
_settling = threading.Lock()  # a backward launches from another thread


def _settle(function: Any, visiting: set[int]) -> None:
    if id(function) in _settled or id(function) in visiting or not hasattr(type(function), "cache_key"):
        return  # the interpreter's have none
    visiting.add(id(function))
    names, scope = function.fn.__code__.co_names, function.fn.__globals__
    values = [scope[name] for name in names if name in scope]
    values += [getattr(module, name, None) for module in values if type(module) is ModuleType for name in names]
    for value in values:
        _settle(value, visiting)
    function.cache_key  # noqa: B018
    _settled[id(function)] = function


def _look(args: Sequence[Argument], values: list[Any], kinds: list[Any], blocks: list[tuple[int, Block]]) -> int:
    """Append what the arguments become.  Returns all bits that are set in an address."""
    bits = 0
    for a in args:
        kind = type(a)
        if kind is Tensor:
            address = a.data_ptr()  # type: ignore[union-attr]
            bits |= address
            values.append(address)
            kinds.append(a.dtype)  # type: ignore[union-attr]
        elif kind is int or kind is Varying:
            values.append(a)
            kinds.append(a >> 31 > 0)  # type: ignore[operator]
        elif kind is Part:
            bits |= a.address  # type: ignore[union-attr]
            values.append(a.address)  # type: ignore[union-attr]
            kinds.append(a.dtype)  # type: ignore[union-attr]
        elif kind is Bundle:
            values += a.addresses  # type: ignore[union-attr]
            kinds.append(a.kind)  # type: ignore[union-attr]
            bits |= a.bits  # type: ignore[union-attr]
        elif a is None:
            kinds.append(None)
        elif kind is Block:
            blocks.append((len(values), a))  # type: ignore[arg-type]
            values.append(None)
            values += a.shape  # type: ignore[union-attr]
            values += a.strides  # type: ignore[union-attr]
            kinds.append((a.base.dtype, a.block))  # type: ignore[union-attr]
        else:  # a bundle, or a subclass of Tensor
            inside = a if isinstance(a, tuple) else (a.as_subclass(Tensor),)  # type: ignore[union-attr]
            bits |= _look(inside, values, kinds, blocks)
    return bits


def _device(first: Any) -> int:
    """Of the memory of a launch, by its first argument."""
    while isinstance(first, tuple) and type(first) is not Part:
        first = first[0]  # of a bundle its first field, of a Block its base
    return first.device if type(first) is Bundle else first.get_device()


def _leaves(args: Sequence[Argument]) -> Iterator[Any]:
    """All parameters of a launch, bundles taken apart."""
    for a in args:
        if isinstance(a, Bundle):
            yield from _leaves(a.fields)
        elif isinstance(a, tuple) and not isinstance(a, Block | Part):
            yield from _leaves(a)
        elif a is not None:
            yield a


def _for_triton(a: Any) -> Any:
    """An argument as Triton's own launch takes it."""
    if isinstance(a, Block):
        return _triton_descriptor(a)
    if isinstance(a, Part):
        return tensor(a)
    if isinstance(a, Bundle):
        a = a.fields
    return type(a)(*map(_for_triton, a)) if isinstance(a, tuple) else a


def copy(target: Tensor, source: Tensor, stream: Any) -> None:
    """The first rows of target = source, both contiguous, behind `stream`'s work; between GPUs by a copy engine."""
    if listed() is not None:
        return
    if not source.is_cuda:
        target[: len(source)].copy_(source)
        return
    given = target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream
    code = in_context(source.get_device(), libcuda().cuMemcpyDtoDAsync_v2, *given)
    if code:
        raise RuntimeError(f"cuMemcpyDtoDAsync of {source.nbytes} bytes failed with CUDA error {code}")
    if (watcher := current_watcher()) is not None:
        watcher.copied(*given)


def temporary(*shape: int, dtype: torch.dtype, device: torch.device, briefly: bool = False) -> Tensor:
    """New memory that only this call uses.  briefly: until `release`."""
    return _allocate(shape, dtype, device, "brief" if briefly else "temporary")


def result(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory that this call may return."""
    return _allocate(shape, dtype, device, "result")


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: What) -> Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    if (watcher := current_watcher()) is not None:
        watcher.allocated(made, what)
    return made


def release() -> None:
    """What was allocated briefly is not used from here on, and nobody refers to it: results may take its place."""
    if (watcher := current_watcher()) is not None:
        watcher.released()


def result_like(tensor: Tensor) -> Tensor:
    """The same, contiguous."""
    return result(*tensor.shape, dtype=tensor.dtype, device=tensor.device)


def fill(memory: Tensor, word: int) -> None:
    """Every 4-byte word of contiguous memory = word, behind the current stream's work."""
    if listed() is not None:
        return
    if not memory.is_cuda:
        memory.view(-1).view(torch.int32).fill_(word)
        return
    stream = torch._C._cuda_getCurrentRawStream(memory.get_device())
    given = memory.data_ptr(), word & 0xFFFFFFFF, memory.nbytes // 4, stream
    code = in_context(memory.get_device(), libcuda().cuMemsetD32Async, *given)
    if code:
        raise RuntimeError(f"cuMemsetD32Async of {memory.nbytes} bytes failed with CUDA error {code}")
    if (watcher := current_watcher()) is not None:
        watcher.filled(*given)


def follow(later: torch.cuda.Stream, earlier: torch.cuda.Stream, point: torch.cuda.Event) -> None:
    """`later` goes on when `earlier` has come to here: `wait_stream`, without a new event."""
    point.record(earlier)
    later.wait_event(point)
    if (watcher := current_watcher()) is not None:
        watcher.followed(later.cuda_stream, earlier.cuda_stream, point)


def parameter_sizes(kernel: Any, compiled: Any, args: Sequence[Argument]) -> list[int] | None:
    """Bytes of each parameter of the code; None where they are not what `args` become, and Triton has to launch.

    Integers must not be specialized, nor be in a bundle, where they always are: the code would hold for the first
    call's values.
    """
    entry = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
    sizes = [int(bits) // 8 * int(count or 1) for bits, count in _PARAMETER.findall(entry)]
    at, fits = 0, compiled.metadata.global_scratch_size == compiled.metadata.profile_scratch_size == 0
    fits = fits and all(p.do_not_specialize for a, p in zip(args, kernel.params, strict=False) if isinstance(a, int))
    fits = fits and not any(isinstance(a, int) for a in _leaves([a for a in args if not isinstance(a, int)]))
    for a in _leaves(args):
        if isinstance(a, Block):
            rank = len(a.shape)
            want = [MAP_BYTES, *[4] * rank, *[8] * rank]
        elif isinstance(a, Memory):
            want = [8]
        else:
            want = sizes[at : at + 1]
        fits = fits and sizes[at : at + len(want)] == want
        at += len(want)
    if not fits or sizes[at:] != [8, 8]:  # Triton's two scratch pointers
        log.warning("kernel %s has unexpected parameters; Triton launches it, slower", compiled.metadata.name)
        return None
    return sizes


class Compiled:
    """One compiled kernel and the memory of its parameters.

    sizes, places: of each parameter in that memory, bytes.  pointers: which of them are addresses.
    map_facts: what Triton says of the tensor map that is parameter number so many.
    """

    def __init__(self, compiled: Any, args: Sequence[Argument], device: int, sizes: list[int]) -> None:
        self.compiled, self.device = compiled, device  # keeps the code loaded
        self.function, self.shared = compiled.function, compiled.metadata.shared
        self.threads = 32 * compiled.metadata.num_warps
        facts = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        self.map_facts: dict[int, Any] = {}
        self.pointers: set[int] = set()
        place = 0
        for a in _leaves(args):
            if isinstance(a, Memory):
                self.pointers.add(place)
            elif type(a) is Block:
                self.map_facts[place] = next(facts)
                place += 2 * len(a.shape)
            place += 1
        self.maps: dict[Any, bytes] = {}
        self.sizes, places, self.format, end = sizes, [], "<", 0
        for size in sizes:
            start = _up(end, MAP_ALIGN if size == MAP_BYTES else size)
            self.format += f"{start - end}x" + {MAP_BYTES: f"{MAP_BYTES}s", 8: "q", 4: "i"}[size]
            places.append(start)
            end = start + size
        self.places, self.size = places, end
        self.memory, self.offset = map_aligned(end)
        base = ctypes.addressof(self.memory) + self.offset
        self.parameters = (ctypes.c_void_p * len(places))(*(base + place for place in places))
        self.launch, self.lock = libcuda().cuLaunchKernelEx, threading.Lock()
        # A kernel that waits for the one before it by itself may come while that one is finishing.
        self.early = _Attribute(id=_EARLY, value=1)
        waits = "griddepcontrol.wait" in compiled.asm["ptx"]
        self.config = LaunchConfig(
            1, 1, 1, self.threads, 1, 1, self.shared, None, ctypes.pointer(self.early), int(waits)
        )

    def run(self, programs: int, values: list[Any], blocks: Sequence[tuple[int, Block]]) -> None:
        """Launch on the current stream.  blocks: with the place of each one's tensor map among the values."""
        for place, block in blocks:
            values[place] = self._map(place, block)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self.lock:  # backward launches from another thread
            struct.pack_into(self.format, self.memory, self.offset, *values, 0, 0)
            self.config.programs, self.config.stream = programs, stream
            given = ctypes.byref(self.config), self.function, self.parameters, None
            code = in_context(self.device, self.launch, *given)
        if code:
            raise RuntimeError(f"cuLaunchKernelEx of {self.compiled.metadata.name} failed with CUDA error {code}")

    def _map(self, place: int, block: Block) -> bytes:
        key = (place, block.base.data_ptr(), block.shape, block.strides)
        made = self.maps.get(key)
        if made is None:
            if len(self.maps) >= _MOST_MAPS:
                self.maps.clear()
            made = self.maps[key] = _tensor_map(block, self.map_facts[place])
        return made


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of one int."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("programs", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("threads", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


_known: dict[Any, Compiled | None] = {}  # None: Triton launches


What = Literal["temporary", "brief", "result"]


class Watcher(Protocol):
    """Is told what a thread does here, after it was done: see `uniep.launch.records.Recording`."""

    def allocated(self, memory: Tensor, what: What) -> None: ...

    def released(self) -> None: ...

    def launched(
        self, known: Compiled, programs: int, values: Sequence[Any], blocks: Sequence[tuple[int, Block]]
    ) -> None: ...

    def copied(self, target: int, source: int, size: int, stream: int) -> None: ...

    def filled(self, target: int, word: int, words: int, stream: int) -> None: ...

    def followed(self, later: int, earlier: int, point: torch.cuda.Event) -> None: ...

    def spoil(self, why: str) -> None: ...


_watching = threading.local()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` what this thread does meanwhile."""
    _watching.watcher = watcher
    try:
        yield
    finally:
        _watching.watcher = None


class Launch(NamedTuple):
    """What `launch` is given, but for the number of programs."""

    kernel: Any
    args: Sequence[Argument]
    constants: dict[str, Any]
    options: dict[str, Any]


@contextlib.contextmanager
def listing() -> Iterator[list[Launch]]:
    """What this thread would launch meanwhile.  Nothing is launched, copied or filled, but for calls from records."""
    _watching.listed = []
    try:
        yield _watching.listed
    finally:
        _watching.listed = None


def listed() -> list[Launch] | None:
    """Of this thread, if it only lists launches."""
    return getattr(_watching, "listed", None)


def current_watcher() -> Watcher | None:
    """Of this thread."""
    return getattr(_watching, "watcher", None)


def in_context(device: int, function: Any, *args: Any) -> int:
    """The code that `function` returns.  A thread in which only the caching allocator was used has no context yet."""
    code = function(*args)
    if code == NO_CONTEXT:
        context = ctypes.c_void_p()
        library = libcuda()
        code = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or library.cuCtxSetCurrent(context)
        code = code or function(*args)
    return code


def map_aligned(size: int) -> tuple[Any, int]:
    """Memory of the host, and from where in it `size` bytes are aligned as tensor maps have to be."""
    memory = ctypes.create_string_buffer(size + MAP_ALIGN)
    return memory, -ctypes.addressof(memory) % MAP_ALIGN


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _triton_descriptor(block: Block) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor(block.base), list(block.shape), list(block.strides), list(block.block))


@functools.cache
def libcuda() -> Any:
    """libcuda with the signatures of what is called here.  Calls hand over the interpreter's lock: where the GPU is a
    thousand launches behind, a launch waits for it."""
    library = ctypes.CDLL("libcuda.so.1")
    word, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer]
    library.cuMemsetD32Async.argtypes = [ctypes.c_uint64, word, ctypes.c_size_t, pointer]
    library.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuTensorMapEncodeTiled.argtypes = [pointer, word, word, *[pointer] * 5, word, word, word, word]
    return library


class MapShape(NamedTuple):
    """What a CUtensorMap says but for the address: CUtensorMapDataType; innermost first, extents, strides in bytes of
    all but the first, and extents of a block; CUtensorMapSwizzle."""

    type: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def map_shape(block: Block, facts: dict[str, Any]) -> MapShape:
    """facts: what Triton says of the descriptor."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    strides = tuple(facts["elem_size"] * s for s in reversed(block.strides[:-1]))
    dtype, box = TMA_DTYPE_DEVICE_TO_HOST[facts["elem_type"]], tuple(reversed(facts["block_size"]))
    return MapShape(dtype, tuple(reversed(block.shape)), strides, box, facts["swizzle"])


def _tensor_map(block: Block, facts: dict[str, Any]) -> bytes:
    """The CUtensorMap that Triton would make."""
    shape, address = map_shape(block, facts), block.base.data_ptr()
    rank = len(shape.dims)
    memory, offset = map_aligned(MAP_BYTES)
    words, long_words = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
    code = libcuda().cuTensorMapEncodeTiled(
        ctypes.addressof(memory) + offset, shape.type, rank, address, long_words(*shape.dims),
        long_words(*shape.strides), words(*shape.box), words(*[1] * rank), 0, shape.swizzle, L2_PROMOTION_128B, 0,
    )  # fmt: skip
    if code:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {code}: address {address:#x}, {shape}")
    return memory.raw[offset : offset + MAP_BYTES]
