"""Whether Triton kernels can run here, and what all launches have in common."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def triton_usable(device: torch.device) -> bool:
    """Whether tensors of `device` can be given to the kernels: CUDA, with Triton installed."""
    return device.type == "cuda" and triton_installed()


@cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the device; 1 elsewhere than on CUDA, where only the interpreter runs kernels, one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; Triton's ranges have such lengths only."""
    assert n >= 1
    return 1 << (n - 1).bit_length()
