"""Attention with block tables that end where memory ends: `python guarded_table.py`, in Triton's interpreter.

The kernels ask for a table's entries one tile ahead. Behind the last entry lies a page that nobody may read, so asking
for one too many ends the process. Prints the largest difference to attention as it is defined.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from kernel_cases import make_pool, make_sequences, reference_attention

from pdserve.engine.kernels.decode import decode
from pdserve.engine.kernels.prefill import cut, prefill, tile_tokens, tiles_tensor
from pdserve.engine.kernels.shape import grouped
from pdserve.engine.kernels.tiling import Tiling

BLOCK_SIZE, DIM = 16, 64
PROT_NONE = 0


def at_the_end_of_memory(entries: tuple[int, ...]) -> tuple[torch.Tensor, mmap.mmap]:
    """[1, entries] int32 whose last byte is the last of a page before one that cannot be read, and what keeps them."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    table = torch.frombuffer(pages, dtype=torch.int32)
    count = mmap.PAGESIZE // 4
    table[count - len(entries) : count] = torch.tensor(entries, dtype=torch.int32)
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(table.data_ptr() + mmap.PAGESIZE)
    if libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return table[count - len(entries) : count].view(1, -1), pages


def difference(start: int, count: int, tiling: Tiling, window: int) -> float:
    """Of one sequence's tokens [start, start + count)."""
    sequences, written, num_blocks = make_sequences([(start, count)], BLOCK_SIZE, window, seed=0)
    pool = make_pool(written, num_blocks, heads=1, dim=DIM, block_size=BLOCK_SIZE)
    query = torch.randn(count, 1, DIM, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(query)
    table, _pages = at_the_end_of_memory(sequences[0].block_table)
    layer = pool.kv.layer(1)
    if count == 1:
        rows, ends = torch.zeros(1, dtype=torch.int32), torch.tensor([start + 1], dtype=torch.int32)
        decode(query, out, grouped(pool.kv, 1, window), layer, table, rows, ends, 2, tiling)
    else:
        tiles = tiles_tensor(cut(0, start, count, 0, tile_tokens(tiling, 1)))
        prefill(query, out, grouped(pool.kv, 1, window), layer, table, tiles, tiling)
    return (out.double() - reference_attention(pool.values, 1, query, sequences, window)).abs().max().item()


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(max(
        difference(start, count, Tiling(16, positions, 4, 1), window)
        for start, count in ((31, 1), (32, 1), (20, 12), (20, 18))
        for positions in (16, 32)
        for window in (0, 20)
    ))  # fmt: skip
