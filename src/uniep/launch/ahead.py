"""Kernels that ranks list (`driver.listing`), and processes without a GPU compile, into Triton's cache on disk."""

from __future__ import annotations

import importlib
import pickle
from typing import Any, NamedTuple

import torch

from uniep.launch.driver import Block, Bundle, Launch, Memory, settle

_BIG, _SMALL = 2**40, 8  # integers that stand for those of 8 and of 4 bytes


class _Memory(NamedTuple):
    dtype: torch.dtype


class _Blocks(NamedTuple):
    dtype: torch.dtype
    block: tuple[int, ...]


class Kernel(NamedTuple):
    """A kernel to compile.  code: pickled, what its code depends on, so that whoever passes it on need not import it:
    its module, kinds of its arguments, constants with options."""

    name: str
    code: bytes

    @classmethod
    def of(cls, launch: Launch) -> Kernel:
        function = launch.kernel.fn
        args = tuple(map(_kind, launch.args))
        return cls(function.__name__, pickle.dumps((function.__module__, args, launch.constants | launch.options)))

    def compile(self) -> Any:
        module, args, constants = pickle.loads(self.code)
        kernel = getattr(importlib.import_module(module), self.name)
        settle(kernel, *constants.values())
        return kernel.run(*map(_example, args), grid=(1,), warmup=True, **constants)


def _kind(a: Any) -> Any:
    if isinstance(a, Block):
        return _Blocks(a.base.dtype, a.block)
    if isinstance(a, Memory):
        return _Memory(a.dtype)
    if isinstance(a, Bundle):
        a = a.fields
    if isinstance(a, tuple):
        return type(a)(*map(_kind, a))
    return a if a is None else _BIG if a >> 31 > 0 else _SMALL


def _example(kind: Any) -> Any:
    """An argument of that kind, for Triton."""
    if isinstance(kind, _Memory):
        return torch.empty(16, dtype=kind.dtype)
    if isinstance(kind, _Blocks):
        from triton.tools.tensor_descriptor import TensorDescriptor

        rank = len(kind.block)
        return TensorDescriptor(torch.empty(16, dtype=kind.dtype), [16] * rank, [16] * (rank - 1) + [1], [*kind.block])
    return type(kind)(*map(_example, kind)) if isinstance(kind, tuple) else kind


class Target:
    """A driver of Triton that knows its target, a GPU that need not exist, and nothing else.  arch: 90 for Hopper."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
