"""Memory checks of a worker between loading and its first request.

First the largest steps take their memory. Then their need is known, and compiled code keeps the memory. One more step then
shows the speed at which prompts are computed, so that placement can weigh a worker before its first request. Then there must be
enough memory for the whole KV pool. Then, on a CPU, every page of the pool is touched. Untouched pages would be cheaper while a
worker idles, but the worker would be killed under load if another process had taken the memory in the meantime.
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
from pdserve.engine.layers.linear import COMPILED_SCHEMES
from pdserve.engine.memory import host
from pdserve.engine.memory.budget import check_device, check_host, weights_bytes
from pdserve.engine.memory.cuda_limits import check_cuda
from pdserve.engine.memory.device import CudaDevice, Device
from pdserve.engine.runner import ModelRunner, device_of


def check_before_loading(card: ModelCard, config: EngineConfig) -> None:
    """Refuse a configuration that cannot work here, before anything is loaded.

    On a CPU, weights and KV pool must fit the free memory. On a GPU, the device must support the settings. Raises
    `ConfigError`.
    """
    device = device_of(config.device)
    if device.type == "cuda":
        check_cuda(config, device)
    else:
        scheme = COMPILED_SCHEMES[config.quantization]
        packed = int(scheme.bits + scheme.scale_bits)
        weights = weights_bytes(card, packed if config.quantization else DTYPE_BITS[resolve_dtype(config.dtype)])
        check_host(available=host.available_bytes(), weights=weights, pool=config.cpu_kv_bytes, step=0)


class Settled(NamedTuple):
    """Measurements of the largest steps."""

    step_bytes: int
    """Bytes that the largest step takes beside weights and KV."""
    slowest_s: float
    """Duration of the slowest of these steps; it includes the compilation of kernels. Where only their memory was taken, it
    is estimated from the step of a prompt."""
    prompt_tokens: int
    """Tokens of a prompt that one more step computed."""
    prompt_s: float
    """Duration of that step. Nothing was compiled in it."""


def settle(
    runner: ModelRunner, config: EngineConfig, *, later: int = 0, available: Callable[[], int] = host.available_bytes
) -> Settled:
    """Run the largest steps and make sure that no later step needs more memory than there is.

    `later`: bytes of the device's memory that users other than the engine may take. `available`: tells the free bytes of
    this machine. Raises `ConfigError` naming the settings to change.
    """
    kv = runner.kv
    if kv.device.type == "cuda":
        return settle_on(CudaDevice(kv.device), runner, config, later=later)
    before = host.resident_bytes()
    settled = _warm_up(runner, config, _taken_here)
    kept = max(0, host.resident_bytes() - before)
    check_host(available=available(), weights=0, pool=kv.nbytes, step=max(0, settled.step_bytes - kept), later=later)
    for cache in kv.caches:
        host.touch(cache.address, cache.nbytes)
    return settled


def settle_on(device: Device, runner: ModelRunner, config: EngineConfig, *, later: int) -> Settled:
    """Do the work of `settle` on a GPU. A measured pool leaves enough memory; a pool of a configured size is checked."""
    settled = _warm_up(runner, config, partial(_taken_on, device))
    for cache in runner.kv.caches:
        cache.blocks.zero_()  # the KV that these steps wrote is meaningless
    device.release()
    free = device.free()
    if config.kv_cache_memory is not None:
        check_device(free=free, later=later)
    return settled


Taken = Callable[[Callable[[], object]], int]
"""Function that runs a step and returns the bytes that it took."""


def _warm_up(runner: ModelRunner, config: EngineConfig, taken: Taken) -> Settled:
    step_bytes, slowest_s = 0, 0.0
    plans, prompt = runner.largest_steps(config), runner.prompt_step(config)
    try:
        for plan in plans:
            began_s = time.monotonic()
            step_bytes += taken(partial(runner.take_memory, plan))
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        began_s = time.monotonic()
        runner.execute(prompt)
        prompt_s = time.monotonic() - began_s
    except OutOfMemory as exc:
        raise ConfigError(
            "not enough memory for the largest step: lower max_num_batched_tokens, max_num_seqs or kv_cache_memory"
        ) from exc
    except OutOfThreads as exc:
        raise ConfigError(
            f"the system gives this process no thread for a step: lower threads ({config.threads}), or raise its limits of"
            " processes (ulimit -u, pids.max) and of address space (ulimit -v)"
        ) from exc
    most_tokens = max(plan.num_tokens for plan in plans)
    slowest_s = max(
        slowest_s, prompt_s * most_tokens / prompt.num_tokens
    )  # compiled code has computed only one layer of these steps
    return Settled(step_bytes, slowest_s, prompt.num_tokens, prompt_s)


def _taken_here(step: Callable[[], object]) -> int:
    """Run a step and return how many bytes the resident memory grew at most.

    Where the peak cannot be reset, the result is the growth that remains after the step.
    """
    fresh, before = host.reset_peak(), host.resident_bytes()
    step()
    return max(0, (host.peak_bytes() if fresh else host.resident_bytes()) - before)


def _taken_on(device: Device, step: Callable[[], object]) -> int:
    device.release()
    before = device.free()
    step()
    return max(0, before - device.free())
