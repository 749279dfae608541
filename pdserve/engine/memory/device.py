"""The KV pool of a GPU, sized by a trial: the largest steps are run on a pool of few blocks, then all of it is dropped.

Written against a `Device`, so that the order of things is tested without one. It has not run on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch

from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, OutOfMemory
from pdserve.engine.memory.budget import GPU_MARGIN_BYTES, DeviceReading, gpu_pool_bytes

TRIAL_BLOCKS: Final = 64  # few; what the trial's steps write there is meaningless


class Device(Protocol):
    """Memory of one GPU, in bytes."""

    def total(self) -> int: ...
    def free(self) -> int:
        """Of the whole device, whoever uses the rest. What the allocator keeps for later is not free."""

    def release(self) -> None:
        """Give back what the allocator keeps."""


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        torch.cuda.empty_cache()


Trial = Callable[[int], Iterable[Callable[[], object]]]
"""Builds the model on a pool of so many bytes; returns what takes memory, to be called one after the other."""


class PoolMeasure:
    """Make it before the weights are loaded; ask once they are."""

    def __init__(self, device: Device, *, later: int = 0, margin: int = GPU_MARGIN_BYTES) -> None:
        """`later`: bytes that others than the engine may take. `margin`: bytes that stay free."""
        self._device = device
        self._later = later
        self._margin = margin
        self._free_at_start = device.free()

    @classmethod
    def of(cls, device: torch.device, config: EngineConfig, later: int = 0) -> PoolMeasure | None:
        """None: the pool's size is given, or the device is the CPU, whose memory is not ours to fill."""
        measured = device.type == "cuda" and config.kv_cache_memory is None
        return cls(CudaDevice(device), later=later) if measured else None

    def pool_bytes(self, config: EngineConfig, block_bytes: int, trial: Trial) -> int:
        """Raises `ConfigError` when weights and the largest step leave no room."""
        device = self._device
        _drop(device)
        free_with_weights = device.free()
        trial_bytes = TRIAL_BLOCKS * block_bytes
        try:
            step = self._taken(trial, trial_bytes) - trial_bytes
        except (OutOfMemory, RuntimeError) as exc:
            if not is_memory_error(exc):
                raise
            raise ConfigError(
                "the largest step does not fit beside the weights: lower max_num_batched_tokens, max_num_seqs or max_model_len"
            ) from exc
        _drop(device)
        reading = DeviceReading(device.total(), self._free_at_start, free_with_weights, max(0, step), self._later, self._margin)
        room = gpu_pool_bytes(reading, config.gpu_memory_utilization, block_bytes)
        return room // block_bytes * block_bytes

    def _taken(self, trial: Trial, trial_bytes: int) -> int:
        """By building on a pool, which stays; and by each step alone, added up: a real one may need two of them at once.

        The allocator keeps what it had to get, so what is not free after a step is the most that the step took.
        """
        device = self._device
        free = device.free()
        steps = list(trial(trial_bytes))
        device.release()
        taken = free - device.free()
        for step in steps:
            free = device.free()
            step()
            taken += free - device.free()
            device.release()
        return taken


def is_memory_error(exc: BaseException) -> bool:
    """torch has a class of its own for a GPU's memory only."""
    return isinstance(exc, MemoryError | OutOfMemory | torch.OutOfMemoryError) or "can't allocate memory" in str(exc)


def _drop(device: Device) -> None:
    """Nobody holds the trial any more; cycles may."""
    gc.collect()
    device.release()
