"""What a worker does about memory between loading and its first request.

The largest steps run once, so that what they need is there (compiled code keeps it) and known; then there must be
enough for the whole KV pool; then on a CPU all of it is touched. Pages that are only promised would be cheaper while a
worker idles, and would end it, under load, when another process has taken them meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, OutOfMemory, OutOfThreads
from pdserve.core.kv_layout import DTYPE_BITS
from pdserve.engine.memory import host
from pdserve.engine.memory.budget import check_device, check_host, weights_bytes
from pdserve.engine.memory.cuda_limits import check_cuda
from pdserve.engine.memory.device import CudaDevice, Device
from pdserve.engine.runner import ModelRunner, device_of


def check_before_loading(card: ModelCard, config: EngineConfig) -> None:
    """Weights and KV pool against what this machine has, where that is a CPU's; on a GPU, what it cannot do.

    Raises `ConfigError`.
    """
    device = device_of(config.device)
    if device.type == "cuda":
        check_cuda(config, device)
    else:
        bits = DTYPE_BITS[resolve_dtype(config.dtype)]
        weights = weights_bytes(card, 8 if config.quantization == "int8" else bits)
        check_host(available=host.available_bytes(), weights=weights, pool=config.cpu_kv_bytes, step=0)


class Settled(NamedTuple):
    step_bytes: int
    """What the largest step takes beside weights and KV."""
    slowest_s: float
    """How long the slowest of the largest steps took, kernels that had to be compiled included."""


def settle(
    runner: ModelRunner, config: EngineConfig, *, later: int = 0, available: Callable[[], int] = host.available_bytes
) -> Settled:
    """Afterwards no step takes more memory than there is.

    `later`: bytes of the device's memory that others than the engine may take.
    Raises `ConfigError` naming the settings that change it.
    """
    kv = runner.kv
    if kv.device.type == "cuda":
        return settle_on(CudaDevice(kv.device), runner, config, later=later)
    before = host.resident_bytes()
    settled = _warm_up(runner, config, _taken_here)
    kept = max(0, host.resident_bytes() - before)
    check_host(available=available(), weights=0, pool=kv.nbytes, step=max(0, settled.step_bytes - kept), later=later)
    host.touch(kv.address, kv.nbytes)
    return settled


def settle_on(device: Device, runner: ModelRunner, config: EngineConfig, *, later: int) -> Settled:
    """As `settle`, on a GPU. A pool that was measured has left what is needed; one that was set may not have."""
    settled = _warm_up(runner, config, partial(_taken_on, device))
    runner.kv.blocks.zero_()  # what the steps wrote means nothing
    device.release()
    free = device.free()
    if config.kv_cache_memory is not None:
        check_device(free=free, later=later)
    return settled


Taken = Callable[[Callable[[], object]], int]
"""Runs a step and tells what it took."""


def _warm_up(runner: ModelRunner, config: EngineConfig, taken: Taken) -> Settled:
    step_bytes, slowest_s = 0, 0.0
    try:
        for plan in runner.largest_steps(config):
            began_s = time.monotonic()
            step_bytes += taken(partial(runner.execute, plan))
            slowest_s = max(slowest_s, time.monotonic() - began_s)
    except OutOfMemory as exc:
        raise ConfigError(
            "not enough memory for the largest step: lower max_num_batched_tokens, max_num_seqs or kv_cache_memory"
        ) from exc
    except OutOfThreads as exc:
        raise ConfigError(
            f"the system gives this process no thread for a step: lower threads ({config.threads}), or raise its limits of"
            " processes (ulimit -u, pids.max) and of address space (ulimit -v)"
        ) from exc
    return Settled(step_bytes, slowest_s)


def _taken_here(step: Callable[[], object]) -> int:
    """What was resident at most while it ran, beyond what was before."""
    fresh, before = host.reset_peak(), host.resident_bytes()
    step()
    return max(0, (host.peak_bytes() if fresh else host.resident_bytes()) - before)


def _taken_on(device: Device, step: Callable[[], object]) -> int:
    device.release()
    before = device.free()
    step()
    return max(0, before - device.free())
