"""Record and replay of routing in transformers' models: their routers choose by `torch.topk`, which is intercepted.

A router of transformers computes scores of all E experts, takes the K largest of a (T, E) tensor by `torch.topk`, and
computes weights for these ids.  `hook_routing` lets `uniep.nn.record_routing` see the ids and `uniep.nn.replay_routing`
replace them.  The router's own code then computes weights and gradients from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from uniep.errors import InputError, UniEPError, UnsupportedError
from uniep.nn.replay import Tape


class _Choice(TorchFunctionMode):
    """Active while a router runs: the tape's choice, if it has one, replaces the router's, and the tape sees the
    choice.

    fail: called with an error, so that it also reaches the other ranks.
    """

    def __init__(self, tape: Tape, x_TD: Tensor, num_experts: int, fail: Callable[[UniEPError], None]) -> None:
        super().__init__()
        self.tape, self.x_TD, self.num_experts, self.fail = tape, x_TD, num_experts, fail

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or out.indices.dim() != 2 or args[0].shape[1] != self.num_experts:
            return out
        with torch._C.DisableTorchFunction():
            return self._replaced(args[0], out)

    def _replaced(self, scores_TE: Tensor, out: Any) -> Any:
        try:
            given = self.tape.given(self.x_TD, out.indices.shape[1])
            if given is not None and bool(((given < 0) | (given >= self.num_experts)).any()):
                raise InputError(
                    f"a choice to be replayed is from {int(given.min())} to {int(given.max())}; routers of "
                    f"transformers take experts 0 to {self.num_experts - 1} in every slot"
                )
        except UniEPError as error:
            self.fail(error)
            return out
        ids_TK = self.tape.keep(out.indices if given is None else given)
        if given is None:
            return out
        return torch.return_types.topk((scores_TE.gather(1, ids_TK), ids_TK))


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


def hook(router: nn.Module, num_experts: int, fail: Callable[[UniEPError], None], hooks: RoutingHooks) -> None:
    """Give one router its tape: `fail` as in `_Choice`."""
    router.tape = None  # type: ignore[assignment]
    active: list[_Choice] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module.tape, Tape):
            x_TD = args[0].reshape(-1, args[0].shape[-1])
            active.append(_Choice(module.tape, x_TD, num_experts, fail))
            active[-1].__enter__()

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if active:
            active.pop().__exit__(None, None, None)

    hooks.handles += [
        router.register_forward_pre_hook(enter),
        router.register_forward_hook(leave, always_call=True),
    ]
    hooks.routers.append(router)


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
