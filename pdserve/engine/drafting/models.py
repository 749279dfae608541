"""Drafters that compute with a model: a copy of the model's own weights in fewer bits, or a smaller model.

Both draw as the sequence itself would: with its parameters, its grammar and its random numbers. The draft of a random draw is
right when both models' distributions put the same token under the same number, which is most often where they are alike.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.step_plan import NO_TOKEN, Sampled, SequenceSlice, StepPlan
from pdserve.engine.drafting.api import NO_DRAFT, Draft, DraftView
from pdserve.engine.drafting.costs import StepCosts, StepSize
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.schedule.sequence import Ahead

CATCH_UP_TOKENS: Final = 256
"""A draft model computes at most so many tokens of prompts in one go: other sequences wait for it."""
FEW_TOKENS: Final = 16
"""A sequence that was left out for some steps, or verified drafts of lookups, computes so many tokens at once."""
CATCH_UP_SHARE: Final = 0.02
"""It spends at most this share of the time on prompts: nobody knows whether an output is long enough to pay for its own."""
MOST_SAVED_S: Final = 0.1
"""Time for prompts is saved up to so much: a first request after a pause waits no longer for it."""
Execute = Callable[[StepPlan], list[Sampled]]
Tables = tuple[tuple[BlockId, ...], ...]


@dataclass(slots=True)
class _Drafting:
    """A sequence for which tokens are drafted. `tables` are the blocks where their KV goes."""

    view: DraftView
    draws: Ahead
    tables: Tables
    packed: tuple[bytes, ...]
    tokens: list[int] = field(default_factory=list)

    def slice_of(self, start: int, ids: tuple[int, ...]) -> SequenceSlice:
        """Plan these tokens, and draw the one after them."""
        return SequenceSlice(self.view.seq_id, start, ids, self.tables, (self.draws.spec,), self.packed)


def _begin(view: DraftView, tables: Tables) -> _Drafting:
    assert view.draws is not None
    return _Drafting(view, view.draws(), tables, tuple([array("i", table).tobytes() for table in tables]))


class ModelSteps:
    """The steps of a drafter, and the time that they take."""

    def __init__(self, execute: Execute, costs: StepCosts) -> None:
        self._execute = execute
        self._costs = costs
        self.spent_s = 0.0
        """The time that the last proposal took, in seconds."""

    def place_s(self, sequences: int, read: int) -> float:
        """Return the expected time to draft one more place of so many sequences, which have `read` tokens, in seconds."""
        return self._costs.step_s(StepSize(sequences, read))

    def draft(self, going: list[_Drafting], first: StepPlan) -> None:
        """Draft place after place. first: the step that gives the first place; each later one computes the token before it."""
        plan, self.spent_s = first, 0.0
        while plan.slices:
            drawn = iter(self._computed(plan))
            left = []
            for one in going:
                token_id, _ = next(drawn)
                if token_id == NO_TOKEN:
                    continue
                one.tokens.append(token_id)
                if len(one.tokens) < one.view.most and one.draws.take(token_id):
                    left.append(one)
            going = left
            slices = [one.slice_of(len(one.view.tokens) + len(one.tokens) - 1, (one.tokens[-1],)) for one in going]
            plan = StepPlan(tuple(slices), len(slices))

    def _computed(self, plan: StepPlan) -> list[Sampled]:
        began_s = time.perf_counter()
        drawn = self._execute(plan)
        took_s = time.perf_counter() - began_s
        self.spent_s += took_s
        if plan.decodes == len(plan.slices):
            self._costs.learn(StepSize(plan.decodes, sum([piece.start for piece in plan.slices])), took_s)
        return drawn


class SelfDrafter(ModelSteps):
    """Drafts with the model's own weights in fewer bits, or with its first layers alone, over the KV of the model itself.

    The KV of drafts goes into the blocks of the sequence, behind its computed tokens, where the step that verifies them
    overwrites it. It is never behind a token that anybody else reads.
    """

    needs_blocks = True

    def __init__(self, execute: Execute, kv: KvPool, costs: StepCosts, kind: str, most: int) -> None:
        """execute: computes a step with the copy, over `kv`, the pool of the model. costs: the times of such steps. kind: the
        name of its drafts. most: the most drafts of a sequence."""
        super().__init__(execute, costs)
        self.kind = kind
        self.most = most
        self._kv = kv

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return a draft for each of these sequences, which have blocks for them."""
        going = [_begin(view, view.block_tables) for view in views]
        slices = tuple([one.slice_of(len(one.view.tokens) - 1, (one.view.tokens[-1],)) for one in going])
        kept = self._keep(views)
        self.draft(list(going), StepPlan(slices, len(slices)))
        for blocks, ids, before in kept:
            blocks[ids] = before
        return [Draft(tuple(one.tokens), self.kind) if one.tokens else NO_DRAFT for one in going]

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Know nothing of sequences."""

    def _keep(self, views: Sequence[DraftView]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the bytes of blocks whose older tokens a draft may change: a quantised block is rounded again as a whole."""
        kept = []
        for group, cache in enumerate(self._kv.caches):
            if cache.layout.quantised:
                size = cache.layout.block_size
                ids = torch.tensor([view.block_tables[group][(len(view.tokens) - 1) // size] for view in views])
                ids = ids.to(cache.device)
                kept.append((cache.blocks, ids, cache.blocks[ids]))
        return kept


@dataclass(slots=True)
class _Known:
    """A sequence that a draft model knows: its blocks in the draft model's pool, and the tokens whose KV they hold. The first
    `sure` of these are tokens of the sequence, the others are drafts."""

    blocks: list[BlockId] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sure: int = 0


class ModelDraft(ModelSteps):
    """Drafts with a smaller model of the same vocabulary, over KV of its own. That KV is never handed over: a decode worker
    computes it from the prompt, a part now and then, before the first drafts of a sequence."""

    needs_blocks = False
    kind = "draft model"

    def __init__(
        self, execute: Execute, costs: StepCosts, *, num_blocks: int, block_size: int, groups: int, longest: int, most: int
    ) -> None:
        """execute: computes a step of the draft model. num_blocks, block_size, groups: its pool. longest: the most tokens of a
        sequence that it takes. most: the most drafts of a sequence."""
        super().__init__(execute, costs)
        self.most = most
        self._block_size = block_size
        self._groups = groups
        self._longest = longest
        self._num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks)]
        self._saved_s, self._saved_at_s = MOST_SAVED_S, time.perf_counter()
        self._known: dict[SeqId, _Known] = {}

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return a draft for each of these sequences whose tokens have KV here, and compute that of some others."""
        going: list[_Drafting] = []
        slices: list[SequenceSlice] = []
        room = self._catch_up_tokens()
        for view in views:
            known = self._room_for(view)
            if known is None:
                continue
            start = _computed(known, view.tokens)
            ids = tuple(view.tokens[start:])
            if len(ids) > FEW_TOKENS:
                ids = ids[:room]
                room -= len(ids)
                self._saved_s -= self._costs.rows_s(len(ids)) if ids else 0.0
            if not ids:
                continue
            one = _begin(view, (tuple(known.blocks),) * self._groups)
            ends = start + len(ids) == len(view.tokens)
            piece = one.slice_of(start, ids)
            slices.append(piece if ends else piece._replace(samples=()))
            known.tokens[start:] = ids
            known.sure = len(known.tokens)
            if ends:
                going.append(one)
        slices.sort(key=lambda piece: len(piece.samples) == 0 or len(piece.token_ids) > 1)
        singles = sum(len(piece.token_ids) == 1 and bool(piece.samples) for piece in slices)
        order = {piece.seq_id: i for i, piece in enumerate(slices)}
        going.sort(key=lambda one: order[one.view.seq_id])
        self.draft(list(going), StepPlan(tuple(slices), singles))
        for one in going:
            self._known[one.view.seq_id].tokens.extend(one.tokens[:-1])
        drafts = {one.view.seq_id: Draft(tuple(one.tokens), self.kind) for one in going if one.tokens}
        return [drafts.get(view.seq_id, NO_DRAFT) for view in views]

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Free the blocks of a sequence."""
        known = self._known.pop(seq_id, None)
        if known is not None:
            self._free += known.blocks

    def _catch_up_tokens(self) -> int:
        """Return how many tokens of prompts may be computed now, by the time that was saved for it."""
        now_s = time.perf_counter()
        self._saved_s = min(self._saved_s + CATCH_UP_SHARE * (now_s - self._saved_at_s), MOST_SAVED_S)
        self._saved_at_s = now_s
        return CATCH_UP_TOKENS if self._saved_s >= self._costs.rows_s(CATCH_UP_TOKENS) or self._saved_s >= MOST_SAVED_S else 0

    def _room_for(self, view: DraftView) -> _Known | None:
        """Return the sequence with blocks for its tokens and drafts. None: it is too long, or no block is free."""
        end = len(view.tokens) + view.most
        known = self._known.get(view.seq_id)
        missing = ceil_div(end, self._block_size) - (len(known.blocks) if known is not None else 0)
        if end > self._longest or missing > len(self._free):
            return None
        if known is None:
            known = self._known[view.seq_id] = _Known()
        for _ in range(missing):
            known.blocks.append(self._free.pop())
        return known


def _computed(known: _Known, tokens: list[int]) -> int:
    """Return the number of first tokens whose KV is right: up to the first draft that was wrong, without the last token."""
    count, most = min(known.sure, len(tokens) - 1), min(len(known.tokens), len(tokens) - 1)
    while count < most and known.tokens[count] == tokens[count]:
        count += 1
    return count
