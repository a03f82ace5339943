"""Finds the modules of any model that hold routed experts, whatever their names, so that no MoE layer is missed.

Such a module has a tensor with one slice per expert, or a list with one module per expert.  The number of experts comes
from attributes of the module or of its parent.  If there is none, the module's name decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

__all__ = ["routed_experts"]

OTHER_COUNTS = ("per_tok", "shared", "size", "dim", "group", "active", "top")
"""Words in attribute names that count something else about experts."""

DENSE = "shared"
"""Words in names of experts that every token goes to."""


def routed_experts(model: nn.Module, known: Callable[[nn.Module], bool] = lambda module: False) -> dict[str, nn.Module]:
    """Name -> module that holds the routed experts of one MoE layer, or, where several do, the module around them.

    known: whether a module is a known one; nothing inside it is searched.
    """
    found: dict[str, nn.Module] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if _is_inside(name, found):
            continue
        around, _, own_name = name.rpartition(".")
        if known(module) or (name and _holds_experts(own_name, module, modules[around])):
            found[name] = module
    beside: dict[str, list[str]] = {}
    for name in found:
        beside.setdefault(name.rpartition(".")[0], []).append(name)
    for around, names in beside.items():
        is_list = isinstance(modules[around], (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if around and len(names) > 1 and not is_list and not any(known(found[name]) for name in names):
            for name in names:
                del found[name]
            found[around] = modules[around]
    return {name: found[name] for name in modules if name in found}


def _is_inside(name: str, found: dict[str, nn.Module]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in found for end in range(len(parts)))


def _holds_experts(name: str, module: nn.Module, around: nn.Module) -> bool:
    label = f"{name} {type(module).__name__}".lower()
    if DENSE in label:
        return False
    named = "expert" in label
    near = set(_numbers(module)) | set(_numbers(around))
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        are_networks = alike and len(list(children[0].parameters())) > 1
        return are_networks and (named or len(children) in near)
    if isinstance(module, nn.Embedding):  # a table whose vectors are experts
        return module.num_embeddings in near
    if type(module).__module__.startswith("torch.nn.modules"):
        return False
    shapes = [tuple(p.shape) for p in _own_parameters(module)]
    first = {shape[0] for shape in shapes if len(shape) > 2 and shape[0] > 1}
    if first & near or (named and first):
        return True
    # Experts stacked in two dimensions, (E * F, D)
    return named and any(len(s) == 2 and s[0] > number and s[0] % number == 0 for s in shapes for number in near)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for parametrized in getattr(module, "parametrizations", {}).values():
        yield parametrized.original


def _numbers(owner: nn.Module) -> Iterator[int]:
    """Numbers of routed experts given by attributes."""
    for name, value in vars(owner).items():
        if type(value) is int and value > 1 and "experts" in name and not any(word in name for word in OTHER_COUNTS):
            yield value
