"""Latent attention and mixtures of experts beside what they must read and do, in the shapes of published models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from pdserve.core.kv_layout import ceil_div
from pdserve.core.model_spec import MlaSpec, MoeSpec, NormSpec, RopeSpec
from pdserve.engine.attention.triton import TritonAttention
from pdserve.engine.kernels.experts import GroupedExperts
from pdserve.engine.kernels.shape import KernelShape, shape_of
from pdserve.engine.kv.paged import PagedKv, plain_kv
from tools.gpu.attention import BLOCK_SIZE, Case, Model
from tools.gpu.machine import machine
from tools.gpu.pools import fill
from tools.gpu.row import Row, Setup, replayed_s, rotations

DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Latent:
    """The latent attention of a model."""

    name: str
    spec: MlaSpec


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model. counts: rows of the batches to time."""

    name: str
    hidden: int
    spec: MoeSpec
    counts: tuple[int, ...]


V3 = Latent("DeepSeek-V3", MlaSpec(128, 512, 128, 64, 128, RopeSpec(1e4), NormSpec(1e-6)))
LITE = Latent("DeepSeek-V2-Lite", MlaSpec(16, 512, 128, 64, 128, RopeSpec(1e4), NormSpec(1e-6)))
TINY_LATENT = Latent("tiny", MlaSpec(4, 32, 16, 16, 16, RopeSpec(1e4), NormSpec(1e-6)))
QWEN3 = Experts("Qwen3-30B-A3B", 2048, MoeSpec(128, 8, 768), (1, 16, 64, 2048))
MIXTRAL = Experts("Mixtral-8x7B", 4096, MoeSpec(8, 2, 14336), (1, 64))
TINY_EXPERTS = Experts("tiny", 32, MoeSpec(4, 2, 16), (3,))


def run(setup: Setup) -> None:
    """Run all cases."""
    if setup.rehearsed:
        run_latent(setup, TINY_LATENT, sequences=2, past=20, count=1)
        run_latent(setup, TINY_LATENT, sequences=1, past=0, count=20)
        run_experts(setup, TINY_EXPERTS)
        return
    for latent in (V3, LITE):
        for sequences, past, count in ((32, 2047, 1), (1, 8191, 1), (1, 0, 2048)):
            run_latent(setup, latent, sequences=sequences, past=past, count=count)
    for experts in (QWEN3, MIXTRAL):
        run_experts(setup, experts)


def run_latent(setup: Setup, latent: Latent, *, sequences: int, past: int, count: int) -> None:
    """Time the absorbed attention of one layer. Its floor is the larger of the times of its bytes and of its operations."""
    shape = shape_of(latent.spec, BLOCK_SIZE, plain_kv(torch.empty((1,) * 6)).format)
    case = Case(Model(8, shape.heads, 1, shape.qk_dim), sequences, past, count)
    pool, spans = latent_pool(setup, case, shape), case.spans()
    backend, query = TritonAttention(pool, shape, torch.bfloat16), case.query(setup.device)
    step = backend.prepare(spans)
    took_s = replayed_s([partial(backend.run, step, layer, query) for layer in range(case.model.layers)], setup.device)
    seen = sequences * sum(past + i + 1 for i in range(count))
    operations = 2 * seen * shape.heads * (shape.qk_dim + shape.v_dim)
    read = sequences * (past + count) * shape.qk_dim * DTYPE_BYTES
    what = f"decode B={sequences}, {past + 1}" if count == 1 else f"prefill of {count}"
    floor_row(setup, f"{latent.name}: {what}", took_s, read, operations)


def latent_pool(setup: Setup, case: Case, shape: KernelShape) -> PagedKv:
    """Return a pool of one plane for all sequences, full of random numbers."""
    blocks = case.sequences * ceil_div(case.positions, BLOCK_SIZE)
    data = torch.empty((blocks, case.model.layers, 1, 1, BLOCK_SIZE, shape.qk_dim), dtype=torch.bfloat16, device=setup.device)
    kv = plain_kv(data)
    fill(kv)
    return kv


def run_experts(setup: Setup, case: Experts) -> None:
    """Time the routed experts of one layer, with experts drawn evenly."""
    spec, hidden, device = case.spec, case.hidden, setup.device
    matrix_bytes = 3 * spec.intermediate * hidden * DTYPE_BYTES  # of one expert
    copies = 1 if setup.rehearsed else rotations(spec.experts * matrix_bytes)

    def matrices(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((spec.experts, rows, columns), device=device, dtype=torch.bfloat16) / columns**0.5

    layers = [
        GroupedExperts(spec, matrices(2 * spec.intermediate, hidden), matrices(hidden, spec.intermediate))
        for _ in range(copies)
    ]
    for rows in case.counts:
        x = torch.randn((rows, hidden), device=device, dtype=torch.bfloat16)
        chosen = torch.rand((rows, spec.experts), device=device).topk(spec.experts_per_token).indices.sort(-1).values
        weights, total = (torch.ones(rows, width, device=device) for width in (spec.experts_per_token, hidden))
        took_s = replayed_s([partial(layer, x, chosen, weights, total) for layer in layers], device)
        read = len(set(chosen.flatten().tolist())) * matrix_bytes
        floor_row(setup, f"{case.name}: experts, {rows} rows", took_s, read, 2 * chosen.numel() * matrix_bytes // DTYPE_BYTES)


def floor_row(setup: Setup, case: str, took_s: float, read_bytes: int, operations: int) -> None:
    """Print a time beside its floor."""
    found = machine(setup)
    of_bytes, of_operations = read_bytes / found.bytes_s, operations / found.flops_s
    floor_s, of = max((of_bytes, "bytes"), (of_operations, "operations"))
    Row("families", case[:38], f"{took_s * 1e6:.0f} us", f"{floor_s * 1e6:.0f} of {of}", f"{floor_s / took_s:.0%}").emit()
