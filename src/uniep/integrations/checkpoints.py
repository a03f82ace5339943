"""Checkpoints with w1 (gate), w3 (up) and w2 (down) matrices, or gate and up in one, under the names of `uniep.nn`, and
back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from uniep.errors import ConfigError

__all__ = ["join_experts", "split_experts"]


def join_experts(
    state: Mapping[str, Tensor],
    *,
    gate: str = "w1",
    up: str = "w3",
    down: str = "w2",
    gate_up: str | None = None,
    router: str | None = None,
    transposed: bool = False,
) -> dict[str, Tensor]:
    """The tensors of another checkpoint, with those of experts as `uniep.nn.MoE` has them; give the result to
    `uniep.integrations.torch.load_full_state_dict`.

    Experts are found by their names, P.experts.GATE, of shape (E, F, D), or P.experts.N.GATE for each expert N, (F, D);
    a ".weight" may follow.  UP likewise; DOWN is (E, D, F) or (D, F).  They become P.experts.w13 (E, 2F, D), gate rows
    first, and P.experts.w2 (E, D, F).  All other tensors are passed on under their names.  Megatron-Core's names are
    understood, too: P.experts.experts.GATE.weight, P.experts.local_experts.N.GATE.weight and P.experts.GATE.weightN.

    gate, up, down: names of the matrices, for example "gate_proj", "up_proj", "down_proj".
    gate_up: name of gate and up in one, (E, 2F, D) or (2F, D), gate rows first, in place of `gate` and `up`; for
        example "linear_fc1", with down="linear_fc2".
    router: name of the router's weight (E, D) beside `experts`, for example "gate.weight"; it becomes P.router.
    transposed: matrices are stored the other way, (D, F) and (F, D).
    Raises ConfigError if there are no experts, one has no matrix of a name, or shapes do not fit each other.
    """
    first = (gate, up) if gate_up is None else (gate_up,)
    pattern = re.compile(
        r"(?P<prefix>(?:.*?\.)?experts)(?:\.(?:local_)?experts)?(?:\.(?P<expert>\d+))?"
        rf"\.(?P<matrix>{'|'.join(map(re.escape, (*first, down)))})(?:\.weight(?P<number>\d+)?)?"
    )
    found: dict[str, dict[str, dict[int | None, Tensor]]] = {}
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if match := pattern.fullmatch(name):
            of_layer = found.setdefault(match["prefix"], {matrix: {} for matrix in (*first, down)})
            number = match["expert"] or match["number"]
            of_layer[match["matrix"]][int(number) if number else None] = tensor
        elif router is not None and (name == router or name.endswith(f".{router}")):
            made[f"{name.removesuffix(router)}router"] = tensor
        else:
            made[name] = tensor
    if not found:
        *names, last = (f"experts.{matrix}" for matrix in (*first, down))
        raise ConfigError(
            f"no name ends in {', '.join(names)} or {last}, with or without an expert's number between; the first "
            f"names are {', '.join(list(state)[:3]) or 'none'}; pass gate=, up= and down=, or gate_up= and down="
        )
    for prefix, matrices in found.items():
        _refuse_missing(prefix, matrices, [n for n in made if n.startswith(f"{prefix}.")])
        stacked = {name: _stacked(of) for name, of in matrices.items()}
        if transposed:
            stacked = {name: tensor.transpose(1, 2) for name, tensor in stacked.items()}
        num_experts, hidden, ffn, *more = (*stacked[down].shape, 0, 0)
        wanted = num_experts, ffn * 2 // len(first), hidden
        if len(more) != 2 or any(tuple(stacked[name].shape) != wanted for name in first):
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in stacked.items())
            rows = f"{' and '.join(first)} must be (E, {'F' if gate_up is None else '2F'}, D)"
            raise ConfigError(
                f"{prefix}: {shapes}; {rows} and {down} (E, D, F), or all stored the other way, with transposed=True"
            )
        made[f"{prefix}.w13"] = torch.cat([stacked[name] for name in first], dim=1)
        made[f"{prefix}.w2"] = stacked[down].contiguous()
    return made


def split_experts(
    state: Mapping[str, Tensor],
    *,
    gate: str = "w1",
    up: str = "w3",
    down: str = "w2",
    router: str | None = None,
    transposed: bool = False,
    each: str | None = None,
) -> dict[str, Tensor]:
    """What `join_experts` was given, of the same options: views of P.experts.w13 and P.experts.w2 of all experts.

    each: None: matrices stay stacked, P.experts.GATE; a suffix such as ".weight" or "": one for each expert,
        P.experts.N.GATE and the suffix.
    Raises ConfigError for experts that are not all there (take `get_model_state_dict` with full_state_dict=True), and
    for those without a gate, whose w13 is one matrix.
    """
    turned: Callable[[Tensor], Tensor] = (lambda t: t.transpose(1, 2)) if transposed else (lambda t: t)
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, _, own = name.rpartition(".")
        if own == "_extra_state" and prefix.rpartition(".")[2] == "experts":
            if tuple(map(int, tensor.tolist())) != (0, 1):
                rank, ranks = map(int, tensor.tolist())
                raise ConfigError(
                    f"{prefix} holds the experts of rank {rank} of {ranks}; take the state of all by "
                    "get_model_state_dict with full_state_dict=True"
                )
        elif own in ("w13", "w2") and prefix.rpartition(".")[2] == "experts":
            w2 = state.get(f"{prefix}.w2")
            if own == "w13" and w2 is not None and tensor.shape[1] != 2 * w2.shape[2]:
                raise ConfigError(
                    f"{name} is {tuple(tensor.shape)} beside w2 {tuple(w2.shape)}, not (E, 2F, D): experts without a "
                    f"gate have no {gate} and {up}; rename their tensors yourself"
                )
            parts = {down: tensor} if own == "w2" else dict(zip((gate, up), tensor.chunk(2, dim=1), strict=True))
            for matrix, part in parts.items():
                if each is None:
                    made[f"{prefix}.{matrix}"] = turned(part)
                else:
                    made |= {f"{prefix}.{n}.{matrix}{each}": of for n, of in enumerate(turned(part))}
        elif own == "router" and router is not None:
            made[f"{prefix}.{router}" if prefix else router] = tensor
        else:
            made[name] = tensor
    return made


def _refuse_missing(prefix: str, matrices: dict[str, dict[int | None, Tensor]], others: list[str]) -> None:
    """Raise ConfigError unless each matrix is there, of all experts.  others: names beside them, of no matrix."""
    for name, of in matrices.items():
        if not of:
            beside = f"; beside the others are {', '.join(others[:3])}" if others else ""
            there = ", ".join(f"{prefix}.{other}" for other, tensors in matrices.items() if tensors)
            raise ConfigError(
                f"{prefix} has {there} but no {name}{beside}; tell by gate=, up= and down= what the matrices are "
                "called, and pass all of them together, also if they come from several files"
            )
        if None in of and len(of) > 1:
            raise ConfigError(f"{prefix}.{name} is there for all experts and again for single ones; leave one out")
    if len({None in of for of in matrices.values()}) > 1:
        kinds = ", ".join(f"{name} {'of all experts' if None in of else 'for each'}" for name, of in matrices.items())
        raise ConfigError(f"{prefix}: {kinds}; store all three alike")
    count = 1 + max((n for of in matrices.values() for n in of if n is not None), default=-1)
    for name, of in matrices.items():
        if missing := [str(n) for n in range(count) if n not in of and None not in of]:
            raise ConfigError(
                f"{prefix}.{name} is there for {len(of)} of {count} experts; missing: {', '.join(missing[:5])}; pass "
                "the tensors of all experts together, also if they come from several files"
            )


def _stacked(of: dict[int | None, Tensor]) -> Tensor:
    """(E, ...) of one matrix, stacked or a tensor for each expert."""
    return of[None] if None in of else torch.stack([of[n] for n in range(len(of))])
