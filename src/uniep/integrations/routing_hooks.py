"""Record and replay of routing in routers of other frameworks, which choose by `torch.topk`: that is intercepted.

A router of transformers computes scores (T, E) of all experts, one of torchtitan (B, L, E), takes the K largest by
`torch.topk`, and computes weights for these ids.  With groups of experts, it first takes the largest of each group: of
scores with one more dimension.  A `RoutingHooks` lets `uniep.nn.record_routing` see the ids and
`uniep.nn.replay_routing` replace them.  The router's own code then computes weights and gradients from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from uniep.errors import ConfigError, InputError, UniEPError, UnsupportedError
from uniep.nn.modules import local_part
from uniep.nn.replay import Tape

Fail = Callable[[UniEPError], None]
"""Is called with an error, so that it also reaches the other ranks."""


class _Choice(TorchFunctionMode):
    """Active while a router runs: the tape's choice, if it has one, replaces the router's, and the tape sees the
    choice.  Of a DTensor it is that of the tokens on this rank.  dims: of the scores."""

    def __init__(self, tape: Tape, num_experts: int, dims: int, framework: str, fail: Fail) -> None:
        super().__init__()
        self.tape, self.num_experts, self.dims, self.framework, self.fail = tape, num_experts, dims, framework, fail
        self.asked = False  # whether the router chose in a way that is intercepted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores = args[0] if args else kwargs["input"]
        if scores.dim() != self.dims or scores.shape[-1] != self.num_experts:
            return out
        self.asked = True
        with torch._C.DisableTorchFunction():
            return self._replaced(scores, out)

    def _replaced(self, scores: Tensor, out: Any) -> Any:
        scores_TE, chosen = local_part(scores).flatten(0, -2), local_part(out.indices)
        try:
            given = self.tape.given(scores_TE, chosen.shape[-1])
            if given is not None and bool(((given < 0) | (given >= self.num_experts)).any()):
                raise InputError(
                    f"a choice to be replayed is from {int(given.min())} to {int(given.max())}; routers of "
                    f"{self.framework} take experts 0 to {self.num_experts - 1} in every slot"
                )
        except UniEPError as error:
            self.fail(error)
            return out
        ids_TK = self.tape.keep(chosen.flatten(0, -2) if given is None else given)
        if given is None:
            return out
        ids = _like(ids_TK.view(chosen.shape), out.indices)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _like(local: Tensor, whole: Tensor) -> Tensor:
    """`local` as a DTensor laid out like `whole`, if that is one."""
    if local_part(whole) is whole:
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(whole, DTensor)
    layout: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, whole.device_mesh, whole.placements, run_check=False, **layout)


class RoutingHooks:
    """The hooks that `hook_routing` made; `remove` removes them."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.routers: list[nn.Module] = []

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for router in self.routers:
            del router.tape
        self.handles.clear()
        self.routers.clear()

    def add(self, router: nn.Module, num_experts: int, dims: int, framework: str, fail: Fail) -> None:
        """Give one router its tape.  dims: of its scores.  Raises ConfigError if it has one."""
        if hasattr(router, "tape"):
            raise ConfigError(
                f"a {type(router).__name__} is hooked already, and would be recorded twice; use these hooks (a copy of "
                "a hooked model has its own), or remove() them first"
            )
        router.tape = None  # type: ignore[assignment]
        active: list[_Choice] = []

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module.tape, Tape):
                active.append(_Choice(module.tape, num_experts, dims, framework, fail))
                active[-1].__enter__()

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not active:
                return
            choice = active.pop()
            choice.__exit__(None, None, None)
            if not choice.asked and output is not None:  # None: it raised
                kind = type(module).__name__
                fail(
                    UnsupportedError(
                        f"{kind} did not choose by torch.topk of scores in {dims} dimensions, of {num_experts} experts "
                        f"in the last, so its choice can be neither recorded nor replayed; remove() the hooks"
                    )
                )

        self.handles += [
            router.register_forward_pre_hook(enter),
            router.register_forward_hook(leave, always_call=True),
        ]
        self.routers.append(router)


def find_router(around: nn.Module, experts: nn.Module, name: str) -> tuple[nn.Module, int]:
    """(the router beside `experts` in `around`, E).  Raises UnsupportedError if there is no separate router module."""
    for child in around.children():
        if child is experts or "router" not in type(child).__name__.lower():
            continue
        for parameter in child.parameters():
            if parameter.dim() == 2:
                return child, parameter.shape[0]
    raise UnsupportedError(
        f"{name or type(around).__name__} has no router module, so its routing cannot be recorded or replayed"
    )
