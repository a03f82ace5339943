"""Compile the kernels that the Hopper backend launches, for sm_90 without a GPU, and list what is wrong.

    python tests/interp/lint.py [--all | --part few | --part others] [--shape NAME]

The backend's own launch code runs with compilation in the place of launches, so what is compiled is what
ships.  Without --all: CASES, in which every shape of benchmarks/cases.py occurs, and every pair of dtype, weighting,
overlap and weight layout.  "few" are the first form of every kernel, of the first FEW cases; "others" are all other
forms and cases.  Prints one JSON object a kernel: its name, its case, the numbers, the complaints.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from hopper_on_host import host_backend, install, use
from inspection import inspect, offline
from own_operators import operators

from cases import SHAPES, parse_shape
from uniep.activation import ACTIVATIONS
from uniep.backends.base import Inputs, MainGrads, Needs
from uniep.backends.collective.local_experts import KernelExperts, Routed, Tokens
from uniep.backends.hopper import calls as hopper_calls
from uniep.backends.hopper import planner
from uniep.config import MoEConfig
from uniep.launch import ahead, dense
from uniep.launch import driver as call
from uniep.launch import groups as launch_groups
from uniep.launch import mega as launch_mega
from uniep.launch import router as launch_router
from uniep.launch import staged as launchers
from uniep.routing import build_plan
from uniep.schedule import TILES, Schedule, default_schedule, parse_schedule, shared_bytes
from uniep.way import resolve
from uniep.weights import ExpertWeights, Lora

TOKENS = 8192
LAUNCHING = launchers, launch_groups, launch_mega, launch_router, planner, hopper_calls, dense
ROUTERS = (
    (64, 1, False),
    (128, 8, True),
    (160, 8, False),
    (256, 8, True),
    (384, 1, True),
    (512, 8, True),
    (1024, 1, False),
)
PLANS = (  # most tokens of a rank, top-k, experts
    *itertools.product((8192, 2**17, 2**20), (8, 16), (256,)),
    (8192, 10, 512),
    (8192, 8, 2048),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer whose kernels are compiled."""

    shape: str
    dtype: torch.dtype = torch.bfloat16
    weight_at: str = "output"
    ep_size: int = 2
    overlap: str = "fused"
    layout: str = "stacked"
    operand: str = "gathered"
    transfer: str = "push"
    combine_groups: int | None = None
    group_sum: str = "after"
    activation: str = "swiglu"
    limit: float | None = None
    bias: bool = False
    sync_free: bool = False
    tile_order: str = "local-first"
    own: bool = False  # with operators of one's own
    lora: int | None = None  # the rank of factors
    adapted: tuple[str, ...] = ("w13", "w2")  # the weights that have them
    more: str = ""  # of the schedule, as text
    preactivation: str = "saved"
    only: tuple[str, ...] = ()  # kernels that are compiled; (): all
    shards: int = 1  # blocks of ranks, whose weight gradients are summed by themselves
    tokens: int = TOKENS  # that a rank has at most

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        groups = f"groups {self.combine_groups} {self.group_sum}"
        how = f"{self.overlap}, {self.transfer}, {self.operand}, {self.layout}, {groups}, {self.activation}"
        how += f" up to {self.limit}" * (self.limit is not None) + ", biases" * self.bias
        how += ", operators of one's own" * self.own
        how += f", LoRA of rank {self.lora} beside {' and '.join(self.adapted)}" * (self.lora is not None)
        how += f", {self.more}" * bool(self.more) + f", {self.shards} gradient shards" * (self.shards > 1)
        how += f", h {self.preactivation}" * (self.preactivation != "saved")
        how += f", {self.tokens} tokens" * (self.tokens != TOKENS)
        how += ", sync-free" * self.sync_free + f", {self.tile_order}" * (self.tile_order != "local-first")
        return f"{self.shape}, {dtype}, weight at {self.weight_at}, EP {self.ep_size}, {how}"

    def config(self) -> MoEConfig:
        shape = parse_shape(self.shape)
        return MoEConfig(
            hidden=shape.hidden, ffn=shape.ffn, num_experts=shape.num_experts, top_k=shape.top_k,
            max_tokens_per_rank=self.tokens, dtype=self.dtype, weight_at=self.weight_at,
            combine_groups=self.combine_groups,
            activation=self.activation, activation_limit=self.limit, bias=self.bias, gradient_shards=self.shards,
            max_rows=2 * self.tokens * shape.top_k if self.sync_free else None,
        )  # fmt: skip

    def schedule(self) -> Schedule:
        names = "overlap", "operand", "transfer", "group_sum", "tile_order", "preactivation"
        fields = {name: getattr(self, name) for name in names}
        usual = default_schedule("hopper", self.config(), self.ep_size)
        return parse_schedule(self.more, dataclasses.replace(usual, **fields))

    def most_shared(self) -> int:
        """Shared memory in bytes that a product may take, of this schedule or of the collective backend's."""
        schedules = self.schedule(), default_schedule("nccl", self.config(), self.ep_size)
        return max(shared_bytes(getattr(s, name), self.dtype.itemsize) for s in schedules for name in TILES)


BF16, FP16 = torch.bfloat16, torch.float16
GPT_OSS = "2880x2880x32x4"
SMALL = ",".join(f"{name}.{change}" for name in TILES for change in ("rows=64", "columns=128", "stages=5"))
GATE_UP, IN_PARTS = ("gate_up_kernel",), ("gate_up_kernel", "product_kernel", "tiles_kernel")
BY_BLOCKS = "block_gradient_kernel", "bias_gradient_kernel"
MEGA = "forward_kernel", "backward_kernel"
PRODUCTS = "gate_up_kernel", "product_kernel", "gathered_product_kernel", "weight_gradient_kernel"
CASES = (
    Case("dsv2-lite", FP16, "activation", 2, "pipelined", "split", "gathered", "push"),
    Case("deepseek-v3", FP16, "output", 8, combine_groups=8, group_sum="beside"),
    Case("deepseek-v3-256", FP16, "output", 8, "serial", "split", own=True),
    Case("qwen3-30b", BF16, "output", 2, "mega", transfer="push"),
    Case("qwen3-30b", BF16, "output", 2, "pipelined", "stacked", "gathered", "copy", sync_free=True),
    Case("qwen3-235b", BF16, "activation", 4, "fused", "stacked", "expanded", "copy"),
    Case("deepseek-v3", FP16, "output", 8, "fused", "stacked"),
    Case("mixtral-8x7b", BF16, "output", 1, "fused", "split", "expanded"),
    Case("dsv2-lite", FP16, "activation", 8, "mega", "split", transfer="push"),
    Case("deepseek-v3", BF16, "activation", 4, "mega", "stacked", transfer="copy", tile_order="critical-path"),
    Case("dsv2-lite", FP16, "activation", 2, combine_groups=8, group_sum="beside"),
    # With the fewest registers left, and in one kernel.
    Case("dsv2-lite", FP16, "activation", 2, "pipelined", "split", "gathered", "push", activation="geglu"),
    Case("dsv2-lite", FP16, "activation", 2, "pipelined", "split", "gathered", "push", activation="geglu_tanh"),
    Case("qwen3-30b", BF16, "output", 2, "mega", transfer="push", activation="geglu"),
    # GPT-OSS-20B; with the fewest registers left; without a gate.
    Case(GPT_OSS, BF16, "output", 2, "pipelined", activation="swiglu_oai", limit=7.0, bias=True),
    Case(GPT_OSS, BF16, "output", 2, "mega", transfer="push", activation="swiglu_oai", limit=7.0, bias=True),
    Case("dsv2-lite", FP16, "activation", 2, "pipelined", "split", activation="geglu_tanh", limit=7.0, bias=True),
    Case("dsv2-lite", FP16, "activation", 2, combine_groups=8, group_sum="beside", bias=True),
    Case("qwen3-30b", BF16, "output", 2, "mega", transfer="push", activation="gelu", bias=True),
    Case("qwen3-30b", BF16, "output", 2, "mega", transfer="push", bias=True),
    Case("5120x1536x160x6", BF16, "output", 2, "mega", transfer="push"),
    Case("deepseek-v3", BF16, "output", 2, "mega", transfer="push"),
    # Pushed, with h saved; few experts.
    Case("qwen3-30b", BF16, "output", 2, transfer="push"),
    Case("mixtral-8x7b", BF16, "output", 4, transfer="copy"),
    # The same with weights at the activation, and with biases; clamped, which is crowded without a push.
    Case("qwen3-30b", BF16, "activation", 2, only=GATE_UP),
    Case(GPT_OSS, BF16, "output", 2, activation="swiglu_oai", limit=7.0, bias=True, only=GATE_UP),
    Case("dsv2-lite", FP16, "activation", 4, activation="swiglu_oai", limit=7.0, only=GATE_UP),
    Case("dsv2-lite", BF16, "output", 4, transfer="copy", limit=7.0, only=GATE_UP),
    # LoRA; with the fewest registers left.
    Case("qwen3-30b", lora=8),
    Case("qwen3-30b", ep_size=4, transfer="copy", operand="expanded", lora=16),
    Case("qwen3-30b", overlap="serial", lora=64),
    Case("qwen3-30b", overlap="pipelined", transfer="copy", lora=16, adapted=("w13",)),
    Case("dsv2-lite", FP16, combine_groups=8, group_sum="beside", lora=64, adapted=("w13",)),
    Case("deepseek-v3", weight_at="activation", layout="split", lora=64),
    Case("deepseek-v3", ep_size=8, transfer="copy", lora=128),
    Case(GPT_OSS, activation="swiglu_oai", limit=7.0, bias=True, lora=128),
    Case("dsv2-lite", FP16, "activation", layout="split", activation="geglu_tanh", limit=7.0, bias=True, lora=128),
    # Tokens are fetched; send lists by expert; other tiles.
    Case("qwen3-30b", BF16, "output", 8, "fused", transfer="pull", more="send_order=expert"),
    Case("dsv2-lite", FP16, "activation", 4, "serial", transfer="pull", more=f"send_order=expert,{SMALL}"),
    Case("qwen3-30b", BF16, "output", 4, "mega", transfer="pull", more="send_order=expert"),
    # gate_up in parts, first and later ones; with the fewest registers left.
    Case("qwen3-30b", overlap="pipelined", transfer="push", more="gate_up_parts=2", only=IN_PARTS),
    Case("qwen3-30b", overlap="pipelined", transfer="copy", more="gate_up_parts=4", sync_free=True, only=IN_PARTS),
    Case(
        "dsv2-lite", FP16, "activation", 2, "pipelined", "split", bias=True, activation="geglu_tanh", limit=7.0,
        more="gate_up_parts=2", only=IN_PARTS,
    ),
    Case(
        "qwen3-235b", BF16, "activation", 4, "pipelined", operand="expanded", transfer="copy", more="gate_up_parts=2",
        only=IN_PARTS,
    ),
    Case(
        "deepseek-v3", FP16, "output", 8, "pipelined", transfer="copy", combine_groups=8, more="gate_up_parts=2",
        only=IN_PARTS,
    ),
    Case(
        "qwen3-30b", overlap="pipelined", transfer="copy", lora=16, adapted=("w13",), more="gate_up_parts=2",
        only=IN_PARTS,
    ),
    # The first product again in the backward; the forward keeps tokens, but not h.
    Case("dsv2-lite", FP16, "activation", 2, "pipelined", "split", bias=True, preactivation="recomputed"),
    Case("qwen3-30b", BF16, "output", 2, "mega", transfer="push", preactivation="recomputed"),
    Case("qwen3-235b", BF16, "output", 1, operand="expanded", activation="relu2", preactivation="recomputed"),
    # Weight gradients by blocks of ranks: of whole tiles and others, of narrow and wide factors.
    Case("qwen3-30b", BF16, "output", 4, transfer="copy", operand="expanded", shards=4, only=BY_BLOCKS),
    Case(
        GPT_OSS, FP16, "output", 2, layout="split", activation="swiglu_oai", limit=7.0, bias=True, shards=2,
        only=BY_BLOCKS,
    ),
    Case("dsv2-lite", FP16, "activation", 2, more=SMALL, shards=2, only=BY_BLOCKS),
    Case("qwen3-30b", lora=8, shards=2, only=BY_BLOCKS),
    Case("deepseek-v3", ep_size=8, lora=128, shards=8, only=BY_BLOCKS),
    # Tiles of experts with few rows, and with some.
    *(Case(shape, BF16, "output", 2, tokens=tokens, only=PRODUCTS)
      for shape, few in (("qwen3-30b", 256), ("deepseek-v3-256", 512), ("granite-small-1k", 128), ("kimi-k2", 512))
      for tokens in (few, 6 * few)),
    Case(
        "dsv2-lite", FP16, "activation", 4, layout="split", transfer="copy", operand="expanded", tokens=64,
        only=PRODUCTS,
    ),
    Case(GPT_OSS, BF16, "output", 2, activation="swiglu_oai", limit=7.0, bias=True, tokens=128, only=PRODUCTS),
    Case(
        "dsv2-lite", FP16, "activation", 2, "pipelined", "split", activation="geglu_tanh", limit=7.0, bias=True,
        tokens=128, only=PRODUCTS,
    ),
    Case("qwen3-30b", lora=16, tokens=256, only=PRODUCTS),
    Case("qwen3-30b", BF16, "output", 2, "mega", transfer="push", tokens=256, only=MEGA),
)  # fmt: skip
FEW = 4  # so many of CASES have every kernel


def compile_case(case: Case, wanted: Callable[[str], bool] = lambda name: True) -> list[tuple[str, object]]:
    """(kernel name, compiled kernel) of every launch of a forward without saving, another one, and its backwards: with
    gradients in the layer's dtype, and in fp32 for main_grad.  wanted: of the kernel's name; others are left out."""
    cfg, schedule, launched = case.config(), case.schedule(), []
    memories = lambda size: [torch.empty(size, dtype=torch.uint8)] * case.ep_size  # noqa: E731
    backend = host_backend(cfg, 0, case.ep_size, memories, schedule)
    use(backend, schedule, operators("triton") if case.own else ())
    backend.planner.fits = lambda: True  # no kernel runs that could answer
    local, like = cfg.experts_per_rank(case.ep_size), {"dtype": case.dtype}
    w13 = torch.empty(1 + cfg.gated, local, cfg.ffn, cfg.hidden, **like)
    stacked = case.layout == "stacked"
    first = (w13.view(local, cfg.h_columns, cfg.hidden),) if stacked else (w13[1], w13[0])  # w3 below w1
    biases = [torch.empty(local, n, **like) for n in (cfg.h_columns, cfg.hidden)] if cfg.bias else []
    second = (torch.empty(local, cfg.hidden, cfg.ffn, **like),)
    experts = ExpertWeights(first, second, case.layout, cfg.gated, *biases)
    if case.lora is not None:
        shapes = (case.lora, cfg.hidden), (cfg.h_columns, case.lora), (case.lora, cfg.ffn), (cfg.hidden, case.lora)
        a13, b13, a2, b2 = (torch.empty(local, *shape, **like) for shape in shapes)
        pairs = {"w13": (a13, b13), "w2": (a2, b2)}
        factors = (pairs[name] if name in case.adapted else None for name in pairs)
        experts = dataclasses.replace(experts, lora=Lora(*factors, 2.0))
    x_TD = torch.empty(case.tokens, cfg.hidden, **like)
    ids_TK = torch.zeros(case.tokens, cfg.top_k, dtype=torch.int64)
    inputs = Inputs(x_TD, ids_TK, torch.zeros(case.tokens, cfg.top_k), experts)

    with compiling(launched, wanted):
        backend.forward(inputs, save=False)
        _, saved = backend.forward(inputs, save=True)
        backend.backward(x_TD, inputs, saved, Needs(), None, case.shards)
        wide = functools.partial(torch.empty_like, dtype=torch.float32)
        w13, w2, of_biases = (tuple(map(wide, ts)) for ts in (*experts.trained, experts.biases))
        for accumulate in (False, True):
            into = MainGrads(w13, w2, accumulate, biases=of_biases)
            backend.backward(x_TD, inputs, saved, Needs(), into, case.shards)
        if case.shards > 1:
            each = [tuple(t.new_empty(case.shards, *t.shape) for t in ts) for ts in (w13, w2, of_biases)]
            into = MainGrads(*each[:2], False, True, each[2])
            backend.backward(x_TD, inputs, saved, Needs(), into, case.shards)
        if case.lora is None:
            run_collective(cfg, case.ep_size, inputs, case.preactivation)
    return launched


def compile_plan(max_tokens: int, top_k: int, num_experts: int) -> list[tuple[str, object]]:
    """What a plan of eight ranks launches, for any number of tokens, and either order of send lists."""
    launched = []
    cfg = MoEConfig(hidden=64, ffn=64, num_experts=num_experts, top_k=top_k, max_tokens_per_rank=max_tokens)
    planner = host_backend(cfg, 0, 8, lambda size: [torch.empty(size, dtype=torch.uint8)] * 8).planner
    with compiling(launched):
        for by_expert in (False, True):
            planner.plan(torch.zeros(64, top_k, dtype=torch.int64), torch.zeros(64, top_k), by_expert=by_expert)
    return launched


def compile_dense() -> list[tuple[str, object]]:
    """A router of DeepSeek-V3's size with a weight in bf16, fp16 and fp32, and the gradient of its inputs."""
    launched = []
    x_TD, d_TE = torch.empty(TOKENS, 7168, dtype=torch.bfloat16), torch.empty(TOKENS, 256)
    with compiling(launched):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            weight_ED = torch.empty(256, 7168, dtype=dtype)
            dense.row_products(x_TD, weight_ED)
            dense.row_products(d_TE, weight_ED.T)
    return launched


def compile_router(num_experts: int, groups: int, sigmoid: bool) -> list[tuple[str, object]]:
    """All that a router's kernels can do: choose, replay, losses, gradients."""
    launched = []
    logits_TE, bias_E, some = torch.empty(64, num_experts), torch.empty(num_experts), torch.empty(())
    slots_TK, tokens = torch.zeros(64, 8, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    every = torch.zeros(8, 2 * num_experts + 4, dtype=torch.int64)
    rules = {"sigmoid": sigmoid, "renormalize": True, "scale": 2.5}
    with compiling(launched):
        for bias, given in ((bias_E, None), (None, None), (None, slots_TK)):
            launch_router.route(
                logits_TE, bias, given, 8, **rules, groups=groups, groups_per_token=min(groups, 4), group_top=2,
                losses=bias is not None,
            )  # fmt: skip
        launch_router.losses(every, 0, aux_loss=0.1, z_loss=0.1)
        for z_loss in (0.0, 0.1):
            launch_router.d_logits(
                logits_TE, slots_TK, slots_TK, torch.empty(64, 8), bias_E if z_loss else None, some, some, tokens,
                **rules, z_loss=z_loss,
            )  # fmt: skip
    return launched


@contextlib.contextmanager
def compiling(launched: list[tuple[str, object]], wanted: Callable[[str], bool] = lambda name: True):
    """Inside, launches compile, and are listed, if their kernel is wanted."""
    run, launch, given = JITFunction.run, call.launch, []

    def compile_only(self, *args, grid, warmup, **options):
        if not wanted(self.__name__):
            return
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        if not any(isinstance(value, JITFunction) for value in options.values()):  # of one's own: no trial has it
            JITFunction.run = run
            elsewhere = ahead.Kernel.of(call.Launch(self, given[-1], options, {})).compile()
            JITFunction.run = compile_only
            assert elsewhere.hash == compiled.hash, f"{self.__name__}: another process compiles something else"
        assert call.parameter_sizes(self, compiled, given[-1]), f"{self.__name__} is launched by Triton, slower"
        launched.append((self.__name__, compiled))

    def remembered(kernel, programs, args, constants, **options):
        given.append(args)
        launch(kernel, programs, args, constants, **options)

    JITFunction.run = compile_only
    for module in LAUNCHING:
        module.launch = remembered
    try:
        yield
    finally:
        JITFunction.run = run
        for module in LAUNCHING:
            module.launch = launch


def run_collective(cfg: MoEConfig, ep_size: int, inputs: Inputs, preactivation: str) -> None:
    """What the collective backend launches, with few tokens: their number is no constant."""
    x_TD, ids_TK = inputs.x_TD[:64], inputs.ids_TK[:64]
    plan = build_plan([ids_TK, *[ids_TK[:0]] * (ep_size - 1)], 0, cfg)
    local = KernelExperts(cfg, 0, resolve(cfg, 1, 0, backend="nccl"), torch.device("cpu"))
    tokens, routed = Tokens(x_TD, x_TD[:1]), Routed(plan, torch.zeros(plan.num_rows))
    _, h_NF = local.forward(tokens, routed, inputs.experts, preactivation == "saved")
    local.backward(tokens, tokens, routed, inputs.experts, h_NF, Needs())
    returns_TKD = x_TD[:, None].expand(-1, cfg.top_k, -1)
    local.combine(returns_TKD, ids_TK, inputs.weights_TK[:64] if cfg.weight_at == "output" else None)
    if cfg.combine_groups is not None:
        local.add_parts(x_TD, torch.zeros(64, cfg.top_k, dtype=torch.int64), None)


def every_case() -> list[Case]:
    choices = (
        SHAPES, (BF16, FP16), ("output", "activation"), (1, 2, 4, 8), ("mega", "pipelined", "fused", "serial"),
        ("stacked", "split"), ("gathered", "expanded"), ("copy", "push"),
    )  # fmt: skip
    cases = [
        Case(*choice, activation=name, bias=bias, limit=7.0 if bias and ACTIVATIONS[name].gated else None)
        for name in ACTIVATIONS
        for bias in (False, True)
        for choice in itertools.product(*choices)
    ]
    cases = [c for c in cases if (c.overlap, c.operand) != ("mega", "expanded")]
    return [c for c in cases if c.layout == "stacked" or ACTIVATIONS[c.activation].gated]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--all", action="store_true", help="the whole product of cases")
    part.add_argument("--part", choices=("few", "others"), help="a part of what CASES launch")
    parser.add_argument("--shape", help="only this shape")
    arguments = parser.parse_args()
    install(multiprocessors=132)
    cases = every_case() if arguments.all else CASES[:FEW] if arguments.part == "few" else CASES
    seen, names = set(), set()

    def wanted(case: Case, name: str) -> bool:
        """Whether this launch of a kernel belongs to the part."""
        if case.only and name not in case.only:
            return False
        first = case in CASES[:FEW] and name not in names
        names.add(name)
        return arguments.part is None or first == (arguments.part == "few")

    with offline():
        chosen = [
            (case, functools.partial(compile_case, case, functools.partial(wanted, case)))
            for case in cases
            if arguments.shape in (None, case.shape)
        ]
        if arguments.shape is None and arguments.part != "few":
            chosen += [
                (f"plan, T {t}, K {k}, E {e}, EP 8", functools.partial(compile_plan, t, k, e)) for t, k, e in PLANS
            ]
            chosen.append(("dense", compile_dense))
            chosen += [
                (f"router, {e} experts, {g} groups", functools.partial(compile_router, e, g, s)) for e, g, s in ROUTERS
            ]
        for case, make in chosen:
            for name, compiled in make():
                if compiled.hash not in seen:
                    seen.add(compiled.hash)
                    report = inspect(compiled)
                    row = {"triton": triton.__version__, "kernel": name, "case": str(case)}
                    row |= {**dataclasses.asdict(report), "complaints": report.complaints()}
                    row["most_shared"] = case.most_shared() if isinstance(case, Case) else None
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
