"""One rank of a test: `python fused_rank.py RANK FOLDER SUITE` runs the suite's cases over shared memory files.

Cases and inputs are pure functions, so that the test makes the same ones.
"""

import dataclasses
import faulthandler
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from uniep.activation import ACTIVATIONS
from uniep.backends.base import ExpertGradients, Inputs, MainGrads, Needs
from uniep.config import MoEConfig
from uniep.routing import build_plan
from uniep.schedule import Schedule, Tile
from uniep.stages import Flags
from uniep.taskflow.lower import lower_backward, lower_forward
from uniep.weights import ExpertWeights, Lora

RANKS = 2  # of cases that do not name more
TIMEOUT_S = 400
SMALL = Tile(rows=64, columns=128, depth=64)
SCHEDULE = Schedule(gate_up=SMALL, down=SMALL, weight_gradient=SMALL, chunk_tokens=32, beside_from=0)
ROUNDS = (  # overlap, operand, transfer, received, activation_gradient
    ("serial", "gathered", "push", "saved", "after"),
    ("fused", "gathered", "push", "saved", "beside"),
    ("fused", "expanded", "push", "saved", "after"),
    ("serial", "expanded", "copy", "saved", "beside"),
    ("pipelined", "gathered", "copy", "saved", "after"),
    ("fused", "expanded", "copy", "saved", "beside"),
    ("pipelined", "expanded", "push", "saved", "after"),
    ("pipelined", "gathered", "push", "again", "beside"),
    {"transfer": "copy", "received": "again", "activation_gradient": "after", "arrival_waves": 2},
    {"preactivation": "recomputed", "activation_gradient": "beside"},
    {"preactivation": "recomputed", "overlap": "serial", "received": "again"},
    {"preactivation": "recomputed", "operand": "expanded", "transfer": "copy"},
    {"preactivation": "recomputed", "overlap": "pipelined", "received": "again", "transfer": "copy"},
    {"down_wgrad": "beside", "activation_gradient": "beside"},
    {"down_wgrad": "beside", "transfer": "copy", "received": "again"},
    {"down_wgrad": "beside", "preactivation": "recomputed", "received": "again"},
)
BEFORE = 1.0  # in main_grads that are added to
LATE_S = 0.05
LATE = (  # kernels that a rank starts late, so that its peer has to wait for what they send
    ("exchange_kernel", "product_kernel", "push_rows_kernel"),
    ("gate_up_kernel", "expand_kernel", "shrink_kernel", "push_tokens_kernel", "forward_kernel", "backward_kernel"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    weight_at: str
    up_first: bool
    tokens: tuple[int, ...]
    num_experts: int = 4
    top_k: int = 2
    hidden: int = 72
    ffn: int = 136
    combine_groups: int | None = None
    activation: str = "swiglu"
    limit: float | None = None
    bias: bool = False
    hot: int | None = None  # the only expert that is used
    exact: bool = False  # values are so small that nothing is rounded
    lora: int | None = None  # rank of factors
    adapted: tuple[str, ...] = ("w13", "w2")
    max_rows: int | None = None

    def config(self, max_tokens: int) -> MoEConfig:
        return MoEConfig(
            hidden=self.hidden, ffn=self.ffn, num_experts=self.num_experts, top_k=self.top_k,
            max_tokens_per_rank=max_tokens, dtype=self.dtype, weight_at=self.weight_at,
            combine_groups=self.combine_groups, activation=self.activation, activation_limit=self.limit, bias=self.bias,
            max_rows=self.max_rows,
        )  # fmt: skip


CASES = {
    "fp16": Case(torch.float16, "output", False, (50, 35)),
    "activation, up first, an idle rank": Case(
        torch.float16, "activation", True, (40, 0), activation="swiglu_oai", limit=0.75, bias=True
    ),
    "fp32, most tokens remote": Case(torch.float32, "output", False, (3, 60), activation="relu2", bias=True),
}
OPERAND_OF_BLOCKS = {"fp16": "gathered", "activation, up first, an idle rank": "expanded"}
GROUPED_CASES = {
    "a group on each rank": Case(torch.float16, "output", False, (50, 35), 4, 3, combine_groups=2),
    "fp32, two groups on each rank": Case(
        torch.float32, "activation", True, (40, 0), 4, 3, combine_groups=4, activation="geglu_tanh", bias=True
    ),
}
GROUPED_ROUNDS = (
    (*ROUNDS[0], "after"), (*ROUNDS[1], "after"), (*ROUNDS[4], "after"), (*ROUNDS[1], "beside"),
    {"overlap": "pipelined", "pipelined_from": 40, "activation_gradient": "beside", "beside_from": 40},  # one of two
    {"down_wgrad": "beside"},
)  # fmt: skip
# With stacked weights, tiles of dW13 begin where serial tiles do: an interpreted product rounds by its place in a tile.
MEGA_CASES = {
    "fp16": Case(torch.float16, "output", False, (50, 35), hidden=136, ffn=128),
    "fp32, activation, up first, an idle rank": Case(
        torch.float32, "activation", True, (40, 0), activation="geglu", bias=True
    ),
    "fp16, all rows to one expert": Case(torch.float16, "output", False, (24, 70), hidden=64, ffn=64, hot=3),
}
MEGA_ROUNDS = (
    {"overlap": "serial"},
    {"overlap": "mega"},
    {"overlap": "mega", "transfer": "copy", "tile_order": "natural", "weight_gradient_order": "interleaved"},
    {"overlap": "mega", "tile_order": "chunk-major", "peer_order": "rotated"},
    {"overlap": "mega", "tile_order": "critical-path"},
    {"overlap": "mega", "preactivation": "recomputed"},
    {"overlap": "mega", "transfer": "copy", "tile_order": "chunk-major", "weight_gradient_order": "interleaved"},
)
# One rank has one token, the other as many as there may be: every two ways that one Schedule may give them.
PAIR_CASES = {
    "fp16": Case(torch.float16, "output", False, (1, 40), hidden=64, ffn=64, activation="gelu_tanh", bias=True)
}
PAIRS = (
    {"mega_to": 1},
    {"mega_to": 1, "overlap": "pipelined", "activation_gradient": "beside"},
    {"pipelined_from": 2, "overlap": "pipelined", "activation_gradient": "beside", "beside_from": 2},
)
PAIR_ROUNDS = (
    {"overlap": "serial"}, *({**pair, "transfer": transfer} for pair in PAIRS for transfer in ("push", "copy")),
)  # fmt: skip
# "mega" runs in stages, since one kernel has no place for operators of one's own.
OWN_CASES = {"exact": Case(torch.float32, "output", False, (24, 10), hidden=64, ffn=64, activation="relu2", exact=True)}
OWN_ROUNDS = (
    {"overlap": "serial", "operators": "torch"},
    {"overlap": "fused", "operators": "triton", "transfer": "push", "activation_gradient": "beside"},
    {"overlap": "mega", "operators": "torch", "transfer": "copy"},
    {"overlap": "pipelined", "pipelined_from": 0, "operators": "returning", "transfer": "copy"},
)
# One kernel has no low-rank terms; with those of w2, rows are shrunk between the two products.
LORA_CASES = {
    "fp16": Case(torch.float16, "output", False, (30, 21), lora=8),
    "fp32, activation, up first, an idle rank": Case(
        torch.float32, "activation", True, (24, 0), activation="swiglu_oai", limit=0.75, bias=True, lora=24
    ),
    "fp32, no gate, groups, w2 alone": Case(
        torch.float32, "output", False, (3, 28), activation="relu2", combine_groups=2, lora=16, adapted=("w2",)
    ),
    "fp16, w13 alone": Case(torch.float16, "output", False, (30, 9), lora=8, adapted=("w13",)),
    "fp32, groups, w13 alone": Case(
        torch.float32, "activation", False, (12, 20), combine_groups=2, lora=8, adapted=("w13",)
    ),
}
LORA_ROUNDS = (
    ROUNDS[0], ROUNDS[1], ROUNDS[2], (*ROUNDS[8], "beside"), {"overlap": "pipelined", "transfer": "copy"},
    {"overlap": "mega", "operand": "gathered"}, ROUNDS[7], {"overlap": "fused", "preactivation": "recomputed"},
)  # fmt: skip
SCALE = 0.75
# Fetched tokens, and send lists by expert, on four ranks and on two.  Exact: the interpreter's BLAS adds tiles of one
# width in another order than those of another.
PULL_CASES = {
    "exact, four ranks": Case(
        torch.float32, "output", False, (20, 0, 35, 7), 8, 3, hidden=64, ffn=64, activation="relu2", exact=True
    ),
    "exact": Case(torch.float32, "activation", False, (50, 35), hidden=72, ffn=64, activation="relu2", exact=True),
}
PULL_ROUNDS = (
    {"overlap": "serial", "transfer": "push"},
    {"overlap": "fused", "send_order": "expert", "sum_programs": 4, "sum_warps": 1},
    {"overlap": "serial"},
    {"overlap": "mega"},
    {"overlap": "pipelined", "activation_gradient": "beside"},
    {"overlap": "serial", "received": "again", "send_order": "expert", "pass_programs": 2, "pass_warps": 4},
    {"overlap": "fused", "received": "again"},
    {"overlap": "mega", "transfer": "push", "send_order": "expert"},
    {"overlap": "fused", "operand": "expanded", "send_order": "expert"},
    {"overlap": "mega", "send_order": "expert", "tile_order": "critical-path"},
)
# gate_up in parts: on four ranks and on two, where routing leaves fewer row tiles than parts, or none, and on one.
PARTS_CASES = {
    "fp16": Case(torch.float16, "output", False, (50, 35), bias=True),
    "four ranks": Case(torch.float32, "activation", False, (20, 0, 35, 7), 8, 3, hidden=64, ffn=64, activation="relu2"),
    "fp16, groups, all rows to one expert": Case(
        torch.float16, "output", False, (24, 10), hidden=64, ffn=64, combine_groups=2, hot=3
    ),
    "fp16, one rank, sync-free": Case(torch.float16, "output", True, (90,), max_rows=1024),
}
OF_GROUPS = {name: dataclasses.replace(SMALL, group_rows=rows) for name, rows in (("gate_up", 2), ("down", 3))}
PARTS_ROUNDS = (
    {"overlap": "serial"},
    {"gate_up_parts": 2, "transfer": "copy"},
    {"gate_up_parts": 4, "down_sms": 2},
    {"gate_up_parts": 4, "transfer": "copy", "arrival_waves": 2, "activation_gradient": "beside"},
    {"gate_up_parts": 3, "operand": "expanded"},
    {"gate_up_parts": 2, "received": "again", "preactivation": "recomputed"},
    {"gate_up_parts": 7, "transfer": "copy", "operand": "expanded"},
)
SUITES = {
    "parts": (PARTS_CASES, PARTS_ROUNDS),
    "lora": (LORA_CASES, LORA_ROUNDS),
    "pull": (PULL_CASES, PULL_ROUNDS),
    "own": (OWN_CASES, OWN_ROUNDS),
    "pairs": (PAIR_CASES, PAIR_ROUNDS),
    "mega": (MEGA_CASES, MEGA_ROUNDS),
    "usual": (CASES, ROUNDS),
    "grouped": (GROUPED_CASES, GROUPED_ROUNDS),
}


def schedule_of(suite: str) -> Schedule:
    """The one that memory is made for."""
    changes = {
        "pull": {"transfer": "pull"},
        "parts": {"overlap": "pipelined", "gate_up_parts": 2, "down_sms": 0, **OF_GROUPS},
    }
    return dataclasses.replace(SCHEDULE, **changes.get(suite, {}))


def rounds_of(suite: str, key: str) -> tuple:
    """Rounds of one case: the first of a suite runs all, the others the serial one and every second of the rest."""
    cases, rounds = SUITES[suite]
    number = list(cases).index(key)
    return rounds if number == 0 else rounds[:1] + rounds[number::2]


def tensors(case: Case) -> dict[str, Tensor]:
    """x, dy (T, D), ids, weights (T, K) of all ranks, w13 (E, 2, F, D), w2 (E, D, F), b13 (E, 2F), b2 (E, D); without a
    gate w13 (E, 1, F, D), b13 (E, F).  Of LoRA a13 (E, r, D), f13 (E, 2F or F, r), a2 (E, r, F), f2 (E, D, r)."""
    generator = torch.Generator().manual_seed(sum(case.tokens))

    def normal(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator)
        return made.round().clamp(-1, 1) if case.exact else made

    def scaled(*shape: int) -> Tensor:
        return normal(*shape) * (1 if case.exact else shape[-1] ** -0.5)

    def quarters(weights: Tensor) -> Tensor:
        return (weights * 4).ceil() / 4 if case.exact else weights

    total, d, f, e = sum(case.tokens), case.hidden, case.ffn, case.num_experts
    halves = 1 + ACTIVATIONS[case.activation].gated
    ids_TK = torch.randint(-1, e, (total, case.top_k), generator=generator)
    ids_TK[: case.tokens[0]] %= e - 1  # rank 0 has no unused slots and leaves the last expert to the others
    if case.hot is not None:
        ids_TK[ids_TK >= 0] = case.hot
    made = {
        "x": normal(total, d).to(case.dtype),
        "dy": normal(total, d).to(case.dtype),
        "ids": ids_TK,
        "weights": quarters(torch.rand(total, case.top_k, generator=generator) + 0.1),
        "w13": scaled(e, halves, f, d).to(case.dtype),
        "w2": scaled(e, d, f).to(case.dtype),
        "b13": normal(e, halves * f).to(case.dtype),
        "b2": normal(e, d).to(case.dtype),
    }
    if case.lora is not None:
        shapes = {"a13": (case.lora, d), "f13": (halves * f, case.lora), "a2": (case.lora, f), "f2": (d, case.lora)}
        made |= {name: scaled(e, *shape).to(case.dtype) for name, shape in shapes.items()}
    return made


def run(backend, case: Case, rank: int, ranks: int, needs: Needs | None = None) -> dict[str, Tensor | None]:
    """Forward and backward of one rank's share: y, dx, dweights, dw13 (e, 2, F, D), dw2; with biases db13, db2; with
    LoRA instead of those the gradients of factors, a13, f13, a2, f2."""
    inputs, dy_TD = share(case, rank, ranks)
    forget(backend)
    y_TD, saved = backend.forward(inputs, save=True)
    forget(backend)
    grads = backend.backward(dy_TD, inputs, saved, needs or Needs(biases=case.lora is None))
    if case.lora is not None:
        return {"y": y_TD, "dx": grads.x, "dweights": grads.weights} | factors(grads)
    dw13 = stacked(case, grads.w13) if grads.w13 else None
    dw2 = grads.w2[0] if grads.w2 else None
    found = {"y": y_TD, "dx": grads.x, "dweights": grads.weights, "dw13": dw13, "dw2": dw2}
    biases = dict(zip(("db13", "db2"), grads.biases, strict=True)) if grads.biases else {}
    assert bool(biases) == (case.bias and (needs is None or needs.biases))
    return found | biases


def factors(grads: ExpertGradients | MainGrads) -> dict[str, Tensor]:
    """Their gradients by name."""
    pairs = zip((("a13", "f13"), ("a2", "f2")), (grads.w13, grads.w2), strict=True)
    return {name: t for names, pair in pairs if pair for name, t in zip(names, pair, strict=True)}


def forget(backend) -> None:
    """NaN where peers will write, which they do once this rank has entered its next call: what is read early shows."""
    views = backend.arena.views
    for part in (views["receive"][:-1], views["returns"], views["dweights"]):  # the last slot is the zero row
        part.fill_(float("nan"))
    if "tokens" in views:  # which they have read by then
        views["tokens"].fill_(float("nan"))


def run_main_grad(backend, case: Case, rank: int, ranks: int) -> dict[str, Tensor]:
    """Likewise with fp32 gradients: written over NaN (w13, w2), and added to `before` (sum13, sum2)."""
    inputs, dy_TD = share(case, rank, ranks)
    _, saved = backend.forward(inputs, save=True)
    found = {}
    for names, fill, accumulate in ((("w13", "w2"), float("nan"), False), (("sum13", "sum2"), BEFORE, True)):
        experts = inputs.experts
        main_grads = [tuple(torch.full(t.shape, fill) for t in ts) for ts in (experts.w13, experts.w2)]
        got = backend.backward(dy_TD, inputs, saved, Needs(), MainGrads(*main_grads, accumulate))
        assert got.w13 is None and got.w2 is None
        found |= dict(zip(names, (stacked(case, main_grads[0]), main_grads[1][0]), strict=True))
    # What is frozen on one rank has no main_grad there.
    w13, w2 = ([torch.full(t.shape, BEFORE) for t in ts] for ts in (experts.w13, experts.w2))
    if rank == 0:
        backend.backward(dy_TD, inputs, saved, Needs(w13=False), MainGrads((), tuple(w2), True))
        assert torch.equal(w2[0], found["sum2"])
    else:
        backend.backward(dy_TD, inputs, saved, Needs(w2=False), MainGrads(tuple(w13), (), True))
        assert torch.equal(stacked(case, tuple(w13)), found["sum13"])
    return found


def run_blocks(backend, case: Case, rank: int, ranks: int) -> dict[str, Tensor]:
    """Likewise with a gradient for each source rank: added (blocks13, blocks2), or apart (apart13, apart2: experts
    first, then blocks); with biases blocks_b13 and so on."""
    inputs, dy_TD = share(case, rank, ranks)
    _, saved = backend.forward(inputs, save=True)
    found = {}
    for name, shape in (("blocks", ()), ("apart", (ranks,))):
        experts = inputs.experts
        w13, w2, biases = (
            tuple(torch.full((*shape, *t.shape), float("nan")) for t in ts)
            for ts in (experts.w13, experts.w2, experts.biases)
        )
        into = MainGrads(w13, w2, False, bool(shape), biases)
        assert backend.backward(dy_TD, inputs, saved, Needs(), into, ranks).biases == ()
        each = list(map(into.of_block, range(ranks))) if shape else [into]
        parts = zip(*((stacked(case, of.w13), of.w2[0], *of.biases) for of in each), strict=True)
        names = ("13", "2", "_b13", "_b2")
        found |= {f"{name}{part}": torch.stack(of, 1) for part, of in zip(names, parts, strict=False)}
    return found


def run_factor_blocks(backend, case: Case, rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """Gradients of factors in fp32 by source ranks: added to `BEFORE`; then those of each rank, apart."""
    inputs, dy_TD = share(case, rank, ranks)
    _, saved = backend.forward(inputs, save=True)
    found = []
    for apart in (False, True):
        shape, fill = ((ranks,), float("nan")) if apart else ((), BEFORE)
        w13, w2 = (tuple(torch.full((*shape, *t.shape), fill) for t in ts) for ts in inputs.experts.trained)
        into = MainGrads(w13, w2, not apart, apart)
        backend.backward(dy_TD, inputs, saved, Needs(biases=False), into, ranks)
        each = list(map(into.of_block, range(ranks))) if apart else [into]
        found += map(factors, each)
    return found


def stacked(case: Case, w13: tuple[Tensor, ...]) -> Tensor:
    """(e, 2, F, D) of one tensor or two; without a gate (e, 1, F, D)."""
    return torch.stack(w13, 1) if len(w13) == 2 else w13[0].unflatten(1, (-1, case.ffn))


def share(case: Case, rank: int, ranks: int) -> tuple[Inputs, Tensor]:
    """(inputs, dO) of one rank."""
    every, local = tensors(case), case.num_experts // ranks
    tokens = case.tokens if ranks > 1 else (sum(case.tokens),)
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    w13, w2, *biases = (every[name][rank * local : (rank + 1) * local] for name in ("w13", "w2", "b13", "b2"))
    more = w13.shape[1] == 2, *(biases if case.bias else ())
    if case.up_first:
        memory = w13.transpose(0, 1).flip(0).contiguous()  # up projections at the lower addresses
        experts = ExpertWeights((memory[1], memory[0]), (w2.contiguous(),), "split", *more)
    else:
        experts = ExpertWeights((w13.flatten(1, 2).contiguous(),), (w2.contiguous(),), "stacked", *more)
    if case.lora is not None:
        a13, f13, a2, f2 = (every[name][rank * local : (rank + 1) * local] for name in ("a13", "f13", "a2", "f2"))
        pairs = {"w13": (a13, f13), "w2": (a2, f2)}
        lora = Lora(*(pairs[name] if name in case.adapted else None for name in pairs), SCALE)
        experts = dataclasses.replace(experts, lora=lora)
    inputs = Inputs(every["x"][mine].clone(), every["ids"][mine], every["weights"][mine], experts)
    return inputs, every["dy"][mine].clone()


def check_trace(backend, case: Case, rank: int) -> None:
    """Every task of this rank is in the trace: once, or, sums and copies of what was received, in parts; the clocks of
    ranks differ, and times do not show it."""
    assert all(0 <= s.claimed_ns < TIMEOUT_S * 10**9 for s in backend.trace)
    ids = tensors(case)["ids"].split(case.tokens)
    by_expert = backend.way.sends_by_expert
    plans = [build_plan(list(ids), peer, backend.cfg, by_expert, backend.way.align) for peer in range(len(case.tokens))]
    needs = {"w13": rank == 1, "w2": rank == 0}
    graphs = {
        "forward": lower_forward(plans, case.tokens, backend.cfg, backend.way, keep=True),
        "backward": lower_backward(plans, case.tokens, backend.cfg, backend.way, Flags(**needs)),
    }
    copied = {"push"} if backend.way.copies else set()
    for phase, graph in graphs.items():
        recorded = Counter((s.op, s.block) for s in backend.trace if s.phase == phase)
        tasks = {(t.op, t.block) for t in graph.tasks if t.rank == rank and t.op not in copied | {"collect"}}
        assert recorded.keys() == tasks, (phase, recorded.keys() ^ tasks)
        assert all(count == 1 for (op, _), count in recorded.items() if op not in ("combine", "keep"))


def main(rank: int, folder: Path, suite: str) -> None:
    import hopper_on_host
    import own_operators
    from triton.runtime.interpreter import InterpretedFunction

    from uniep.kernels import claims

    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    hopper_on_host.interpret(ahead_ns=rank * 10**15)
    launch = InterpretedFunction.run

    def late_launch(self, *args, **options):
        if self.fn.__name__ in LATE[rank % 2]:
            time.sleep(LATE_S)
        if "push_programs" in self.arg_names:  # programs run in turn: one that waits must not hold up another's push
            args = list(args)
            place = self.arg_names.index("push_programs")
            args[place] = min(args[place], 1)
        return launch(self, *args, **options)

    InterpretedFunction.run = late_launch
    if suite in ("mega", "pull"):
        hopper_on_host.programs_at_once(max(3 - rank, 1), slow=rank == 0)
    if suite == "pull" and rank == 0:  # fetches in one kernel while peers have done so
        move = claims.move_chunk

        def late_move(*args):
            time.sleep(10 * LATE_S)
            return move(*args)

        claims.move_chunk = late_move
    for number, (key, case) in enumerate(SUITES[suite][0].items()):
        ranks = len(case.tokens)
        if rank >= ranks:
            continue

        def memories(size: int, number: int = number, ranks: int = ranks) -> list[Tensor]:
            names = [str(folder / f"{number}-{peer}") for peer in range(ranks)]
            return [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]

        schedule = schedule_of(suite)
        backend = hopper_on_host.host_backend(case.config(max(case.tokens)), rank, ranks, memories, schedule)
        results = []
        for how in rounds_of(suite, key):
            fields = ("overlap", "operand", "transfer", "received", "activation_gradient", "group_sum")
            changes = dict(how) if isinstance(how, dict) else dict(zip(fields, how, strict=False))
            own = own_operators.operators(changes.pop("operators")) if suite == "own" else ()
            hopper_on_host.use(backend, dataclasses.replace(schedule, **changes), own)
            results.append(run(backend, case, rank, ranks))
        if suite == "lora":
            part = run(backend, case, rank, ranks, Needs(rank == 0, rank == 1, rank == 1, rank == 0, False))
            for name, value in part.items():
                assert value is None or torch.equal(value, results[0][name]), f"{name}, needed by rank {rank} only"
            results += run_factor_blocks(backend, case, rank, ranks)
        if suite in ("grouped", "own", "pairs", "lora", "parts"):
            torch.save(results, folder / f"result-{number}-{rank}")
            continue
        # What one rank needs, another may not.
        backend.trace = [] if suite in ("mega", "pull") else None
        part = run(backend, case, rank, ranks, Needs(rank == 0, rank == 1, rank == 1, rank == 0, rank == 1))
        for name, value in part.items():
            assert value is None or torch.equal(value, results[0][name]), f"{name}, needed by rank {rank} only"
        if backend.trace is not None:
            check_trace(backend, case, rank)
            backend.trace = None
        if suite == "pull":
            torch.save(results, folder / f"result-{number}-{rank}")
            continue
        results.append(run_main_grad(backend, case, rank, ranks))
        entry_ns, data_ns = backend.waited().tolist()
        assert suite == "mega" or (data_ns > LATE_S * 1e9 and entry_ns > LATE_S * 1e9 * rank), (entry_ns, data_ns)
        if suite == "usual" and key in OPERAND_OF_BLOCKS:
            hopper_on_host.use(
                backend, dataclasses.replace(SCHEDULE, operand=OPERAND_OF_BLOCKS[key], down_wgrad="beside")
            )
            results[-1] |= run_blocks(backend, case, rank, ranks)
        torch.save(results, folder / f"result-{number}-{rank}")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
