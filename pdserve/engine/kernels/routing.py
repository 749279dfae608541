"""The choice of experts, and the sort of pairs by expert, in one launch each.

A decode step of a few rows takes some microseconds in either form; in torch the same work is about thirty launches a layer,
which together take as long as the experts of one row. The sort is one program that reads the choice twice, so it is for steps
of up to MOST_PAIRS pairs, which is 2,048 * 128 comparisons of pairs with experts; larger steps are sorted by torch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.kernels.support import next_power_of_2

MOST_PAIRS: Final = 2048
COMPARED: Final = 8192  # pairs times experts of one turn of the sort
LEAST_SUM = tl.constexpr(1e-20)  # as in torch, see `pdserve.engine.layers.moe`


@triton.jit
def best(ranks, among, index, NONE: tl.constexpr):
    """Return the index of the largest number where `among` is true, the lowest index among equal numbers.

    index: the places, below NONE, which is returned when there is none.
    """
    largest = tl.max(tl.where(among, ranks, float("-inf")), 0)
    return tl.min(tl.where(among & (ranks == largest), index, NONE), 0)


@triton.jit
def route_kernel(
    chosen, weights, outputs, bias, step, scale,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). outputs: [rows, at least EXPERTS] float32; bias: [EXPERTS] float32; chosen, weights: [rows, TOP]."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    there = expert < EXPERTS
    raw = tl.load(outputs + row * step + expert, mask=there, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-tl.where(there, raw, 0.0)))
    else:
        grown = tl.exp(raw - tl.max(raw, 0))
        scores = grown / tl.sum(grown, 0)
    ranks = scores
    if BIASED:
        ranks += tl.load(bias + expert, mask=there, other=0.0)
    ranks = tl.where(ranks == ranks, ranks, float("inf"))  # NaN counts as the largest
    ranks = tl.where(there, ranks, float("-inf"))
    if TOP_GROUPS < GROUPS:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        group = expert // SIZE
        left = tl.full([PADDED], 0.0, tl.float32)  # the score of each expert's group
        for g in range(GROUPS):
            members = there & (group == g)
            first = best(ranks, members, expert, PADDED)
            score = tl.max(tl.where(members, ranks, float("-inf")), 0)
            if BEST_TWO:
                score += tl.max(tl.where(members & (expert != first), ranks, float("-inf")), 0)
            left = tl.where(members, score, left)
        allowed = expert < 0
        for _ in range(TOP_GROUPS):
            allowed = allowed | (group == best(left, there & (allowed == 0), expert, PADDED) // SIZE)
        there = there & allowed
    held = expert < 0
    for _ in range(TOP):
        held = held | (expert == best(ranks, there & (held == 0), expert, PADDED))
    factor = scores
    if RENORMALISE:
        factor = scores / (tl.sum(tl.where(held, scores, 0.0), 0) + LEAST_SUM)
    place = row * TOP + tl.cumsum(held.to(tl.int32), 0) - 1
    tl.store(chosen + place, expert.to(tl.int64), mask=held)
    tl.store(weights + place, factor * scale, mask=held)


@triton.jit(do_not_specialize=["pairs", "tiles_count"])
def sort_kernel(
    order, tiles, counts, chosen, real, pairs, tiles_count,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Grid (1,). It sorts `pairs` pairs as `experts.sort_pairs` says, and writes `tiles_count` tiles of at most ROWS pairs.

    CHUNK: pairs, and tiles, of one turn. SOME: only the first rows count, as many as `real` says.
    """
    expert = tl.arange(0, PADDED)
    offset = tl.arange(0, CHUNK)
    limit = pairs
    if SOME:
        limit = tl.minimum(pairs, (tl.load(real) * TOP).to(tl.int32))
    held = tl.zeros([PADDED], tl.int32)
    for start in range(0, limit, CHUNK):
        own = tl.load(chosen + start + offset, mask=start + offset < limit, other=-1).to(tl.int32)
        held += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + expert, held.to(tl.int64), mask=expert < EXPERTS)
    begin = tl.cumsum(held, 0) - held
    at = begin
    for start in range(0, limit, CHUNK):
        there = start + offset < limit
        own = tl.load(chosen + start + offset, mask=there, other=-1).to(tl.int32)
        same = (own[:, None] == expert[None, :]).to(tl.int32)
        place = tl.sum(same * (tl.cumsum(same, 0) - 1 + at[None, :]), 1)
        tl.store(order + place, (start + offset).to(tl.int64), mask=there)
        at += tl.sum(same, 0)
    needed = (held + ROWS - 1) // ROWS
    ends = tl.cumsum(needed, 0)
    for start in range(0, tiles_count, CHUNK):
        number = start + offset
        of = tl.minimum(tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1), EXPERTS - 1)
        same = (of[:, None] == expert[None, :]).to(tl.int32)
        within = (number - tl.sum(same * (ends - needed)[None, :], 1)) * ROWS
        left = tl.sum(same * held[None, :], 1) - within
        there = number < tiles_count
        tl.store(tiles + number * 3, of, mask=there)
        tl.store(tiles + number * 3 + 1, tl.sum(same * begin[None, :], 1) + within, mask=there)
        tl.store(tiles + number * 3 + 2, tl.minimum(tl.maximum(left, 0), ROWS), mask=there)


def route(spec: MoeSpec, outputs: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what `pdserve.engine.layers.moe.route` returns. outputs: [rows, at least experts] float32, rows contiguous."""
    rows = outputs.shape[0]
    chosen = torch.empty((rows, spec.experts_per_token), dtype=torch.int64, device=outputs.device)
    weights = torch.empty((rows, spec.experts_per_token), dtype=torch.float32, device=outputs.device)
    if rows:
        route_kernel[(rows,)](
            chosen, weights, outputs, outputs if bias is None else bias, outputs.stride(0), spec.scale,
            EXPERTS=spec.experts, PADDED=next_power_of_2(spec.experts), TOP=spec.experts_per_token, GROUPS=spec.groups,
            TOP_GROUPS=spec.top_groups, BEST_TWO=spec.group_score == "best_two", SIGMOID=spec.score == "sigmoid",
            BIASED=bias is not None, RENORMALISE=spec.renormalise, num_warps=1,
        )  # fmt: skip
    return chosen, weights


def sort_few(experts: Tensor, count: int, rows: int, tiles_count: int, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `experts.Sorted` for at most MOST_PAIRS pairs. The places of pairs that do not count are undefined.

    The arguments are those of `experts.sort_pairs`, and the number of tiles.
    """
    pairs, device, padded = experts.numel(), experts.device, next_power_of_2(count)
    order = torch.empty(pairs, dtype=torch.int64, device=device)
    tiles = torch.empty((tiles_count, 3), dtype=torch.int32, device=device)
    counts = torch.empty(count, dtype=torch.int64, device=device)
    chunk = max(16, min(COMPARED // padded, next_power_of_2(pairs)))
    sort_kernel[(1,)](
        order, tiles, counts, experts, experts if real is None else real, pairs, tiles_count,
        EXPERTS=count, PADDED=padded, TOP=experts.shape[1], ROWS=rows, CHUNK=chunk, SOME=real is not None, num_warps=4,
    )  # fmt: skip
    return order, tiles, counts
