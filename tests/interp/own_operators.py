"""Operators of one's own for tests: the same ones as torch functions and as Triton bodies.  Exact for small numbers."""

import triton
import triton.language as tl

from uniep import RowOperator


@triton.jit
def half_and_one(values):
    return values * 0.5 + 1.0


@triton.jit
def double(values):
    return tl.add(values, values)


def half_and_one_in_torch(values, valid):
    values.mul_(0.5).add_(1.0)


def double_in_torch(values, valid):
    values.mul_(2.0)


FUNCTIONS = {"half_and_one": (half_and_one, half_and_one_in_torch), "double": (double, double_in_torch)}
PLACES = {"gate_up": "half_and_one", "down": "double", "down_grad": "half_and_one", "gate_up_grad": "double"}


def operators(kind):
    """kind: "torch" or "triton", of all places; "returning": Triton bodies of rows that return alone."""
    places = [p for p in PLACES if kind != "returning" or p in ("down", "gate_up_grad")]
    made = []
    for place in places:
        body, rows = FUNCTIONS[PLACES[place]]
        made.append(RowOperator(name=f"own_{place}", after=place, rows=rows, body=None if kind == "torch" else body))
    return made
