"""KV pools full of random numbers. Zeros would hide wrong addresses, and would make some products faster."""

from __future__ import annotations

import torch

from pdserve.engine.kv.paged import KvFormat, PagedKv, plain_kv, quantised_block_bytes, quantised_kv


def random_pool(
    device: torch.device, kind: KvFormat, *, num_blocks: int, num_layers: int, kv_heads: int, block_size: int, dim: int
) -> PagedKv:
    """Return a pool in the engine's layout. Its numbers are bfloat16 when `kind` is plain."""
    if kind is KvFormat.PLAIN:
        shape = (num_blocks, num_layers, 2, kv_heads, block_size, dim)
        kv = plain_kv(torch.empty(shape, dtype=torch.bfloat16, device=device))
    else:
        size = num_blocks * quantised_block_bytes(num_layers, kv_heads, block_size, dim, kind)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        kv = quantised_kv(memory, num_layers=num_layers, num_kv_heads=kv_heads, block_size=block_size, head_dim=dim, kind=kind)
    fill(kv)
    return kv


def fill(kv: PagedKv) -> None:
    """Fill the pool in place, with numbers as large as those of K and V."""
    if kv.scales is None:
        kv.data.normal_()
        return
    kv.data.random_(0, 256)
    if kv.format is KvFormat.FP8_E4M3:
        kv.data.bitwise_and_(0xFE)  # 0x7F and 0xFF are NaN
    kv.scales.uniform_(0.5, 1.5).div_(kv.format.largest)
