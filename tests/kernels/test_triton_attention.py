"""The backend as the model uses it: mixed steps, and steps of a fixed shape that are filled again and again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, INTERPRETED, make_pool, make_sequences, poisoned, reference_attention, tolerance

from pdserve.core.ids import BlockId
from pdserve.core.kv_layout import gqa_group
from pdserve.engine.attention.triton import TritonAttention
from pdserve.engine.kernels.shape import grouped
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.paged import KvFormat, plain_kv
from pdserve.engine.kv.span import Span
from tests.reference_attention import ReferenceAttention

DIM, HEADS, KV_HEADS = 64, 6, 2


def make_case(spans: list[tuple[int, int]], dtype: torch.dtype, seed: int, kept_blocks: int = 0):
    """(start, count) on shuffled blocks of 16, `kept_blocks` more in each table than hold KV. Returns cache, spans, query."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-(start + count) // 16) for start, count in spans]
    num_blocks = sum(needed) + kept_blocks * len(spans)
    ids = rng.sample(range(num_blocks), num_blocks)
    made, written, row = [], [], 0
    for (start, count), blocks in zip(spans, needed, strict=True):
        table, ids = ids[: blocks + kept_blocks], ids[blocks + kept_blocks :]
        made.append(Span(row, start, count, tuple(BlockId(b) for b in table)))
        written += [(b, min(16, start + count - i * 16)) for i, b in enumerate(table[:blocks])]
        row += count
    pool = make_pool(written, num_blocks, heads=KV_HEADS, dim=DIM, block_size=16, dtype=dtype, seed=seed)
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    layout = gqa_group(2, KV_HEADS, DIM, 16, names[dtype])
    kv = KvCache(layout, num_blocks * layout.block_bytes, DEVICE)
    kv.tensor.copy_(pool.kv.data)
    return kv, tuple(made), torch.randn(row, HEADS, DIM, generator=generator).to(dtype).to(DEVICE)


def expected(kv: KvCache, spans: tuple[Span, ...], query: torch.Tensor) -> torch.Tensor:
    on_cpu = KvCache(kv.layout, kv.nbytes, torch.device("cpu"))
    on_cpu.tensor.copy_(kv.tensor)
    return ReferenceAttention(on_cpu, HEADS).run(spans, 1, query.cpu())


def triton(kv: KvCache, dtype: torch.dtype) -> TritonAttention:
    paged = plain_kv(kv.tensor)
    return TritonAttention(paged, grouped(paged, HEADS), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spans", [[(5, 1), (0, 20), (40, 1), (17, 2)], [(3, 1), (30, 1)], [(0, 2)]])
def test_a_step_of_prompts_and_single_tokens_equals_the_definition(spans, dtype):
    kv, made, query = make_case(spans, dtype, seed=1, kept_blocks=2)
    backend = triton(kv, dtype)
    found = backend.run(backend.prepare(made), 1, query)
    assert (found.double().cpu() - expected(kv, made, query)).abs().max() < tolerance(dtype)


def test_all_parts_of_a_step_start_where_kernels_expect_it():
    """Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes."""
    kv, made, _ = make_case([(5, 1), (0, 3), (40, 1), (17, 1)], torch.float32, seed=2)
    step = triton(kv, torch.float32).prepare(made)
    assert [x.data_ptr() % 16 for x in (step.tables, step.rows, step.ends, step.tiles)] == [0, 0, 0, 0]


def test_a_fixed_step_is_filled_again_with_fewer_and_shorter_sequences():
    """What the longer sequences left behind in tables and ends is not used."""
    kv, made, query = make_case([(70, 1), (3, 1), (33, 1)], torch.float32, seed=3)
    backend = triton(kv, torch.float32)
    step = backend.fixed(4, max_positions=80)
    padded = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, 1), value=1.0)
    backend.refill(step, made)
    found = backend.run(step, 1, padded)
    assert (found[:3].double().cpu() - expected(kv, made, query)).abs().max() < 2e-5
    assert torch.equal(found[3], torch.zeros_like(found[3]))
    fewer = tuple(Span(i, s.start, 1, s.block_table) for i, s in enumerate(made[1:]))
    backend.refill(step, fewer)
    found = backend.run(step, 1, padded)
    assert (found[:2].double().cpu() - expected(kv, fewer, query[:2])).abs().max() < 2e-5
    assert torch.equal(found[2:], torch.zeros_like(found[2:]))


def test_a_layer_reads_its_own_kv_only():
    kv, made, query = make_case([(3, 2), (20, 1)], torch.float32, seed=4)
    backend = triton(kv, torch.float32)
    before = backend.run(backend.prepare(made), 0, query)
    kv.tensor[:, 1] = poisoned(1)
    assert torch.equal(backend.run(backend.prepare(made), 0, query), before)


@pytest.mark.parametrize("kind", [KvFormat.PLAIN, KvFormat.INT4])
def test_windows_and_quantised_pools_pass_through_the_backend(kind):
    lengths, window = [(50, 1), (40, 5)], 20
    sequences, written, num_blocks = make_sequences(lengths, 16, window, seed=5)
    pool = make_pool(written, num_blocks, heads=KV_HEADS, dim=DIM, block_size=16, kind=kind, seed=5)
    rows = [0, 1]
    spans = tuple(
        Span(row, s.start, s.count, tuple(BlockId(b) for b in s.block_table)) for row, s in zip(rows, sequences, strict=True)
    )
    query = torch.randn(6, HEADS, DIM, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    backend = TritonAttention(pool.kv, grouped(pool.kv, HEADS, window), torch.float32)
    found = backend.run(backend.prepare(spans), 1, query)
    wanted = reference_attention(pool.values, 1, query, sequences, window)
    assert (found.double().cpu() - wanted).abs().max() < 2e-5


@pytest.mark.skipif(not INTERPRETED, reason="the guarded page is memory of the CPU")
def test_no_entry_behind_the_end_of_a_block_table_is_read():
    """Entries are asked for one tile ahead; the last tile has none after it."""
    script = Path(__file__).with_name("guarded_table.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert float(done.stdout) < tolerance(torch.float32)
