"""Checks of test_hopper.py: the router kit and the dense operators beside it."""

import unittest.mock

import torch
import triton
import triton.language as tl

import uniep
from uniep import MoEConfig
from uniep.kernels.ptx import exp, log
from uniep.nn import Router, RouterConfig, choose_experts, router_ops
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
    check_exponential(r)
    check_router_kernels(r)


@triton.jit
def exponential_kernel(x_ptr, exp_ptr, log_ptr):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(x_ptr + at)
    tl.store(exp_ptr + at, exp(x))
    tl.store(log_ptr + at, log(exp(x)))


def check_exponential(r):
    """Errors in units in the last place, over what routers meet."""
    x = torch.linspace(-87, 88, 2**22, device=r.device)
    power, back = torch.empty_like(x), torch.empty_like(x)
    exponential_kernel[(len(x) // 128,)](x, power, back)
    for got, exact, most in ((power, x.double().exp(), 2), (back, power.double().log(), 1)):
        unit = torch.exp2(exact.abs().log2().floor().clamp(min=-126) - 23)
        error = float(((got.double() - exact).abs() / unit).max())
        assert error <= most, error
    ends = torch.tensor([0.0, -200.0, 200.0, float("nan"), float("inf"), -float("inf")] + [0.0] * 122, device=r.device)
    power, back = torch.empty_like(ends), torch.empty_like(ends)
    exponential_kernel[(1,)](ends, power, back)
    assert str(power[:6].tolist()) == "[1.0, 0.0, inf, nan, inf, 0.0]", power[:6]


def check_router_kernels(r):
    """The kernels beside the formulas in PyTorch: the same choice but for ties of an ulp, values near each other."""
    make = torch.Generator(r.device).manual_seed(5)
    x, bias = torch.randn(900, 512, device=r.device, generator=make), torch.randn(256, device=r.device, generator=make)
    losses = {"aux_loss": 0.1, "z_loss": 0.1}
    for experts, top_k, config in (
        (256, 8, RouterConfig(**losses)),
        (256, 8, RouterConfig(score="sigmoid", scale=2.5, groups=8, groups_per_token=4, selection_bias=True, **losses)),
        (
            160,
            6,
            RouterConfig(
                groups=8, groups_per_token=3, group_top=1, renormalize=False, capacity_factor=1.0, overflow="drop"
            ),
        ),
        (1000, 7, RouterConfig(score="sigmoid", aux_loss=0.1)),
    ):
        weight = torch.randn(experts, 512, device=r.device, generator=make) * 512**-0.5
        dw = torch.randn(900, top_k, device=r.device, generator=make)

        def run(rows=900, weight=weight, dw=dw, top_k=top_k, config=config):
            leaves = [x[:rows].clone().requires_grad_(), weight.clone().requires_grad_()]
            got = choose_experts(*leaves, top_k, config, bias_E=bias * 0.1 if config.selection_bias else None)
            loss = (got.weights_TK * dw[:rows]).sum() + got.aux_loss + got.z_loss
            return got, torch.autograd.grad(loss, leaves)

        assert router_ops._kernels(x, experts, top_k, config) is not None
        ours, of_ours = run()
        again, of_again = run()
        for one, other in zip((*ours, *of_ours), (*again, *of_again), strict=True):
            assert torch.equal(one, other), config
        for rows in (0, 1, 129) if config.capacity_factor is None else ():
            few, _ = run(rows)
            assert torch.equal(few.ids_TK, ours.ids_TK[:rows]) and torch.equal(few.weights_TK, ours.weights_TK[:rows])
        with unittest.mock.patch.object(router_ops, "_kernels", lambda *given: None):
            theirs, of_theirs = run()
        same = (ours.ids_TK == theirs.ids_TK).all(1)
        assert int((~same).sum()) <= 2, (config, int((~same).sum()))
        assert int((ours.counts_E - theirs.counts_E).abs().sum()) <= 4, config
        torch.testing.assert_close(ours.weights_TK[same], theirs.weights_TK[same], rtol=2e-6, atol=0)
        for name in ("aux_loss", "z_loss"):
            torch.testing.assert_close(
                getattr(ours, name), getattr(theirs, name), rtol=1e-3 if (~same).any() else 1e-6, atol=0
            )
        torch.testing.assert_close(of_ours[0][same], of_theirs[0][same], rtol=1e-4, atol=1e-6)
