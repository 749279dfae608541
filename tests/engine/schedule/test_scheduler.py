"""The scheduler: one story a test. `test_scheduler_machine.py` runs it through random histories."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.errors import IllegalTransition
from pdserve.core.ids import NULL_BLOCK, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.step_plan import StepPlan
from pdserve.engine.schedule.scheduler import STEPS_A_LEVEL, Scheduler, StepOutcome
from pdserve.engine.schedule.sequence import SequenceKind

BLOCK = 4
EOS = 99


def make(num_blocks: int = 10, *, seqs: int = 8, budget: int = 8, max_len: int | None = None) -> Scheduler:
    limit = num_blocks * BLOCK if max_len is None else max_len
    pool = BlockPools(num_blocks)
    return Scheduler(pool, BLOCK, max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=limit, eos_token_ids=(EOS,))


def prompt(length: int) -> tuple[int, ...]:
    return tuple(range(1, length + 1))


def step(scheduler: Scheduler, token: int = 7) -> tuple[StepPlan, StepOutcome | None]:
    """Plan, draw `token` everywhere, collect."""
    plan = scheduler.plan()
    scheduler.check_invariants()
    if not plan.slices:
        return plan, None
    outcome = scheduler.collect([(token, None) for _ in plan.specs])
    scheduler.check_invariants()
    return plan, outcome


def assert_empty(scheduler: Scheduler) -> None:
    scheduler.check_invariants()
    assert scheduler.num_live == 0
    assert scheduler.queued_tokens == 0
    assert not scheduler.has_work
    counts = scheduler._pool.counts()
    assert counts.free == counts.total


def add(scheduler: Scheduler, seq_id: int, length: int, *, kind=SequenceKind.LOCAL, priority: int = 0, **params) -> SeqId:
    scheduler.add(SeqId(seq_id), RequestSpec(prompt(length), SamplingParams(**params), priority), kind=kind)
    return SeqId(seq_id)


def test_a_long_prompt_is_chunked_then_decoded_and_leaves_no_trace():
    scheduler = make(budget=8)
    add(scheduler, 1, 19, max_tokens=3)
    spans = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        spans += [(s.start, len(s.token_ids), len(s.samples) == 1) for s in plan.slices]
    assert spans == [(0, 8, False), (8, 8, False), (16, 3, True), (19, 1, True), (20, 1, True)]
    assert_empty(scheduler)


def test_decodes_come_first_and_prompts_share_what_is_left():
    scheduler = make(budget=8)
    add(scheduler, 1, 3, max_tokens=9)
    step(scheduler)
    add(scheduler, 2, 5, max_tokens=2)
    add(scheduler, 3, 5, max_tokens=2)
    plan, _ = step(scheduler)
    assert [(s.seq_id, len(s.token_ids)) for s in plan.slices] == [(1, 1), (2, 5), (3, 2)]


def test_a_lent_prompt_with_one_token_left_still_tells_its_reader_that_the_rest_is_final():
    """A replayed one ends with output, and a chunk may end just before its last token: it looks like a decode."""
    scheduler = make(budget=4)
    scheduler.add(SeqId(1), RequestSpec(prompt(3), SamplingParams(max_tokens=9)), kind=SequenceKind.LENT, resumed=(4, 5))
    advanced = [step(scheduler)[1].advanced for _ in range(2)]
    assert [[(a.seq_id, a.computed) for a in one] for one in advanced] == [[(1, 4)], [(1, 5)]]
    scheduler.return_lease(SeqId(1))
    assert_empty(scheduler)


def test_a_lent_sequence_lends_its_blocks_and_ends_with_token_0():
    scheduler = make(budget=8)
    seq = add(scheduler, 1, 10, kind=SequenceKind.LENT, max_tokens=50)
    _, first = step(scheduler)
    (admitted,) = scheduler.take_admitted()
    assert admitted.seq_id == seq
    assert len(admitted.block_tables[0]) == 3
    assert first is not None
    assert first.advanced == ((1, 8),)
    _, second = step(scheduler)
    assert second is not None
    assert second.advanced == ((1, 10),)
    assert second.tokens == ((1, 0, 7, None, None, (), None),)
    assert scheduler.num_live == 0
    assert scheduler._pool.num_free == 7, "the lease still holds its blocks"
    scheduler.return_lease(seq)
    scheduler.return_lease(seq)
    assert_empty(scheduler)


def test_a_lent_sequence_waits_for_all_its_blocks_and_nothing_overtakes_it():
    scheduler = make(num_blocks=4, budget=16)
    first = add(scheduler, 1, 12, kind=SequenceKind.LENT)
    big = add(scheduler, 2, 8, kind=SequenceKind.LENT)
    add(scheduler, 3, 2, kind=SequenceKind.LENT)
    step(scheduler)
    assert [a.seq_id for a in scheduler.take_admitted()] == [first]
    plan, _ = step(scheduler)
    assert not plan.slices, "number 3 would fit, but number 2 is first"
    assert not scheduler.has_work
    scheduler.return_lease(first)
    assert scheduler.has_work
    step(scheduler)
    assert [a.seq_id for a in scheduler.take_admitted()] == [big, 3]


def test_larger_priority_is_served_first_even_while_a_prompt_is_being_computed():
    scheduler = make(budget=8, num_blocks=20)
    add(scheduler, 1, 32)
    step(scheduler)
    add(scheduler, 2, 6, priority=5)
    plan, _ = step(scheduler)
    assert [(s.seq_id, len(s.token_ids)) for s in plan.slices] == [(2, 6), (1, 2)]


def test_inbound_is_reserved_whole_activated_and_decoded():
    scheduler = make()
    room = scheduler.reserve(SeqId(1), RequestSpec(prompt(8), SamplingParams(max_tokens=3)), local_prefill=False)
    assert room is not None
    blocks = room.block_tables[0]
    assert len(blocks) == 3
    assert not scheduler.has_work
    scheduler.activate(SeqId(1), 42)
    plan, outcome = step(scheduler)
    assert plan.slices[0].token_ids == (42,)
    assert plan.slices[0].start == 8
    assert plan.slices[0].block_tables == (blocks,)
    assert outcome is not None
    assert outcome.tokens == ((1, 1, 7, None, None, (), None),)
    _, outcome = step(scheduler)
    assert outcome is not None
    assert outcome.tokens == ((1, 2, 7, FinishReason.LENGTH, None, (), None),)
    assert_empty(scheduler)


def test_growth_room_is_not_asked_for_when_it_can_never_be_used():
    scheduler = make(num_blocks=2)
    params = SamplingParams(max_tokens=100)
    assert scheduler.reserve(SeqId(1), RequestSpec(prompt(7), params), local_prefill=True) is not None
    scheduler.abort(SeqId(1))
    assert_empty(scheduler)


def test_reserve_refuses_without_room_or_slot_and_changes_nothing():
    scheduler = make(num_blocks=4, seqs=2)
    params = SamplingParams(max_tokens=30)
    reserve = lambda seq_id, length: scheduler.reserve(SeqId(seq_id), RequestSpec(prompt(length), params), local_prefill=False)  # noqa: E731 - short
    assert reserve(1, 4) is not None
    assert reserve(2, 8) is None
    assert scheduler.num_live == 1
    assert reserve(3, 4) is not None
    assert reserve(4, 1) is None, "no slot"
    for seq_id in (1, 3):
        scheduler.abort(SeqId(seq_id))
    assert_empty(scheduler)


def test_reserve_leaves_room_for_those_who_wait():
    scheduler = make(num_blocks=4)
    add(scheduler, 1, 12)
    params = SamplingParams(max_tokens=30)
    assert scheduler.reserve(SeqId(2), RequestSpec(prompt(4), params), local_prefill=False) is None
    assert scheduler.reserve(SeqId(3), RequestSpec(prompt(1), SamplingParams(max_tokens=1)), local_prefill=False) is not None


def test_the_youngest_is_preempted_and_its_output_goes_on_where_it_was():
    scheduler = make(num_blocks=4, budget=16)
    add(scheduler, 1, 7, max_tokens=6)
    add(scheduler, 2, 6, max_tokens=6)
    outputs: dict[int, list[int]] = {1: [], 2: []}
    preempted: list[int] = []
    while scheduler.has_work:
        _, outcome = step(scheduler)
        assert outcome is not None
        preempted += outcome.preempted
        for token in outcome.tokens:
            outputs[token.seq_id].append(token.output_index)
    assert preempted == [2]
    assert outputs == {1: list(range(6)), 2: list(range(6))}
    assert_empty(scheduler)


def test_inbound_blocks_of_an_aborted_read_are_quarantined_until_it_stops():
    scheduler = make()
    params = SamplingParams(max_tokens=9)
    for seq_id in (1, 2):
        assert scheduler.reserve(SeqId(seq_id), RequestSpec(prompt(4), params), local_prefill=False) is not None
    scheduler.abort(SeqId(1), read_in_flight=True)
    scheduler.abort(SeqId(2), read_in_flight=False)
    assert scheduler._pool.counts().quarantined == 2
    assert scheduler._pool.num_free == 8
    scheduler.end_quarantine(SeqId(1))
    assert_empty(scheduler)


def test_an_event_that_the_state_does_not_list_raises_with_the_history_and_changes_nothing():
    scheduler = make()
    add(scheduler, 1, 5)
    scheduler.plan()
    with pytest.raises(IllegalTransition, match="sequence 1: ACTIVATED is illegal in PREFILLING") as raised:
        scheduler.activate(SeqId(1), 42)
    assert raised.value.history == ("QUEUED:WAITING", "ADMITTED:PREFILLING")
    with pytest.raises(KeyError):
        scheduler.activate(SeqId(2), 42)
    scheduler.check_invariants()


def test_a_sequence_aborted_during_a_step_keeps_its_blocks_until_the_step_is_collected():
    scheduler = make()
    seq = add(scheduler, 1, 4, max_tokens=5)
    plan = scheduler.plan()
    scheduler.abort(seq)
    scheduler.abort(seq)
    assert scheduler._pool.num_free == 9
    outcome = scheduler.collect([(7, None) for _ in plan.slices])
    assert outcome.tokens == ()
    assert_empty(scheduler)


def test_abort_of_a_waiting_a_running_and_an_unknown_sequence():
    scheduler = make(num_blocks=2)
    add(scheduler, 1, 5, max_tokens=2)
    add(scheduler, 2, 5, max_tokens=2)
    step(scheduler)
    for seq_id in (2, 1, 77):
        scheduler.abort(SeqId(seq_id))
    assert_empty(scheduler)


@pytest.mark.parametrize(
    ("token", "params", "expected"),
    [
        (EOS, {"max_tokens": 9}, FinishReason.STOP),
        (EOS, {"max_tokens": 9, "ignore_eos": True}, None),
        (5, {"max_tokens": 9, "stop_token_ids": (5,)}, FinishReason.STOP),
        (5, {"max_tokens": 1}, FinishReason.LENGTH),
        (EOS, {"max_tokens": 1}, FinishReason.STOP),
        (5, {"max_tokens": 9}, None),
    ],
)
def test_what_finishes_a_sequence(token, params, expected):
    scheduler = make()
    add(scheduler, 1, 3, **params)
    _, outcome = step(scheduler, token)
    assert outcome is not None
    assert outcome.tokens == ((1, 0, token, expected, None, (), None),)


def test_the_context_length_finishes_a_sequence():
    scheduler = make(max_len=5)
    add(scheduler, 1, 3, max_tokens=50)
    reasons = []
    while scheduler.has_work:
        _, outcome = step(scheduler)
        assert outcome is not None
        reasons += [t.finish_reason for t in outcome.tokens]
    assert reasons == [None, FinishReason.LENGTH]


def test_stopping_ids_are_banned_until_min_tokens_are_out():
    scheduler = make()
    add(scheduler, 1, 3, max_tokens=9, min_tokens=2, stop_token_ids=(5,))
    banned = []
    for _ in range(3):
        plan, _ = step(scheduler)
        (spec,) = plan.slices[0].samples
        banned.append(spec.banned_ids)
    assert banned == [(EOS, 5), (EOS, 5), ()]


def test_a_budget_below_the_sequence_limit_limits_the_sequences():
    """Else every step could be full of decodes, one arriving for each that ends, while a prompt waits for ever."""
    scheduler = make(seqs=8, budget=2)
    params = SamplingParams(max_tokens=4)
    for seq_id, fits in ((1, True), (2, True), (3, False)):
        room = scheduler.reserve(SeqId(seq_id), RequestSpec(prompt(2), params), local_prefill=False)
        assert (room is not None) == fits
    for seq_id in (1, 2):
        scheduler.activate(SeqId(seq_id), 7)
    add(scheduler, 4, 3, max_tokens=1)
    while scheduler.has_work:
        plan, _ = step(scheduler)
        assert plan.num_tokens <= 2
    assert_empty(scheduler)


def test_a_prefill_worker_whose_limit_is_one_token_short_does_not_end_the_answer():
    """A prompt of 19 tokens fits a limit of 20 with its first token, and the reader has room for the rest. Ended by that
    limit, its answer was one token, by LENGTH, with nothing said."""
    scheduler = make(num_blocks=5, budget=32, max_len=20)
    seq = add(scheduler, 1, 19, kind=SequenceKind.LENT, max_tokens=50)
    _, outcome = step(scheduler)
    assert outcome is not None
    assert [(t.token_id, t.finish_reason) for t in outcome.tokens] == [(7, None)]
    scheduler.return_lease(seq)
    one = add(scheduler, 2, 19, kind=SequenceKind.LENT, max_tokens=1)
    _, outcome = step(scheduler)
    assert outcome is not None
    assert [t.finish_reason for t in outcome.tokens] == [FinishReason.LENGTH], "by its own max_tokens it does"
    scheduler.return_lease(one)
    assert_empty(scheduler)


def flood(scheduler: Scheduler, priority: int, length: int, first_id: int) -> int:
    """Keep four prompts of that priority in the scheduler; the next id."""
    while scheduler.num_live < 5:
        add(scheduler, first_id, length, kind=SequenceKind.LENT, priority=priority)
        first_id += 1
    return first_id


def test_a_prompt_that_holds_a_lease_goes_on_while_larger_priorities_keep_coming():
    """It was computed for one step, and then not again as long as they came: its reader gave up, and blamed the pair."""
    scheduler = make(num_blocks=400, budget=16)
    victim, steps, next_id, computed = add(scheduler, 1, 100, kind=SequenceKind.LENT), [], 2, 0
    step(scheduler)
    assert [admitted.seq_id for admitted in scheduler.take_admitted()] == [victim]
    for number in range(200):
        next_id = flood(scheduler, 100, 40, next_id)
        plan, outcome = step(scheduler)
        mine = [s for s in plan.slices if s.seq_id == victim]
        steps += [number] if mine else []
        computed += sum(len(s.token_ids) for s in plan.slices if s.seq_id != victim)
        assert outcome is not None
        for token in outcome.tokens:
            scheduler.return_lease(token.seq_id)
        if victim in {token.seq_id for token in outcome.tokens}:
            break
    assert steps == list(range(21)), "84 tokens were left, four in each step"
    assert computed >= 12 * 20, "larger priorities have the rest"


def test_overtaken_prompts_take_turns():
    scheduler = make(num_blocks=400, budget=16)
    for seq_id, length, priority in ((1, 60, 0), (2, 60, 1), (3, 60, 2), (4, 300, 3)):
        add(scheduler, seq_id, length, kind=SequenceKind.LENT, priority=priority)
        step(scheduler)
    served = [[s.seq_id for s in step(scheduler)[0].slices] for _ in range(6)]
    assert [first for first, _ in served] == [4] * 6
    assert [{second for _, second in served[i : i + 3]} for i in range(4)] == [{1, 2, 3}] * 4


@pytest.mark.quick("1")
@pytest.mark.parametrize("priority", [1, 100])
def test_a_prompt_of_small_priority_waits_no_longer_than_its_priority_is_worth(priority: int):
    """It has not begun. Those that came at most so many prompt tokens after it go first, and no others."""
    scheduler = make(num_blocks=4000, budget=400)
    next_id = flood(scheduler, priority, 400, 2)
    victim, computed = add(scheduler, 1, 40, kind=SequenceKind.LENT), 0
    worth = priority * STEPS_A_LEVEL * 400
    while True:
        plan, _ = step(scheduler)
        if victim in {s.seq_id for s in plan.slices}:
            break
        computed += plan.num_tokens
        assert computed <= worth + 5 * 400
        for admitted in scheduler.take_admitted():
            scheduler.return_lease(admitted.seq_id)
        next_id = flood(scheduler, priority, 400, next_id)
    assert computed > worth / 2, "and larger priorities are worth something"


@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 90), st.integers(0, 3)), min_size=1, max_size=30),
    budget=st.integers(8, 16),
)
def test_no_prompt_that_runs_is_overtaken_in_more_steps_in_a_row_than_others_run(history, budget: int):
    """Whatever priorities come: who holds blocks gets a chunk in turn."""
    scheduler = make(num_blocks=120, seqs=8, budget=budget, max_len=100)
    overtaken: dict[int, int] = {}
    pending, due = list(enumerate(history, start=1)), 0
    for number in range(4000):
        while pending and (due <= number or not scheduler.num_live):
            seq_id, (priority, length, pause) = pending.pop(0)
            due = number + pause
            add(scheduler, seq_id, length, kind=SequenceKind.LENT, priority=priority)
        plan, outcome = step(scheduler)
        if outcome is None:
            break
        served = [int(s.seq_id) for s in plan.slices]
        overtaken = {s: 0 if s in served else n + (max(served) > s) for s, n in (dict.fromkeys(served, 0) | overtaken).items()}
        assert max(overtaken.values()) <= 8
        for token in outcome.tokens:
            scheduler.return_lease(token.seq_id)
            del overtaken[token.seq_id]
    assert not pending
    assert_empty(scheduler)


def make_windowed(window: int, num_blocks: int = 10, **limits) -> Scheduler:
    """A scheduler over a group without a window and one with it."""
    layouts = [KvGroup((i,), ((1, 1),), BLOCK, "float32", width) for i, width in enumerate((None, window))]
    pool = BlockPools(num_blocks, num_blocks, layouts=layouts)
    return Scheduler(pool, BLOCK, max_num_batched_tokens=8, max_model_len=num_blocks * BLOCK, eos_token_ids=(EOS,), **limits)


def test_a_long_output_holds_only_its_window():
    scheduler = make_windowed(5, max_num_seqs=2)
    add(scheduler, 1, 9, max_tokens=20)
    held = []
    while scheduler.has_work:
        step(scheduler)
        held.append(tuple(pool.counts().held for pool in scheduler._pool.groups))
    assert max(full for full, _ in held) == 7
    assert max(windowed for _, windowed in held[2:]) == 2
    assert_empty(scheduler)


def test_a_pulled_prompt_reserves_only_what_the_token_after_it_sees():
    scheduler = make_windowed(5, max_num_seqs=2)
    room = scheduler.reserve(SeqId(1), RequestSpec(prompt(22), SamplingParams(max_tokens=9)), local_prefill=False)
    assert room is not None
    assert [table.count(NULL_BLOCK) for table in room.block_tables] == [0, 4]
    assert [pool.counts().held for pool in scheduler._pool.groups] == [7, 3]
    scheduler.activate(SeqId(1), 7)
    while scheduler.has_work:
        step(scheduler)
    assert_empty(scheduler)


def test_a_lease_keeps_what_is_live_at_the_end_of_the_prompt_and_no_more():
    scheduler = make_windowed(5, max_num_seqs=2)
    seq = add(scheduler, 1, 22, kind=SequenceKind.LENT, max_tokens=9)
    step(scheduler)
    (admitted,) = scheduler.take_admitted()
    assert [table.count(NULL_BLOCK) for table in admitted.block_tables] == [0, 4]
    while scheduler.has_work:
        step(scheduler)
    assert [pool.counts().held for pool in scheduler._pool.groups] == [6, 2]
    scheduler.return_lease(seq)
    assert_empty(scheduler)


def test_a_preempted_sequence_gets_the_blocks_back_that_had_died():
    scheduler = make_windowed(4, num_blocks=8, max_num_seqs=2)
    add(scheduler, 1, 12, max_tokens=16)
    add(scheduler, 2, 12, max_tokens=16)
    preempted, tables = 0, {}
    while scheduler.has_work:
        plan, outcome = step(scheduler)
        preempted += len(outcome.preempted) if outcome is not None else 0
        tables |= {piece.seq_id: piece.block_tables[1] for piece in plan.slices if not piece.start}
    assert preempted
    assert all(NULL_BLOCK not in table for table in tables.values())
    assert_empty(scheduler)


def test_a_prompt_runs_in_a_window_group_that_is_much_smaller_than_it():
    """The pool behind the window has the fewest blocks that take any prompt, and the prompt has four times as many."""
    layouts = [KvGroup((i,), ((1, 1),), BLOCK, "float32", width) for i, width in enumerate((None, 5))]
    least = layouts[1].least_pool
    pool = BlockPools(4 * least, least, layouts=layouts)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 4 * least * BLOCK}
    scheduler = Scheduler(pool, BLOCK, **limits, eos_token_ids=(EOS,))
    add(scheduler, 1, 3 * least * BLOCK, max_tokens=BLOCK)
    add(scheduler, 2, least * BLOCK, max_tokens=BLOCK)
    sizes = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        sizes += [len(piece.token_ids) for piece in plan.slices if piece.seq_id == SeqId(1)]
        for piece in plan.slices:
            assert NULL_BLOCK not in piece.block_tables[1][layouts[1].first_live(piece.start) :]
    assert max(sizes) == 16
    assert_empty(scheduler)


def test_a_prompt_goes_on_in_smaller_steps_when_others_leave_it_only_what_it_was_promised():
    layouts = [KvGroup((i,), ((1, 1),), BLOCK, "float32", width) for i, width in enumerate((None, 5))]
    pool = BlockPools(20, 20, layouts=layouts)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 80}
    scheduler = Scheduler(pool, BLOCK, **limits, eos_token_ids=(EOS,))
    add(scheduler, 1, 40, max_tokens=2)
    step(scheduler)
    window = pool.groups[1]
    assert window.allocate(Holder(HolderKind.SEQUENCE, SeqId(9)), window.num_allocatable) is not None
    sizes = []
    while scheduler.has_work:
        plan = scheduler.plan()
        sizes += [len(piece.token_ids) for piece in plan.slices]
        scheduler.collect([(7, None) for _ in plan.specs])
    assert sizes == [8, 8, 8, 1]


def test_a_recomputed_sequence_takes_its_last_block_before_it_decodes():
    """Its chunks end just before its last output token, which is then computed as a decode, in a block of its own."""
    scheduler = make_windowed(5, num_blocks=20, max_num_seqs=2)
    spec = RequestSpec(prompt(12), SamplingParams(max_tokens=8, ignore_eos=True))
    scheduler.add(SeqId(1), spec, kind=SequenceKind.LOCAL, resumed=(7,) * 5)
    spans = []
    while scheduler.has_work:
        plan, _ = step(scheduler)
        for piece in plan.slices:
            spans.append((piece.start, len(piece.token_ids)))
            assert NULL_BLOCK not in piece.block_tables[1][max(0, piece.start - 4) // BLOCK :]
    assert spans == [(0, 8), (8, 8), (16, 1), (17, 1), (18, 1)]
    assert_empty(scheduler)


def test_a_pulled_sequence_that_was_preempted_is_recomputed_in_a_small_window_group():
    one = KvGroup((0,), ((1, 1),), BLOCK, "float32", 5)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 80}
    scheduler = Scheduler(BlockPools(one.least_pool, layouts=[one]), BLOCK, **limits, eos_token_ids=(EOS,))
    spec = RequestSpec(prompt(60), SamplingParams(max_tokens=8, ignore_eos=True))
    assert scheduler.reserve(SeqId(1), spec, local_prefill=False) is not None
    scheduler.activate(SeqId(1), 7)
    scheduler._preempt(scheduler._sequences[SeqId(1)])
    drawn = []
    while scheduler.has_work:
        _, outcome = step(scheduler)
        drawn += [] if outcome is None else [token.output_index for token in outcome.tokens]
    assert drawn == list(range(1, 8))
    assert_empty(scheduler)
