"""The Hopper backend on real GPUs: `pytest -s tests/gpu`, one process per GPU, 2 or more Hopper cards.

All checks run in one launch, because every new shape compiles its kernels; each is reported as its own test, and with
-s as a line when it ends.  On one card two ranks take turns (`one_gpu.py`).  UNIEP_TEST_RANKS sets their number, a
power of two: where it is more than there are cards, all are on the first one.  UNIEP_TEST_SCHEDULES, names with
semicolons between them, are what checks of bits compare with the serial one instead of everything.
"""

import dataclasses
import functools
import os
import random
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import calls
import one_gpu
import pytest
import routing
import shards
import torch
import torch.distributed as dist
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "interp"))
import activation_grid
import own_operators

import uniep
from uniep import MoEConfig, Schedule, Tile, Workspace
from uniep.activation import ACTIVATIONS
from uniep.kernels.entry import clock_kernel
from uniep.launch import driver as call
from uniep.launch import records
from uniep.reference import composition
from uniep.routing import build_plan
from uniep.schedule import FEW_ROWS, default_schedule
from uniep.stages import DIRECTIONS
from uniep.trials.compilers import Compilers
from uniep.trials.trial import Job, Trial
from uniep.tuner import strategies

pytestmark = pytest.mark.gpu
HAVE = torch.cuda.device_count() if torch.cuda.is_available() else 0
if not HAVE or torch.cuda.get_device_capability(0)[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
RANKS = int(os.environ.get("UNIEP_TEST_RANKS", max(2, 1 << (HAVE.bit_length() - 1))))
SHARED = RANKS > HAVE

FIELDS = ("y", "dx", "dweights", "dw13", "dw2", "db13", "db2")
SERIAL = Schedule(overlap="serial", tile_order="natural")
HALF_TILES = {"gate_up": Tile(rows=64, stages=4), "down": Tile(rows=64, stages=4)}
SCHEDULES = {
    "pushed": Schedule(transfer="push"),
    "pushed, natural": Schedule(transfer="push", tile_order="natural"),
    "copied": Schedule(transfer="copy"),
    "copied, serial": Schedule(transfer="copy", overlap="serial"),
    "pipelined": Schedule(transfer="copy", overlap="pipelined"),
    "pipelined, pushed": Schedule(transfer="push", overlap="pipelined", down_sms=7),
    "copied, waves": Schedule(transfer="copy", arrival_waves=4),
    "pipelined, waves": Schedule(transfer="copy", overlap="pipelined", arrival_waves=4),
    "parts": Schedule(transfer="copy", overlap="pipelined", gate_up_parts=4, down_sms=0),
    "parts, pushed": Schedule(transfer="push", overlap="pipelined", gate_up_parts=2, down_sms=7),
    "parts, waves": Schedule(transfer="copy", overlap="pipelined", gate_up_parts=2, down_sms=0, arrival_waves=4),
    "copied again": Schedule(transfer="copy", received="again"),
    "pushed again": Schedule(transfer="push", received="again"),
    "gradient beside, pushed": Schedule(activation_gradient="beside", beside_from=0),
    "pushed by expert": Schedule(transfer="push", send_order="expert", sum_programs=4, sum_warps=1),
    "pulled": Schedule(transfer="pull"),
    "pulled, by expert, serial": Schedule(
        transfer="pull", send_order="expert", overlap="serial", pass_programs=2, pass_warps=4
    ),
    "pulled again": Schedule(transfer="pull", received="again"),
    "dW2 beside": Schedule(transfer="copy", down_wgrad="beside"),
    "dW2 beside, pushed": Schedule(transfer="push", down_wgrad="beside"),
    "few rows, beside": Schedule(
        **HALF_TILES, weight_gradient=FEW_ROWS[64], activation_gradient="beside", beside_from=0
    ),
    "few rows, copied": Schedule(transfer="copy", **HALF_TILES, weight_gradient=FEW_ROWS[256]),
}
FUSED = Schedule(transfer="copy", activation_gradient="beside", beside_from=0)
MEGA = {
    "mega": Schedule(transfer="push", overlap="mega"),
    "mega, copied": Schedule(
        transfer="copy", overlap="mega", tile_order="natural", weight_gradient_order="interleaved", peer_order="rotated"
    ),
    "mega, pulled by expert": Schedule(transfer="pull", overlap="mega", send_order="expert"),
    "mega, critical path": Schedule(transfer="push", overlap="mega", tile_order="critical-path"),
    "mega, chunks": Schedule(transfer="push", overlap="mega", tile_order="chunk-major", chunk_experts=2),
    "mega, chunks, copied": Schedule(
        transfer="copy", overlap="mega", tile_order="chunk-major", weight_gradient_order="interleaved", push_programs=1
    ),
}
RECOMPUTED = {
    "recomputed": dataclasses.replace(FUSED, preactivation="recomputed"),
    "recomputed, expanded": Schedule(transfer="push", operand="expanded", preactivation="recomputed"),
    "recomputed, mega": Schedule(transfer="push", overlap="mega", preactivation="recomputed"),
    "recomputed, copied again": Schedule(transfer="copy", received="again", preactivation="recomputed"),
    "recomputed, pushed again": Schedule(transfer="push", received="again", preactivation="recomputed"),
}
SCHEDULES |= {"gradient beside": FUSED, **MEGA, **RECOMPUTED}
AGAIN = dict(SCHEDULES)
"""For tests that repeat a call.  The third time it comes from records."""
if SHARED:  # a call from records does not wait for its copies as one_gpu.py needs it
    del AGAIN["gradient beside"], AGAIN["recomputed"]
BIASED = {"bias": True, "activation": "swiglu_oai", "activation_limit": 1.0}
SHAPE = {"hidden": 512, "ffn": 264, "num_experts": 16, "top_k": 4, "max_tokens_per_rank": 1024}


class Rank:
    """One rank's process group, data and helpers."""

    def __init__(self, rank, size):
        self.rank, self.size, self.device = rank, size, torch.device("cuda", torch.cuda.current_device())
        self.group = dist.group.WORLD

    def gather(self, tensor):
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(out, tensor.contiguous())
        return out

    def gather_ragged(self, tensor, fill=0):
        """Tensors of all ranks, whose first sizes differ."""
        counts = [int(t) for t in self.gather(torch.tensor([tensor.shape[0]], device=self.device))]
        padded = torch.full((max(*counts, 1), *tensor.shape[1:]), fill, dtype=tensor.dtype, device=self.device)
        padded[: tensor.shape[0]] = tensor
        return [t[:n] for t, n in zip(self.gather(padded), counts, strict=True)]

    def data(self, cfg, tokens, seed=0, unused=0.1):
        """x, ids, weights, w13, w2, dy of this rank, and any b13, b2; every expert from its own generator."""
        make = torch.Generator(self.device).manual_seed(seed * 1000 + self.rank)
        like = {"device": self.device, "generator": make}
        x = torch.randn(tokens, cfg.hidden, **like).to(cfg.dtype)
        ids = torch.rand(tokens, cfg.num_experts, **like).topk(cfg.top_k, 1).indices
        ids = torch.where(torch.rand(ids.shape, **like) < unused, -1, ids)
        weights = torch.rand(tokens, cfg.top_k, **like)
        dy = torch.randn(tokens, cfg.hidden, **like).to(cfg.dtype)
        local = cfg.num_experts // self.size
        memory = {"device": self.device, "dtype": cfg.dtype}
        w13 = torch.empty(local, cfg.h_columns, cfg.hidden, **memory)
        w2 = torch.empty(local, cfg.hidden, cfg.ffn, **memory)
        biases = [torch.empty(local, n, **memory) for n in ((cfg.h_columns, cfg.hidden) if cfg.bias else ())]
        for e in range(local):
            own = torch.Generator(self.device).manual_seed(seed * 1000 + 500 + self.rank * local + e)
            w13[e] = torch.randn(w13.shape[1:], device=self.device, generator=own) * cfg.hidden**-0.5
            w2[e] = torch.randn(w2.shape[1:], device=self.device, generator=own) * cfg.ffn**-0.5
            for bias in biases:
                bias[e] = torch.randn(bias.shape[1], device=self.device, generator=own)
        return x, ids, weights, w13, w2, dy, *biases

    def run(self, workspace, data):
        """(y, dx, dweights, dw13, dw2), with biases also db13 and db2."""
        x, ids, weights, w13, w2, dy, *biases = data
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights, w13, w2, *biases)]
        y = uniep.moe(leaves[0], ids, *leaves[1:4], workspace=workspace, **named(leaves[4:]))
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def once(self, cfg, data, schedule=None, **kwargs):
        with Workspace(cfg, self.group, schedule=schedule, timeout_s=60, **kwargs) as workspace:
            out = self.run(workspace, data)
            torch.cuda.synchronize()
            workspace.check()
        return out

    def alone(self, cfg, data):
        """The same global batch at EP=1, this rank's part of it."""
        ids, w13 = data[1], data[3]
        rows = [t.shape[0] for t in self.gather_ragged(ids, -1)]
        joined = [torch.cat(self.gather_ragged(t, -1 if t is ids else 0)) for t in data]
        whole = dataclasses.replace(cfg, max_tokens_per_rank=cfg.max_tokens_per_rank * self.size, max_rows=None)
        with Workspace(whole, None, device=self.device, timeout_s=60) as workspace:
            out = self.run(workspace, joined)
            torch.cuda.synchronize()
        mine = slice(sum(rows[: self.rank]), sum(rows[: self.rank + 1]))
        local = w13.shape[0]
        experts = slice(self.rank * local, (self.rank + 1) * local)
        return [t[mine] for t in out[:3]] + [t[experts] for t in out[3:]], joined, mine, experts


def chosen(variants):
    """Those that UNIEP_TEST_SCHEDULES names, or all."""
    some = os.environ.get("UNIEP_TEST_SCHEDULES")
    return {name: variant for name, variant in variants.items() if not some or name in some.split(";")}


def named(biases):
    """As arguments of `uniep.moe`."""
    return dict(zip(("b13", "b2"), biases, strict=True)) if len(biases) else {}


def differing(want, got):
    return [name for name, a, b in zip(FIELDS[: len(want)], want, got, strict=True) if not torch.equal(a, b)]


def check_plan(r):
    """Every field of the GPU's plan equals the CPU's: ragged T, unused slots, repeats, one rank without tokens."""
    wrong = []
    for tokens, unused in ((300, 0.2), (1000, 0.0), ([700, 0, 17, 64][r.rank % 4], 0.5)):
        cfg = MoEConfig(**SHAPE)
        _, ids, *_ = r.data(cfg, tokens, unused=unused)
        ids[: tokens // 4] = ids[: tokens // 4, :1]  # repeats
        with Workspace(cfg, r.group, timeout_s=60) as workspace:
            plan, align = uniep.route(ids.int(), workspace=workspace), workspace.backend.way.gate_up.rows
        want = build_plan([t.cpu() for t in r.gather_ragged(ids, -1)], r.rank, cfg, align=align)
        fields = (f.name for f in dataclasses.fields(want))
        wrong += [
            f"T={tokens} {name}" for name in fields if not torch.equal(getattr(plan, name).cpu(), getattr(want, name))
        ]
    assert not wrong, wrong


def some_ids(r, cfg, tokens, seed=0):
    """Random ids, an eighth of them unused, without the tokens' values."""
    make = torch.Generator(r.device).manual_seed(seed * 1000 + r.rank)
    ids = torch.randint(0, cfg.num_experts, (tokens, cfg.top_k), device=r.device, generator=make)
    return torch.where(torch.rand(ids.shape, device=r.device, generator=make) < 1 / 8, -1, ids)


def check_plan_of_a_million(r):
    """Room for a million tokens of 1024 values, and for 262,144 of 7168: plans of few and of all equal `build_plan`,
    ragged ones, too.  A million of 7168 do not fit, and every rank says so before it allocates them."""
    wrong = []
    for hidden, most in ((1024, 2**20), (7168, 2**18)):
        cfg = MoEConfig(hidden=hidden, ffn=64, num_experts=64, top_k=8, max_tokens_per_rank=most)
        with Workspace(cfg, r.group, timeout_s=60) as workspace:
            for tokens in ((1,) * 8, (4096,) * 8, (most, 1, 0, 17, most // 4, 5, 0, 1), (most,) * min(r.size, 2)):
                ids = some_ids(r, cfg, (tokens * 4)[r.rank])
                plan = uniep.route(ids, workspace=workspace)
                want = build_plan(r.gather_ragged(ids, -1), r.rank, cfg)
                fields = (f.name for f in dataclasses.fields(want))
                wrong += [
                    f"{hidden}, T={tokens}: {name}"
                    for name in fields
                    if not torch.equal(getattr(plan, name), getattr(want, name))
                ]
                del plan, want
        torch.cuda.empty_cache()
    assert not wrong, wrong
    before = torch.cuda.mem_get_info()[0]
    huge = MoEConfig(hidden=7168, ffn=64, num_experts=64, top_k=16, max_tokens_per_rank=2**20)
    with pytest.raises(uniep.CapacityError, match=r"(?s)lower max_tokens_per_rank.*returns +16777216 x 7168"):
        Workspace(huge, r.group, timeout_s=60)
    assert torch.cuda.mem_get_info()[0] > before - 2**28


def check_plan_time(r):
    """All tokens to one expert: behind the entry the plan takes at most twice the time of a balanced one."""
    cfg = MoEConfig(hidden=64, ffn=64, num_experts=128, top_k=8, max_tokens_per_rank=8192, max_rows=r.size * 8192 * 8)
    balanced = torch.rand(8192, 128, device=r.device).topk(8, 1).indices
    weights, times = torch.zeros(8192, 8, device=r.device), {}
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        planner = workspace.backend.planner
        for repeat in range(25):
            for name, ids in {"balanced": balanced, "one expert": torch.zeros_like(balanced)}.items():
                entered, ended = torch.zeros(2, 2, dtype=torch.int64, device=r.device).unbind()
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda._sleep(4_000_000)  # so that everything is launched before it begins
                plan = planner.enter_new(ids, weights, "route")
                planner.clock(entered)
                planner.make(plan, len(ids), (4, 4))
                call.launch(clock_kernel, 1, (ended,), {}, num_warps=1)
                torch.cuda.synchronize()
                if repeat >= 5:
                    times.setdefault(name, []).append(int(ended[0] - entered[0]) / 1000)
        workspace.check()
    median = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    if r.rank == 0:
        print(f"plan, EP {r.size}, us: {median}")
    assert median["one expert"] <= 2 * median["balanced"], median


def check_kept_tokens(r):
    """Where 32 times as many tokens may come: what is saved is what `plan_memory` says for this many, and a call that
    receives more than the one before, ragged or not, has the bits of serial schedules."""
    plain = MoEConfig(**{**SHAPE, "max_tokens_per_rank": 2**15})
    few, many, ragged = (r.data(plain, t, seed=t) for t in (32, 1000, (900, 40, 0, 300)[r.rank % 4]))
    want = [r.once(MoEConfig(**SHAPE), data, SERIAL) for data in (few, many, ragged)]
    bounded = dataclasses.replace(plain, max_rows=8192)
    ways = {how: (plain, SCHEDULES[how]) for how in ("copied", "pushed", "pushed again", "mega", "mega, copied")}
    ways |= {f"{how}, sync-free": (bounded, SCHEDULES[how]) for how in ("copied", "pushed", "mega")}
    for how, (cfg, schedule) in ways.items():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            for turn in (0, 1, 0, 2, 1):
                wrong = differing(want[turn], r.run(workspace, (few, many, ragged)[turn]))
                assert not wrong, f"{how}, {turn}: {wrong}"
            x, ids, weights, w13, w2, _ = many
            x = x.clone().requires_grad_()
            for _ in range(12):  # rows of the first call go by halves
                y = uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
            del y
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
            torch.cuda.synchronize()
            saved = torch.cuda.memory_allocated() - before - y.nbytes
            planned = uniep.plan_memory(cfg, r.size, schedule=schedule, tokens=1000).total_bytes("saved")
            assert saved <= 1.25 * planned + 2**20, f"{how}: {saved / 2**20:.1f} MiB, planned {planned / 2**20:.1f}"
            del y


def check_bits(r):
    """Schedules, tiles, programs, chunks, allocation modes and EP=1: the same bits; errors within twice torch's."""
    same_everywhere(r, {})
    same_everywhere(r, {"weight_at": "activation", "dtype": torch.float16})


def few_rows(r, changes):
    """Tiles that are the default where experts have few rows: the bits of others, also after calls with more rows,
    which leave theirs behind the last one."""
    cfg = MoEConfig(**{**SHAPE, "max_tokens_per_rank": 96}, **changes)
    usual = default_schedule("hopper", cfg, r.size)
    assert (usual.gate_up.rows, usual.weight_gradient) == (64, FEW_ROWS[64])
    calls = [r.data(cfg, tokens, seed=tokens) for tokens in (96, (61, 40, 0, 13)[r.rank % 4], 7)]
    want = [r.once(cfg, data, SERIAL) for data in calls]
    for how in ("", "few rows, beside", "few rows, copied"):
        with Workspace(cfg, r.group, schedule=SCHEDULES.get(how), timeout_s=60) as workspace:
            for turn in (0, 1, 2, 0, 2, 2, 2):
                wrong = differing(want[turn], r.run(workspace, calls[turn]))
                assert not wrong, (how, turn, wrong)
    wrong = {"EP=1": r.alone(cfg, calls[0])[0], "nccl": r.once(cfg, calls[0], backend="nccl")}
    if cfg.combine_groups is None:
        wrong["mega"] = r.once(cfg, calls[0], dataclasses.replace(usual, overlap="mega"))
    wrong = {how: differing(want[0], made) for how, made in wrong.items()}
    assert not any(wrong.values()), wrong


def check_strategies(r):
    """Every named strategy has the serial bits."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
    want, wrong = r.once(cfg, data, SERIAL), {}
    for name, strategy in strategies.STRATEGIES.items():
        for backend in strategy.points.keys() & {"hopper", "nccl"}:
            schedule = strategies.point(name, backend, cfg, r.size)
            wrong[f"{name} on {backend}"] = differing(want, r.once(cfg, data, schedule, backend=backend))
    assert len(wrong) >= len(strategies.STRATEGIES) and not any(wrong.values()), wrong


def check_activations(r):
    """The same with gelu, gated and not, and with combine groups; every activation over a dense grid of gates against
    fp64; every 16-bit value, widened."""
    for dtype in (torch.bfloat16, torch.float16):
        activation_grid.check_widened(dtype, r.device)
    for name, activation in ACTIVATIONS.items():
        for limit in (None, 3.0) if activation.gated else (None,):
            said = activation_grid.check(activation, r.device, blocks=2**10, limit=limit)
            if r.rank == 0:
                print(said, flush=True)
        if name not in ("geglu", "geglu_tanh", "gelu"):  # others are in check_bits and check_biases
            continue
        same_everywhere(r, {"activation": name})
        same_everywhere(r, {"activation": name, "weight_at": "activation", "dtype": torch.float16})
        cfg = MoEConfig(**SHAPE, activation=name, combine_groups=8)
        data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
        want = r.once(cfg, data, SERIAL)
        wrong = {how: differing(want, r.once(cfg, data, schedule)) for how, schedule in BESIDE.items()}
        wrong["nccl"] = differing(want, r.once(cfg, data, backend="nccl"))
        assert not any(wrong.values()), (name, wrong)


def check_biases(r):
    """The same with biases, a limit and no gate."""
    same_everywhere(r, BIASED)
    same_everywhere(r, {"bias": True, "activation": "relu2", "weight_at": "activation", "dtype": torch.float16})
    same_everywhere(r, {"bias": True, "activation": "silu"})


def check_biases_and_groups(r):
    """Biases with combine groups."""
    cfg = MoEConfig(**SHAPE, bias=True, weight_at="activation", combine_groups=8)
    same_as_serial(r, cfg, r.data(cfg, [900, 300, 0, 17][r.rank % 4]), chosen(GROUP_SCHEDULES))


def check_biases_again(r):
    """Biases in calls that are made again."""
    cfg = MoEConfig(**SHAPE, max_rows=8192, **BIASED)
    data = r.data(cfg, 700)
    want = r.once(cfg, data, SERIAL)
    for how in filter(AGAIN.get, ("copied", "gradient beside", "mega", "mega, copied")):  # from records, the third time
        with Workspace(cfg, r.group, schedule=AGAIN[how], timeout_s=60) as workspace:
            wrong = [differing(want, r.run(workspace, data)) for _ in range(5)]
            assert not any(wrong), (how, wrong)


def check_gpt_oss(r):
    """A layer of GPT-OSS-20B's shape."""
    shape = {"hidden": 2880, "ffn": 2880, "num_experts": 32, "top_k": 4, "max_tokens_per_rank": 2048}
    cfg = MoEConfig(**shape, bias=True, activation="swiglu_oai", activation_limit=7.0)
    few = {how: SCHEDULES[how] for how in ("copied", "pipelined", "gradient beside", "mega", "mega, copied")}
    same_as_serial(r, cfg, r.data(cfg, 2000), {**few, "": None})


def same_as_serial(r, cfg, data, schedules):
    """These schedules, the collective backend and EP=1."""
    want = r.once(cfg, data, SERIAL)
    wrong = {how: differing(want, r.once(cfg, data, schedule)) for how, schedule in schedules.items()}
    wrong["nccl"] = differing(want, r.once(cfg, data, backend="nccl"))
    wrong["EP=1"] = differing(want, r.alone(cfg, data)[0])
    assert not any(wrong.values()), {how: names for how, names in wrong.items() if names}


def same_everywhere(r, changes):
    """For one config."""
    cfg = MoEConfig(**SHAPE, **changes)
    data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
    want = r.once(cfg, data, SERIAL)
    narrow = Tile(columns=128, depth=64, group_rows=4)
    variants = {
        "default": (cfg, None),
        **{how: (cfg, schedule) for how, schedule in SCHEDULES.items()},
        "chunks": (cfg, Schedule(tile_order="natural", chunk_tokens=128, push_programs=3)),
        "expanded": (cfg, Schedule(operand="expanded")),
        "expanded, copied": (cfg, Schedule(operand="expanded", transfer="copy")),
        "tiles": (cfg, Schedule(gate_up=narrow, down=narrow, weight_gradient=narrow)),
        "sync-free": (dataclasses.replace(cfg, max_rows=8192), None),
    }
    wrong = {name: differing(want, r.once(c, data, s)) for name, (c, s) in chosen(variants).items()}
    one, joined, mine, experts = r.alone(cfg, data)
    wrong["EP=1"] = differing(want, one)
    assert not any(wrong.values()), {k: v for k, v in wrong.items() if v}

    def gradients(dtype, batch=joined, rows=mine, own=experts, weight_at=cfg.weight_at):
        x, ids, weights, w13, w2, dy, *biases = batch
        leaves = [t.to(dtype).requires_grad_() for t in (x, weights.float(), w13, w2, *biases)]
        how = weight_at, cfg.activation, cfg.activation_limit, tuple(leaves[4:]) or None
        y = composition(leaves[0], ids, *leaves[1:4], *how)
        grads = torch.autograd.grad(y, leaves, dy.to(dtype))
        return [y.detach()[rows], grads[0][rows], grads[1][rows], *(grad[own] for grad in grads[2:])]

    exact, torch_own = gradients(torch.float32), gradients(cfg.dtype)
    for name, e, t, u in zip(FIELDS[: len(want)], exact, torch_own, want, strict=True):
        if e.numel():
            theirs, ours = (t.float() - e).norm() / e.norm(), (u.float() - e).norm() / e.norm()
            assert ours <= 2 * theirs, f"{name}: error {ours:.2e}, torch's own {theirs:.2e}"


def check_many_tiles(r):
    """Where every program has a dozen tiles, all schedules have the same bits, with combine groups and without."""
    cfg = MoEConfig(hidden=1024, ffn=704, num_experts=32, top_k=8, max_tokens_per_rank=4096)
    expanded = Schedule(operand="expanded", overlap="pipelined")
    for groups, schedules in ((None, {**SCHEDULES, "expanded, pipelined": expanded}), (8, GROUP_SCHEDULES)):
        cfg = dataclasses.replace(cfg, combine_groups=groups)
        data = r.data(cfg, 4000, seed=6)
        want = r.once(cfg, data, SERIAL)
        wrong = {how: differing(want, r.once(cfg, data, schedule)) for how, schedule in chosen(schedules).items()}
        assert not any(wrong.values()), (groups, {k: v for k, v in wrong.items() if v})


BESIDE = {
    "beside": Schedule(transfer="copy", group_sum="beside"),
    "beside, pushed": Schedule(transfer="push", group_sum="beside"),
}
GROUP_SCHEDULES = {"serial": SERIAL, **{how: s for how, s in SCHEDULES.items() if s.overlap != "mega"}, **BESIDE}


def check_combine_groups(r):
    """combine_groups = 2, 4, 8 (those that ranks divide): schedules, delays, the collective backend and EP=1 have the
    same bits; y and dx are at most 1.5 times as far from fp32 as without groups."""
    chance = random.Random(r.rank)
    plain = MoEConfig(**SHAPE)
    for changes in ({}, {"weight_at": "activation", "dtype": torch.float16}):
        for groups in (g for g in (2, 4, 8) if g % r.size == 0):
            cfg = dataclasses.replace(plain, combine_groups=groups, **changes)
            data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
            want, joined, mine, _ = r.alone(cfg, data)
            wrong = {}
            for how, schedule in chosen(GROUP_SCHEDULES).items():
                with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
                    for repeat in range(5):
                        torch.cuda._sleep(chance.randrange(2_000_000))
                        wrong[how, repeat] = differing(want, r.run(workspace, data))
            wrong["sync-free"] = differing(want, r.once(dataclasses.replace(cfg, max_rows=8192), data))
            wrong["nccl"] = differing(want, r.once(cfg, data, backend="nccl"))
            assert not any(wrong.values()), (cfg, {k: v for k, v in wrong.items() if v})

            x, ids, weights, w13, w2, dy = (t.float() if t.is_floating_point() else t for t in joined)
            x.requires_grad_()
            y = composition(x, ids, weights, w13, w2, cfg.weight_at)
            exact = [y.detach()[mine], torch.autograd.grad(y, x, dy)[0][mine]]
            without = r.once(dataclasses.replace(cfg, combine_groups=None), data)
            for name, e, usual, ours in zip(("y", "dx"), exact, without, want, strict=False):
                if e.numel():
                    ratio = float((ours.float() - e).norm() / (usual.float() - e).norm())
                    assert ratio <= 1.5, f"{groups} groups, {name}: error {ratio:.2f} times that without groups"


def same_while_held(r, workspace, data, want, held, how):
    """Call while as many programs as `held` says, of another stream of rank 0, hold multiprocessors."""
    other = torch.cuda.Stream()
    r.run(workspace, data)
    for programs in held:
        torch.cuda.synchronize()
        dist.barrier()
        if r.rank == 0:
            with torch.cuda.stream(other):
                calls.hold_kernel[(programs,)](20_000_000, num_warps=32)
        wrong = differing(want, r.run(workspace, data))
        assert not wrong, f"{how}, {programs} programs: {wrong}"


def check_combine_groups_held(r):
    """Sums beside the product while another stream holds multiprocessors, and with fewer of them: the same bits."""
    cfg = MoEConfig(**SHAPE, max_rows=8192, combine_groups=8)
    data = r.data(cfg, 1000)
    want = r.once(cfg, data, SERIAL)
    for how, schedule in BESIDE.items():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            same_while_held(r, workspace, data, want, (8, 131, 264), how)
            for repeat in range(200):
                y = uniep.moe(*data[:5], workspace=workspace)
                if repeat % 7 == r.rank:
                    torch.cuda._sleep(100_000)
            assert torch.equal(y, want[0]), how
        for free in (54, 18):
            fewer = dataclasses.replace(schedule, free_sms=free)
            assert not differing(want, r.once(cfg, data, fewer)), f"{how}, {free} multiprocessors free"


def check_repeats(r):
    """50 repeats of every schedule, with random delays per rank and a competing stream: one set of bits."""
    cfg = MoEConfig(**SHAPE)
    data, chance, other = r.data(cfg, 700, seed=3), random.Random(r.rank), torch.cuda.Stream()
    block = torch.randn(2048, 2048, device=r.device, dtype=torch.bfloat16)
    want = r.once(cfg, data, SERIAL)
    for how, schedule in SCHEDULES.items():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            for repeat in range(50):
                torch.cuda._sleep(chance.randrange(2_000_000))
                with torch.cuda.stream(other):
                    for _ in range(chance.randrange(8)):
                        block @ block
                wrong = differing(want, r.run(workspace, data))
                assert not wrong, f"{how}, repeat {repeat}: {wrong}"


def check_recorded_calls(r):
    """Calls that are made again have the bits of serial ones: with other tensors, layers and numbers of tokens in turn,
    gradients into main_grad, the pair (w1, w3), on other streams, and without a C compiler."""
    cfg = MoEConfig(**SHAPE)
    batches = [r.data(cfg, tokens, seed=seed) for seed, tokens in enumerate((700, 300, 700))]
    want = [r.once(cfg, data, SERIAL) for data in batches]
    bounded = dataclasses.replace(cfg, max_rows=8192)
    for how, schedule in {"default": None, "expanded": Schedule(operand="expanded"), **AGAIN}.items():
        for walk in (records.compiled_walk, lambda: None):
            with Workspace(bounded, r.group, schedule=schedule, timeout_s=60) as workspace:
                recorded, side = workspace.backend.recorded, torch.cuda.Stream()
                usual, records.compiled_walk = records.compiled_walk, walk
                try:
                    for turn in range(5):
                        side.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(side if turn == 4 else torch.cuda.current_stream()):
                            for number, data in enumerate(batches):
                                wrong = differing(want[number], r.run(workspace, data))
                                assert not wrong, f"{how}, turn {turn}, batch {number}: {wrong}"
                finally:
                    records.compiled_walk = usual
                made = [p for p in recorded.known.values() if isinstance(p, records.RecordedCall)]
                backwards = 0 if how.endswith("again") else 2
                assert len(made) == 2 + backwards, f"{how}: {recorded.known.values()}"
    x, ids, weights, w13, w2, dy = batches[0]
    halves = w13.view(w13.shape[0], 2, -1, cfg.hidden)
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, halves[:, 0], halves[:, 1], w2)]
    with Workspace(bounded, r.group, timeout_s=60) as workspace:
        for _ in range(4):
            y = uniep.moe(leaves[0], ids, leaves[1], tuple(leaves[2:4]), leaves[4], workspace=workspace)
            dx, dweights, dw1, dw3, dw2 = torch.autograd.grad(y, leaves, dy)
            got = [y, dx, dweights, torch.cat([dw1, dw3], 1), dw2]
            assert not differing(want[0], got)
        parameters = [torch.nn.Parameter(t) for t in (w13, w2)]
        for p in parameters:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        for _ in range(4):
            uniep.moe(x, ids, weights, *parameters, workspace=workspace, main_grad="overwrite").backward(dy)
        assert all(torch.equal(p.main_grad.to(cfg.dtype), t) for p, t in zip(parameters, want[0][3:], strict=True))
        made = [p for p in workspace.backend.recorded.known.values() if isinstance(p, records.RecordedCall)]
        assert len(made) == 4, workspace.backend.recorded.known.values()
    with Workspace(cfg, r.group, timeout_s=60) as workspace:  # rows by the last call's need
        for turn in range(12):
            for number, data in enumerate(batches):
                wrong = differing(want[number], r.run(workspace, data))
                assert not wrong, f"rows as needed, turn {turn}, batch {number}: {wrong}"
        assert any(isinstance(p, records.RecordedCall) for p in workspace.backend.recorded.known.values())


def check_own_operators(r):
    """Operators of one's own, as torch functions and as Triton bodies: one set of bits over schedules, repeats and a
    graph.  `prepare` compiles them; bodies are recorded, functions are not."""
    cfg, wants = MoEConfig(**SHAPE, max_rows=8192), {}
    data = r.data(cfg, [300, 700, 0, 64][r.rank % 4])
    plain = r.once(cfg, data, SERIAL)
    ways = {"serial": SERIAL, "default": None, "fused": FUSED, "pushed": Schedule(transfer="push")}
    ways |= {"mega": MEGA["mega"], "pipelined": Schedule(overlap="pipelined", transfer="copy", pipelined_from=0)}
    for how, schedule in ways.items():
        for kind in ("torch", "triton", "returning"):
            forward, backward = (
                [op for op in own_operators.operators(kind) if op.direction == direction] for direction in DIRECTIONS
            )
            with Workspace(cfg, r.group, schedule=schedule, timeout_s=60, operators=forward) as workspace:
                workspace.prepare()
                known = len(call._known)
                with torch.no_grad():
                    ys = [uniep.moe(*data[:5], workspace=workspace) for _ in range(4)]
                    made = [p for p in workspace.backend.recorded.known.values() if isinstance(p, records.RecordedCall)]
                    assert bool(made) == (kind != "torch" and len(data[0]) > 0), f"{how}, {kind}"
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        replayed = uniep.moe(*data[:5], workspace=workspace)
                graph.replay()
                assert len(call._known) == known, f"{how}, {kind}: compiled after prepare"
                torch.cuda.synchronize()
            with Workspace(cfg, r.group, schedule=schedule, timeout_s=60, operators=backward) as workspace:
                found = [r.run(workspace, data) for _ in range(4)]
            y, of_step = wants.setdefault(kind == "returning", (ys[0], found[0]))
            assert all(torch.equal(y, other) for other in (*ys, replayed)), f"{how}, {kind}"
            assert not [wrong for got in found if (wrong := differing(of_step, got))], f"{how}, {kind}"
    y, of_step = wants[False]
    assert differing(plain, of_step) == (["dx", "dweights", "dw13"] if len(data[0]) else ["dw13"])
    assert torch.equal(y, plain[0]) == (not len(data[0]))


def check_calls_without_pause(r):
    """300 forwards back to back, every tenth with a backward, ranks out of step: one set of bits, for each schedule."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    data = r.data(cfg, 700, seed=4)
    for how, schedule in SCHEDULES.items():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            want, wrong = r.run(workspace, data), torch.zeros((), dtype=torch.int64, device=r.device)
            for repeat in range(300):
                if repeat % 10 == 0:
                    got = r.run(workspace, data)
                    wrong += sum((a != b).sum() for a, b in zip(want, got, strict=True))
                else:
                    wrong += (uniep.moe(*data[:5], workspace=workspace) != want[0]).sum()
                if repeat % 7 == r.rank:
                    torch.cuda._sleep(100_000)
            assert not int(wrong), f"{how}: {int(wrong)} values differ"
            workspace.check()


def check_streams(r):
    """On a side stream, x freed after the call and its memory filled with NaN at once: the same bits."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    data = r.data(cfg, 600, seed=5)
    side = torch.cuda.Stream()
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        want = r.run(workspace, data)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for repeat in range(100):
                x = data[0].clone()
                y = uniep.moe(x, *data[1:5], workspace=workspace)
                del x
                torch.full_like(data[0], float("nan"))
                assert torch.equal(y, want[0]), repeat
                assert not differing(want, r.run(workspace, data)), repeat


def check_shared_experts_beside(r):
    """On a stream of their own: the bits of one behind the other, also while memory that was used is filled with NaN at
    once, with checkpointing, and in a captured graph."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    x, dy = r.data(cfg, 600, seed=5)[0], r.data(cfg, 600, seed=6)[0]
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        layers = [
            uniep.nn.MoE(cfg, workspace=workspace, seed=0, shared_ffn=512, shared_beside=beside)
            for beside in (False, True)
        ]

        def step(layer, wrap=lambda f: f):
            given = x.clone().requires_grad_()
            y = wrap(layer)(given * 1)
            grads = torch.autograd.grad(y, [given, *layer.parameters()], dy)
            torch.full_like(x, float("nan"))
            return [y.detach(), *grads]

        want = step(layers[0])
        for repeat in range(50):
            assert all(map(torch.equal, want, step(layers[1]))), repeat
        again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        assert all(map(torch.equal, want, step(layers[1], lambda f: functools.partial(again, f))))
        with torch.no_grad():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layers[1](x)
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, want[0])


def check_growth(r):
    """Random T and routing on three layers of one Workspace: memory in use stays flat after the first steps."""
    cfg = MoEConfig(**SHAPE)
    chance, used = random.Random(r.rank), []
    layers = [r.data(cfg, 1, seed=seed)[3:5] for seed in range(3)]
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        for step in range(60):
            x, ids, weights, *_ = r.data(cfg, chance.randrange(1025), seed=step)
            x.requires_grad_()
            y = x
            for w13, w2 in layers:
                y = uniep.moe(y, ids, weights, w13, w2, workspace=workspace)
            y.sum().backward()
            del x, y
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
        assert max(used[20:]) <= 1.01 * max(used[:20]), used


def check_gradient_strides(r):
    """An expanded, a sliced and a transposed incoming gradient: the bits of a contiguous one."""
    cfg = MoEConfig(**SHAPE)
    x, ids, weights, w13, w2, dy = r.data(cfg, 512)
    like = {"device": r.device, "dtype": cfg.dtype}
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        for given in (
            torch.ones((), **like).expand(512, cfg.hidden),
            torch.cat([dy, dy], 1)[:, 1:-511],
            dy.T.contiguous().T,
        ):
            grads = []
            for gradient in (given, given.contiguous()):
                leaf = x.clone().requires_grad_()
                y = uniep.moe(leaf, ids, weights, w13, w2, workspace=workspace)
                grads.append(torch.autograd.grad(y, leaf, gradient)[0])
            assert torch.equal(*grads)


def check_batch_invariance(r):
    """A token's result alone and among others is the same, and so is its gradient."""
    cfg = MoEConfig(**SHAPE)
    x, ids, weights, w13, w2, dy = r.data(cfg, 1000)
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        want = r.run(workspace, (x, ids, weights, w13, w2, dy))
        for tokens in (1, 4, 17, 257):
            got = r.run(workspace, (x[:tokens], ids[:tokens], weights[:tokens], w13, w2, dy[:tokens]))
            assert all(torch.equal(a[:tokens], b) for a, b in zip(want[:3], got[:3], strict=True)), tokens


def check_multiprocessors(r):
    """Fewer multiprocessors (other cards, caps): the same bits."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 1000)
    want = r.once(cfg, data, SERIAL)
    for schedule in SCHEDULES.values():
        for free in (54, 18):
            fewer = dataclasses.replace(schedule, free_sms=free)
            assert not differing(want, r.once(cfg, data, fewer)), f"{free} multiprocessors free, {schedule}"


def check_held_multiprocessors(r):
    """A kernel of another stream holds multiprocessors of one rank: the call ends after it, with the same bits."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    data = r.data(cfg, 1000)
    want = r.once(cfg, data, SERIAL)
    for how, schedule in SCHEDULES.items():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            same_while_held(r, workspace, data, want, (8, 64, 131, 264), how)


def check_shapes(r):
    """Sizes that are no multiples of anything, 512 experts, top 10: within twice torch's error of fp32."""
    for hidden, ffn, experts, top_k in ((200, 480, 3 * r.size, 3), (72, 136, 512, 10)):
        cfg = MoEConfig(
            hidden=hidden, ffn=ffn, num_experts=experts, top_k=top_k, max_tokens_per_rank=333, dtype=torch.float16
        )
        data = r.data(cfg, [333, 1, 0, 64][r.rank % 4])
        got = r.once(cfg, data)
        joined = [torch.cat(r.gather_ragged(t, -1 if t is data[1] else 0)) for t in data]
        rows = [len(t) for t in r.gather_ragged(data[1], -1)]
        mine, local = slice(sum(rows[: r.rank]), sum(rows[: r.rank + 1])), experts // r.size
        own = slice(r.rank * local, (r.rank + 1) * local)
        of = {}
        for dtype in (torch.float32, cfg.dtype):
            x, ids, weights, w13, w2, dy = joined
            leaves = [t.to(dtype).requires_grad_() for t in (x, weights.float(), w13, w2)]
            y = composition(leaves[0], ids, *leaves[1:], "output")
            grads = torch.autograd.grad(y, leaves, dy.to(dtype))
            of[dtype] = [y.detach()[mine], grads[0][mine], grads[1][mine], grads[2][own], grads[3][own]]
        for name, e, t, u in zip(FIELDS[: len(got)], of[torch.float32], of[cfg.dtype], got, strict=True):
            if e.numel():
                theirs, ours = (t.float() - e).norm() / e.norm(), (u.float() - e).norm() / e.norm()
                assert ours <= 2 * theirs, f"D={hidden} {name}: error {ours:.2e}, torch's own {theirs:.2e}"


def check_large(r):
    """304,000 slots of 7168 values a rank (beyond 2**31 in one index, 4 GiB symmetric): sampled tokens have the bits
    that they have alone."""
    cfg = MoEConfig(hidden=7168, ffn=64, num_experts=16, top_k=8, max_tokens_per_rank=38000, max_rows=400_000)
    data = r.data(cfg, 38000, unused=0.0)
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        y, dx, dweights, *_ = r.run(workspace, data)
        some = torch.tensor([0, 1, 17, 19_000, 37_448, 37_449, 37_999], device=r.device)
        few = [t[some] if t.shape[0] == 38000 else t for t in data]
        for whole, part in zip((y, dx, dweights), r.run(workspace, few), strict=False):
            assert torch.equal(whole[some], part)


def check_large_weights(r):
    """Weights, saved pre-activations and their gradients of more than 2**31 values: sampled tokens have the bits
    that they have alone, and gradients of the first and the last expert those of its own tokens alone."""
    local = 80
    cfg = MoEConfig(hidden=2048, ffn=8192, num_experts=local * r.size, top_k=8, max_tokens_per_rank=17000)
    data = r.data(cfg, 17000, unused=0.0)
    some = torch.tensor([0, 1, 17, 8_400, 16_999], device=r.device)
    for schedule in (FUSED, MEGA["mega"]):
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            y, dx, dweights, dw13, dw2 = r.run(workspace, data)
            few = [t[some] if t.shape[0] == 17000 else t for t in data]
            for whole, part in zip((y, dx, dweights), r.run(workspace, few), strict=False):
                assert torch.equal(whole[some], part)
            x, ids, *rest = data
            for own in (0, local - 1):
                alone = torch.where(ids % local == own, ids, -1)
                *_, own13, own2 = r.run(workspace, (x, alone, *rest))
                assert torch.equal(dw13[own], own13[own]), f"dw13 of expert {own}"
                assert torch.equal(dw2[own], own2[own]), f"dw2 of expert {own}"


def check_memory(r):
    """Peak memory of a forward and its backward is what `plan_memory` says, within 5 %."""
    plain = MoEConfig(hidden=2048, ffn=768, num_experts=16, top_k=8, max_tokens_per_rank=8192, max_rows=66_000)
    few = dataclasses.replace(plain, max_tokens_per_rank=512, max_rows=8192)
    grouped = dataclasses.replace(plain, combine_groups=r.size)
    for cfg, schedule in ((plain, None), (grouped, None), (few, None), (few, MEGA["mega"])):
        x, ids, weights, w13, w2, dy = r.data(cfg, cfg.max_tokens_per_rank, unused=0.0)
        planned = uniep.plan_memory(cfg, r.size, schedule=schedule).peak_bytes()
        leaves = [t.requires_grad_() for t in (x, weights, w13, w2)]
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            for _ in range(2):
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                y = uniep.moe(leaves[0], ids, *leaves[1:], workspace=workspace)
                grads = torch.autograd.grad(y, leaves, dy)
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                del y, grads
        sizes = f"peak {peak / 2**20:.0f} MiB, planned {planned / 2**20:.0f} MiB"
        assert abs(peak - planned) <= 0.05 * planned, f"{cfg}: {sizes}"


def check_collapse(r):
    """All tokens on one expert, on another the next call: exact allocation follows, nothing is dropped."""
    cfg = MoEConfig(**SHAPE)
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        for hot in (0, cfg.num_experts - 1, 3):
            x, ids, weights, w13, w2, dy = r.data(cfg, 1000, seed=hot)
            data = (x, torch.full_like(ids, hot), weights, w13, w2, dy)
            got = r.run(workspace, data)
            wrong = differing(r.alone(cfg, data)[0], got)
            assert not wrong, f"hot expert {hot}: {wrong}"


def check_empty(r):
    """No tokens at all, then only unused slots, after memory was poisoned: exact zeros everywhere."""
    cfg = MoEConfig(**SHAPE)
    for schedule in (FUSED, MEGA["mega"], MEGA["mega, chunks, copied"]):
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            r.run(workspace, r.data(cfg, 1000))
            poison = [torch.full((1 << 22,), float("nan"), device=r.device) for _ in range(16)]
            del poison
            for tokens in (0, 32):
                x, ids, weights, w13, w2, dy = r.data(cfg, tokens)
                got = r.run(workspace, (x, torch.full_like(ids, -1), weights, w13, w2, dy))
                wrong = [n for n, t in zip(FIELDS, got, strict=False) if t.any()]
                assert not wrong, (schedule, wrong)


def check_bad_ids(r):
    """The same InputError on every rank, naming rank, row, slot and value; the Workspace works afterwards."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 200)
    with Workspace(cfg, r.group, timeout_s=60) as workspace:
        want = r.run(workspace, data)
        for value in (cfg.num_experts, 2**31 - 1, -2):
            ids = data[1].clone()
            if r.rank == r.size - 1:
                ids[7, 2] = value
            with pytest.raises(uniep.InputError, match=f"rank {r.size - 1}, row 7, slot 2"):
                uniep.moe(data[0], ids, *data[2:5], workspace=workspace)
        assert not differing(want, r.run(workspace, data))


def check_refusal(r):
    """One rank passes a wrong dtype: all ranks raise its error at once, and the Workspace works afterwards."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 200)
    for schedule in (FUSED, MEGA["mega"]):
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            want = r.run(workspace, data)
            x = data[0].float() if r.rank == r.size - 1 else data[0]
            with pytest.raises(uniep.DTypeError, match=r"torch\.float32"):
                uniep.moe(x, *data[1:5], workspace=workspace)
            assert not differing(want, r.run(workspace, data))


def check_capacity(r):
    """max_rows too small: CapacityError on every rank, with rows needed and available; then ClosedError."""
    cfg = MoEConfig(**SHAPE, max_rows=64)
    x, ids, weights, w13, w2, _ = r.data(cfg, 1000)
    for schedule in (FUSED, MEGA["mega"]):
        workspace = Workspace(cfg, r.group, schedule=schedule, timeout_s=60)
        y = uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
        torch.cuda.synchronize()
        assert torch.isnan(y).any()
        with pytest.raises(uniep.CapacityError, match="max_rows=64"):
            workspace.check()
        with pytest.raises(uniep.ClosedError, match="max_rows=64"):
            uniep.moe(x, ids, weights, w13, w2, workspace=workspace)


def check_frozen_and_twice(r):
    """Frozen parameters change no other gradient; a second backward gives the same bits."""
    cfg = MoEConfig(**SHAPE)
    x, ids, weights, w13, w2, dy = data = r.data(cfg, 500)
    for schedule in (FUSED, MEGA["mega"]):
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            want = r.run(workspace, data)
            leaf = x.clone().requires_grad_()
            y = uniep.moe(leaf, ids, weights, w13, w2, workspace=workspace)
            first = torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]
            second = torch.autograd.grad(y, leaf, dy)[0]
            assert torch.equal(first, want[1])
            assert torch.equal(second, want[1])


def check_main_grad(r):
    """main_grad: overwritten, the fp32 gradient whose one rounding is the usual one; accumulated, the sum with it."""
    cfg = MoEConfig(**SHAPE)
    x, ids, weights, w13, w2, dy = data = r.data(cfg, [500, 0, 17, 64][r.rank % 4])
    found = {}
    ways = {"hopper": {"schedule": FUSED}, "mega": {"schedule": MEGA["mega"]}, "nccl": {"backend": "nccl"}}
    for backend, how in ways.items():
        with Workspace(cfg, r.group, timeout_s=60, **how) as workspace:
            want = r.run(workspace, data)[3:]
            parameters = [t.clone().requires_grad_() for t in (w13, w2)]
            for main_grad, before in (("overwrite", float("nan")), ("accumulate", 0.3)):
                for t in parameters:
                    t.main_grad = torch.full(t.shape, before, device=r.device)
                for _ in range(2):
                    uniep.moe(x, ids, weights, *parameters, workspace=workspace, main_grad=main_grad).backward(dy)
                found[backend, main_grad] = [t.main_grad for t in parameters]
        assert all(t.grad_added_to_main_grad and not t.grad.any() for t in parameters)
        for finished, added, usual in zip(*(found[backend, m] for m in ("overwrite", "accumulate")), want, strict=True):
            assert torch.equal(finished.to(cfg.dtype), usual), backend
            assert torch.equal(added, torch.full_like(finished, 0.3) + finished + finished), backend
    for ours, theirs in zip(found["hopper", "overwrite"], found["nccl", "overwrite"], strict=True):
        assert torch.equal(ours, theirs)


def check_collective_backend(r):
    """backend="nccl" gives the bits of the hopper backend."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, [900, 300, 0, 17][r.rank % 4])
    wrong = differing(r.once(cfg, data, SERIAL), r.once(cfg, data, backend="nccl"))
    assert not wrong, wrong


def check_graph(r):
    """A captured sync-free forward, replayed with other tokens: the bits of a call."""
    cfg = MoEConfig(**SHAPE, max_rows=8192)
    x, ids, weights, w13, w2, _ = r.data(cfg, 700)
    ways = {how: (cfg, SCHEDULES[how]) for how in ("copied", "pushed", "pipelined", "parts", "mega", "mega, copied")}
    ways["beside"] = dataclasses.replace(cfg, combine_groups=8), BESIDE["beside"]
    for how, (cfg, schedule) in ways.items():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=10) as workspace:
            for _ in range(2):
                uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
            for seed in range(3):
                x.copy_(r.data(cfg, 700, seed=seed)[0])
                graph.replay()
                torch.cuda.synchronize()
                workspace.check()
                replayed = y.clone()
                assert torch.equal(uniep.moe(x, ids, weights, w13, w2, workspace=workspace), replayed), f"{how}, {seed}"

    exact = MoEConfig(**SHAPE)
    with Workspace(exact, r.group, timeout_s=10) as workspace:
        want = uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(uniep.UnsupportedError, match=r"set MoEConfig\.max_rows"):  # noqa: SIM117
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                uniep.moe(x, ids, weights, w13, w2, workspace=workspace)
        assert torch.equal(uniep.moe(x, ids, weights, w13, w2, workspace=workspace), want)


def check_prepare(r):
    """Calls after `prepare` are made once and compile nothing, also from a thread that CUDA has not seen; afterwards
    from another stream, and the Workspace is closed at once."""
    cfg = MoEConfig(**SHAPE)
    data, found = r.data(cfg, 700), []
    want = r.once(cfg, data, SERIAL)
    for schedule in (FUSED, MEGA["mega"], Schedule(transfer="push")):
        workspace = Workspace(cfg, r.group, schedule=schedule, timeout_s=60)
        planner = workspace.backend.planner
        rows = planner.allocate
        workspace.prepare()
        assert planner.allocate == rows
        calls, known = planner.calls_made, len(call._known)
        caller = threading.Thread(target=lambda: found.append(r.run(workspace, data)))  # noqa: B023
        caller.start()
        caller.join()
        assert planner.calls_made == calls + 2
        assert len(call._known) == known
        assert not differing(want, found.pop())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found.append(r.run(workspace, data))
        workspace.close()
        zeros = torch.zeros(2**24, device=r.device)  # may take what the Workspace had
        torch.cuda.synchronize()
        assert not differing(want, found.pop()) and not zeros.any()


def check_listed(r):
    """Processes without a GPU compile what a trial lists, and its first call finds all of it; both backends."""
    cfg, found = MoEConfig(**SHAPE, max_rows=8192), []

    def seen(*, src, cache_hit, **_):
        found.append((src.name, cache_hit))

    tile = Tile(columns=128, stages=3, group_rows=4)
    own = Schedule(transfer="push", gate_up=tile, down=tile, weight_gradient=dataclasses.replace(tile, stages=4))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched, Compilers(4) as compilers:
        patched.setenv("TRITON_CACHE_DIR", folder)
        for backend, schedule in (("hopper", own), ("nccl", default_schedule("nccl", cfg, r.size))):
            trial = Trial(Job(cfg, r.size, backend, "cuda", 700), r.rank, r.group, r.device)
            assert compilers.compile([trial.kernels(schedule)], 60.0) == [None]
            patched.setattr(triton.knobs.compilation, "listener", seen)
            trial.prove(schedule)
            trial.close()
    assert len(found) > 5 and all(hit for _, hit in found), found


def check_ten_steps(r):
    """Ten steps of every schedule, a product on a side stream beside each: one set of bits.  Also run where launches
    wait for their kernels (CUDA_LAUNCH_BLOCKING=1)."""
    cfg = MoEConfig(**SHAPE)
    data, side = r.data(cfg, [300, 700, 0, 64][r.rank % 4]), torch.cuda.Stream()
    block = torch.randn(2048, 2048, device=r.device, dtype=torch.bfloat16)
    want = r.once(cfg, data, SERIAL)
    for how, schedule in {"default": None, **SCHEDULES}.items():
        with Workspace(cfg, r.group, schedule=schedule, timeout_s=60) as workspace:
            for step in range(10):
                with torch.cuda.stream(side):
                    block @ block
                wrong = differing(want, r.run(workspace, data))
                assert not wrong, f"{how}, step {step}: {wrong}"


def check_timeout(r):
    """A rank that makes no call: the others get PeerTimeoutError naming it, then ClosedError."""
    cfg = MoEConfig(**SHAPE)
    data = r.data(cfg, 100)
    for schedule in (FUSED, MEGA["mega"]):
        workspace = Workspace(cfg, r.group, schedule=schedule, timeout_s=3)
        r.run(workspace, data)
        torch.cuda.synchronize()
        dist.barrier()
        if r.rank != 1:
            with pytest.raises(uniep.PeerTimeoutError, match="rank 1"):
                uniep.moe(*data[:5], workspace=workspace)
                torch.cuda.synchronize()
                workspace.check()
            with pytest.raises(uniep.ClosedError, match="rank 1"):
                uniep.moe(*data[:5], workspace=workspace)
        dist.barrier()


CHECKS = {
    name.removeprefix("check_"): f
    for name, f in (*globals().items(), *vars(calls).items(), *vars(shards).items(), *vars(routing).items())
    if name.startswith("check_")
}
CHECKS |= {
    f"few_rows_{name}": functools.partial(few_rows, changes=changes)
    for name, changes in {
        "bf16": {}, "fp16": {"weight_at": "activation", "dtype": torch.float16}, "biases": BIASED,
        "biases_weighted": {**BIASED, "weight_at": "activation"}, "groups": {"combine_groups": 8},
        "sync_free": {"max_rows": 2048},
    }.items()
}  # fmt: skip


def _main(rank, size, port, results, names, environment):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {variable: text.format(node=2 * rank // size) for variable, text in environment.items()}
    if SHARED:
        one_gpu.install()
        dist.init_process_group("cpu:gloo,cuda:gloo")
    else:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for name in names:
        started, error = time.monotonic(), ""
        try:
            CHECKS[name](Rank(rank, size))
        except BaseException:
            error = traceback.format_exc()
        results.put((name, rank, error))
        said = f" {error.splitlines()[-1]}" if error else "right"
        print(f"{name}, rank {rank}: {said}, {time.monotonic() - started:.1f} s", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def launched(*names, **environment):
    """{check: {rank: error text}} of one launch of all ranks.  environment: "{node}" is 0 for the first half of ranks,
    1 for the other."""
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_main, args=(RANKS, port, results, names, environment), nprocs=RANKS)
    found: dict[str, dict[int, str]] = {}
    while not results.empty():
        name, rank, error = results.get()
        found.setdefault(name, {})[rank] = error
    return found


def assert_right(outcome):
    errors = {rank: text for rank, text in outcome.items() if text}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())


@pytest.fixture(scope="module")
def outcomes(request):
    chosen = {item.callspec.params["name"] for item in request.session.items if item.originalname == "test_hopper"}
    return launched(*(name for name in CHECKS if name in chosen and not (SHARED and name in one_gpu.NEEDS_OWN_GPU)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKS)
def test_hopper(name, outcomes):
    if SHARED and name in one_gpu.NEEDS_OWN_GPU:
        pytest.skip(f"a GPU for each rank: {one_gpu.NEEDS_OWN_GPU[name]}")
    assert_right(outcomes[name])


@pytest.mark.timeout(300)
@pytest.mark.skipif(SHARED, reason="a GPU for each rank: ranks that share one have no NCCL")
def test_two_logical_nodes():
    """NCCL takes the halves of the ranks for two hosts, and sends between them by sockets."""
    assert_right(launched("collective_backend", NCCL_HOSTID="host {node}")["collective_backend"])


@pytest.mark.timeout(300)
def test_launches_that_wait():
    assert_right(launched("ten_steps", CUDA_LAUNCH_BLOCKING="1")["ten_steps"])
