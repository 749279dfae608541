"""The KV blocks themselves: one tensor for all layers, so that a block is one run of bytes.

Shape [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]. A reader on another machine fetches a
block with one descriptor; attention gathers rows of block_size * head_dim elements, one for each (block, layer, K or
V, head), straight into [heads, positions, head_dim].
"""

from __future__ import annotations

import mmap
from typing import Final

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvLayout

TORCH_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvCache:
    """Owns the memory; lives as long as its process, since peers may hold its address."""

    def __init__(self, layout: KvLayout, memory_bytes: int, device: torch.device) -> None:
        """As many blocks as `memory_bytes` holds. Raises `ConfigError` when that is none."""
        self.layout = layout
        self.num_blocks = memory_bytes // layout.block_bytes
        if self.num_blocks == 0:
            raise ConfigError(f"kv_cache_memory of {memory_bytes} B is less than one block of {layout.block_bytes} B")
        shape = (
            self.num_blocks,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        flat = _zeros(self.num_blocks * layout.block_bytes, device)
        self.tensor: Tensor = flat.view(TORCH_DTYPES[layout.dtype]).view(shape)
        self._tokens = self.tensor.view(-1, layout.head_dim)
        self._rows = self.tensor.view(-1, layout.block_size * layout.head_dim)

    @property
    def address(self) -> int:
        """Of block 0; block i follows i * layout.block_bytes later. Page-aligned on CPU."""
        return self.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def token_slots(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        """Where layer 0 keeps K and V of the tokens at `offsets` of `block_ids`, both [tokens] int64, for `write`."""
        size = self.layout.block_size
        return (self._head_rows(block_ids) * size + offsets.view(1, -1, 1)).reshape(-1)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """key, value: [tokens, num_kv_heads, head_dim] of the pool's dtype; slots as `token_slots` gave them."""
        step = layer * 2 * self.layout.num_kv_heads * self.layout.block_size
        rows = torch.cat((key, value)).view(-1, self.layout.head_dim)
        self._tokens.index_copy_(0, slots + step, rows)

    def gather_rows(self, block_tables: Tensor) -> Tensor:
        """Where layer 0 keeps K and V of the blocks of `block_tables` [sequences, blocks] int64, for `gather`."""
        sequences, blocks = block_tables.shape
        rows = self._head_rows(block_tables.reshape(-1)).view(2, sequences, blocks, self.layout.num_kv_heads)
        return rows.transpose(2, 3).reshape(-1)

    def gather(self, layer: int, rows: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """K and V, each [sequences, num_kv_heads, blocks * block_size, head_dim], copied out of the pool."""
        heads, dim = self.layout.num_kv_heads, self.layout.head_dim
        found = self._rows.index_select(0, rows + layer * 2 * heads).view(2, sequences, heads, -1, dim)
        return found[0], found[1]

    def _head_rows(self, block_ids: Tensor) -> Tensor:
        """[2, blocks, num_kv_heads]: the index of (block, layer 0, K or V, head) among all heads of all blocks."""
        heads = self.layout.num_kv_heads
        base = block_ids.view(1, -1, 1) * (self.layout.num_layers * 2 * heads)
        which = torch.arange(2, device=block_ids.device).view(2, 1, 1) * heads
        return base + which + torch.arange(heads, device=block_ids.device)


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes. On CPU they are mapped and not touched: a block costs memory when it is first used."""
    if device.type != "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise ConfigError(f"kv_cache_memory of {nbytes} B is more than this machine can give") from exc
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
