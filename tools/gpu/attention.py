"""The attention kernels beside torch's scaled_dot_product_attention on contiguous K and V, and in every KV format."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pdserve.core.ids import BlockId
from pdserve.engine.attention.api import Span
from pdserve.engine.attention.triton import TritonAttention
from pdserve.engine.kernels.paged_kv import KvFormat, PagedKv, plain_kv, quantised_block_bytes, quantised_kv
from tools.gpu.machine import machine
from tools.gpu.row import Row, Setup, mean_s

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16  # of Llama-3-8B


def make_kv(setup: Setup, kind: KvFormat, num_blocks: int) -> PagedKv:
    """One layer of zeros, which take as long as anything else."""
    if kind is KvFormat.PLAIN:
        shape = (num_blocks, 1, 2, KV_HEADS, BLOCK_SIZE, DIM)
        return plain_kv(torch.zeros(shape, dtype=torch.bfloat16, device=setup.device))
    size = num_blocks * quantised_block_bytes(1, KV_HEADS, BLOCK_SIZE, DIM, kind)
    memory = torch.zeros(size, dtype=torch.uint8, device=setup.device)
    return quantised_kv(memory, num_layers=1, num_kv_heads=KV_HEADS, block_size=BLOCK_SIZE, head_dim=DIM, kind=kind)


def ours_s(setup: Setup, kind: KvFormat, sequences: int, past: int, count: int) -> float:
    blocks = -(-(past + count) // BLOCK_SIZE)
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0)).tolist()
    spans = tuple(
        Span(i * count, past, count, tuple(BlockId(b) for b in order[i * blocks : (i + 1) * blocks])) for i in range(sequences)
    )
    query = torch.randn((sequences * count, HEADS, DIM), device=setup.device).to(torch.bfloat16)
    backend = TritonAttention(make_kv(setup, kind, sequences * blocks), HEADS, torch.bfloat16)
    step = backend.prepare(spans)
    return mean_s(lambda: backend.run(step, 0, query), setup.device)


def torch_s(setup: Setup, sequences: int, past: int, count: int) -> float:
    """K and V gathered beforehand, without cost."""
    query = torch.randn((sequences, HEADS, count, DIM), device=setup.device).to(torch.bfloat16)
    key, value = torch.zeros((2, sequences, KV_HEADS, past + count, DIM), dtype=torch.bfloat16, device=setup.device)
    causal = count > 1
    return mean_s(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True), setup.device)


def run(setup: Setup) -> None:
    found = machine(setup)
    count = 20 if setup.rehearsed else 2048
    operations = 2 * HEADS * DIM * count * (count + 1)
    took_s, theirs_s = ours_s(setup, KvFormat.PLAIN, 1, 0, count), torch_s(setup, 1, 0, count)
    of_peak = f"{operations / took_s / found.flops_s:.0%} of peak"
    compared(f"prefill of {count}", took_s, theirs_s, of_peak).emit()
    for sequences, past in ((2, 20),) if setup.rehearsed else ((1, 8191), (32, 2047), (128, 2047)):
        theirs_s = torch_s(setup, sequences, past, 1)
        for kind in KvFormat:
            took_s = ours_s(setup, kind, sequences, past, 1)
            element_bytes = 2 if kind is KvFormat.PLAIN else kind.stored_dim(DIM) / DIM
            floor_s = sequences * (past + 1) * 2 * KV_HEADS * DIM * element_bytes / found.bytes_s
            name = "bfloat16" if kind is KvFormat.PLAIN else kind.name.lower()
            case = f"decode B={sequences}, {past + 1}, {name}"
            compared(case, took_s, theirs_s, f"{floor_s / took_s:.0%} of its bytes").emit()


def compared(case: str, ours_s: float, theirs_s: float, note: str) -> Row:
    ours, theirs = f"{ours_s * 1e6:.0f} us", f"{theirs_s * 1e6:.0f} SDPA"
    return Row("attention", case, ours, theirs, f"{theirs_s / ours_s:.2f} x", note)
