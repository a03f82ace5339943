"""Where results of uniep and its peers differ in bits: between repeats, between EP 1 and all ranks, and from uniep's
serial schedule.

    torchrun --standalone --nproc-per-node=2 benchmarks/bits.py --deepep DIR --liger DIR --json FILE

Each layer gets the same inputs and weights.  At EP 1 every rank computes the tokens of all ranks with all experts, and
compares its own part.  A layer that fails is reported and left out.  Counts are sums over ranks of elements whose bits
differ, and the largest difference.  A repeat is compared with the first run.

Against uniep's serial schedule peers differ because they round elsewhere; repeats and EP 1 ask for no particular bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import uniep
from cases import ROUTINGS, Case, make_case, parse_shape
from layers import UniEPLayer, Workspaces
from moe import Bench, Parser, add_run_options, everyone, of_run
from peers import DeepEp, DeepEpLayer, Layer, Liger, LigerLayer, NcclLayer
from uniep.reference import composition

IMPLS = ("uniep", "uniep-nccl", "torch", "nccl", "deepep", "deepep-nowait", "liger-cute")
OUTPUTS = {"y": 0, "dx": 1, "dW13": 3, "dW2": 4}
"""What is compared -> its place in the outputs of a layer.  Gradients of routing weights are left out: some peers round
them to bf16."""
INTEGERS = {2: torch.int16, 4: torch.int32}


class Difference(NamedTuple):
    """Elements whose bits differ, of how many, and the largest difference of values."""

    different: int
    elements: int
    largest: float

    def __str__(self) -> str:
        return "0" if not self.different else f"{self.different:,} of {self.elements:,} ({self.largest:.1e})"


def difference(got: Tensor, wanted: Tensor) -> Difference:
    """Of two tensors of one shape and dtype."""
    bits = (t.contiguous().view(INTEGERS[t.element_size()]) for t in (got, wanted))
    where = torch.ne(*bits)
    largest = (got[where].float() - wanted[where].float()).abs().max() if where.any() else 0.0
    return Difference(int(where.sum()), got.numel(), float(largest))


def together(parts: Sequence[Difference]) -> Difference:
    """Of all ranks, or of several comparisons; a NaN is the largest."""
    worst = max((part.largest for part in parts), key=lambda value: (value != value, value))
    return Difference(sum(p.different for p in parts), sum(p.elements for p in parts), worst)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each layer and comparison."""
    lines = [f"| layer | compared | {' | '.join(OUTPUTS)} |", f"|---|---|{'---:|' * len(OUTPUTS)}"]
    for row in rows:
        cells = (str(Difference(*row[name])) for name in OUTPUTS)
        lines.append(f"| {row['impl']} | {row['compared']} | {' | '.join(cells)} |")
    return "\n".join(lines)


class TorchLayer(Layer):
    """PyTorch alone: every rank gets all tokens, computes its experts' part of the layer, and parts are added."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def forward_backward(self, case: Case) -> tuple[Tensor, ...]:
        given = (case.x_TD, case.weights_TK, case.ids_TK, case.dy_TD)
        x_TD, weights_TK, ids_TK, dy_TD = (everyone(t, self.group) for t in given)
        ids_TK = ids_TK - self.rank * case.num_local
        ids_TK = torch.where((ids_TK >= 0) & (ids_TK < case.num_local), ids_TK, -1)
        leaves = [t.detach().requires_grad_() for t in (x_TD, weights_TK, case.w13_e2FD, case.w2_eDF)]
        y_TD = composition(leaves[0], ids_TK, *leaves[1:])
        dx_TD, dweights_TK, *of_experts = torch.autograd.grad(y_TD, leaves, dy_TD)
        parts = [y_TD.detach(), dx_TD, dweights_TK]
        for part in parts:
            dist.all_reduce(part, group=self.group)
        return *(part.chunk(self.ranks)[self.rank] for part in parts), *of_experts


class Bits(Bench):
    """One run."""

    def meta(self) -> dict[str, Any]:
        args = self.args
        of_case = {name: getattr(args, name) for name in ("shape", "tokens", "routing", "dtype", "weight_at")}
        return {**of_run("bits.py", self.device, args.commit), **of_case, "repeats": args.repeats}

    def run(self) -> None:
        args, shape = self.args, parse_shape(self.args.shape)
        impls = [name for name in args.impl.split(",") if args.deepep or not name.startswith("deepep")]
        impls = [name for name in impls if args.liger or name != "liger-cute"]
        self.say(f"{self.results['meta']}")
        case = make_case(shape, args.tokens, args.routing, self.rank, self.weights(shape))
        singles = [dist.new_group([rank]) for rank in range(self.ranks)]
        groups = {"ep": self.group, "alone": singles[self.rank]}
        if self.ranks == 1:
            del groups["alone"]
        fields = (case.x_TD, case.ids_TK, case.weights_TK, case.w13_e2FD, case.w2_eDF, case.dy_TD)
        cases = {"ep": case, "alone": Case(*(everyone(t, self.group) for t in fields), shape.num_experts)}
        self.comms: dict[str, DeepEp | None] = {}
        if any(name.startswith("deepep") for name in impls):
            for name, group in groups.items():
                of_group = args.deepep, group, shape.hidden
                self.comms[name] = self.attempt(f"deepep, {name}", lambda of_group=of_group: DeepEp(*of_group))
        if "liger-cute" in impls:
            most = args.tokens * self.ranks
            self.liger = self.attempt("liger-cute", lambda: Liger(args.liger, groups, self.device, most, [shape]))
        (serial,) = self.outputs("uniep-serial", "ep", groups["ep"], case, 1) or [None]
        if serial is None:
            raise SystemExit("uniep's serial schedule failed, with which all are compared")
        for impl in impls:
            runs = self.outputs(impl, "ep", groups["ep"], case, args.repeats + 1)
            if runs is None:
                continue
            first, *others = runs
            self.compare_runs(impl, f"{args.repeats} repeats", others, first)
            if "alone" in groups:
                alone = self.outputs(impl, "alone", groups["alone"], cases["alone"], 1)
                if alone is not None:
                    own = [t.chunk(self.ranks)[self.rank] for t in alone[0]]
                    self.compare_runs(impl, f"EP 1 against EP {self.ranks}", [own], first)
            self.compare_runs(impl, "uniep, serial", [first], serial)
        self.write()
        self.say(f"bits that differ:\n{table(self.results['rows'])}")
        for comm in self.comms.values():
            if comm is not None:
                comm.close()

    def layer(self, impl: str, name: str, group: dist.ProcessGroup, workspaces: Workspaces) -> Layer:
        """name: of the group."""
        if impl == "nccl":
            return NcclLayer(group)
        if impl == "torch":
            return TorchLayer(group)
        if impl.startswith("deepep"):
            if (comm := self.comms[name]) is None:
                raise RuntimeError("DeepEP has no buffer for this group")
            return DeepEpLayer(comm, wait=impl == "deepep")
        if impl == "liger-cute":
            if self.liger is None:
                raise RuntimeError("liger-cute-kernels could not be configured")
            return LigerLayer(self.liger, group)
        return UniEPLayer(workspaces.get(impl))

    def outputs(
        self, impl: str, name: str, group: dist.ProcessGroup, case: Case, count: int
    ) -> list[tuple[Tensor, ...]] | None:
        """Outputs of `count` runs; None if it fails."""
        (tokens, hidden), top_k = case.x_TD.shape, case.ids_TK.shape[1]
        cfg = uniep.MoEConfig(
            hidden=hidden, ffn=case.w2_eDF.shape[2], num_experts=case.num_experts, top_k=top_k,
            max_tokens_per_rank=tokens, dtype=self.dtype, weight_at=self.args.weight_at,
        )  # fmt: skip
        most = dist.get_world_size(group) * tokens * top_k
        workspaces = Workspaces(cfg, most, group, self.device, self.args.timeout_s)

        def run() -> list[tuple[Tensor, ...]]:
            layer = self.layer(impl, name, group, workspaces)
            layer.prepare(case, True)
            made = [layer.joined(layer.forward_backward(case)) for _ in range(count)]
            layer.check()
            return made

        try:
            return self.attempt(f"{impl}, {name}", run)
        finally:
            workspaces.close()

    def compare_runs(
        self, impl: str, compared: str, runs: Sequence[Sequence[Tensor]], wanted: Sequence[Tensor]
    ) -> None:
        """A row of the results, the same on every rank."""
        row: dict[str, Any] = {"impl": impl, "compared": compared}
        for name, place in OUTPUTS.items():
            mine = together([difference(run[place], wanted[place]) for run in runs])
            each = [mine] * self.ranks
            dist.all_gather_object(each, mine, group=self.control)
            row[name] = together(each)
        self.results["rows"].append(row)


def options(argv: list[str] | None) -> argparse.Namespace:
    made = Parser(prog="bits.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="qwen3-30b", help="a name or DxFxExK (default %(default)s)")
    made.add_argument("--tokens", type=int, default=2048, help="tokens per rank (default %(default)s)")
    made.add_argument("--routing", choices=ROUTINGS, default="balanced")
    made.add_argument("--repeats", type=int, default=3, help="runs after the first (default %(default)s)")
    made.add_argument("--impl", default=",".join(IMPLS), help="(default: all that are there)")
    made.add_argument("--deepep", metavar="DIR", help="folder that holds an importable deep_ep")
    made.add_argument("--liger", metavar="DIR", help="folder that holds an importable liger_cute_kernels")
    made.add_argument(
        "--weight-at", choices=("output", "activation"), default="activation",
        help="of uniep; most peers weight the activation (default %(default)s)",
    )  # fmt: skip
    made.add_argument("--timeout-s", type=float, default=120, help="longest wait for a peer (default %(default)s)")
    add_run_options(made)
    made.set_defaults(directions="fwd_bwd")
    args = made.parse_args(argv)
    if unknown := [name for name in args.impl.split(",") if name not in IMPLS]:
        made.error(f"implementation {unknown[0]!r} is unknown; use {', '.join(IMPLS)}")
    if args.repeats < 1:
        made.error(f"--repeats is {args.repeats}; it must be at least 1")
    try:
        parse_shape(args.shape)
    except ValueError as error:
        made.error(str(error))
    return args


def main(argv: list[str] | None = None) -> None:
    bits = Bits(options(argv))
    bits.run()
    bits.close()


if __name__ == "__main__":
    main()
