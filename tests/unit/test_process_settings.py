"""Settings of the process and its threads that decide bits: as before after every call, and not changed during one."""

import dataclasses
import os
import threading

import pytest
import torch

import uniep
from uniep import UniEPError, numerics
from uniep.activation import ACTIVATIONS
from uniep.backends.pinned import PinnedThreads

CFG = uniep.MoEConfig(hidden=64, ffn=64, num_experts=4, top_k=2, max_tokens_per_rank=64, dtype=torch.float32)
PRODUCTS = torch.backends.mkldnn.matmul
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "nccl"])


@pytest.fixture
def settings():
    """Numbers of threads and a precision that calls must leave alone: (threads, precision)."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    products = PRODUCTS.fp32_precision
    torch.set_num_threads(4)
    torch.set_float32_matmul_precision("medium")
    yield 4, PRODUCTS.fp32_precision
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    PRODUCTS.fp32_precision = products


def in_thread(function):
    """What it returns in a new thread, which has no settings of its own yet."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def inside(layer, x, act):
    """`act()` in the middle of a call, in the thread that computes."""
    found, usual = [], ACTIVATIONS["swiglu"]

    def forward(gate, up):
        if not found:
            found.append(act())
        return usual.forward(gate, up)

    ACTIVATIONS["swiglu"] = dataclasses.replace(usual, forward=forward)
    try:
        layer(x).sum().backward()
    finally:
        ACTIVATIONS["swiglu"] = usual
    return found[0]


@BACKENDS
def test_112_threads_that_start_during_a_call(settings, backend):
    """112: their number of intra-op threads is that of the process, and the calling thread's is as before."""
    with uniep.Workspace(CFG, device="cpu", backend=backend) as ws:
        layer, x = uniep.nn.MoE(CFG, workspace=ws), torch.randn(20, 64)
        during = inside(layer, x, lambda: (torch.get_num_threads(), in_thread(torch.get_num_threads)))
        assert during == (1, 4)
        assert (torch.get_num_threads(), PRODUCTS.fp32_precision) == settings
        assert in_thread(torch.get_num_threads) == 4
        with pytest.raises(KeyboardInterrupt):
            inside(layer, x, raising(KeyboardInterrupt))
        assert (torch.get_num_threads(), PRODUCTS.fp32_precision) == settings


def raising(error):
    def act():
        raise error("in the middle")

    return act


def test_112_each_thread_keeps_its_own_number(settings):
    """112: whatever numbers threads have chosen for themselves."""
    found = []

    def work(number):
        torch.set_num_threads(number)
        with uniep.Workspace(CFG, device="cpu") as ws:
            uniep.nn.MoE(CFG, workspace=ws)(torch.randn(20, 64)).sum().backward()
        found.append(torch.get_num_threads() == number)

    for number in (1, 2, 3):
        in_thread(lambda number=number: work(number))
    assert found == [True] * 3 and torch.get_num_threads() == 4


@BACKENDS
def test_another_thread_changes_the_precision_during_a_call(settings, backend):
    """Results would have other bits: an error, and the other thread's choice stays."""
    ws = uniep.Workspace(CFG, device="cpu", backend=backend)
    layer = uniep.nn.MoE(CFG, workspace=ws)

    def change():
        assert PRODUCTS.fp32_precision == "ieee"
        in_thread(lambda: torch.set_float32_matmul_precision("high"))

    torch.set_float32_matmul_precision("highest")
    with pytest.raises(UniEPError, match="another thread set the precision of fp32 products"):
        inside(layer, torch.randn(20, 64), change)
    assert torch.get_float32_matmul_precision() == "high" and PRODUCTS.fp32_precision != "ieee"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_during_a_call(settings):
    """The child has the precision of before, and its own calls set and restore it."""

    def child():
        own = PRODUCTS.fp32_precision
        with numerics.fp32_products():
            within = PRODUCTS.fp32_precision
        return (own, within, PRODUCTS.fp32_precision) == (settings[1], "ieee", settings[1])

    with numerics.fp32_products():
        process = os.fork()
        if process == 0:
            os._exit(0 if child() else 1)
        assert os.waitpid(process, 0)[1] == 0
        assert PRODUCTS.fp32_precision == "ieee"
    assert PRODUCTS.fp32_precision == settings[1]


def test_pinned_threads(settings):
    """One intra-op thread each, also for the first product; nothing of it outside; they end with their owner."""
    before = threading.active_count()
    threads = PinnedThreads(3)
    found = []
    product = torch.ones(8, 8)
    threads.run([lambda: found.append(((product @ product).sum(), torch.get_num_threads())[1]) for _ in range(3)])
    assert found == [1, 1, 1] and torch.get_num_threads() == 4 and in_thread(torch.get_num_threads) == 4
    with pytest.raises(ZeroDivisionError):
        threads.call(lambda: 1 // 0)
    assert threads.call(lambda: torch.is_grad_enabled()) is False
    del threads
    for _ in range(100):
        if threading.active_count() == before:
            break
        threading.Event().wait(0.05)
    assert threading.active_count() == before
