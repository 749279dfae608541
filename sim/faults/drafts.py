"""Speculation in simulated engines: the production choice of drafts over production drafters, a drafter that knows the oracle's
output with errors, and a model that drafts over the KV of the engine.

The time of a step by its rows changes from phase to phase, so that drafts pay in some phases and not in others. A watch counts
the drafts by itself, and compares what the engine takes, verifies, tells and remembers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.core.step_plan import Sampled, SampleSpec, StepPlan
from pdserve.engine.drafting.api import NO_DRAFT, Draft, DraftView, ModelDrafter
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.drafting.costs import StepCosts
from pdserve.engine.drafting.forced import ForcedDrafter
from pdserve.engine.drafting.lookup import LookupDrafter
from pdserve.engine.schedule.collect import OutputToken
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind, SequenceState
from sim.faults.oracle import BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE, answer

PHASE_S: Final = 1.5
SpecOf = Callable[[SeqId], RequestSpec]


@dataclass(frozen=True, slots=True)
class Drafting:
    """The way in which an engine drafts."""

    right: float
    """The share of the drafts by the drafter that knows the output, and by the model, that are right."""
    token_s: tuple[float, ...]
    """The time of one more token of a step, in each phase of `PHASE_S`, again and again."""
    most: int = 8
    place_s: float | None = None
    """The time of one place that the model drafts. None: no model drafts."""

    def token_s_at(self, now_s: float) -> float:
        """Return the time of one more token of a step that begins at this time, in seconds."""
        return self.token_s[int(now_s / PHASE_S) % len(self.token_s)]


def draw_drafting(rng: random.Random) -> Drafting | None:
    """Draw how the engines of a run draft. None, in a sixth of the runs: they do not."""
    free, cheap, dear = 0.00002, 0.0003, 0.004
    phases = rng.choice(((free,), (cheap,), (cheap,), (dear,), (free, dear), (dear, cheap, free)))
    drafting = Drafting(
        rng.choice((0.3, 0.7, 0.95)), phases, rng.choice((2, 8, 8)), rng.choice((None, None, 0.0001, 0.0001, 0.002))
    )
    return None if rng.random() < 1 / 6 else drafting


class OracleDrafter:
    """Knows the output of each sequence, with errors. Some drafts go on behind its end."""

    def __init__(self, spec_of: SpecOf, rng: random.Random, right: float) -> None:
        self._spec_of = spec_of
        self._rng = rng
        self._right = right
        self.known: dict[SeqId, tuple[int, ...]] = {}

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return a draft for most of these sequences."""
        return [self._propose(view) if self._rng.random() < 0.8 else NO_DRAFT for view in views]

    def _propose(self, view: DraftView) -> Draft:
        if view.seq_id not in self.known:
            spec = self._spec_of(view.seq_id)
            self.known[view.seq_id] = answer(spec.prompt_ids, spec.sampling, spec.constraint).ids
        at, count = len(view.tokens) - view.prompt_len, self._rng.randint(1, view.most)
        ids = (*self.known[view.seq_id][at : at + count], *(self._other() for _ in range(count)))[:count]
        return Draft(tuple(i if self._rng.random() < self._right else self._other() for i in ids), f"oracle {self._right}")

    def _other(self) -> int:
        return self._rng.randrange(VOCAB_SIZE)

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Forget a sequence."""
        self.known.pop(seq_id, None)


class SimDraftModel:
    """A model that drafts over the KV of the engine, and mostly draws what the engine draws. What it writes there is of no use
    to anybody else."""

    kind = "model"
    needs_blocks = True

    def __init__(
        self, drafting: Drafting, rng: random.Random, draw: Callable[[list[int], SampleSpec], int], spoil: Callable[..., None]
    ) -> None:
        """draw: the engine's draw after some tokens. spoil: writes KV of no use, for positions of block tables."""
        assert drafting.place_s is not None
        self.most = drafting.most
        self._place_s = drafting.place_s
        self._right = drafting.right
        self._rng = rng
        self._draw = draw
        self._spoil = spoil
        self.spent_s = 0.0
        """The time that its last proposal took."""
        self.took_s = 0.0
        """The time of its drafts since the engine has last looked."""

    def place_s(self, sequences: int, read: int) -> float:
        """Return the time to draft one more place."""
        return self._place_s

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return a draft for each of these sequences."""
        drafts = [self._propose(view) for view in views]
        self.spent_s = self._place_s * max(len(draft.token_ids) for draft in drafts)
        self.took_s += self.spent_s
        return drafts

    def _propose(self, view: DraftView) -> Draft:
        assert view.draws is not None
        draws, tokens = view.draws(), list(view.tokens)
        while len(tokens) < len(view.tokens) + view.most:
            self._spoil(view.block_tables, (len(tokens) - 1,))
            token_id = self._draw(tokens, draws.spec)
            if self._rng.random() >= self._right:
                token_id = self._rng.randrange(VOCAB_SIZE)
            if token_id < 0:
                break
            tokens.append(token_id)
            if not draws.take(token_id):
                break
        return Draft(tuple(tokens[len(view.tokens) :]), self.kind)

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Know nothing of sequences."""


class WatchedLookup(LookupDrafter):
    """The production drafter. Asserts that each draft is a copy of tokens of the sequence, or of one with its cache salt."""

    def __init__(self, spec_of: SpecOf) -> None:
        super().__init__()
        self._spec_of = spec_of
        self._texts: dict[str, list[list[int]]] = {}
        self._salts: dict[SeqId, str] = {}

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return the drafts of the production drafter."""
        drafts = super().propose(views)
        for view, draft in zip(views, drafts, strict=True):
            salt = self._salts[view.seq_id] = self._spec_of(view.seq_id).cache_salt
            others = self._texts.get(salt, ())
            mine = [*view.tokens, *draft.token_ids]
            assert _begins(mine, draft.token_ids, len(view.tokens)) or any(
                _begins(text, draft.token_ids, len(text)) for text in others
            ), f"sequence {view.seq_id} gets the draft {draft}, which no sequence with its salt has"
        return drafts

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Forget a sequence."""
        super().forget(seq_id, tokens, group)
        self._texts.setdefault(self._salts.pop(seq_id, group.decode()), []).append(list(tokens))

    @property
    def live(self) -> set[SeqId]:
        """The sequences that it knows."""
        return set(self._live)


def _begins(text: Sequence[int], ids: tuple[int, ...], end: int) -> bool:
    """Tell whether these ids begin in the text, before `end`."""
    return any(tuple(text[at : at + len(ids)]) == ids for at in range(end))


class DraftWatch:
    """Watches the drafts of one engine, which it makes."""

    def __init__(
        self,
        drafting: Drafting,
        scheduler: Scheduler,
        rng: random.Random,
        step_s: float,
        draw: Callable[[list[int], SampleSpec], int],
        spoil: Callable[..., None],
        told: Callable[[int, int, DraftCounts | None], None],
    ) -> None:
        """draw, spoil: as of `SimDraftModel`. told: takes the seed of a request, the index of a token, and the counts that the
        engine tells with this token."""
        self._scheduler = scheduler
        self._spoil = spoil
        self._told = told
        self._seeds: dict[SeqId, int] = {}
        self._counts: dict[SeqId, DraftCounts] = {}
        self.all = NO_COUNTS
        """The drafts that the engine has verified."""
        rows = (1, 2, 4, 8, 16)
        costs = StepCosts([(n, step_s + drafting.token_s[0] * n) for n in rows])
        self._oracle, self._lookup = OracleDrafter(self._spec, rng, drafting.right), WatchedLookup(self._spec)
        self.model = None if drafting.place_s is None else SimDraftModel(drafting, rng, draw, spoil)
        model: ModelDrafter | None = self.model
        self.choice = DraftChoice((ForcedDrafter(), self._lookup, self._oracle), costs, most=drafting.most, model=model)

    def _spec(self, seq_id: SeqId) -> RequestSpec:
        return self._scheduler._sequences[seq_id].spec

    def planned(self, plan: StepPlan) -> None:
        """Check the drafts of a plan against the limits of the engine and of each request."""
        drawn = sum(spec.scored is None for spec in plan.specs)
        assert drawn <= self._scheduler._max_seqs, "more rows draw a token than there is memory for"
        assert plan.num_tokens <= self._scheduler.max_num_batched_tokens
        for piece in plan.slices:
            spec = self._spec(piece.seq_id)
            limit = spec.draft_limit
            assert limit is None or len(piece.drafts) <= limit, f"{len(piece.drafts)} drafts, and {limit} are allowed"
            end = min(len(spec.prompt_ids) + spec.sampling.max_tokens, MAX_MODEL_LEN)
            assert piece.start + len(piece.token_ids) < end, "a token behind the last one that can be drawn"

    def drawn(self, plan: StepPlan, sampled: Sequence[Sampled]) -> None:
        """Count the drafts of a step that is about to be collected. The KV of wrong ones is of no use from now on."""
        rest = iter(sampled)
        for piece in plan.slices:
            ids, right = [next(rest)[0] for _ in piece.samples], 0
            seq = self._scheduler._sequences[piece.seq_id]
            self._seeds[piece.seq_id] = seq.spec.sampling.seed
            if not piece.drafts:
                continue
            while right < len(piece.drafts) and piece.drafts[right] == ids[right]:
                right += 1
            self._spoil(piece.block_tables, range(piece.start + 1 + right, piece.start + len(piece.token_ids)))
            if seq.state is not SequenceState.ABORTING:
                counts = self._counts.get(piece.seq_id, NO_COUNTS)
                self._counts[piece.seq_id] = counts.plus(DraftCounts(1, len(piece.drafts), right, (1,) * right))
                self.all = self.all.plus(DraftCounts(1, len(piece.drafts), right, (1,) * right))

    def collected(self, tokens: Sequence[OutputToken], all_told: DraftCounts | None) -> None:
        """Check what the engine tells of a step. all_told: what it has told of all its drafts."""
        for token in tokens:
            counts = self._counts.get(token.seq_id)
            assert token.speculation == counts, f"the engine tells {token.speculation} instead of {counts}"
            self._told(self._seeds[token.seq_id], token.output_index, counts)
        assert all_told == self.all, f"the engine tells {all_told} instead of {self.all}"
        live = set(self._scheduler._sequences)
        for known in (self._seeds, self._counts):
            for seq_id in [seq_id for seq_id in known if seq_id not in live]:
                del known[seq_id]
        assert not self.leftovers(), self.leftovers()

    def leftovers(self) -> list[str]:
        """Return who knows a sequence that has ended. Empty: nobody does."""
        live, known = set(self._scheduler._sequences), {"lookup": self._lookup.live, "oracle": set(self._oracle.known)}
        known["odds"] = set(self.choice._odds._own)
        return [f"{name} knows ended sequences {sorted(ids - live)}" for name, ids in known.items() if ids - live]

    def final_blocks(self) -> list[set[BlockId]]:
        """Return the blocks of each group that are shared, or that a running prompt has lent and filled."""
        found = []
        for pool in self._scheduler._pool.groups:
            lent = [
                pool.blocks_of(Holder(HolderKind.LEASE, seq.seq_id))[: seq.computed // BLOCK_SIZE]
                for seq in self._scheduler._sequences.values()
                if seq.kind is SequenceKind.LENT
            ]
            found.append({*pool._hash_of, *chain.from_iterable(lent)})
        return found
