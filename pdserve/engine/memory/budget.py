"""How much memory goes to the KV pool, and whether there is enough for everything. Pure arithmetic over bytes.

A worker takes memory for four things: weights; the KV pool; what one step needs beside them (activations, logits, on a
GPU the recordings); the rest (libraries, Python). All four are bounded: a step by `max_num_batched_tokens`,
`max_num_seqs` and `max_model_len`, which the scheduler keeps to. So what is enough for the largest step is enough for
ever, and it is found out before the first request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB
from pdserve.core.errors import ConfigError

REST_BYTES: Final = 128 * MIB
"""For what a worker on a CPU takes after its check: the transport's agent, gRPC, Python's objects. 28 MiB were measured
until it is ready; each peer adds some."""

GPU_MARGIN_BYTES: Final = 256 * MIB
"""Bytes of a GPU's memory that stay free whatever is set: kernels that are loaded at their first use, workspaces of cuBLAS, the
transport's own buffers, and what the allocator cannot use between two tensors. vLLM keeps 150 MiB. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Bytes of a GPU, as its driver tells them. `step`: what the largest step took beside weights and KV. `later`: what
    others than the engine may take. `margin`: what stays free."""

    total: int
    free_at_start: int
    free_with_weights: int
    step: int
    later: int = 0
    margin: int = 0


def gpu_pool_bytes(reading: DeviceReading, utilization: float, block_bytes: int) -> int:
    """What is left for KV of this worker's share of the GPU, which is `utilization` of its memory.

    Other processes on the GPU have their own shares; what they take counts only where it leaves less than ours.
    Raises `ConfigError` when not even one block is left.
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
    """A GPU once weights, pool and recorded steps are there, where the pool's size was set and not measured.

    Raises `ConfigError` when what others than the engine may take, and the margin, do not fit any more.
    """
    if free < later + GPU_MARGIN_BYTES:
        raise ConfigError(
            f"not enough memory on the GPU: {_mib(free)} are free beside weights, KV pool and the largest step, "
            f"{_mib(later)} may be needed for KV of other dtypes and {_mib(GPU_MARGIN_BYTES)} as a margin: "
            "lower kv_cache_memory"
        )


def check_host(*, available: int, weights: int, pool: int, step: int, later: int = 0) -> None:
    """Refuse to start rather than be killed later. All but `available` are bytes that are still to be taken. `later`: what
    may be taken for peers that store KV in other dtypes.

    Raises `ConfigError` with the settings that change it.
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
    """Of the matrices, `bits` a number; norms are too small to matter."""
    kv = card.num_kv_heads * card.head_dim
    attention = card.hidden_size * (2 * card.num_heads * card.head_dim + 2 * kv)
    layer = attention + 3 * card.hidden_size * card.intermediate_size
    tables = 1 if card.tie_word_embeddings else 2
    return (card.num_layers * layer + tables * card.vocab_size * card.hidden_size) * bits // 8


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
