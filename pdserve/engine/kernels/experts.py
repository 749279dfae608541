"""The experts of a mixture: products of gathered rows with the matrices of the experts that they chose.

Floor: with few rows, the matrices of the experts that were chosen, each read once. Qwen3-30B-A3B in bfloat16: 9.4 MB an
expert; one token reads 8 of 128, 64 tokens nearly all: 1.2 GB a layer, 0.25 ms at 4.8 TB/s. With many rows the products:
6 * hidden * intermediate operations for each row and expert.

A *pair* is a row with one of its experts. Pairs are sorted by expert and cut into tiles of one expert. The number of tiles is
bounded by the numbers of rows and experts, so a launch does not depend on the choice, nothing waits for the device, and steps
can be recorded in a CUDA graph; programs of unused tiles end at once. The first product keeps gate and up of the same columns
together, so that the activation needs no pass of its own. The sum over the experts of a row is a kernel of its own: it adds
in ascending order, as torch does, and needs no atomic addition, whose order would differ from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.kernels.activation import gated
from pdserve.engine.kernels.routing import MOST_PAIRS, route, sort_few
from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kernels.tiling import dot_dtype, dot_precision

TILE_FIELDS: Final = 3  # expert, first place among the sorted pairs, pairs
SUMMED: Final = 1024  # columns of a program that sums


class Sorted(NamedTuple):
    """Pairs, sorted by expert.

    order: [pairs] int64, the pair at each place. tiles: [tiles, 3] int32: expert, first place, number of pairs, which is 0
    for an unused tile. counts: [experts] int64, the pairs of each expert.
    """

    order: Tensor
    tiles: Tensor
    counts: Tensor


class Product(NamedTuple):
    """The tile of one program. rows, columns: of the result. depth: of one step of the sum."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def product_kernel(
    out, x, weight, order, tiles, x_step, expert_step,
    WIDTH: tl.constexpr, OUT: tl.constexpr, TOP: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (columns of the result, tiles of pairs).

    With GATED, x is [rows, WIDTH], pair p is row p // TOP of it, weight is [experts, 2 * OUT, WIDTH], and out [pairs, OUT],
    in the order of the places, gets activation(gate) * up. Otherwise x is [pairs, WIDTH] in the order of the places, weight
    is [experts, OUT, WIDTH], and out [pairs, OUT] is in the order of the pairs.
    """
    fields = tiles + tl.program_id(1) * 3
    expert = tl.load(fields).to(tl.int64)
    first = tl.load(fields + 1)
    count = tl.load(fields + 2)
    if count > 0:
        m = tl.arange(0, TILE_M)
        there = m < count
        place = (first + m).to(tl.int64)
        pair = tl.load(order + place, mask=there, other=0)
        column = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
        depth = tl.arange(0, TILE_K)
        if GATED:
            rows = x + (pair // TOP)[:, None] * x_step + depth[None, :]
        else:
            rows = x + place[:, None] * x_step + depth[None, :]
        matrix = weight + expert * expert_step + column.to(tl.int64)[None, :] * WIDTH + depth[:, None]
        inside = column < OUT
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        up = tl.zeros([TILE_M, TILE_N], tl.float32)
        for start in range(0, WIDTH, TILE_K):
            left = depth < WIDTH - start
            a = tl.load(rows + start, mask=there[:, None] & left[None, :], other=0.0).to(COMPUTE)
            b = tl.load(matrix + start, mask=left[:, None] & inside[None, :], other=0.0).to(COMPUTE)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if GATED:
                c = tl.load(matrix + OUT * WIDTH + start, mask=left[:, None] & inside[None, :], other=0.0).to(COMPUTE)
                up = tl.dot(a, c, up, input_precision=PRECISION)
        dtype: tl.constexpr = out.dtype.element_ty
        if GATED:
            activated = gated(acc.to(dtype).to(tl.float32), GELU).to(dtype).to(tl.float32)  # rounded as two products are
            acc = activated * up.to(dtype).to(tl.float32)
            target = place
        else:
            target = pair
        mask = there[:, None] & inside[None, :]
        tl.store(out + target[:, None] * OUT + column[None, :], acc.to(dtype), mask=mask)


@triton.jit
def sum_kernel(
    out, total, products, weights, real,
    WIDTH: tl.constexpr, TOP: tl.constexpr, TILE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Grid (rows, columns / TILE). out: [rows, WIDTH]: total [rows, WIDTH] float32 plus the products of the row's pairs, each
    times its weight, in their order. products: [rows * TOP, WIDTH]; weights: [rows, TOP] float32. With SOME, only the first
    rows have products, as many as `real` says.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    acc = tl.load(total + row * WIDTH + column, mask=mask, other=0.0)
    summed = TOP
    if SOME:
        summed = tl.where(row < tl.load(real), TOP, 0)
    for i in range(summed):
        product = tl.load(products + (row * TOP + i) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        acc += product * tl.load(weights + row * TOP + i)
    tl.store(out + row * WIDTH + column, acc.to(out.dtype.element_ty), mask=mask)


def sort_pairs(experts: Tensor, count: int, rows: int, real: Tensor | None = None) -> Sorted:
    """Return the pairs sorted by expert and cut into tiles of at most `rows`. It does not wait for the device.

    experts: [rows, experts_per_token] int64 below `count`. real: [] int64 on the device, the rows that have experts at all;
    None means all.
    """
    number_of_tiles = most_tiles(experts.numel(), count, rows)
    if experts.numel() <= MOST_PAIRS:
        return Sorted(*sort_few(experts, count, rows, number_of_tiles, real))
    chosen = experts.flatten()
    if real is not None:
        nobodys = torch.arange(len(experts), device=experts.device).unsqueeze(1) >= real
        chosen = experts.masked_fill(nobodys, count).flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:count]
    tiles = (counts + rows - 1) // rows
    ends = tiles.cumsum(0)
    number = torch.arange(number_of_tiles, device=chosen.device)
    expert = torch.searchsorted(ends, number, right=True).clamp(max=count - 1)
    within = (number - (ends - tiles)[expert]) * rows
    first = (counts.cumsum(0) - counts)[expert] + within
    held = (counts[expert] - within).clamp(0, rows)
    return Sorted(order, torch.stack((expert, first, held), 1).to(torch.int32), counts)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return a bound of the tiles: each expert has at most one tile that is not full."""
    return pairs // rows + min(experts, pairs)


def product_tile(pairs: int, experts: int, dtype: torch.dtype, *, gated: bool) -> Product:
    """Return the tile of a product, chosen for Hopper, with as many rows as an expert has pairs on average.

    A gated program has two sums, so it has half of the columns: both kinds of program hold equally many numbers.
    """
    rows = min(128, max(16, next_power_of_2(-(-pairs // experts))))
    if dtype is torch.float32:
        return Product(16, 32, 32, 4, 1)
    if rows <= 32:
        return Product(rows, 64 if gated else 128, 128, 4, 3)
    return Product(rows, 64 if gated else 128, 64, 4 if rows == 64 else 8, 3)


class GroupedExperts:
    """The routed experts of one layer. `counts` is on the device."""

    def __init__(
        self,
        spec: MoeSpec,
        gate_up: Tensor,
        down: Tensor,
        gather: Callable[[Tensor, int], Tensor] = lambda own, _: own,
    ) -> None:
        """Hold the matrices, which are contiguous.

        gate_up: [experts, 2 * intermediate, hidden]. down: [experts, hidden, intermediate]. Of intermediate in gate_up, and of
        hidden in down, a rank of a gang has some columns. gather: returns whole rows of a width from those of its columns.
        """
        self._spec = spec
        self._gather = gather
        self._gate_up = gate_up
        self._down = down
        self.counts = torch.zeros(spec.experts, dtype=torch.int64, device=down.device)
        """[experts] int64: the pairs of each expert since the model was loaded."""

    def route(self, outputs: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `pdserve.engine.layers.moe.route` returns, in one launch."""
        return route(self._spec, outputs, bias)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, total: Tensor, real: Tensor | None = None) -> Tensor:
        """Return total plus the weighted results of the experts of each row: [rows, hidden] in x's dtype.

        x: [rows, hidden], contiguous. experts, weights: [rows, experts_per_token] int64 and float32. total: [rows, hidden]
        float32. real: [] int64 on the device: only this many rows go to experts; the other rows give `total`.
        """
        spec, pairs = self._spec, experts.numel()
        if pairs == 0:
            return total.to(x.dtype)
        tile = product_tile(pairs, spec.experts, x.dtype, gated=True)
        placed = sort_pairs(experts, spec.experts, tile.rows, real)
        self.counts += placed.counts
        hidden, width = x.shape[1], self._down.shape[2]
        own = x.new_empty(pairs, self._gate_up.shape[1] // 2)
        self._product(own, x, self._gate_up, placed, tile, gated=True)
        inner = self._gather(own, width)
        own = x.new_empty(pairs, self._down.shape[1])
        self._product(own, inner, self._down, placed, product_tile(pairs, spec.experts, x.dtype, gated=False), gated=False)
        products = self._gather(own, hidden)
        out = torch.empty_like(x)
        columns = min(SUMMED, next_power_of_2(hidden))
        sum_kernel[(len(x), triton.cdiv(hidden, columns))](
            out, total, products, weights, total if real is None else real,
            WIDTH=hidden, TOP=spec.experts_per_token, TILE=columns, SOME=real is not None, num_warps=4,
        )  # fmt: skip
        return out

    def _product(self, out: Tensor, x: Tensor, weight: Tensor, placed: Sorted, tile: Product, *, gated: bool) -> None:
        columns = out.shape[1]
        if columns == 0:  # another rank has all of them
            return
        product_kernel[(triton.cdiv(columns, tile.columns), len(placed.tiles))](
            out, x, weight, placed.order, placed.tiles, x.stride(0), weight.stride(0),
            WIDTH=weight.shape[2], OUT=columns, TOP=self._spec.experts_per_token, GATED=gated,
            GELU=self._spec.activation == "gelu_tanh", TILE_M=tile.rows, TILE_N=tile.columns, TILE_K=tile.depth,
            COMPUTE=dot_dtype(x), PRECISION=dot_precision(x.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
