"""Megatron-Core without CUDA: it asks CUDA for devices, streams and random states even where tensors are on the CPU."""

import contextlib
import multiprocessing

import pytest
import torch
from torch.overrides import TorchFunctionMode


class _Stream:
    def wait_event(self, event): ...
    def wait_stream(self, stream): ...


class _Random:
    """Stands for the tracker of CUDA's random states."""

    def is_initialized(self):
        return True

    def fork(self, *args, **kwargs):
        return contextlib.nullcontext()

    def get_states(self):
        return {}

    def set_states(self, states): ...


def stand_in():
    """From now on, in this process."""
    import megatron.core.tensor_parallel.random as random

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *device: _Stream()
    torch.cuda.synchronize = lambda *device: None
    torch.cuda.get_rng_state = lambda *device: torch.get_rng_state()
    random._CUDA_RNG_STATE_TRACKER = _Random()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU, and say that they are CUDA's: Megatron's distributed
    optimizer looks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the step in its group, as Apex and Transformer Engine have it: what Megatron's distributed optimizer
    loads at other sizes, it loads with that only."""

    def __init__(self, params, lr, betas, eps, weight_decay, **_):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - second)
                root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt() + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["exp_avg"] / (1 - first ** group["step"]), root, value=-group["lr"])


@contextlib.contextmanager
def distributed_optimizer():
    """Inside, Megatron's distributed optimizer can be made, with `FusedAdam`; its checkpoints are written by children,
    which workers of a pool may have."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with OnCpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "Adam", FusedAdam)
        patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        patch.setitem(multiprocessing.current_process()._config, "daemon", False)
        yield
