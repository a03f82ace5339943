"""Activations as Triton functions, interpreted, against fp64."""

import activation_grid
import pytest
import torch

from uniep.activation import ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_dense_grid(activation):
    print(activation_grid.check(activation, "cpu", blocks=4))
    if activation.gated:
        print(activation_grid.check(activation, "cpu", blocks=4, limit=3.0))


def test_widened():
    activation_grid.check_widened(torch.float16, "cpu")
