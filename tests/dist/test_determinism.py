"""Arrival, load, EP sizes and other tokens change no bit.  Numbers: see test_odd_routings.py."""

import dataclasses
import random
import threading
import time

import case
import pytest
import torch
from case import config, random_batch, same_bits, steps

import uniep

HALF_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]


def steps_under_load(world, cfg, batch, ep_size, repeats, seed):
    """Repeated steps, sleeping at random before each, while another thread multiplies matrices at random times."""
    stop = threading.Event()
    chance = random.Random(seed + world.rank)

    def disturb():
        other = random.Random(seed)
        while not stop.is_set():
            torch.randn(64, 64) @ torch.randn(64, 64)
            time.sleep(other.random() * 2e-3)

    noise = threading.Thread(target=disturb)
    noise.start()
    try:
        outcomes, orders = [], []
        with case.workspace(world, cfg, ep_size) as ws:
            for _ in range(repeats):
                time.sleep(chance.random() * 0.02)
                outcomes.append(case.forward_backward(ws, batch))
                time.sleep(chance.random() * 0.02)
                orders.append(uniep.route(batch.ids[batch.rows(ws.rank, ep_size)], workspace=ws).row_return_N)
        return outcomes, orders
    finally:
        stop.set()
        noise.join()


def test_40_41_no_arrival_order_changes_bits_or_rows(pool):
    """40, 41: random delays per rank and competing work: rows in (source, token, k) order, the same bits each time."""
    cfg = config(num_experts=16, top_k=8, dtype=torch.bfloat16)
    batch = random_batch(cfg, (128, 128, 128, 128))
    want = case.oracle(pool, cfg, batch)
    ranks = pool.run(steps_under_load, cfg, batch, 4, 12, 7)
    for parts in zip(*(outcomes for outcomes, _ in ranks), strict=True):
        same_bits(case.gather(list(parts)), want)
    for _, orders in ranks:
        assert all(torch.equal(order, orders[0]) for order in orders)


def train(world, cfg, batch, ep_size, schedule, rounds):
    """SGD on a fixed target; the parameters after each step and every step's outputs."""
    with case.workspace(world, cfg, ep_size, schedule) as ws:
        rows, experts = batch.rows(ws.rank, ep_size), batch.experts(ws.rank, ep_size)
        w13, w2 = case.leaf(batch.w13[experts]), case.leaf(batch.w2[experts])
        optimizer = torch.optim.SGD([w13, w2], lr=0.05, momentum=0.9)
        history = []
        for _ in range(rounds):
            x, weights = case.leaf(batch.x[rows]), case.leaf(batch.weights[rows])
            y = uniep.moe(x, batch.ids[rows], weights, w13, w2, workspace=ws)
            optimizer.zero_grad()
            (0.5 * (y.float() - batch.dy[rows].float()) ** 2).sum().backward()
            history.append(case.Outcome(y.detach(), x.grad, weights.grad, w13.grad.clone(), w2.grad.clone()))
            optimizer.step()
        last = w13.detach()
        return [*history, dataclasses.replace(history[-1], dw13=last, dw2=w2.detach())]


@pytest.mark.parametrize("weight_at", ["output", "activation"])
def test_42_training_has_the_same_bits_at_each_ep_size(pool, weight_at):
    """42: 256 tokens, E=16, K=4, EP 1, 2, 4: outputs, gradients and parameters over five SGD steps."""
    cfg = config(num_experts=16, top_k=4, dtype=torch.bfloat16, weight_at=weight_at)
    batch = random_batch(cfg, (64, 64, 64, 64))
    runs = {}
    for ep_size in (1, 2, 4):
        ranks = pool.run(train, cfg, batch, ep_size, case.FUSED if ep_size > 1 else case.SERIAL, 5, ranks=ep_size)
        runs[ep_size] = [case.gather(list(parts)) for parts in zip(*ranks, strict=True)]
    for ep_size in (2, 4):
        for step, (got, want) in enumerate(zip(runs[ep_size], runs[1], strict=True)):
            same_bits(got, want, f"EP={ep_size} step {step}")
    assert not torch.equal(runs[1][0].dw2, runs[1][4].dw2), "the parameters move"


@pytest.mark.parametrize("dtype", HALF_AND_FULL, ids=str)
def test_45_a_token_does_not_see_its_batch(pool, dtype):
    """45: one token alone and among 4, 16, 64, 257, 1024 others: the same y and dX."""
    cfg = config(max_tokens_per_rank=1024, dtype=dtype)
    full = random_batch(cfg, (1024, 0, 0, 0))
    batches = [full.with_tokens(torch.arange(1024) > 1023 - size) for size in (1, 4, 16, 64, 257, 1024)]
    alone, *rest = steps(pool, cfg, batches, 2)
    for got in rest:
        for name in ("y", "dx", "dweights"):
            case.equal_bits(getattr(got, name)[-1:], getattr(alone, name), f"{name} among {len(got.y)}")


def test_47_deterministic_algorithms_flag(pool):
    """47: torch.use_deterministic_algorithms(True) raises nothing, warns nothing and changes nothing."""
    cfg = config()
    batch = random_batch(cfg, (9, 5, 4, 7))
    ranks = pool.run(with_the_flag, cfg, batch, ranks=2)
    same_bits(case.gather([outcome for outcome, _ in ranks]), case.oracle(pool, cfg, batch))
    assert all(not warned for _, warned in ranks)


def with_the_flag(world, cfg, batch):
    import warnings

    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (outcome,) = case.steps_of_rank(world, cfg, [batch], 2)
        return outcome, [str(w.message) for w in caught if "determin" in str(w.message)]
    finally:
        torch.use_deterministic_algorithms(False)
