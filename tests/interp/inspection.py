"""What is wrong with a compiled Hopper kernel: facts that ptxas knows and nobody sees unless they look.

Needs no GPU: `offline()` makes Triton compile for sm_90 wherever it runs, and `inspect` reads the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import tempfile
import unittest.mock
from collections.abc import Iterator
from typing import Any

import triton
import triton.backends.nvidia

from uniep.launch.ahead import Target

MAX_SHARED_BYTES = 232448
"""Dynamic shared memory of one block on Hopper; Triton does not refuse more until launch."""


@dataclasses.dataclass(frozen=True)
class Report:
    """One compiled kernel.

    spills: loads and stores of local memory.  dots: matrix products.  slow_dots: those not on Hopper's tensor
    cores (wgmma).  register_dots: those whose left operand comes through registers (seen to give wrong results
    where it was a reshaped block load).  narrow_stores: global stores of 2 bytes or less per thread.
    divergent_polls: reads of flags on which the threads of several warps branch before they have agreed (sync.py).
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    dots: int
    slow_dots: int
    register_dots: int
    narrow_stores: int
    divergent_polls: int

    def complaints(self) -> list[str]:
        """Why this kernel should not ship; empty if it may."""
        said = []
        if self.spills or self.stack_bytes:
            said.append(f"{self.spills} spills, {self.stack_bytes} bytes of stack, {self.registers} registers")
        if self.shared_bytes > MAX_SHARED_BYTES:
            said.append(f"{self.shared_bytes} bytes of shared memory; the limit is {MAX_SHARED_BYTES}")
        if self.slow_dots:
            said.append(f"{self.slow_dots} of {self.dots} products without wgmma")
        if self.register_dots:
            said.append(f"{self.register_dots} of {self.dots} products read their left operand from registers")
        if self.narrow_stores:
            said.append(f"{self.narrow_stores} global stores of 2 bytes or less")
        if self.divergent_polls:
            said.append(f"{self.divergent_polls} reads of flags on which threads branch before they agree")
        return said


def inspect(compiled: Any) -> Report:
    """Read a CompiledKernel's Triton IR, PTX and machine code."""
    folder = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()

        def tool(*command: str) -> str:
            name = os.path.join(folder, command[0])
            return subprocess.run([name, *command[1:], cubin.name], capture_output=True, text=True, check=True).stdout

        usage = {k: int(v) for k, v in re.findall(r"(REG|STACK):(\d+)", tool("cuobjdump", "--dump-resource-usage"))}
        sass = tool("nvdisasm", "-c") if usage["STACK"] else ""  # without a stack nothing spills; it takes 0.4 s
    # %d = ttng.warp_group_dot %a, %b, %c ... : A type * B type -> C type; in shared memory A is a !ttg.memdesc.
    left = re.findall(r"ttng\.warp_group_dot .*? : (!ttg\.memdesc|tensor)<", compiled.asm["ttgir"])
    slow = len(re.findall(r"\btt\.dot ", compiled.asm["ttgir"]))
    return Report(
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared_bytes=compiled.metadata.shared,
        dots=len(left) + slow,
        slow_dots=slow,
        register_dots=left.count("tensor"),
        divergent_polls=_divergent_polls(compiled) if compiled.metadata.num_warps > 1 else 0,
        narrow_stores=len(re.findall(r"\bst(?:\.\w+)*\.global(?:\.\w+)*\.[bsu](?:8|16)\b", compiled.asm["ptx"])),
    )


def _divergent_polls(compiled: Any) -> int:
    """Flag reads that are followed by a conditional branch before a barrier (a warp agrees without one)."""
    pending = divergent = 0
    for line in compiled.asm["ptx"].splitlines():
        if "ld.acquire.sys" in line:
            pending += 1
        elif "bar.sync" in line or "barrier.sync" in line:
            pending = 0
        elif re.search(r"@!?%p\d+\s+bra\b", line):
            divergent, pending = divergent + pending, 0
    return divergent


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, kernels compile for a Hopper GPU that need not exist; only `warmup=True` launches can work."""
    with unittest.mock.patch.object(triton.runtime.driver, "_active", Target(90)):
        yield
