"""Stages: what a call does, in which order, for every executor.  Pure: it knows no routing, no tiles and no tensors.

    Way ──► stages ──┬─ operators ──► tiles of a RoutingPlan ──► queues       CPU, simulator
                     ├─ a function for each name ──► launches                 GPU
                     └─ buffers ──► plan_memory

`stages` lists a direction once.  With one kernel each way, that kernel carries out the operators of all stages behind
the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from uniep.config import MoEConfig
from uniep.dimension import COLLECTIVE, CPU, GPU
from uniep.row_operator import RowOperator
from uniep.way import Way

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = "forward", "backward"
Stream = Literal["call", "side", "copies"]
END, SAVED, CALLER = "end", "saved", "caller"
"""How long memory is used: to the end of the call, up to the backward, as long as the caller wants."""


class Flags(NamedTuple):
    """What a call is to do.  save: a backward will follow.  x to biases: gradients that are needed.  main_grad: the
    caller has memory for those of experts.  wire: tokens and rows cross it.  blocks: number of blocks of source
    ranks, by which gradients of experts are summed."""

    save: bool = True
    x: bool = True
    weights: bool = True
    w13: bool = True
    w2: bool = True
    biases: bool = True
    main_grad: bool = False
    wire: bool = True
    blocks: int = 1


ALL = Flags()


class Order(NamedTuple):
    """The order of a product's tiles, of which `Way` says more.  leads: experts whose local tiles come first, if not
    all or none.  waves: by arrival, if more than 1, all local tiles before them."""

    local_first: str
    leads: int
    waves: int
    chunk_experts: int
    critical_path: bool
    rotated: bool

    def __str__(self) -> str:
        first = {"none": "", "leading": f"own rows of {self.leads} experts first", "all": "own rows first"}
        rules = (
            "critical path" if self.critical_path else first["all" if self.waves > 1 else self.local_first],
            f"{self.waves} waves by arrival" if self.waves > 1 else "",
            f"{self.chunk_experts} experts at a time" if self.chunk_experts else "",
            "by peer" if self.rotated else "",
        )
        return ", ".join(filter(None, rules)) or "by expert"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a call.

    operators: those of the task graph that it carries out.  kernels: what it launches on a GPU, in turn; "copy" is one
    by copy engines, "torch" what a torch function launches; collectives by their names.  stream: of a GPU.  sms:
    multiprocessors of its kernels; 0: it takes none.  waits, signals: flags of peers.  after: stages of other streams
    that it waits for.  beside: the stage from whose start on its stream goes on; "": from its own.  shares_cursor: it
    is a launch of a product whose other launch takes tiles from the same cursor.  part: it is a launch of a product for
    one part of the row tiles, (number, of how many).  buffers: memory that it makes, each with the last stage that uses
    it, or END, SAVED or CALLER.  own: the operator of one's own that it is.
    """

    name: str
    operators: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    stream: Stream = "call"
    sms: int = 0
    waits: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    beside: str = ""
    shares_cursor: bool = False
    part: tuple[int, int] | None = None
    buffers: tuple[tuple[str, str], ...] = ()
    order: Order | None = None
    own: RowOperator | None = None


class Program(NamedTuple):
    """The stages of a direction.  Printed, a table."""

    title: str
    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        rows = [("stage", "operators", "launches", "stream", "SMs", "waits for", "signals", "makes", "order")]
        for s in self.stages:
            lists = s.operators, s.kernels, s.waits + s.after, s.signals, [name for name, _ in s.buffers]
            operators, kernels, waits, signals, makes = map(" ".join, lists)
            sms = f"{s.sms or ''}{' shared' if s.shares_cursor else ''}"
            name = s.name if s.part is None else f"{s.name} {s.part[0] + 1}/{s.part[1]}"
            rows.append((name, operators, kernels, s.stream, sms, waits, signals, makes, str(s.order or "")))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join([self.title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)])


@functools.lru_cache(maxsize=1024)
def stages(cfg: MoEConfig, way: Way, direction: Direction, flags: Flags = ALL) -> tuple[Stage, ...]:
    """The stages of a call of `way`, in the order in which they begin."""
    call = _Call(cfg, way, flags, direction == "forward")
    if way.backend == COLLECTIVE:
        return tuple(call.collective())
    before, behind = call.before(), call.forward() if call.is_forward else call.backward()
    return (*before, *(call.in_one_kernel(direction, behind) if way.mega else behind))


class _Call:
    def __init__(self, cfg: MoEConfig, way: Way, flags: Flags, is_forward: bool) -> None:
        self.cfg, self.way, self.flags, self.is_forward = cfg, way, flags, is_forward
        self.device = way.backend == GPU
        self.remote = way.ep_size > 1 and way.backend != COLLECTIVE
        self.wired = self.remote and self.flags.wire
        self.copies = self.device and way.copies and self.wired
        self.dispatched = self.device and self.wired and way.gates and not way.mega  # by a stage of its own
        self.move = "pull" if way.pulls else "push"
        self.publish = "publish_kernel" * (way.pulls and self.wired)
        self.in_torch = way.backend == CPU or (way.backend == COLLECTIVE and bool(way.lora))  # tile bodies compute
        self.beside = way.down_sms if self.is_forward else 0
        count = way.gate_up_parts if is_forward and way.gate_up_parts > 1 else 0
        self.parts = [(number, count) for number in range(count)]
        self.has_mask = False
        self.barrier = "barrier_kernel" * self.remote

    def make(self, name: str, operators: str = "", kernels: str = "", **fields: Any) -> Stage:
        """A stage of these operators and, on a GPU, these kernels: words of a text."""
        how: dict[str, Any] = {"kernels": tuple(kernels.split()), "sms": self.way.sms} if self.device else {}
        if not self.device:
            fields.pop("stream", None)
        return Stage(name=name, operators=tuple(operators.split()), **how | fields)

    def flag(self, name: str, when: bool = True) -> tuple[str, ...]:
        return (name,) * (self.remote and when)

    def before(self) -> list[Stage]:
        """Ranks enter; tokens leave that no product sends; a forward makes the plan."""
        way, flags, entered = self.way, self.flags, self.flag("entered")
        both: Any = {"waits": entered, "signals": entered}
        again = self.again() if way.recomputes and not self.is_forward else []
        if not self.device:
            name = ((("fingerprint", SAVED),) * self.is_forward) if flags.save else ()
            return [self.make("enter", buffers=name, **both), self.make("push", "push", signals=self.flag("arrived"))]
        names = "extent", "plan", "tiles", "rows"
        plan = tuple((name, SAVED) for name in names) if self.is_forward else (("address", END),)
        by_row = way.recomputes or flags.w13 or flags.w2 or self.cfg.bias
        rows = "row_addresses_kernel" * (not self.is_forward and by_row)
        kernels = f"{self.publish} exchange_kernel {rows} {self.barrier}"
        made = [*again, self.make("enter", "", kernels, buffers=plan, **both)]
        sent: Any = {"stream": "copies", "sms": 0, "signals": self.flag("finished")}
        if self.copies:
            made.append(self.make("send", "push", "copy", **sent))
        if self.is_forward:
            kernels = "histogram_kernel scan_kernel tiles_kernel place_kernel " + "parts_kernel" * way.grouped
            tables = (("histogram", END), ("parts", SAVED))[: 1 + way.grouped]
            made.append(self.make("plan", "", kernels, buffers=tables))
            if self.copies and way.ep_size > 2:  # which the plan does not wait for on the host
                made.append(self.make("send_others", "", "copy", **sent))
        if self.dispatched:
            push = "push_tokens_kernel" * (not self.copies)
            made.append(self.make(
                "dispatch", self.move * (not self.copies), f"{push} {self.barrier}", waits=self.flag("finished"),
                signals=self.flag("finished", not self.copies),
            ))  # fmt: skip
        return made

    def product(self, name: str, operators: str, kernels: str, **fields: Any) -> Stage:
        """Whose tiles wait for tokens, and whose first programs push this rank's or pull its peers', unless something
        else has, such as its first part."""
        way, (number, _) = self.way, fields.get("part", (0, 1))
        pushes = self.device and not self.copies and not self.dispatched and number == 0
        waits = not self.device or (self.wired and way.waits)
        return self.make(
            name, f"{self.move * pushes} {operators}", kernels,
            waits=self.flag("finished" if self.copies else "arrived", waits),
            signals=self.flag("arrived", pushes and waits and not way.pulls),
            **{"order": self.order(way.leads[not self.is_forward])} | fields,
        )  # fmt: skip

    def order(self, leads: int) -> Order | None:
        way = self.way
        if way.backend == COLLECTIVE:
            return None
        return Order(way.local_first, leads, way.waves, way.chunk_experts, way.critical_path, way.rotated)

    def own(self, product: str) -> list[Stage]:
        """Operators of one's own behind a product.  The first torch function of a direction makes the mask of rows."""
        after, made = (product,) * bool(product == "down" and self.beside), list[Stage]()
        for op in self.way.own(product):
            how: dict[str, Any] = {"own": op, "after": after}
            if op.body is None:
                how |= {"sms": 0, "buffers": (("valid", END),) * (self.device and not self.has_mask)}
                self.has_mask = True
            made.append(self.make(op.name, op.name, "torch" if op.body is None else "row_operator_kernel", **how))
        return made

    def forward(self) -> list[Stage]:
        way, save = self.way, self.flags.save
        expanded = self.device and way.expanded
        make, how = self.product, {"sms": way.sms - self.beside} if self.device else {}
        parts, first = self.parts, {"sms": way.sms, "part": self.parts[0]} if self.parts else how
        made: list[Stage] = []
        until = SAVED if save else END
        if expanded:
            made.append(make("expand", "", "expand_kernel", order=None, buffers=(("kept", until),)))
            make = self.make
        if low := self.shrink("gate_up", "w13", ("u13", until), make):
            made, make = made + low, self.make
        h = (("h", SAVED),) * save if not way.recomputes else (("h", END),) * self.in_torch
        made.append(make("gate_up", "gate_up", "gate_up_kernel", buffers=(("act", END), *h), **first))
        for before, part in itertools.pairwise(parts):
            made += [self.down_of(before), make("gate_up", "", "gate_up_kernel", part=part, **how)]
        if way.separate:
            made.append(self.make("activation", "activation"))
        made += self.own("gate_up")
        if save and not expanded:
            kept = (("kept" if self.device else "received", SAVED),)
            copy = "copy" * (self.remote and not way.again)
            made.append(self.make("keep", "keep" * (not way.again), copy, stream="copies", sms=0, buffers=kept))
        made += self.returning("down")
        made.append(self.combine("combine", "", after=("down",) * bool(self.beside), buffers=(("y", CALLER),)))
        return made

    def returning(self, name: str, **fields: Any) -> list[Stage]:
        """The product whose rows return: from its epilogue, by a pass behind it, or added by combine groups.  fields:
        of its stage."""
        way, kernel, sent = self.way, "product_kernel", {"signals": self.flag("returned")}
        kept = way.keeps_results
        results: Any = {"buffers": (("results", END),) * kept}
        if self.parts:
            made = [self.down_of(self.parts[-1])]
        elif self.beside:
            side = {"stream": "side", "beside": "gate_up", "sms": self.beside, **results}
            here, shared = {"sms": way.sms - self.beside}, {"shares_cursor": True, **({} if kept else sent)}
            made = [self.make(name, name * one, kernel, **shared | how) for one, how in ((0, side), (1, here))]
        elif self.device and way.returns == "sums beside" and self.is_forward:
            kernels = "return_order_kernel counted_product_kernel claimed_sum_kernel"
            return [self.make("group_sum", f"{name} group_sum", kernels, **results, **sent)]
        else:
            weight, low = ("w2", ("u2", name)) if name == "down" else ("w13", ("v13", END))
            made = self.shrink(name, weight, low, self.make)
            made.append(self.make(name, name, kernel, **results, **({} if kept else sent), **fields))
        made += self.own(name)
        after = (name,) * bool(self.beside)
        if way.grouped:
            stream = "call" if self.is_forward else "side"
            made.append(self.make("group_sum", "group_sum", "group_sum_kernel", stream=stream, after=after, **sent))
        elif kept and way.backend != COLLECTIVE:
            rows = "push_rows" * (not self.device)
            made.append(self.make("push_rows", rows, "push_rows_kernel", after=after, **sent))
        return made

    def down_of(self, part: tuple[int, int]) -> Stage:
        """The down product of a part of gate_up: beside the next part, or, the last one, behind all."""
        way, is_first, is_last = self.way, part[0] == 0, part == self.parts[-1]
        how: dict[str, Any] = {} if is_last else {"stream": "side", "after": ("gate_up",), "sms": self.beside}
        how["buffers"] = (("results", END),) * (way.keeps_results and is_first)
        how["signals"] = self.flag("returned", not way.keeps_results)
        return self.make("down", "down" * is_last, "product_kernel", part=part, **how)

    def shrink(self, product: str, weight: str, low: tuple[str, str], make: Callable[..., Stage]) -> list[Stage]:
        """On GPUs, of calls with low-rank factors beside `weight`: the rows that the product adds, times one factor."""
        if not self.device or weight not in self.way.lora:
            return []
        return [make(f"{product}_shrink", "", "shrink_kernel", buffers=(low,))]

    def combine(self, operators: str, more: str, **fields: Any) -> Stage:
        """The fixed-order sums, once everything has returned."""
        waits = self.flag("returned")
        return self.make("combine", operators, f"{self.barrier} combine_kernel {more}", waits=waits, **fields)

    def backward(self) -> list[Stage]:
        """Weight gradients need nothing from peers: on GPUs the sums are beside them, on another stream, and so is
        gate_up_grad where dW2 takes multiprocessors of its own."""
        way, flags = self.way, self.flags
        until = "activation_gradient" if self.device else END
        raw = (("raw", until),) * (way.separate_gradient or not self.in_torch)
        through = (*raw, ("dh", END), ("act", END), ("dweight_groups", END))
        made = [self.recompute(until)] if way.recomputes else []
        low = self.shrink("down_grad", "w2", ("v2", END), self.product)
        make = self.make if low else self.product
        made += [*low, make("down_grad", "down_grad", "gathered_product_kernel", buffers=through)]
        made += self.own("down_grad")
        if way.separate_gradient:
            kernel = "claimed_activation_gradient_kernel" if way.gradient_beside else "activation_gradient_kernel"
            made.append(self.make("activation_gradient", "activation_gradient", kernel))
        if self.device or flags.weights:  # a GPU makes what its peers may need
            made.append(self.make("dweight", "dweight", "dweights_kernel"))
        rows: dict[str, Any] = {}
        of_w2: dict[str, Any] = {}
        if way.down_wgrad_beside and flags.w2:
            rows, of_w2 = {"stream": "side", "sms": way.gate_up_grad_sms}, {"sms": way.sms - way.gate_up_grad_sms}
        made += self.returning("gate_up_grad", **rows) if self.device or flags.x else []
        operators = f"{'collect' * flags.weights} {'combine' * (self.device or flags.x)}"
        used = "used_dweights_kernel" * flags.weights
        sums = self.combine(operators, used, buffers=(("dx", CALLER),), stream="side")
        weights: list[Stage] = []
        if self.device and flags.biases and self.cfg.bias:
            biases = ("db13", CALLER), ("db2", CALLER)
            weights.append(self.make("bias_gradient", "", "bias_gradient_kernel", buffers=biases))
        if flags.w2 and self.trains("w2"):
            weights.append(self.weight_gradient("down_wgrad", "dw2", **of_w2))
        if not way.recomputes:
            weights += self.again()
        if flags.w13 and self.trains("w13"):
            weights.append(self.weight_gradient("gate_up_wgrad", "dw13"))
        return [*made, sums, *weights] if self.device and not way.mega else [*made, *weights, sums]

    def trains(self, weight: str) -> bool:
        """Itself, or its factors."""
        return not self.way.lora or weight in self.way.lora

    def again(self) -> list[Stage]:
        """A GPU's second dispatch of x: when nobody reads dO any more, or, kept for the rest of the backward, before dO
        comes, where h is recomputed from it."""
        way = self.way
        if not (self.device and way.again and self.wired):
            return []
        send = "copy" if self.copies else "push_tokens_kernel"
        kernels = f"{self.publish} exchange_kernel {self.barrier} {send} {self.barrier}"
        how: dict[str, Any] = {"after": ("combine",)}
        if way.recomputes:
            kernels, how = f"{kernels} copy", {"buffers": (("received_again", END),)}
        flag = self.flag("entered") + self.flag("finished")
        return [self.make("dispatch_again", "", kernels, waits=flag, signals=flag, **how)]

    def recompute(self, until: str) -> Stage:
        """h from the forward's tokens, in the forward's order; waits for nobody.  With one kernel each way it is a
        launch in front of that."""
        alone, order = self.way.mega, self.order(self.way.leads[0])
        buffers = (("h", END if alone else until),)
        return self.make("recompute", "recompute" * (not alone), "gate_up_kernel", buffers=buffers, order=order)

    def weight_gradient(self, name: str, dw: str, **fields: Any) -> Stage:
        """Of W, or of its factors A and B."""
        lora = self.way.lora
        kernels = "weight_gradient_kernel" if self.flags.blocks == 1 else "block_gradient_kernel"
        made = ((dw.replace("w", "lora") if lora else dw, CALLER),) * (not self.flags.main_grad)
        if lora and self.device:
            kernels = f"{'shrink_kernel' * (name == 'down_wgrad')} {kernels} {kernels}"
            made += (("u2", END),) * (name == "down_wgrad")
        if not self.device and self.flags.biases and self.cfg.bias:
            made += ((dw.replace("w", "b"), CALLER),)
        return self.make(name, name, kernels, buffers=made, **fields)

    def in_one_kernel(self, name: str, behind: list[Stage]) -> list[Stage]:
        """The lists of its tasks, and the kernel that carries out the operators of all stages; h is recomputed before
        it, d(bias) comes behind."""
        before, apart = ([s for s in behind if s.name == name] for name in ("recompute", "bias_gradient"))
        inside = [s for s in behind if s not in (*before, *apart)]
        buffers = {n: u if u in (SAVED, CALLER) else END for s in inside for n, u in s.buffers}
        flags = [tuple(dict.fromkeys(f for s in inside for f in getattr(s, kind))) for kind in ("waits", "signals")]
        kernel = Stage(
            name=name, operators=tuple(op for s in inside for op in s.operators), kernels=(f"{name}_kernel",),
            sms=max(self.way.sms - 1, 1), waits=flags[0], signals=flags[1], buffers=tuple(buffers.items()),
            order=inside[0].order,
        )  # fmt: skip
        return [*before, self.make("lists", "", "list_kernel", buffers=(("lists", END),)), kernel, *apart]

    def collective(self) -> list[Stage]:
        """Each stage begins when the one before has ended; what computes is `backends/collective/local_experts.py`."""
        forward, again, parts = self.is_forward, self.way.again, (("parts", END),) * self.way.grouped
        saved = tuple((n, SAVED) for n in ("fingerprint", "row_weight", "plan", "rows", "received") * forward)
        inner = [s for s in (self.forward() if forward else self.backward()) if s.name not in ("keep", "combine")]
        if self.in_torch:
            inner = self.by_expert(inner)
        sums, x = ("collect",) * (not forward and self.flags.weights), (("received_again", END),) * again
        made = x if forward else (("received_dy", END),)
        made += (("x_rows", END),) * (not self.in_torch)
        return [
            Stage(name="enter", kernels=("all_gather",), buffers=(*saved, *parts)),
            *[self.exchanged("dispatch_again", (), x)] * (again and not forward),
            self.exchanged("dispatch", ("push",), made),
            *inner,
            Stage(name="return", kernels=("all_to_all",), buffers=(("sorted", "return"), ("slots", END))),
            Stage(name="combine", operators=(*sums, "combine"), buffers=(("y" if forward else "dx", CALLER),)),
        ]

    def exchanged(self, name: str, operators: tuple[str, ...], made: tuple[tuple[str, str], ...]) -> Stage:
        """An all-to-all of tokens."""
        return Stage(name=name, operators=operators, kernels=("all_to_all",), buffers=(("sent", name), *made))

    def by_expert(self, computing: list[Stage]) -> list[Stage]:
        """Torch operations on one expert's rows at a time, in memory of all rows that is made before the first expert
        and, but for results, ends with the last.  A gradient passes the activation in matrices of the expert."""
        first, last = computing[0], computing[-1].name
        held = {n: last if until == END and n != "results" else until for s in computing for n, until in s.buffers}
        through = "activation_gradient" if self.way.separate_gradient else "down_grad"
        return [
            dataclasses.replace(
                s, buffers=tuple(held.items()) * (s is first) + (("of_expert", s.name),) * (s.name == through)
            )
            for s in computing
        ]
