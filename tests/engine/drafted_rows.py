"""One step with drafts beside steps of one token: the same bits of logits, and the same bytes of KV, whatever is accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from hypothesis import strategies as st

from pdserve.core.ids import NULL_BLOCK, BlockId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.step_plan import GREEDY, SequenceSlice, StepPlan
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.models.api import Model

VOCAB = 160
ILL: Final = VOCAB - 1
"""No known token, but every fifth draft: its embedding may be no number."""


class Case(NamedTuple):
    """A sequence before a step: its known tokens, the drafts of the step, and the rows of them that will count."""

    known: int
    drafts: int
    count: int


@st.composite
def cases(draw: st.DrawFn, most: int = 400) -> list[Case]:
    """Sequences of which at least one has drafts. They often end near the end of a block of 16 tokens."""
    made = []
    for least in (1, *[0] * draw(st.integers(0, 3))):
        known = draw(st.one_of(st.integers(1, most), st.sampled_from([1, 2, 12, 15, 16, 17, 31, 32, 47, 255, 256, 257]))) % most
        drafts = draw(st.integers(least, 20))
        made.append(Case(max(1, known), drafts, draw(st.integers(1, drafts + 1))))
    return made


class _Row(NamedTuple):
    """A sequence on its own blocks, which are others in each KV group."""

    seq_id: SeqId
    tokens: list[int]
    tables: tuple[tuple[BlockId, ...], ...]
    groups: tuple[KvGroup, ...]

    def piece(self, start: int, end: int, samples: int = 0) -> SequenceSlice:
        dead = [group.first_live(start) for group in self.groups]
        live = tuple((NULL_BLOCK,) * count + table[count:] for count, table in zip(dead, self.tables, strict=True))
        return SequenceSlice(self.seq_id, start, tuple(self.tokens[start:end]), live, (GREEDY,) * samples)


@torch.inference_mode()
def check_drafts(model: Model, pools: Sequence[KvPool], cases: list[Case], seed: int, *, company: bool = True) -> None:
    """Compute a step with drafts, and the same tokens one by one. pools: those of all ranks.

    company: sequences without drafts and a chunk of another prompt are in the step with drafts.
    """
    rng, size = random.Random(seed), pools[0].spec.block_size
    caches = [cache for kv in pools for cache in kv.caches]
    free = [rng.sample(range(cache.num_blocks), cache.num_blocks) for cache in pools[0].caches]
    rows = []
    for i, (known, drafts, _) in enumerate([*cases, Case(40, 0, 1)]):
        tables = tuple(tuple(BlockId(blocks.pop()) for _ in range(-(-(known + drafts) // size))) for blocks in free)
        tokens = [rng.randrange(ILL) for _ in range(known)]
        tokens += [ILL if rng.random() < 0.2 else rng.randrange(ILL) for _ in range(drafts)]
        rows.append(_Row(SeqId(i), tokens, tables, pools[0].spec.groups))
    *rows, other = rows
    prompts = [row.piece(0, case.known - 1) for row, case in zip(rows, cases, strict=True) if case.known > 1]
    for cache in caches:  # what a block held for an earlier owner changes nothing
        cache.blocks.random_(256, generator=torch.Generator().manual_seed(seed))
    if prompts:
        model.forward(StepPlan(tuple(prompts)), [])
    before = [cache.blocks.clone() for cache in caches]

    logits: dict[tuple[int, int], torch.Tensor] = {}
    expected: dict[int, list[torch.Tensor]] = {}
    for turn in range(max(case.drafts for case in cases) + 1):
        chosen = [i for i, case in enumerate(cases) if case.drafts >= turn]
        pieces = [rows[i].piece(cases[i].known - 1 + turn, cases[i].known + turn, 1) for i in chosen]
        found = model.forward(StepPlan(tuple(pieces), len(pieces)), list(range(len(pieces))))
        assert found is not None
        for i, values in zip(chosen, found.values.clone(), strict=True):
            logits[i, turn] = values
        for i in chosen:
            if turn + 1 == cases[i].count:
                expected[i] = stored(caches, rows[i].tables, cases[i].known + turn, size)

    for cache, blocks in zip(caches, before, strict=True):
        cache.blocks.copy_(blocks)
    order = sorted(range(len(cases)), key=lambda i: cases[i].drafts > 0)
    pieces = [rows[i].piece(cases[i].known - 1, cases[i].known + cases[i].drafts, cases[i].drafts + 1) for i in order]
    plain = sum(case.drafts == 0 for case in cases)
    plan = StepPlan((*pieces, *([other.piece(0, 37)] if company else [])), plain)
    assert [bool(piece.drafts) for piece in plan.slices] == [cases[i].drafts > 0 for i in order] + [False] * company
    found = model.forward(plan, plan.sampled_rows)
    assert found is not None
    keys = [(i, turn) for i in order for turn in range(cases[i].drafts + 1)]
    for key, values in zip(keys, found.values, strict=True):
        assert same(values, logits[key]), f"row {key[1]} of sequence {key[0]}"
    if pools[0].spec.quantised:
        model.settle_drafts([*(cases[i].count for i in order), *[1] * company])
    for i, (known, _, count) in enumerate(cases):
        kept = stored(caches, rows[i].tables, known - 1 + count, size)
        assert all(map(same, kept, expected[i])), f"KV of sequence {i}"


def stored(caches: Sequence[KvCache], tables: tuple[tuple[BlockId, ...], ...], tokens: int, size: int) -> list[torch.Tensor]:
    """Return the numbers of the first tokens in each KV group of each pool, and all scales of their blocks."""
    found = []
    for number, cache in enumerate(caches):
        blocks = list(tables[number % len(tables)][: -(-tokens // size)])
        for part in cache.parts:
            found.append(part.data[blocks].movedim(3, 1).flatten(0, 1)[:tokens].clone())
            if part.scales is not None:
                found.append(part.scales[blocks])
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether all numbers are equal, and the same ones are no numbers."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
