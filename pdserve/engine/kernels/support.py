"""Helpers that all kernel launches share, and the test that tells whether Triton kernels can run here."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def triton_usable(device: torch.device) -> bool:
    """Tell whether the kernels can take tensors of `device`: it must be CUDA, and Triton must be installed."""
    return device.type == "cuda" and triton_installed()


@cache
def triton_installed() -> bool:
    """Tell whether Triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the device.

    It is 1 on any device but CUDA, because there the interpreter runs the programs of a kernel one after the other.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`. Triton's ranges must have such lengths."""
    assert n >= 1
    return 1 << (n - 1).bit_length()
