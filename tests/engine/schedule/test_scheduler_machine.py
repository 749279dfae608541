"""Random histories on a pool of ten blocks: nothing is lost, everyone finishes, preemption and drafts are invisible in the
output.

The model is a function of all tokens so far, so any wrong token, position or index shows in the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.core.block_pools import BlockPools, TableReservation
from pdserve.core.ids import NULL_BLOCK, BlockId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.step_plan import NO_DRAFTS, NO_TOKEN, Drafts, Sampled, SequenceSlice, StepPlan
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind

BLOCKS, BLOCK, EOS, VOCAB = 10, 4, 3, 23
LIMIT = BLOCKS * BLOCK
FAILS_EVERY = 29
"""Of so many rows, one has logits that are no numbers."""


def least_blocks(group: KvGroup) -> int:
    """Return the fewest blocks of a pool that takes every request."""
    return next(count for count in range(1, BLOCKS + 1) if group.longest_table(count) is None or count == BLOCKS)


def model(tokens: tuple[int, ...]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def expected_output(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    tokens = list(prompt)
    while True:
        tokens.append(model(tuple(tokens)))
        count = len(tokens) - len(prompt)
        if tokens[-1] == EOS or count == params.max_tokens or len(tokens) == LIMIT:
            return tokens[len(prompt) :]


# Half of the prompts are one of a few that begin alike, some of whole blocks only: what prefix caching is about.
ALIKE = tuple((1,) * count + tail for count in (BLOCK, 2 * BLOCK, 4 * BLOCK) for tail in ((), (2,), (3,) * BLOCK))
random_prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LIMIT - 1).map(tuple)
prompts = st.one_of(st.sampled_from(ALIKE), random_prompts)
lengths = st.integers(1, 30)
priorities = st.integers(-1, 1)
targets_s = st.sampled_from([0.0, 0.0, 0.004, 0.02])
STEP_S, TOKEN_S = 0.002, 0.001


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the engine thread, its commands, and a KV memory of (sequence, tokens up to here) per slot."""

    @initialize(
        seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
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
        self.outputs: dict[SeqId, list[int]] = {}
        self.inbound: dict[SeqId, TableReservation] = {}
        self.leases: list[SeqId] = []
        self.quarantined: list[tuple[SeqId, TableReservation]] = []
        self.finished: list[SeqId] = []
        self.steps = 0

    def ask(self, prompt: tuple[int, ...], length: int, kind: SequenceKind) -> tuple[SeqId, SamplingParams]:
        seq_id, params = SeqId(len(self.asked)), SamplingParams(max_tokens=length)
        self.asked[seq_id] = (prompt, params, kind)
        return seq_id, params

    @rule(prompt=prompts, length=lengths, priority=priorities, lent=st.booleans(), tpot_s=targets_s)
    def add(self, prompt: tuple[int, ...], length: int, priority: int, lent: bool, tpot_s: float) -> None:
        kind = SequenceKind.LENT if lent else SequenceKind.LOCAL
        seq_id, params = self.ask(prompt, length, kind)
        self.outputs[seq_id] = []
        self.scheduler.add(seq_id, RequestSpec(prompt, params, priority, tpot_s=tpot_s), kind=kind)

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

    @rule(prompt=prompts, length=lengths, priority=priorities, local=st.booleans(), tpot_s=targets_s)
    def reserve(self, prompt: tuple[int, ...], length: int, priority: int, local: bool, tpot_s: float) -> None:
        seq_id, params = self.ask(prompt, length, SequenceKind.LOCAL if local else SequenceKind.INBOUND)
        before, live = self.pool.counts(), self.scheduler.num_live
        room = self.scheduler.reserve(seq_id, RequestSpec(prompt, params, priority, tpot_s=tpot_s), local_prefill=local)
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

    @rule(data=st.data())
    def step_with_drafts(self, data: st.DataObject) -> None:
        """Each sequence gets drafts of its true output, some of them replaced by a wrong id."""
        drafts = {}
        for seq_id, output in sorted(self.outputs.items()):
            prompt, params, _ = self.asked[seq_id]
            right = expected_output(prompt, params)[len(output) :] + [0] * 3
            wrong = data.draw(st.sets(st.integers(0, 6)))
            count = data.draw(st.integers(0, 7))
            drafts[seq_id] = tuple((token + (i in wrong)) % VOCAB for i, token in enumerate(right[:count]))
        if data.draw(st.booleans()):
            self.draft_into_blocks(data.draw(st.integers(1, 7)))
        self.step(drafts)

    def draft_into_blocks(self, most: int) -> None:
        """A drafter computes KV of the last token of each sequence and of wrong drafts, into the blocks of the sequence."""
        written: set[tuple[int, BlockId, int]] = set()
        for view in self.scheduler.draft_views(most):
            if (view := self.scheduler.with_blocks(view)) is None:
                continue
            last = len(view.tokens) - 1
            for position in range(last, last + view.most + 1):
                for group, table in enumerate(view.block_tables):
                    slot = (group, table[position // BLOCK], position % BLOCK)
                    assert slot[1] != NULL_BLOCK, "a draft would be written into no block"
                    assert slot not in written
                    written.add(slot)
                    self.memory[slot] = VOCAB
            for group, window in enumerate(self.windows):
                first = 0 if window is None else max(0, last - window + 1)
                assert NULL_BLOCK not in view.block_tables[group][first // BLOCK : last // BLOCK + 1], "it sees a dead block"

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
        sampled = self.execute(plan)
        for i in [i for i in range(len(sampled)) if (self.steps + i) % FAILS_EVERY == 0]:
            sampled[i] = (NO_TOKEN, None)
        self.steps += 1
        self.scheduler.took(STEP_S + TOKEN_S * plan.num_tokens)
        for seq_id in aborted:
            self.scheduler.abort(seq_id)
            self.outputs.pop(seq_id, None)
            self.inbound.pop(seq_id, None)
        outcome = self.scheduler.collect(sampled)
        for seq_id in outcome.failed:
            del self.outputs[seq_id]
        for token in outcome.tokens:
            output = self.outputs[token.seq_id]
            assert token.output_index == len(output)
            output.append(token.token_id)
            if token.finish_reason is not None or self.asked[token.seq_id][2] is SequenceKind.LENT:
                self.finish(token.seq_id, token.finish_reason)

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
            sampled += [(model(text[: last + 1]), None) for last in range(end - len(piece.samples), end)]
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
            self.step()
            self.books_agree()
        assert not self.outputs, "starved"
        while self.leases:
            self.lease_ends()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total
        assert not self.scheduler.has_work


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
