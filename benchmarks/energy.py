"""Energy on one GPU: joules per TFLOP of the grouped products and of a layer, uniep's and PyTorch's; L2 hit rates.

    python benchmarks/energy.py --json benchmarks/results/h200x1_energy.json

Energy is the GPU's own counter (NVML, whole board).  Calls run back to back; after --warm-s counting begins and ends at
a step of the counter.  Joules of a call: mean watts times its mean time.  "above idle": less the watts of the idle GPU.

products: see products.py.
layer: forward and backward at EP 1.  uniep; uniep in one kernel per direction, weight gradients last and interleaved;
    grouped_mm: PyTorch's grouped GEMM between fused passes (peers.py), which exchange nothing.
vector: SwiGLU and an addition to its result: two passes; one pass of both, tile by tile through memory, so that the
    second reads what lies in L2; one that keeps it in registers.
tasks: ns of a task without work, dealt out by its number or claimed.
l2: what moves through L2 in these products and layers, the share of it that hits, and what moves to and from DRAM:
    counters that cupti-python samples while calls run back to back, so that kernels overlap as they do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

import timing
import uniep
from cases import Case, Shape, make_case, make_weights, parse_shape
from critical import empty_tasks
from kernels import collect, sort_by_expert, spread
from layers import UniEPLayer
from moe import add_file_options, of_run
from peers import Layer, PeerLayer
from products import Products
from uniep.kernels.activation import activate
from uniep.schedule import default_schedule, parse_schedule

BATCH_MS = 5.0  # of work between two looks at the counter
LAYERS = {
    "uniep": "",
    "uniep, mega": "overlap=mega+transfer=push",
    "uniep, mega, interleaved": "overlap=mega+transfer=push+weight_gradient_order=interleaved",
}  # with `default_schedule`
L2_METRICS = [
    "lts__t_sectors.sum", "lts__average_t_sector_hit_rate_realtime.pct", "dram__bytes_read.sum",
    "dram__bytes_write.sum",
]  # fmt: skip
SECTOR = 32  # bytes
SAMPLED_NS = 1_000_000  # between two samples of counters


def nvml_joules(device: torch.device) -> Callable[[], float]:
    """Reads this GPU's counter."""
    try:
        import pynvml
    except ImportError as error:
        raise SystemExit("energy is read through NVML: pip install nvidia-ml-py") from error
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3


class Meter:
    """Mean watts, from a counter of joules that moves in steps."""

    def __init__(self, joules: Callable[[], float]) -> None:
        self.joules = joules

    def step(self, going_on: Callable[[], object]) -> tuple[float, float]:
        """(s, J) at the next step of the counter.  going_on: called until then."""
        before, late = self.joules(), time.perf_counter() + 5
        while (now := self.joules()) == before:
            if time.perf_counter() > late:
                raise SystemExit("the energy counter of this GPU has stood still for 5 s")
            going_on()
        return time.perf_counter(), now

    def watts(self, going_on: Callable[[], object], seconds: float) -> float:
        (start_s, start_j), until = self.step(going_on), time.perf_counter() + seconds
        while time.perf_counter() < until:
            going_on()
        end_s, end_j = self.step(going_on)
        return (end_j - start_j) / (end_s - start_s)


class Running:
    """Calls back to back, two batches queued."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.batch = max(1, round(BATCH_MS / max(timing.sustained(call, 0.01), 1e-3)))
        self.queued: deque[Any] = deque()
        self.times: list[float] = []

    def __call__(self) -> None:
        start = timing.record_event()
        for _ in range(self.batch):
            self.call()
        self.queued.append((start, timing.record_event()))
        if len(self.queued) > 2:
            start, end = self.queued.popleft()
            timing.wait_event(end)
            self.times.append(start.elapsed_time(end) / self.batch)


def energy(
    meter: Meter, call: Callable[[], object], tflop: float, idle: float, args: argparse.Namespace
) -> dict[str, float]:
    running = Running(call)
    until = time.perf_counter() + args.warm_s
    while time.perf_counter() < until:
        running()
    running.times.clear()
    watts = meter.watts(running, args.seconds)
    ms = sum(running.times) / len(running.times)
    timing.synchronize()
    return {
        "ms": round(ms, 4), "watts": round(watts, 1), "joules": round(watts * ms / 1e3, 4),
        "joules_per_tflop": round(watts * ms / 1e3 / tflop, 4),
        "above_idle_joules_per_tflop": round((watts - idle) * ms / 1e3 / tflop, 4),
    }  # fmt: skip


class GroupedMmLayer(PeerLayer):
    """The peers' layer on one rank: sort, permute, experts, sum; nothing is exchanged."""

    def forward(self, case: Case) -> tuple[Tensor, Any]:
        row_TK, _, end_E = sort_by_expert(case.ids_TK, case.num_experts)
        x_ND, weight_N = spread(case.x_TD, row_TK, row_TK.numel(), case.weights_TK)
        assert weight_N is not None
        y_ND, saved = self.experts(x_ND, weight_N, end_E, case)
        return collect(y_ND, row_TK)[0], (row_TK, saved)

    def backward(self, dy_TD: Tensor, case: Case, saved: Any) -> tuple[Tensor, ...]:
        row_TK, of_experts = saved
        dy_ND, _ = spread(dy_TD, row_TK, row_TK.numel())
        dx_ND, dweight_N, dw13, dw2 = self.experts_backward(dy_ND, of_experts, case)
        dx_TD, dweights_TK = collect(dx_ND, row_TK, dweight_N)
        assert dweights_TK is not None
        return dx_TD, dweights_TK, dw13, dw2


def half_of(shape: Shape) -> Shape:
    """The experts that one of two ranks has, as in products.py."""
    return dataclasses.replace(shape, num_experts=shape.num_experts // 2)


def layers(shape: Shape, tokens: int, device: torch.device) -> Iterator[tuple[str, Layer, Case]]:
    """Each layer, prepared; bits of uniep's are compared."""
    local = half_of(shape)
    case = make_case(local, tokens, "balanced", 0, make_weights(local, 0, 1, torch.bfloat16, device))
    cfg = local.config(1, tokens, max_rows=local.sync_free_rows(tokens))
    wanted: tuple[Tensor, ...] = ()
    for name, change in LAYERS.items():
        usual = default_schedule("hopper", cfg, 1)
        with uniep.Workspace(cfg, None, device=device, schedule=parse_schedule(change, usual)) as workspace:
            layer = UniEPLayer(workspace)
            layer.prepare(case, True)
            got = layer.forward_backward(case)
            wanted = wanted or got
            for mine, theirs in zip(got, wanted, strict=True):
                assert torch.equal(mine, theirs), f"{shape.name}: {name} differs from uniep"
            yield name, layer, case
    del wanted
    yield "grouped_mm", GroupedMmLayer(), case


# ------------------------------------------------------------------------------------------------ microbenchmarks


@triton.jit
def swiglu_add_kernel(
    gate_ptr, up_ptr, act_ptr, more_ptr, out_ptr, size, BLOCK: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):  # fmt: skip
    """act = SwiGLU(gate, up) (FIRST), out = act + more (SECOND); both: act through memory, unless act_ptr is None."""
    for item in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = item.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < size
        if FIRST:
            gate, up = tl.load(gate_ptr + at, mask=mask), tl.load(up_ptr + at, mask=mask)
            act = activate(gate.to(tl.float32), up.to(tl.float32), "swiglu", None).to(out_ptr.dtype.element_ty)
            if act_ptr is not None:
                tl.store(act_ptr + at, act, mask=mask)
                if SECOND:
                    tl.debug_barrier()
        if SECOND:
            if act_ptr is not None:
                act = tl.load(act_ptr + at, mask=mask)
            total = act.to(tl.float32) + tl.load(more_ptr + at, mask=mask).to(tl.float32)
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def vector_passes(rows: int, columns: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """SwiGLU and an addition of (rows, columns) bf16, three ways."""
    gate, up, more = (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(3))
    act, out = torch.empty_like(gate), torch.empty_like(gate)
    programs = torch.cuda.get_device_properties(device).multi_processor_count * 8

    def one(first: bool, second: bool, through: Tensor | None = act) -> Tensor:
        swiglu_add_kernel[(programs,)](
            gate, up, through, more, out, gate.numel(), BLOCK=4096, FIRST=first, SECOND=second, num_warps=8
        )
        return out

    def two_passes() -> Tensor:
        one(True, False)
        return one(False, True)

    return {
        "two passes": two_passes, "tile by tile": lambda: one(True, True),
        "in registers": lambda: one(True, True, None),
    }  # fmt: skip


@triton.jit
def dealt_kernel(list_ptr, seen_ptr, total):
    """As `critical.empty_kernel`, with places dealt out by number."""
    seen = tl.full((), 0, tl.int64)
    for place in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        seen += tl.load(list_ptr + place)
        tl.debug_barrier()
    tl.store(seen_ptr + tl.program_id(0), seen)


def dealt_tasks(device: torch.device, places: int = 100_000, programs: int = 131) -> float:
    """ns that a program takes for a task without work, dealt out."""
    words, seen, times = torch.ones(places, dtype=torch.int64, device=device), torch.zeros(0), []
    for _ in range(5):
        seen = words.new_zeros(programs)
        start = timing.record_event()
        dealt_kernel[(programs,)](words, seen, places, num_warps=8)
        end = timing.record_event()
        timing.wait_event(end)
        times.append(start.elapsed_time(end) * 1e6 * programs / places)
    assert int(seen.sum()) == places, f"{int(seen.sum())} of {places} tasks were done"
    return round(sorted(times)[2], 1)


# ------------------------------------------------------------------------------------------------ L2


class Counters:
    """Sums of L2_METRICS over a time, of one GPU.  Needs cupti-python, and the right to read the GPU's counters."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cupti import pm_sampling
        except ImportError as error:
            raise SystemExit("--parts l2 needs cupti-python: pip install it, or leave l2 out") from error
        self.collector = pm_sampling.Collector(device_index=device.index)
        try:
            self.collector.enable()
            self.collector.configure(metrics=L2_METRICS, sampling_interval=SAMPLED_NS)
        except (RuntimeError, ValueError, PermissionError) as error:
            raise SystemExit(f"--parts l2 cannot read the counters of this GPU, leave l2 out: {error}") from error

    def during(self, call: Callable[[], object], seconds: float) -> tuple[list[float], int]:
        """(Sums of sectors, of those that hit, and of bytes of DRAM; calls) of so long, of four calls at the least."""
        call()
        timing.synchronize()
        calls = 0
        self.collector.start()
        until = time.perf_counter() + seconds
        while not calls or time.perf_counter() < until:
            for _ in range(4):
                call()
            timing.synchronize()
            calls += 4
        self.collector.stop()
        samples = self.collector.decode(max_samples=int(4e9 * seconds / SAMPLED_NS) + 1000)
        of_sample = [(n, n * percent / 100, read, written) for n, percent, read, written in map(_values, samples)]
        return [sum(values) for values in zip(*of_sample, strict=True)], calls


def _values(sample: Any) -> tuple[float, float, float, float]:
    """Of L2_METRICS."""
    sectors, percent, read, written = sample.metric_values
    return sectors, percent if sectors else 0.0, read, written


def l2_rows(shape: Shape, counters: Counters, args: argparse.Namespace, device: torch.device) -> Iterator[Any]:
    """GB that a call moves through L2, the share of hits, GB that it moves to and from DRAM: of products and layers."""

    def row(what: str, side: str, call: Callable[[], object]) -> dict[str, Any]:
        sums, calls = counters.during(call, args.seconds)
        if not sums or not sums[0]:
            raise SystemExit(f"the counters of this GPU stood still during {what}, {side}; leave l2 out")
        sectors, hit, from_dram, to_dram = sums
        gb = {"l2_gb": SECTOR * sectors, "dram_read_gb": from_dram, "dram_write_gb": to_dram}
        per_call = {name: round(value / calls / 1e9, 4) for name, value in gb.items()}
        return {"shape": shape.name, "what": what, "side": side, "l2_hit": round(hit / sectors, 4), **per_call}

    products = Products(shape, args.tokens, device)
    for name, sides in products.of.items():
        for side, call in zip(("uniep", "grouped_mm"), sides, strict=False):
            yield row(name, side, call)
    products.workspace.close()
    for name, layer, case in layers(shape, args.tokens, device):
        yield row("layer", name, functools.partial(layer.forward_backward, case))


# ------------------------------------------------------------------------------------------------


def product_rows(
    shape: Shape, meter: Meter, idle: float, args: argparse.Namespace, device: torch.device
) -> Iterator[Any]:
    products = Products(shape, args.tokens, device)
    for name, sides in products.of.items():
        products.check(name)
        tflop = products.tflop_of(name)
        for side, call in zip(("uniep", "grouped_mm"), sides, strict=False):
            found = energy(meter, call, tflop, idle, args)
            yield {"shape": shape.name, "what": name, "side": side, "tflop": round(tflop, 4), **found}
    products.workspace.close()


def layer_rows(
    shape: Shape, meter: Meter, idle: float, args: argparse.Namespace, device: torch.device
) -> Iterator[Any]:
    tflop = half_of(shape).tflop(args.tokens, "fwd_bwd")
    for name, layer, case in layers(shape, args.tokens, device):

        def call(layer: Layer = layer, case: Case = case) -> None:
            layer.forward_backward(case)

        found = energy(meter, call, tflop, idle, args)
        yield {"shape": shape.name, "what": "layer", "side": name, "tflop": round(tflop, 4), **found}


def vector_rows(meter: Meter, idle: float, args: argparse.Namespace, device: torch.device) -> Iterator[Any]:
    rows, columns = 65536, 1536
    wanted: Tensor | None = None
    for name, call in vector_passes(rows, columns, device).items():
        got = call().clone()
        wanted = got if wanted is None else wanted
        assert torch.equal(got, wanted), f"SwiGLU and addition {name} differs"
        found = energy(meter, call, 1.0, idle, args)
        kept = ("ms", "watts", "joules")
        yield {"what": f"SwiGLU + addition, {rows} x {columns}", "side": name, **{k: found[k] for k in kept}}


PARTS = ("products", "layer", "vector", "tasks", "l2")


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed and checked arguments."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shapes", default="qwen3-30b,qwen3-235b,deepseek-v3")
    arguments.add_argument("--tokens", type=int, default=8192)
    arguments.add_argument("--parts", default=",".join(PARTS), help="(default %(default)s)")
    arguments.add_argument("--seconds", type=float, default=0.8, help="counted, of each (default %(default)s)")
    arguments.add_argument("--warm-s", type=float, default=0.3, help="before counting (default %(default)s)")
    add_file_options(arguments)
    args = arguments.parse_args(argv)
    if unknown := [part for part in args.parts.split(",") if part not in PARTS]:
        arguments.error(f"--parts {unknown[0]!r} is unknown; use one or more of {', '.join(PARTS)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    timing.setup(device, None)
    shapes = [parse_shape(name) for name in args.shapes.split(",")]
    measure(shapes, args, device)
    dist.destroy_process_group()


def measure(shapes: Sequence[Shape], args: argparse.Namespace, device: torch.device) -> None:
    """All parts; results are written after every row."""
    results: dict[str, Any] = {"meta": of_run("energy.py", device, args.commit) | {"tokens": args.tokens}, "rows": []}

    def keep(row: dict[str, Any], where: str = "rows") -> None:
        results.setdefault(where, []).append(row)
        print(row, flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    parts, meter = args.parts.split(","), Meter(nvml_joules(device))
    timing.synchronize()
    idle = results["meta"]["idle_watts"] = round(meter.watts(lambda: time.sleep(0.005), 1.0), 1)
    print(f"idle: {idle} W", flush=True)
    of_gpu: tuple[Any, ...] = (meter, idle, args, device)
    for shape in shapes:
        for part, rows in (("products", product_rows), ("layer", layer_rows)):
            for row in rows(shape, *of_gpu) if part in parts else ():
                keep(row)
            torch.cuda.empty_cache()
    for row in vector_rows(*of_gpu) if "vector" in parts else ():
        keep(row)
    if "tasks" in parts:
        keep({"dealt_ns": dealt_tasks(device), "claimed_ns": empty_tasks(device)}, "tasks")
    if "l2" in parts:
        counters = Counters(device)
        for shape in shapes:
            for row in l2_rows(shape, counters, args, device):
                keep(row, "l2")


if __name__ == "__main__":
    main()
