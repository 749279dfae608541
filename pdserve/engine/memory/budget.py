"""The memory budget of a worker: the size of the KV pool, and checks that everything fits. It is pure arithmetic.

A worker takes memory for four things: the weights; the KV pool; the needs of one step beside them (activations, logits, and
on a GPU the recordings); the rest (libraries, Python). All four are bounded. A step is bounded by `max_num_batched_tokens`,
`max_num_seqs` and `max_model_len`, which the scheduler obeys. So memory that is enough for the largest step is always
enough, and the checks are made before the first request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB
from pdserve.core.errors import ConfigError

REST_BYTES: Final = 128 * MIB
"""Bytes for the memory that a worker on a CPU takes after its check: the transport's agent, gRPC, Python's objects. It was
measured to take 28 MiB until it is ready; each peer adds some."""

GPU_MARGIN_BYTES: Final = 256 * MIB
"""Bytes of a GPU's memory that always stay free: for kernels that are loaded at their first use, workspaces of cuBLAS, the
transport's own buffers, and gaps between tensors that the allocator cannot use. vLLM keeps 150 MiB. The value was chosen,
not measured."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Bytes of a GPU's memory, as its driver reports them.

    step: bytes that the largest step took beside weights and KV. later: bytes that users other than the engine may take.
    margin: bytes that stay free.
    """

    total: int
    free_at_start: int
    free_with_weights: int
    step: int
    later: int = 0
    margin: int = 0


def gpu_pool_bytes(reading: DeviceReading, utilization: float, block_bytes: int) -> int:
    """Return the bytes that are left for KV in this worker's share of the GPU. The share is `utilization` of its memory.

    Other processes on the GPU have their own shares. Their memory counts only where it leaves less than our share.
    Raises `ConfigError` when less than one block is left.
    """
    weights = reading.free_at_start - reading.free_with_weights
    taken = reading.step + reading.later
    share = int(reading.total * utilization) - weights - taken
    room = min(share, reading.free_with_weights - taken - reading.margin)
    if room < block_bytes:
        raise ConfigError(
            f"no room for KV: gpu_memory_utilization {utilization:g} of {_mib(reading.total)}, of which "
            f"{_mib(reading.free_at_start)} were free, is used up by weights ({_mib(weights)}), the largest step "
            f"({_mib(reading.step)}), KV of other dtypes ({_mib(reading.later)}) and a margin ({_mib(reading.margin)}): "
            "raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return room


def check_device(*, free: int, later: int) -> None:
    """Check a GPU on which weights, a pool of a configured size and recorded steps are in place.

    free: bytes that are free. Raises `ConfigError` when `later` and the margin do not fit into them. later: bytes that users
    other than the engine may take.
    """
    if free < later + GPU_MARGIN_BYTES:
        raise ConfigError(
            f"not enough memory on the GPU: {_mib(free)} are free beside weights, KV pool and the largest step, "
            f"{_mib(later)} may be needed for KV of other dtypes and {_mib(GPU_MARGIN_BYTES)} as a margin: "
            "lower kv_cache_memory"
        )


def check_host(*, available: int, weights: int, pool: int, step: int, later: int = 0) -> None:
    """Refuse to start when memory would run out later, so that the worker is not killed.

    available: bytes that are free. The other arguments are bytes that are still to be taken; `later` is for peers that store KV
    in other dtypes. Raises `ConfigError` naming the settings to change.
    """
    needed = weights + pool + step + later + REST_BYTES
    if needed > available:
        converted = ("KV of other dtypes", later)
        parts = (("weights", weights), ("KV pool", pool), ("largest step", step), converted, ("rest", REST_BYTES))
        named = ", ".join(f"{name} {_mib(size)}" for name, size in parts if size)
        raise ConfigError(
            f"not enough memory: {_mib(available)} are free here, {_mib(needed)} needed ({named}): "
            "lower kv_cache_memory or max_num_batched_tokens, or run fewer workers here"
        )


def weights_bytes(card: ModelCard, bits: int) -> int:
    """Return the bytes of the model's matrices with `bits` for each number. Norms are too small to count."""
    return card.spec.numbers * bits // 8


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
