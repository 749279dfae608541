"""The size of a GPU's KV pool, found by a trial: the largest steps run on a pool of few blocks, which is dropped afterwards.

The code uses the GPU through `Device`, so the order of its steps is tested without a GPU. It has not run on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch

from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, OutOfMemory
from pdserve.engine.memory.budget import GPU_MARGIN_BYTES, DeviceReading, gpu_pool_bytes

TRIAL_BLOCKS: Final = 64  # few blocks are enough, because the KV of the trial is meaningless


class Device(Protocol):
    """Memory of one GPU, in bytes."""

    def total(self) -> int:
        """Return the bytes of the whole device."""

    def free(self) -> int:
        """Return the bytes that no process uses. Memory that the allocator keeps for later is not free."""

    def release(self) -> None:
        """Give back the unused memory that the allocator keeps."""


class CudaDevice:
    """Memory of a GPU, as CUDA's driver and torch's allocator report it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """Return the bytes of the whole device."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """Wait for the device and return the bytes that no process uses."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        """Give back the unused memory that the allocator keeps."""
        torch.cuda.empty_cache()


Trial = Callable[[int], Iterable[Callable[[], object]]]
"""Function that builds the model on a pool of the given bytes and returns the steps to measure, one after the other."""


class PoolMeasure:
    """The trial that sizes the pool. Make it before the weights are loaded, and ask for `pool_bytes` afterwards."""

    def __init__(self, device: Device, *, later: int = 0, margin: int = GPU_MARGIN_BYTES) -> None:
        """Read the free memory. later: bytes that users other than the engine may take. margin: bytes that stay free."""
        self._device = device
        self._later = later
        self._margin = margin
        self._free_at_start = device.free()

    @classmethod
    def of(cls, device: torch.device, config: EngineConfig, later: int = 0) -> PoolMeasure | None:
        """Return a measure for a GPU whose pool has no configured size, or else None. A CPU's memory is not ours to fill."""
        measured = device.type == "cuda" and config.kv_cache_memory is None
        return cls(CudaDevice(device), later=later) if measured else None

    def pool_bytes(self, config: EngineConfig, block_bytes: int, trial: Trial) -> int:
        """Run the trial and return the bytes of the pool, a multiple of `block_bytes`.

        Raises `ConfigError` when weights and the largest step leave no room.
        """
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
        """Return the bytes that building the model takes, plus those of each step.

        The steps are added up, because a real step may need the memory of two such steps at once. The allocator keeps the
        memory that it got, so the loss of free memory after a step is the most that the step took.
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
    """Tell whether an exception means that memory ran out. Torch has a class of its own only for a GPU's memory."""
    return isinstance(exc, MemoryError | OutOfMemory | torch.OutOfMemoryError) or "can't allocate memory" in str(exc)


def _drop(device: Device) -> None:
    """Free the memory of the trial, also of objects in reference cycles."""
    gc.collect()
    device.release()
