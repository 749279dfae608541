"""Random histories on a pool of ten blocks: nothing is lost, everyone finishes, preemption and drafts are invisible in the
output.

The model is a function of all tokens so far, and of seed, index, penalties, bans and grammar as a sampler's draw is, so any
wrong token, position or state shows in the output. A copy of the model drafts as well, and leaves KV of no use behind.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from pdserve.core.block_pools import BlockPools, TableReservation
from pdserve.core.ids import NULL_BLOCK, BlockId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, LogitEdits, SamplingParams
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.core.step_plan import NO_DRAFTS, NO_TOKEN, Drafts, Sampled, SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from tests.sim.draft_mutants import HISTORY_MUTANTS
from tests.sim.mutants import Mutant

BLOCKS, BLOCK, EOS, VOCAB = 10, 4, 3, 23
LIMIT = BLOCKS * BLOCK
FAILS_EVERY = 61
"""Of so many rows, one has logits that are no numbers."""


def least_blocks(group: KvGroup) -> int:
    """Return the fewest blocks of a pool that takes every request."""
    return next(count for count in range(1, BLOCKS + 1) if group.longest_table(count) is None or count == BLOCKS)


class Stride:
    """A grammar: no token is within `least` of the one before it, and after token 0 nothing follows."""

    failure: str | None = None

    def __init__(self, least: int, taken: tuple[int, ...] = ()) -> None:
        self.least = least
        self.taken = taken

    @property
    def ended(self) -> bool:
        return self.taken[-1:] == (0,)

    def catch_up(self, tokens: Sequence[int], prompt_len: int) -> None:
        for token_id in tokens[prompt_len + len(self.taken) :]:
            assert self.allows(token_id)
            self.taken += (token_id,)

    def after(self, token_id: int) -> Stride | None:
        return Stride(self.least, (*self.taken, token_id)) if self.allows(token_id) else None

    def allows(self, token_id: int) -> bool:
        return not self.taken or (not self.ended and abs(token_id - self.taken[-1]) > self.least)

    def mask(self) -> bytes | None:
        return sum(1 << token_id for token_id in range(VOCAB) if self.allows(token_id)).to_bytes(3, "little")

    def forced(self) -> tuple[int, ...]:
        return ()


def model(tokens: tuple[int, ...], spec: SampleSpec) -> int:
    """Draw as a sampler does: the seed and the index decide a draw that is not greedy, and edits, bans and mask every draw."""
    edits = spec.edits and sorted(zip(spec.edits.seen_ids, spec.edits.output_counts, strict=True))
    drawn = () if spec.params.greedy else (spec.params.seed, spec.output_index)
    token_id = zlib.crc32(bytes(tokens), zlib.crc32(repr((drawn, edits or None)).encode())) % VOCAB
    mask = None if spec.grammar is None else int.from_bytes(spec.grammar.mask() or b"", "little")
    while token_id in spec.banned_ids or (mask is not None and not mask >> token_id & 1):
        token_id = (token_id + 1) % VOCAB
    return token_id


def stride_of(params: SamplingParams) -> Stride | None:
    return Stride(params.seed % 3) if params.seed % 2 and not params.min_tokens else None


def expected_output(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    output: list[int] = []
    stops = (*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids)
    while True:
        count, grammar = len(output), stride_of(params)
        edits = LogitEdits(params, len(prompt)) if params.edits_logits else None
        if edits is not None:
            edits.catch_up([*prompt, *output])
        if grammar is not None:
            grammar.catch_up([*prompt, *output], len(prompt))
        banned = stops if count < params.min_tokens else ()
        output.append(model((*prompt, *output), SampleSpec(params, count, banned, edits, grammar)))
        if output[-1] in stops and count + 1 >= params.min_tokens:
            return output
        if (grammar is not None and output[-1] == 0) or count + 1 == params.max_tokens or len(prompt) + count + 1 == LIMIT:
            return output


# Half of the prompts are one of a few that begin alike, some of whole blocks only: what prefix caching is about.
ALIKE = tuple((1,) * count + tail for count in (BLOCK, 2 * BLOCK, 4 * BLOCK) for tail in ((), (2,), (3,) * BLOCK))
random_prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LIMIT - 1).map(tuple)
short_prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple)  # which leave room for drafts
prompts = st.one_of(st.sampled_from(ALIKE), random_prompts, short_prompts, short_prompts, short_prompts)
lengths = st.integers(1, 30)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    """A third of the requests are plainly greedy."""
    length = draw(lengths)
    if not draw(st.integers(0, 2)):
        return SamplingParams(max_tokens=length, temperature=0.0)
    return SamplingParams(
        max_tokens=length,
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 5)),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 0, 1, min(length, 6)])),
        stop_token_ids=draw(st.sampled_from([(), (5, 7)])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
    )


draft_limits = st.sampled_from([None, None, 0, 2])
priorities = st.integers(-1, 1)
targets_s = st.sampled_from([0.0, 0.0, 0.004, 0.02])
STEP_S, TOKEN_S = 0.002, 0.001


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine thread, its commands, and a KV memory of (sequence, tokens up to here) per slot."""

    @initialize(
        seqs=st.integers(1, 8),
        budget=st.integers(1, 24),
        salt=st.sampled_from([None, b"model"]),
        whole=st.sampled_from([(BLOCKS,), (), (BLOCKS + 3,)]),
        windows=st.lists(st.tuples(st.sampled_from([None, 1, 4, 6, 13]), st.sampled_from([0, 2, BLOCKS])), max_size=2),
    )
    def start(
        self, seqs: int, budget: int, salt: bytes | None, whole: tuple[int, ...], windows: list[tuple[int | None, int]]
    ) -> None:
        """Make groups without a window, and groups with one, whose pools have the least blocks, or a few more."""
        if not whole and not windows:
            windows = [(4, 0)]
        self.windows = [None for _ in whole] + [window for window, _ in windows]
        layouts = [KvGroup((0,), ((1, 1),), BLOCK, "float32", window) for window in self.windows]
        more = [n for _, n in windows]
        sizes = [*whole, *[least_blocks(one) + n for one, n in zip(layouts[len(whole) :], more, strict=True)]]
        self.pool = BlockPools(*sizes, layouts=layouts)
        self.scheduler = Scheduler(
            self.pool,
            BLOCK,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=LIMIT,
            eos_token_ids=(EOS,),
            prefix_salt=salt,
        )
        self.largest_step = self.budget = budget
        self.seqs = self.slots = min(seqs, budget)
        self.memory: dict[tuple[int, BlockId, int], int] = {}
        self.asked: dict[SeqId, tuple[tuple[int, ...], SamplingParams, SequenceKind]] = {}
        self.limits: dict[SeqId, int | None] = {}
        self.counts: dict[SeqId, DraftCounts] = {}
        self.outputs: dict[SeqId, list[int]] = {}
        self.inbound: dict[SeqId, TableReservation] = {}
        self.leases: list[SeqId] = []
        self.quarantined: list[tuple[SeqId, TableReservation]] = []
        self.finished: list[SeqId] = []
        self.steps = 0

    def ask(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        tpot_s: float,
        kind: SequenceKind,
        limit: int | None,
    ) -> tuple[SeqId, RequestSpec]:
        seq_id = SeqId(len(self.asked))
        self.asked[seq_id] = (prompt, params, kind)
        self.limits[seq_id] = limit
        return seq_id, RequestSpec(prompt, params, priority, tpot_s=tpot_s, draft_limit=limit)

    @rule(prompt=prompts, params=samplings(), priority=priorities, lent=st.booleans(), tpot_s=targets_s, limit=draft_limits)
    def add(
        self, prompt: tuple[int, ...], params: SamplingParams, priority: int, lent: bool, tpot_s: float, limit: int | None
    ) -> None:
        kind = SequenceKind.LENT if lent else SequenceKind.LOCAL
        seq_id, spec = self.ask(prompt, params, priority, tpot_s, kind, limit)
        self.outputs[seq_id] = []
        self.scheduler.add(seq_id, spec, kind=kind, grammar=stride_of(params))

    @rule(data=st.data())
    def set_budget(self, data: st.DataObject) -> None:
        self.budget = data.draw(st.integers(self.seqs, self.largest_step))
        self.scheduler.set_budget(self.budget)

    @rule(data=st.data())
    def set_max_num_seqs(self, data: st.DataObject) -> None:
        """Nobody who runs stops; who comes waits until fewer run."""
        running = self.scheduler.num_running
        self.slots = data.draw(st.integers(1, self.seqs))
        self.scheduler.set_max_num_seqs(self.slots)
        assert self.scheduler.max_num_seqs == self.slots
        assert self.scheduler.num_running == running

    @rule(prompt=prompts, params=samplings(), priority=priorities, local=st.booleans(), tpot_s=targets_s, limit=draft_limits)
    def reserve(
        self, prompt: tuple[int, ...], params: SamplingParams, priority: int, local: bool, tpot_s: float, limit: int | None
    ) -> None:
        kind = SequenceKind.LOCAL if local else SequenceKind.INBOUND
        seq_id, spec = self.ask(prompt, params, priority, tpot_s, kind, limit)
        before, live = self.pool.counts(), self.scheduler.num_live
        room = self.scheduler.reserve(seq_id, spec, local_prefill=local, grammar=stride_of(params))
        if room is None:
            assert self.pool.counts() == before
            return
        assert live < self.slots
        self.outputs[seq_id] = []
        if not local:
            self.inbound[seq_id] = room

    @precondition(lambda self: self.inbound)
    @rule(data=st.data())
    def transfer_ends(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.inbound)))
        prompt, params, _ = self.asked[seq_id]
        room = self.inbound.pop(seq_id)
        first = expected_output(prompt, params)[0]
        if len(expected_output(prompt, params)) == 1:
            self.finish(seq_id, None)
            self.scheduler.abort(seq_id)
            return
        for position in range(room.hits * BLOCK, len(prompt)):  # the rest was found here
            for group, table in enumerate(room.block_tables):
                if (block := table[position // BLOCK]) != NULL_BLOCK:
                    self.memory[group, block, position % BLOCK] = prompt[position]
        self.outputs[seq_id].append(first)
        self.scheduler.activate(seq_id, first)

    @precondition(lambda self: self.outputs)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.outputs)))
        room = self.inbound.pop(seq_id, None)
        if room is not None and in_flight:
            self.quarantined.append((seq_id, room))
        self.scheduler.abort(seq_id, read_in_flight=in_flight)
        del self.outputs[seq_id]

    @precondition(lambda self: self.leases)
    @rule()
    def lease_ends(self) -> None:
        self.scheduler.return_lease(self.leases.pop(0))

    @precondition(lambda self: self.quarantined)
    @rule()
    def read_stops(self) -> None:
        """Until then it may have written whatever it likes into the blocks that were its own."""
        seq_id, room = self.quarantined.pop(0)
        for group, table in enumerate(room.block_tables):
            self.memory.update({(group, block, slot): VOCAB for block in table[room.hits :] for slot in range(BLOCK)})
        self.scheduler.end_quarantine(seq_id)

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def step_with_aborts(self, data: st.DataObject) -> None:
        """Some requests end, perhaps twice, while the model computes the step."""
        self.step(aborted=data.draw(st.lists(st.sampled_from(sorted(self.outputs)), max_size=3)))

    @rule(steps=st.integers(1, 6), pattern=st.integers(0, 999), copied=st.integers(0, 4), data=st.data())
    def steps_with_drafts(self, steps: int, pattern: int, copied: int, data: st.DataObject) -> None:
        """Each sequence gets drafts of its true output, some of them replaced by a wrong id. Some requests end meanwhile."""
        for step in range(steps):
            self.draft_by_copy(copied)
            ends = st.lists(st.sampled_from(sorted(self.outputs)), max_size=1) if self.outputs and not step else st.just([])
            self.step(self.drafts(pattern + step), data.draw(ends))

    def drafts(self, pattern: int) -> Drafts:
        """Return drafts of all sequences, of which every fifth or so is wrong. Some go on behind the end of the output."""
        drafts = {}
        for seq_id, output in sorted(self.outputs.items()):
            prompt, params, _ = self.asked[seq_id]
            pattern = zlib.crc32(bytes(str(pattern), "ascii"))
            right = expected_output(prompt, params)[len(output) :] + [EOS] * 3
            wrong = {pattern % 5, pattern // 5 % 11}
            drafts[seq_id] = tuple((token + (i in wrong)) % VOCAB for i, token in enumerate(right[: pattern // 55 % 8]))
        return drafts

    def draft_by_copy(self, most: int) -> None:
        """Let a copy of the model write KV of its drafts behind the computed tokens, where only they may lie."""
        for view in self.scheduler.draft_views(most) if most else ():
            limit = self.limits[view.seq_id]
            assert limit is None or view.most <= limit
            prompt, _, _ = self.asked[view.seq_id]
            assert view.tokens == [*prompt, *self.outputs[view.seq_id]]
            if (got := self.scheduler.with_blocks(view)) is not None:
                for position in range(len(view.tokens) - 1, len(view.tokens) - 1 + got.most):
                    for group, table in enumerate(got.block_tables):
                        assert table[position // BLOCK] != NULL_BLOCK
                        self.memory[group, table[position // BLOCK], position % BLOCK] = VOCAB

    @rule(aborted=st.just(()))
    def step(self, drafts: Drafts = NO_DRAFTS, aborted: Sequence[SeqId] = ()) -> None:
        had_work, ran = self.scheduler.has_work, self.scheduler.num_running
        plan = self.scheduler.plan(drafts)
        self.leases += [a.seq_id for a in self.scheduler.take_admitted()]
        assert self.scheduler.num_running <= max(ran, self.slots), "more are admitted than may run"
        if not plan.slices:
            assert not self.scheduler.has_work, "an engine with work left would spin"
            return
        assert had_work
        assert plan.num_tokens <= self.budget
        assert len(plan.specs) <= self.seqs, "more rows draw a token than there is memory for"
        for piece in plan.slices:
            limit = self.limits[piece.seq_id]
            assert limit is None or len(piece.drafts) <= limit, "more drafts than the request allows"
        sampled = self.execute(plan)
        for i in [i for i in range(len(sampled)) if (self.steps + i) % FAILS_EVERY == 0]:
            sampled[i] = (NO_TOKEN, None)
        self.steps += 1
        self.scheduler.took(STEP_S + TOKEN_S * plan.num_tokens)
        for seq_id in aborted:
            self.scheduler.abort(seq_id)
            self.outputs.pop(seq_id, None)
            self.inbound.pop(seq_id, None)
        self.count(plan, sampled, aborted)
        outcome = self.scheduler.collect(sampled)
        for token in outcome.tokens:
            assert token.speculation == self.counts.get(token.seq_id)
        for seq_id in outcome.failed:
            del self.outputs[seq_id]
        for token in outcome.tokens:
            output = self.outputs[token.seq_id]
            assert token.output_index == len(output)
            output.append(token.token_id)
            if token.finish_reason is not None or self.asked[token.seq_id][2] is SequenceKind.LENT:
                self.finish(token.seq_id, token.finish_reason)

    def count(self, plan: StepPlan, sampled: list[Sampled], aborted: Sequence[SeqId]) -> None:
        """Count the drafts of the step, and spoil the KV of those that were wrong."""
        drawn = iter(sampled)
        for piece in plan.slices:
            ids, right = [next(drawn)[0] for _ in piece.samples], 0
            while right < len(piece.drafts) and piece.drafts[right] == ids[right]:
                right += 1
            for position in range(piece.start + 1 + right, piece.start + 1 + len(piece.drafts)):
                for group, table in enumerate(piece.block_tables):
                    self.memory[group, table[position // BLOCK], position % BLOCK] = VOCAB
            if piece.drafts and piece.seq_id not in aborted:
                counts = self.counts.get(piece.seq_id, NO_COUNTS)
                self.counts[piece.seq_id] = counts.plus(DraftCounts(1, len(piece.drafts), right, (1,) * right))

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Write the slice's tokens into their blocks, then read what each token sees back through the block table. Free blocks
        hold nothing of use."""
        for group, pool in enumerate(self.pool.groups):
            self.memory.update({(group, block, slot): VOCAB for block in pool._free for slot in range(BLOCK)})
        ends = accumulate(len(piece.token_ids) for piece in plan.slices)
        rows = [end - k for end, piece in zip(ends, plan.slices, strict=True) for k in range(len(piece.samples), 0, -1)]
        assert plan.sampled_rows == rows, "the model would draw after other tokens"
        sampled: list[Sampled] = []
        written: set[tuple[int, BlockId, int]] = set()
        for piece in plan.slices:
            for offset, token in enumerate(piece.token_ids):
                position = piece.start + offset
                for group, table in enumerate(piece.block_tables):
                    slot = (group, table[position // BLOCK], position % BLOCK)
                    assert slot not in written
                    written.add(slot)
                    self.memory[slot] = token
            end = piece.start + len(piece.token_ids)
            assert end <= LIMIT - 1, "a token behind the last one that can be drawn"
            prompt, _, _ = self.asked[piece.seq_id]
            text = (*prompt, *self.outputs[piece.seq_id])[: piece.start] + piece.token_ids
            for group, window in enumerate(self.windows):
                for query in range(piece.start, end) if window is not None else ():
                    first = max(0, query - window + 1)
                    assert self.read(piece, group, first, query + 1) == text[first : query + 1], "a token sees wrong KV"
            assert all(self.read(piece, group, 0, end) == text for group, window in enumerate(self.windows) if window is None)
            ends_at = range(end - len(piece.samples), end)
            sampled += [(model(text[: last + 1], spec), None) for last, spec in zip(ends_at, piece.samples, strict=True)]
        return sampled

    def read(self, piece: SequenceSlice, group: int, first: int, end: int) -> tuple[int, ...]:
        """Return the tokens [first, end) of a sequence, as the blocks of a group hold them."""
        table = piece.block_tables[group]
        assert NULL_BLOCK not in table[first // BLOCK : -(-end // BLOCK)], "a token sees a dead block"
        return tuple(self.memory[group, table[p // BLOCK], p % BLOCK] for p in range(first, end))

    def finish(self, seq_id: SeqId, reason: FinishReason | None) -> None:
        prompt, params, kind = self.asked[seq_id]
        output = self.outputs.pop(seq_id)
        expected = expected_output(prompt, params)
        if kind is SequenceKind.LENT:
            assert output == expected[:1]
        elif reason is not None:
            assert output == expected
        self.finished.append(seq_id)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()
            assert self.scheduler.num_live == len(self.outputs)

    def teardown(self) -> None:
        """Everyone who is still there finishes once the outside world answers, and then nothing is held."""
        if not hasattr(self, "scheduler"):
            return
        while self.quarantined:
            self.read_stops()
        for seq_id in sorted(self.inbound):
            self.scheduler.abort(seq_id)
            del self.outputs[seq_id], self.inbound[seq_id]
        for _ in range(4000):
            if not self.outputs:
                break
            while self.leases:
                self.lease_ends()
            self.step(self.drafts(self.steps) if self.steps % 4 else NO_DRAFTS)
            self.books_agree()
        assert not self.outputs, "starved"
        while self.leases:
            self.lease_ends()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total
        assert not self.scheduler.has_work


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.quick("drafts_go*", "penalties*", "the_last_right*")
@pytest.mark.parametrize("mutant", HISTORY_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_drafts_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - each breaks something else
        run_state_machine_as_test(
            SchedulerMachine,
            settings=settings(
                max_examples=300,
                stateful_step_count=40,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
