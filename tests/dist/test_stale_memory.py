"""What a call may reuse is full of NaN, and nothing of it is seen.  Numbers: see test_odd_routings.py."""

import dataclasses
import itertools

import case
import pytest
import torch
from case import config, random_batch, run, same_bits, steps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUICK = [(torch.bfloat16, "saved"), (torch.float32, "again")]


@pytest.mark.parametrize(
    ("dtype", "received"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(DTYPES, ["saved", "again"])
    ],
    ids=str,
)
def test_16_poisoned_memory_reaches_nothing(pool, dtype, received):
    """16: capacity far above use, all memory poisoned: three steps finite and equal to a run without poison."""
    cfg = config(max_tokens_per_rank=512, dtype=dtype)
    batch = random_batch(cfg, (16, 7, 0, 41), unused=0.2)
    want = case.oracle(pool, cfg, batch)
    schedule = dataclasses.replace(case.FUSED, received=received)
    for ep_size in (1, 2, 4):
        for got in steps(pool, cfg, [batch], ep_size, schedule, poisoned=True, repeats=3):
            assert all(getattr(got, name).isfinite().all() for name in case.FIELDS)
            same_bits(got, want)


def test_18_a_single_local_expert(pool):
    """18: one expert per rank, capacity far above use, poisoned: dW finite and equal."""
    cfg = config(num_experts=4, max_tokens_per_rank=256)
    batch = random_batch(cfg, (16, 16, 16, 16))
    want = case.oracle(pool, cfg, batch)
    case.accurate(want, batch, cfg)
    same_bits(run(pool, cfg, batch, 4, poisoned=True), want)
