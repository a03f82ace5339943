"""Checks of test_hopper.py: the router kit and the dense operators beside it."""

import torch

import uniep
from uniep import MoEConfig
from uniep.nn import Router, RouterConfig
from uniep.nn.invariant import row_products

DTYPES = torch.bfloat16, torch.float16, torch.float32


def check_dense(r):
    """Products of every pair of dtypes: rows alone have the same bits; errors are at most twice those of PyTorch's
    fp32."""
    make = torch.Generator(r.device).manual_seed(1)
    a, b = (torch.randn(n, 1000, device=r.device, generator=make) for n in (700, 300))
    for dtype in DTYPES:
        for other in DTYPES:
            x, w = a.to(dtype), b.to(other)
            got = row_products(x, w.T)
            for rows in (1, 100, 129):
                assert torch.equal(row_products(x[:rows], w.T), got[:rows]), (dtype, other, rows)
            exact = x.double() @ w.double().T
            ours, theirs = ((t - exact).norm() for t in (got, x.float() @ w.float().T))
            assert ours <= 2 * theirs, (dtype, other, float(ours), float(theirs))


def check_router(r):
    """Choice, weights and gradient rows of a token alone and among others; a gradient near PyTorch's."""
    cfg = MoEConfig(hidden=1000, ffn=64, num_experts=64, top_k=6, max_tokens_per_rank=700)
    x = torch.randn(700, 1000, device=r.device, generator=torch.Generator(r.device).manual_seed(2)).to(cfg.dtype)
    for config in (
        RouterConfig(),
        RouterConfig(score="sigmoid", groups=8, groups_per_token=3, selection_bias=True, scale=2.5),
    ):
        router = Router(cfg, config, device=r.device, seed=3)

        def run(x, router=router):
            x = x.clone().requires_grad_()
            routing = router(x)
            dy = torch.arange(1, 7, device=x.device) / 7
            router.weight.grad = None
            routing.weights_TK.backward(dy.expand_as(routing.weights_TK))
            return routing.ids_TK, routing.weights_TK.detach(), x.grad, router.weight.grad

        *of_rows, dw = run(x)
        for rows in (1, 130):
            for t, alone in zip(of_rows, run(x[:rows]), strict=False):
                assert torch.equal(t[:rows], alone), (config, rows)
        if config.score == "softmax":
            weight = router.weight.detach().float().requires_grad_()
            scores = torch.softmax(x.float() @ weight.T, 1).gather(1, of_rows[0])
            ((scores / scores.sum(1, keepdim=True)) * (torch.arange(1, 7, device=r.device) / 7)).sum().backward()
            error = float((dw.float() - weight.grad).norm() / weight.grad.norm())
            assert error < 0.01, error
    assert uniep.nn.linear(x, router.weight).shape == (700, 64)
