"""The attention kernels beside torch's scaled_dot_product_attention on contiguous K and V, in every KV format.

The pool is Llama-3-8B's with 32 layers, so that blocks lie as far apart as they do in production. All layers take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.ids import BlockId
from pdserve.core.kv_layout import ceil_div
from pdserve.engine.attention.triton import TritonAttention, TritonStep
from pdserve.engine.kernels.prefill import prefill
from pdserve.engine.kernels.shape import KernelShape, grouped
from pdserve.engine.kernels.tiling import Tiling, prefill_tiling
from pdserve.engine.kv.paged import KvFormat, PagedKv
from pdserve.engine.kv.span import Span
from tools.gpu.machine import machine
from tools.gpu.pools import random_pool
from tools.gpu.row import Row, Setup, replayed_s, rotations

BLOCK_SIZE = 16
MEMORY_SHARE = 0.4  # one pool may take this share of the device's memory
# Tilings to compare with the one in use, see prefill_tiling. All have as many rows, so they take the same tiles of the query.
OTHER_TILINGS = (Tiling(128, 32, 8, 3), Tiling(128, 64, 8, 4), Tiling(128, 128, 8, 3))


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of one model's attention."""

    layers: int
    heads: int
    kv_heads: int
    dim: int


LLAMA_8B = Model(32, 32, 8, 128)
TINY = Model(2, 4, 2, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """One step of `sequences` sequences. Each has `past` positions and gets `count` tokens."""

    model: Model
    sequences: int
    past: int
    count: int

    @property
    def positions(self) -> int:
        """Positions of each sequence after the step."""
        return self.past + self.count

    def kv_bytes(self, kind: KvFormat) -> float:
        """Return the bytes of the numbers in K and V of one layer, without their scales."""
        number_bytes = 2 if kind is KvFormat.PLAIN else kind.stored_dim(self.model.dim) / self.model.dim
        return self.sequences * self.positions * 2 * self.model.kv_heads * self.model.dim * number_bytes

    def pool(self, device: torch.device, kind: KvFormat) -> PagedKv:
        """Return a pool for all sequences, full of random numbers."""
        blocks = self.sequences * ceil_div(self.positions, BLOCK_SIZE)
        model = self.model
        return random_pool(
            device, kind, num_blocks=blocks, num_layers=model.layers, kv_heads=model.kv_heads,
            block_size=BLOCK_SIZE, dim=model.dim,
        )  # fmt: skip

    def spans(self) -> tuple[Span, ...]:
        """Return the span of each sequence, on shuffled blocks."""
        blocks = ceil_div(self.positions, BLOCK_SIZE)
        order = torch.randperm(self.sequences * blocks, generator=torch.Generator().manual_seed(0)).tolist()
        tables = [tuple(BlockId(b) for b in order[i * blocks : (i + 1) * blocks]) for i in range(self.sequences)]
        return tuple(Span(i * self.count, self.past, self.count, table) for i, table in enumerate(tables))

    def backend(self, pool: PagedKv) -> TritonAttention:
        """Return the engine's attention over `pool`."""
        return TritonAttention(pool, grouped(pool, self.model.heads), torch.bfloat16)

    def query(self, device: torch.device) -> Tensor:
        """Return a random query: [sequences * count, heads, dim], bfloat16."""
        shape = (self.sequences * self.count, self.model.heads, self.model.dim)
        return torch.randn(shape, device=device).to(torch.bfloat16)


def ours_s(setup: Setup, case: Case, kind: KvFormat) -> float:
    """Return the seconds of one layer, called as the engine calls it."""
    backend = case.backend(case.pool(setup.device, kind))
    step, query = backend.prepare(case.spans()), case.query(setup.device)
    return replayed_s([partial(backend.run, step, layer, query) for layer in range(case.model.layers)], setup.device)


def torch_s(setup: Setup, case: Case) -> float:
    """Return the seconds of one layer by torch. K and V are gathered beforehand, which costs it nothing."""
    model = case.model
    causal = case.count > 1
    query = torch.randn((case.sequences, model.heads, case.count, model.dim), device=setup.device).to(torch.bfloat16)
    shape = (2, case.sequences, model.kv_heads, case.positions, model.dim)
    copies = 1 if setup.rehearsed else rotations(round(case.kv_bytes(KvFormat.PLAIN)))
    pairs = [torch.randn(shape, device=setup.device, dtype=torch.bfloat16).unbind(0) for _ in range(copies)]

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    return replayed_s([partial(attend, key, value) for key, value in pairs], setup.device)


def run_prefill(setup: Setup, case: Case) -> None:
    """Compare a prefill with torch, and its tiling with others."""
    operations = 2 * case.model.heads * case.model.dim * case.count * (case.count + 1)
    flops_s = machine(setup).flops_s
    took_s, theirs_s = ours_s(setup, case, KvFormat.PLAIN), torch_s(setup, case)
    compared(f"prefill of {case.count}", took_s, theirs_s, f"{operations / took_s / flops_s:.0%} of peak").emit()
    pool, spans, query = case.pool(setup.device, KvFormat.PLAIN), case.spans(), case.query(setup.device)
    step = case.backend(pool).prepare(spans)
    shape = grouped(pool, case.model.heads)
    usual = prefill_tiling(shape, torch.bfloat16)
    for tiling in [tiling for tiling in OTHER_TILINGS if tiling != usual][: 1 if setup.rehearsed else None]:
        other_s = replayed_s(tiled(pool, shape, step, query, tiling), setup.device)
        name = f"prefill, {tiling.positions} positions, {tiling.stages} stages"
        usually = f"{took_s * 1e6:.0f} as it is"
        Row("attention", name, f"{other_s * 1e6:.0f} us", usually, f"{took_s / other_s:.2f} x", "another tile").emit()


def tiled(pool: PagedKv, shape: KernelShape, step: TritonStep, query: Tensor, tiling: Tiling) -> list[Callable[[], None]]:
    """Return a call of the kernel with this tiling for each layer."""
    out = torch.empty_like(query)
    layers = [pool.layer(i) for i in range(pool.num_layers)]
    return [partial(prefill, query, out, shape, layer, step.tables, step.tiles, tiling) for layer in layers]


def run_decode(setup: Setup, case: Case) -> None:
    """Compare a decode step in every KV format with torch. A case whose KV is too large for the device is skipped."""
    model = case.model
    name = f"decode B={case.sequences}, {case.positions}"
    if not setup.rehearsed:
        wanted, there = case.kv_bytes(KvFormat.PLAIN) * model.layers, torch.cuda.mem_get_info()[1]
        if wanted > MEMORY_SHARE * there:
            Row("attention", name, "skipped", note=f"its KV takes {wanted / 1e9:.0f} GB of {there / 1e9:.0f}").emit()
            return
    theirs_s, bytes_s = torch_s(setup, case), machine(setup).bytes_s
    for kind in KvFormat:
        took_s = ours_s(setup, case, kind)
        note = f"{case.kv_bytes(kind) / bytes_s / took_s:.0%} of its bytes"
        compared(f"{name}, {'bfloat16' if kind is KvFormat.PLAIN else kind.name.lower()}", took_s, theirs_s, note).emit()


def compared(case: str, ours_s: float, theirs_s: float, note: str) -> Row:
    """Return the row of one comparison."""
    ours, theirs = f"{ours_s * 1e6:.0f} us", f"{theirs_s * 1e6:.0f} SDPA"
    return Row("attention", case, ours, theirs, f"{theirs_s / ours_s:.2f} x", note)


def run(setup: Setup) -> None:
    """Run all cases."""
    if setup.rehearsed:
        run_prefill(setup, Case(TINY, 1, 0, 20))
        run_decode(setup, Case(TINY, 2, 20, 1))
        return
    for sequences, past in ((32, 2047), (1, 8191), (128, 2047)):
        run_decode(setup, Case(LLAMA_8B, sequences, past, 1))
    run_prefill(setup, Case(LLAMA_8B, 1, 0, 2048))
