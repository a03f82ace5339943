"""Megatron-Core without CUDA: it asks CUDA for devices, streams and random states even where tensors are on the CPU."""

import contextlib

import torch


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
