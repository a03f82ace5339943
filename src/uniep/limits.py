"""What the kernels need: one list, for the backend that requires them and for the one that can run without."""

from __future__ import annotations

import torch

from uniep.config import MoEConfig
from uniep.errors import ConfigError, UniEPError, UnsupportedError

MAX_TOP_K = 128
MAX_LORA_RANK = 128
TRITON = (3, 6), (3, 10)  # from, below


def why_not(cfg: MoEConfig, device: torch.device) -> UniEPError | None:
    """The error that says why the kernels cannot run `cfg` on `device`; None if they can."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        name = torch.cuda.get_device_name(device)
        return UnsupportedError(f"{name} has compute capability {major}.{minor}; the kernels need 9.0 (H100, H200)")
    try:
        import triton
    except ImportError:
        return UnsupportedError("triton is not installed; install the version that your torch requires")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not TRITON[0] <= version < TRITON[1]:
        low, high = (".".join(map(str, bound)) for bound in TRITON)
        return UnsupportedError(f"triton is {triton.__version__}; the kernels are tested with {low} <= triton < {high}")
    return shape_limit(cfg)


def group_limit(ep_size: int) -> UniEPError | None:
    """The error that says why groups of this size cannot run the kernels; None if they can."""
    if ep_size & (ep_size - 1):
        return ConfigError(f"the EP group has {ep_size} ranks; the hopper backend needs a power of two")
    return None


def lora_limit(r: int, instead: str = ", or backend='nccl' (far slower)") -> UniEPError | None:
    """The error that says why factors of rank r cannot run the kernels; None if they can.  instead: the other way out
    where this is called."""
    if r % 8 or r > MAX_LORA_RANK:
        return UnsupportedError(
            f"r is {r}; LoRA on backend 'hopper' takes multiples of 8 up to {MAX_LORA_RANK}; use one of these{instead}"
        )
    return None


def shape_limit(cfg: MoEConfig) -> UniEPError | None:
    """The same check without the device."""
    if cfg.dtype == torch.float32:
        return ConfigError("dtype is torch.float32; the kernels compute in bfloat16 or float16 (never TF32)")
    for name, value in (("hidden", cfg.hidden), ("ffn", cfg.ffn)):
        if value % 8:
            need = -(-value // 8) * 8
            return ConfigError(
                f"{name} is {value}; on Hopper it must be a multiple of 8 (16-byte rows); pad it to {need}"
            )
    if cfg.top_k > MAX_TOP_K:
        return ConfigError(f"top_k is {cfg.top_k}; the kernels' limit is {MAX_TOP_K}")
    return None
