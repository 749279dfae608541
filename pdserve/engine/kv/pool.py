"""The memory of a model's KV: one `KvCache` for each KV group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvShare, KvSpec, whole_share
from pdserve.engine.kv.cache import Allocate, KvCache, zeros

NOTHING: Final = KvShare(0, range(1), range(1))
"""The memory of a rank that stores nothing of a group. Steps compute places in it, and write to none."""


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
        shares: Sequence[KvShare | None] = (),
    ) -> None:
        """Allocate as many blocks in each group as `memory_bytes` holds of all groups together, but nowhere more than `most`.

        shares: the part of each group's blocks that this process has memory for; `memory_bytes` counts all parts. Empty: it
        has whole blocks. None for a group: it stores nothing of it, and has one head of one layer, which nobody reads.

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
        self.shares = tuple(shares) or tuple(map(whole_share, spec.groups))
        """The part of each group's blocks that lies here. None: nothing of the group does."""
        layouts = [(share or NOTHING).of(group) for share, group in zip(self.shares, spec.groups, strict=True)]
        pairs = zip(layouts, sizes, strict=True)
        self.caches = tuple(KvCache(layout, count * layout.block_bytes, device, dtype, allocate) for layout, count in pairs)
        """The memory of each group, in the order of the groups."""

    @property
    def whole(self) -> bool:
        """True when whole blocks lie here."""
        return all(share == whole_share(group) for share, group in zip(self.shares, self.spec.groups, strict=True))

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
        """Bytes of the blocks of all groups, as far as they lie here."""
        return sum(cache.nbytes for cache in self.caches)
