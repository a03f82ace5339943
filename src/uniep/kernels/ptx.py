"""All inline assembly of uniep, and calls of CUDA's library, each with the twin that Triton's interpreter runs.

The interpreter cannot execute them; under TRITON_INTERPRET=1 the twins below take its place.  The
GPU test suite runs twin and assembly against each other (tests/gpu).
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = triton.knobs.runtime.interpret

if INTERPRETED:

    @triton.jit
    def load_acquire(ptr):
        """int32 at `ptr` (scalar or tensor), acquire, system scope."""
        return tl.atomic_add(ptr, 0, sem="acquire", scope="sys")

    @triton.jit
    def nanoseconds():
        """Monotonic clock; the interpreter has none, so interpreted waits never time out."""
        return tl.full((), 0, tl.int64)

    @triton.jit
    def after_previous():
        """Wait for the kernel before this one in the stream, all of it; the interpreter runs one at a time."""

    @triton.jit
    def next_may_come():
        """Allow the next kernel to launch early (programmatic dependent launch); it waits in `after_previous`."""

    @triton.jit
    def block_stores_complete():
        """Wait until all block stores (TMA) of this program are visible to it."""

    @triton.jit
    def block_loads_follow():
        """Let block loads (TMA) from here on see what this program has acquired."""

    @triton.jit
    def sigmoid(x):
        """1 / (1 + exp(-x)) in fp32."""
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def normal_tail(x):
        """(P(Z > |x|), exp(-x^2 / 2)) in fp32, Z of the normal distribution, by the formula of the assembly."""
        t = 1.0 / (tl.abs(x) * 0.3 + 1.0)
        q = t * 0.0356747716 - 0.157203073
        q = q * t + 0.20635349
        q = q * t - 0.0536836302
        q = q * t + 0.12856162
        q = q * t + 0.099913494
        q = q * t + 0.120753956
        q = q * t + 0.119629299
        bell = tl.exp2(x * x * -0.72134752)
        return q * t * bell, bell

    @triton.jit
    def gelu(x):
        """x P(Z <= x) in fp32."""
        tail, _ = normal_tail(x)
        return tl.maximum(x, 0.0) - tl.abs(x) * tail

    @triton.jit
    def exp(x):
        """e^x in fp32."""
        return tl.exp(x)

    @triton.jit
    def log(x):
        """Natural logarithm in fp32."""
        return tl.log(x)

    @triton.jit
    def narrow(x, dtype: tl.constexpr):
        """fp32 to a 16-bit dtype, round to nearest even."""
        return x.to(dtype)

    @triton.jit
    def widen(x):
        """A 16-bit dtype to fp32."""
        return x.to(tl.float32)

else:
    # q = P(Z > |x|), Z of the normal distribution: t Q(t) exp(-x^2 / 2), t = 1 / (1 + 0.3 |x|), by approximate exp2 and
    # reciprocal.  Its error is relative, however small it is; Q, fitted to |x| <= 14, is off by 1.5e-7 at most.  erf of
    # libdevice takes twice the instructions.  In Triton's operations, with the exponential first, or with two constants in
    # an fma, which take a register each, kernels spilled (docs/log.md).
    _TAIL = """{
        .reg .f32 x, bell, t, q;
        mov.f32 x, $INPUT;
        abs.f32 t, x;
        mul.rn.f32 t, t, 0.3;
        add.rn.f32 t, t, 1.0;
        rcp.approx.ftz.f32 t, t;
        mul.rn.f32 q, t, 0.0356747716;
        add.rn.f32 q, q, -0.157203073;
        fma.rn.f32 q, q, t, 0.20635349;
        fma.rn.f32 q, q, t, -0.0536836302;
        fma.rn.f32 q, q, t, 0.12856162;
        fma.rn.f32 q, q, t, 0.099913494;
        fma.rn.f32 q, q, t, 0.120753956;
        fma.rn.f32 q, q, t, 0.119629299;
        mul.rn.f32 q, q, t;
        mul.rn.f32 bell, x, x;
        mul.rn.f32 bell, bell, -0.72134752;
        ex2.approx.ftz.f32 bell, bell;
        mul.rn.f32 q, q, bell;
        """
    _NORMAL_TAIL = tl.constexpr(_TAIL.replace("$INPUT", "$2") + "mov.f32 $0, q; mov.f32 $1, bell; }")
    _GELU = tl.constexpr(
        _TAIL.replace("$INPUT", "$1") + "abs.f32 t, x; neg.f32 t, t; max.f32 x, x, 0.0; fma.rn.f32 $0, t, q, x; }"
    )

    @triton.jit
    def _statement(ASSEMBLY: tl.constexpr):
        """Assembly that every thread runs once.  A result is demanded of it: `mov.u32 $0, 0`."""
        tl.inline_asm_elementwise(ASSEMBLY, "=r", [], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def load_acquire(ptr):
        """int32 at `ptr` (scalar or tensor), acquire, system scope."""
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def nanoseconds():
        """Monotonic clock of the device."""
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)

    @triton.jit
    def after_previous():
        """Wait for the kernel before this one in the stream, all of it, if it may still be running (see `Compiled` in
        launch/driver.py)."""
        _statement("griddepcontrol.wait; mov.u32 $0, 0;")

    @triton.jit
    def next_may_come():
        """Allow the next kernel to launch early (programmatic dependent launch); it waits in `after_previous`."""
        _statement("griddepcontrol.launch_dependents; mov.u32 $0, 0;")

    @triton.jit
    def block_stores_complete():
        """Wait until all block stores (TMA) of this program are visible to it.

        The barrier is inside: in loops that Triton flattens, where it sees one, it does not pipeline loads.
        """
        _statement("cp.async.bulk.wait_group 0; bar.sync 0; mov.u32 $0, 0;")

    @triton.jit
    def block_loads_follow():
        """Let block loads (TMA) from here on see what this program has acquired."""
        _statement("fence.proxy.async.global; mov.u32 $0, 0;")
        tl.debug_barrier()

    @triton.jit
    def sigmoid(x):
        """1 / (1 + exp(-x)) in fp32 by approximate exp2 and reciprocal (tl.sigmoid compiles to checked ones)."""
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.rn.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.rn.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def normal_tail(x):
        """(P(Z > |x|), exp(-x^2 / 2)) in fp32, Z of the normal distribution; see _TAIL."""
        return tl.inline_asm_elementwise(
            _NORMAL_TAIL, "=f,=f,f", [x], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )

    @triton.jit
    def gelu(x):
        """x P(Z <= x) in fp32, which is max(x, 0) - |x| P(Z > |x|); see _TAIL."""
        return tl.inline_asm_elementwise(_GELU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def exp(x):
        """e^x in fp32, off by at most 2 units in the last place; 0 where it is below 2^-126.  (tl.exp is off by more.)"""
        return libdevice.exp(x)

    @triton.jit
    def log(x):
        """Natural logarithm in fp32, off by at most 1 unit in the last place, of x >= 2^-126."""
        return libdevice.log(x)

    @triton.jit
    def narrow(x, dtype: tl.constexpr):
        """fp32 to a 16-bit dtype, round to nearest even, two values an instruction.

        A value that is stored narrow and widened again otherwise compiles to scalar F2F, on the slow unit.
        """
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        elif dtype == tl.float16:
            return tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            return x.to(dtype)

    @triton.jit
    def widen(x):
        """A 16-bit dtype to fp32.

        bf16 out of pairs, as `narrow` leaves them: otherwise the upper ones get registers of their own first.
        """
        if x.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
            )  # fmt: skip
        else:
            return x.to(tl.float32)
