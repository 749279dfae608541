"""The memory of a model's KV: one `KvCache` for each KV group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvSpec
from pdserve.engine.kv.cache import Allocate, KvCache, zeros


class KvPool:
    """Owner of the blocks of all groups. It lives as long as its process, because peers may hold its addresses."""

    def __init__(
        self,
        spec: KvSpec,
        memory_bytes: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        most: Sequence[int | None] = (),
        allocate: Allocate = zeros,
    ) -> None:
        """Allocate as many blocks in each group as `memory_bytes` holds of all groups together, but nowhere more than `most`.

        allocate: returns zeroed bytes on a device, and is called once for each group, in their order. dtype: the dtype of
        tokens that are written and gathered; None means that of each group. Raises `ConfigError` when `memory_bytes` is less
        than one block of each group.
        """
        self.spec = spec
        sizes = spec.split(memory_bytes, most)
        self.num_blocks = min(sizes)
        """The blocks of the smallest group."""
        if self.num_blocks == 0:
            raise ConfigError(f"kv_cache_memory of {memory_bytes} B is less than one block of {spec.block_bytes} B")
        self.tokens = spec.pool_tokens(sizes)
        """The tokens that the pool holds."""
        self.longest = spec.longest_tokens(sizes)
        """The tokens of the longest sequence that it takes. None: it takes those of any length."""
        pairs = zip(spec.groups, sizes, strict=True)
        self.caches = tuple(KvCache(group, count * group.block_bytes, device, dtype, allocate) for group, count in pairs)
        """The memory of each group, in the order of the groups."""

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.caches[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first group's tokens that are written and gathered."""
        return self.caches[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks of all groups."""
        return sum(cache.nbytes for cache in self.caches)
