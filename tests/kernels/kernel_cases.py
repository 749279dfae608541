"""Random pools with poison wherever nothing may be read, and attention as the definition says it, in float64 loops."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.engine.kernels.tiling import INT4_POSITIONS, WGMMA_ROWS, Tiling
from pdserve.engine.kv.paged import KvFormat, PagedKv, plain_kv, quantised_block_bytes, quantised_kv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
POISON_BYTE = 0x7F  # NaN in E4M3, the largest in int8, 15 and 7 in int4
LAYERS = 2
NAN = float("nan")


def sound(tiling: Tiling, kind: KvFormat, dtype: torch.dtype) -> Tiling:
    """The tiling, or one with as many positions as the compiler needs."""
    small = kind is KvFormat.INT4 and dtype is not torch.float32 and tiling.rows < WGMMA_ROWS
    return replace(tiling, positions=max(tiling.positions, INT4_POSITIONS)) if small else tiling


@dataclass(frozen=True)
class Pool:
    """A pool of LAYERS layers. values: what each slot means, [blocks, LAYERS, 2, heads, block_size, dim] float64, NaN where
    nothing was written.
    """

    kv: PagedKv
    values: Tensor


def make_pool(
    written: list[tuple[int, int]], num_blocks: int, *, heads: int, dim: int, block_size: int,
    kind: KvFormat = KvFormat.PLAIN, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Pool:  # fmt: skip
    """written: (block, tokens in it), from offset 0 on; everything else is poison."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, LAYERS, 2, heads, block_size, dim)
    there = torch.zeros(shape, dtype=torch.bool)
    for block, tokens in written:
        there[block, :, :, :, :tokens] = True
    if kind is KvFormat.PLAIN:
        numbers = torch.randn(shape, generator=generator).to(dtype).masked_fill(~there, NAN)
        return Pool(plain_kv(numbers.to(DEVICE)), numbers.double())
    block_bytes = quantised_block_bytes(LAYERS, heads, block_size, dim, kind)
    memory = torch.empty(num_blocks * block_bytes, dtype=torch.uint8)
    kv = quantised_kv(memory, num_layers=LAYERS, num_kv_heads=heads, block_size=block_size, head_dim=dim, kind=kind)
    stored = random_stored(kv.data.shape, kind, generator)
    kv.data.copy_(torch.where(there[..., : kv.data.shape[-1]], stored, POISON_BYTE))
    assert kv.scales is not None
    used = there[..., 0, 0]
    kv.scales.copy_((torch.rand(used.shape, generator=generator) + 0.5) / kind.largest)
    kv.scales.masked_fill_(~used, NAN)
    values = stored_values(kv).masked_fill(~there, NAN)
    moved = quantised_kv(
        memory.to(DEVICE), num_layers=LAYERS, num_kv_heads=heads, block_size=block_size, head_dim=dim, kind=kind
    )
    return Pool(moved, values)


def random_settings(rng: random.Random, seed: int) -> dict[str, object]:
    """Settings of attention that both kernels take: any heads, sizes, format and dtype."""
    return {
        "kv_heads": rng.randrange(1, 3), "group": rng.choice([1, 2, 3, 4, 6, 8, 16]), "dim": rng.choice([64, 80, 96, 128]),
        "block_size": rng.choice([16, 32, 64]), "window": rng.choice([0, 0, rng.randrange(1, 50)]),
        "kind": rng.choice(list(KvFormat)), "dtype": rng.choice([torch.float32, torch.bfloat16, torch.float16]), "seed": seed,
    }  # fmt: skip


def random_stored(shape: torch.Size, kind: KvFormat, generator: torch.Generator) -> Tensor:
    """Random bytes that stand for numbers."""
    random_bytes = torch.randint(0, 256, shape, generator=generator, dtype=torch.int32)
    if kind is KvFormat.FP8_E4M3:
        return torch.where(random_bytes & 0x7F == 0x7F, 0, random_bytes).to(torch.uint8)
    if kind is KvFormat.INT8:
        return torch.where(random_bytes == 0x80, 0, random_bytes).to(torch.uint8)
    low, high = (random_bytes & 15).clamp(1), (random_bytes >> 4).clamp(1)
    return (low | high << 4).to(torch.uint8)


def stored_values(kv: PagedKv) -> Tensor:
    """What a pool's bytes mean, by torch: float64, [blocks, layers, 2, heads, block_size, dim]."""
    data = kv.data.cpu()
    if kv.format is KvFormat.PLAIN:
        return data.double()
    if kv.format is KvFormat.INT8:
        numbers = data.contiguous().view(torch.int8).double()
    elif kv.format is KvFormat.FP8_E4M3:
        numbers = data.contiguous().view(torch.float8_e4m3fn).double()
    else:
        wide = data.to(torch.int32)
        numbers = torch.stack(((wide & 15) - 8, (wide >> 4) - 8), -1).flatten(-2).double()
    assert kv.scales is not None
    return numbers * kv.scales.cpu().double()[..., None, None]


@dataclass(frozen=True)
class Sequence:
    """Tokens [start, start + count) are queries; block_table holds [0, start + count), or less where a window lets it."""

    start: int
    count: int
    block_table: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.count


def make_sequences(lengths: list[tuple[int, int]], block_size: int, window: int, seed: int) -> tuple[list[Sequence], list, int]:
    """(start, count) pairs on shuffled blocks. Returns sequences, what is written as (block, tokens), number of blocks.

    Blocks wholly behind the window of the first query have been given away: nothing is written, and their entries are -1.
    """
    needed = [-(-(start + count) // block_size) for start, count in lengths]
    num_blocks = sum(needed) + 2
    ids = random.Random(seed).sample(range(num_blocks), sum(needed))
    sequences, written = [], []
    for (start, count), blocks in zip(lengths, needed, strict=True):
        table, ids = ids[:blocks], ids[blocks:]
        for i, block in enumerate(table):
            tokens = min(block_size, start + count - i * block_size)
            if window == 0 or i * block_size + tokens > start - window + 1:
                written.append((block, tokens))
            else:
                table[i] = -1
        sequences.append(Sequence(start, count, tuple(table)))
    return sequences, written, num_blocks


def tables_tensor(sequences: list[Sequence]) -> Tensor:
    """[sequences, longest] int32; behind a table's end stands a block that does not exist."""
    width = max(len(s.block_table) for s in sequences)
    rows = [(*s.block_table, *[1 << 20] * (width - len(s.block_table))) for s in sequences]
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def reference_attention(
    values: Tensor, layer: int, query: Tensor, sequences: list[Sequence], window: int = 0, *,
    scale: float | None = None, softcap: float | None = None, latent: int = 0,
) -> Tensor:  # fmt: skip
    """query: [tokens, heads, dim], rows in the order of the sequences. One token and one head at a time, float64.

    latent: a value is the first so many numbers of its key.
    """
    query = query.double().cpu()
    result = torch.zeros_like(query[..., :latent] if latent else query)
    kv_heads, size = values.shape[3], values.shape[4]
    group = query.shape[1] // kv_heads
    row = 0
    for sequence in sequences:
        for position in range(sequence.start, sequence.end):
            lowest = max(0, position - window + 1) if window else 0
            where = [(sequence.block_table[n // size], n % size) for n in range(lowest, position + 1)]
            blocks, offsets = (torch.tensor(x) for x in zip(*where, strict=True))
            for head in range(query.shape[1]):
                key, value = (values[blocks, layer, which, head // group, offsets] for which in (0, 1))
                scores = key @ query[row, head] * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                result[row, head] = scores.softmax(0) @ (key[:, :latent] if latent else value)
            row += 1
    return result


def tolerance(dtype: torch.dtype) -> float:
    """Of attention's output, whose values are about 1 and below."""
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)
