"""The lease machine: what a late, repeated, foreign or premature event may and may not do."""

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.core import lease as lease_module
from pdserve.core.errors import InternalBug
from pdserve.core.ids import BlockId, BlockSum, Incarnation, LeaseId, ReaderId, SeqId
from pdserve.core.lease import CommitAnswer, FirstToken, LeaseState, LeaseTable

TTL_S = 10.0
READER = ReaderId(Incarnation(7), 1)
OTHER = ReaderId(Incarnation(7), 2)
TOKEN = FirstToken(5, None)


def granted(prompt_len: int = 32, blocks: int = 2) -> tuple[LeaseTable, LeaseId]:
    table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
    return table, table.grant(SeqId(1), (tuple(BlockId(i) for i in range(blocks)),), prompt_len, now_s=0.0)


def test_commit_needs_every_block_and_the_whole_watermark():
    table, lease = granted()
    assert not table.commit(lease, READER, 2, now_s=1), "nothing is final yet"
    table.advance(lease, 16, None, now_s=1)
    assert not table.commit(lease, READER, 2, now_s=1), "half is final"
    table.advance(lease, 32, TOKEN, now_s=1)
    assert not table.commit(lease, READER, 1, now_s=1), "one block was not read"
    assert table.take_returned() == [], "a refused commit leaves the lease as it was"
    assert table.commit(lease, READER, 2, now_s=1)
    assert [lease.block_tables for lease in table.take_returned()] == [((0, 1),)]


def test_a_lease_that_has_ended_keeps_no_checksums():
    blocks = 1000
    table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
    ids = tuple(BlockId(i) for i in range(blocks))
    sums = [BlockSum(i) for i in range(blocks)]
    tracemalloc.start()
    try:
        for number in range(100):
            lease = table.grant(SeqId(number), (ids,), 16 * blocks, sums=((),), now_s=0)
            table.seal(lease, 0, [sums], now_s=0)
            table.advance(lease, 16 * blocks, TOKEN, now_s=0)
            assert table.commit(lease, READER, blocks, 0, [sums], now_s=0)
            table.take_returned()
            del lease
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 100 * blocks, "the checksums of a prompt take 8 kB and more"


def test_a_repeated_commit_is_ok_to_the_same_reader_only():
    table, lease = granted()
    table.advance(lease, 32, TOKEN, now_s=0)
    assert table.commit(lease, READER, 2, now_s=0)
    assert table.commit(lease, READER, 2, now_s=99), "its reply may have been lost"
    assert not table.commit(lease, OTHER, 2, now_s=0)
    assert len(table.take_returned()) == 1, "the blocks come back once"


def test_an_expired_lease_is_gone_for_ever_even_when_nobody_noticed_in_time():
    table, lease = granted()
    table.advance(lease, 32, TOKEN, now_s=0)
    assert not table.commit(lease, READER, 2, now_s=TTL_S), "expiry is applied before the event"
    assert not table.renew(lease, now_s=0).held, "nothing revives it, not even a clock that went back"
    assert len(table.take_returned()) == 1


def test_renew_pushes_the_expiry_out_and_repeats_the_level_state():
    table, lease = granted()
    table.advance(lease, 16, None, now_s=0)
    view = table.renew(lease, now_s=9)
    assert view.held
    assert view.watermark == 16
    assert table.renew(lease, now_s=18).held
    assert not table.renew(lease, now_s=28).held


def test_a_restarted_worker_answers_gone_to_its_past():
    _, old = granted()
    table = LeaseTable(Incarnation(2), ttl_s=TTL_S)
    fresh = table.grant(SeqId(1), ((BlockId(0),),), 4, now_s=0)
    assert fresh != old
    assert not table.renew(old, now_s=0).held
    assert not table.commit(old, READER, 2, now_s=0)


def test_release_is_repeatable_and_makes_a_later_commit_gone():
    table, lease = granted()
    table.advance(lease, 32, TOKEN, now_s=0)
    for _ in range(2):
        table.release(lease, now_s=0)
    assert not table.commit(lease, READER, 2, now_s=0)
    assert len(table.take_returned()) == 1


@pytest.mark.parametrize(("watermark", "token"), [(40, TOKEN), (32, None), (8, TOKEN)])
def test_an_impossible_advance_is_our_bug(watermark, token):
    table, lease = granted()
    with pytest.raises(InternalBug):
        table.advance(lease, watermark, token, now_s=0)


def test_the_watermark_never_shrinks():
    table, lease = granted()
    table.advance(lease, 16, None, now_s=0)
    with pytest.raises(InternalBug):
        table.advance(lease, 8, None, now_s=0)


def test_a_forgotten_commit_is_answered_gone_and_never_ok_to_another(monkeypatch):
    monkeypatch.setattr(lease_module, "MAX_TOMBSTONES", 1)
    table, first = granted()
    table.advance(first, 32, TOKEN, now_s=0)
    assert table.commit(first, READER, 2, now_s=0)
    table.release(table.grant(SeqId(2), ((BlockId(2),),), 4, now_s=0), now_s=0)
    for reader in (READER, OTHER):
        assert not table.commit(first, reader, 2, now_s=0)
    assert [lease.seq_id for lease in table.take_returned()] == [1, 2], "what is forgotten was returned before"
    table.check_invariants()


class LeaseMachine(RuleBasedStateMachine):
    """Random events at random times: each lease's blocks come back exactly once, and OK only ever while held."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
        self.now_s = 0.0
        self.leases: list[LeaseId] = []
        self.expires: dict[LeaseId, float] = {}
        self.returned: list[LeaseId] = []
        self.ended: set[LeaseId] = set()
        self.winner: dict[LeaseId, ReaderId] = {}

    def pick(self, index: int) -> LeaseId | None:
        return self.leases[index % len(self.leases)] if self.leases else None

    def alive(self, lease: LeaseId) -> bool:
        return lease not in self.ended and self.now_s < self.expires[lease]

    @rule(dt=st.floats(0, 6))
    def wait(self, dt):
        self.now_s += dt

    @rule()
    def grant(self):
        lease = self.table.grant(SeqId(len(self.leases)), ((BlockId(0),),), 4, now_s=self.now_s)
        assert lease not in self.leases
        self.leases.append(lease)
        self.expires[lease] = self.now_s + TTL_S

    @rule(i=st.integers(0, 9))
    def renew(self, i):
        if (lease := self.pick(i)) is not None:
            alive = self.alive(lease)
            assert self.table.renew(lease, now_s=self.now_s).held == alive
            if alive:
                self.expires[lease] = self.now_s + TTL_S
            else:
                self.ended.add(lease)

    @rule(i=st.integers(0, 9))
    def finish_prefill(self, i):
        if (lease := self.pick(i)) is not None:
            self.table.advance(lease, 4, TOKEN, now_s=self.now_s)

    @rule(i=st.integers(0, 9), reader=st.sampled_from([READER, OTHER]), blocks=st.integers(0, 2))
    def commit(self, i, reader, blocks):
        if (lease := self.pick(i)) is not None:
            alive = self.alive(lease)
            if self.table.commit(lease, reader, blocks, now_s=self.now_s):
                assert alive or self.winner.get(lease) == reader
                assert self.winner.setdefault(lease, reader) == reader, "two readers were told OK"
                self.ended.add(lease)

    @rule(i=st.integers(0, 9), watermark=st.integers(0, 4))
    def look_and_advance(self, i, watermark):
        """Level state: it never shrinks, is told while held only, and looking renews nothing."""
        if (lease := self.pick(i)) is not None:
            alive = self.alive(lease)
            before = self.table.look(lease, now_s=self.now_s)
            assert before.held == alive
            if alive and before.watermark <= watermark < 4:
                after = self.table.advance(lease, watermark, None, now_s=self.now_s)
                assert after.watermark == watermark
                assert self.table.look(lease, now_s=self.now_s) == after

    @rule(i=st.integers(0, 9))
    def release(self, i):
        if (lease := self.pick(i)) is not None:
            self.table.release(lease, now_s=self.now_s)
            self.ended.add(lease)

    @invariant()
    def blocks_come_back_once(self):
        self.table.expire_due(now_s=self.now_s)
        self.table.check_invariants()
        self.returned += [lease.lease_id for lease in self.table.take_returned()]
        assert len(set(self.returned)) == len(self.returned)
        gone = {lease for lease in self.leases if not self.alive(lease)}
        assert set(self.returned) == gone
        self.ended |= gone


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# --- checksums and proofs


SUMS = ((BlockSum(11), BlockSum(12)), (BlockSum(21), BlockSum(22)))
"""Of two blocks in each of two KV groups."""
TABLES = ((BlockId(0), BlockId(1)), (BlockId(1), BlockId(6)))


def cut(first: int, end: int) -> tuple[tuple[BlockSum, ...], ...]:
    """The checksums of blocks [first, end)."""
    return tuple(group[first:end] for group in SUMS)


def summed() -> tuple[LeaseTable, LeaseId]:
    """Two blocks, computed, of which the first is a prefix hit that had its checksum."""
    table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
    lease = table.grant(SeqId(1), TABLES, 32, sums=cut(0, 1), now_s=0)
    table.advance(lease, 32, TOKEN, now_s=0)
    assert table.awaits_sums(lease, now_s=0)
    table.seal(lease, 1, cut(1, 2), now_s=0)
    assert not table.awaits_sums(lease, now_s=0)
    return table, lease


def test_commit_is_ok_only_for_what_was_summed():
    table, lease = summed()
    for wrong in (((11, 13), (21, 22)), ((11, 12), (23, 22))):
        assert table.commit(lease, READER, 2, 0, wrong, now_s=0) is CommitAnswer.CORRUPT  # type: ignore[arg-type]
        assert table.held(lease).differing(0, wrong) == 1  # type: ignore[arg-type, union-attr]
    assert table.take_returned() == [], "CORRUPT leaves the lease"
    assert table.commit(lease, READER, 2, 0, SUMS, now_s=0) is CommitAnswer.OK


def test_a_readers_own_blocks_are_not_compared():
    table, lease = summed()
    assert table.commit(lease, READER, 2, 1, cut(1, 2), now_s=0) is CommitAnswer.OK
    table, lease = summed()
    assert table.commit(lease, READER, 2, 2, (), now_s=0) is CommitAnswer.OK


@pytest.mark.parametrize(
    ("first", "sums"),
    [
        (0, ()),
        (0, cut(0, 1)),
        (1, SUMS),
        (1, ()),
        (3, ()),
        (0, cut(0, 2) + cut(0, 2)[:1]),
        (0, SUMS[:1]),
        (0, SUMS[1:]),
        (0, (SUMS[0], SUMS[1][:1])),
        (0, (SUMS[0], ())),
        (0, ((*SUMS[0], SUMS[0][0]), SUMS[1])),
        (2, ((), SUMS[1])),
    ],
)
def test_missing_or_surplus_checksums_are_not_ok(first, sums):
    table, lease = summed()
    assert table.commit(lease, READER, 2, first, sums, now_s=0) is CommitAnswer.GONE
    assert table.num_held == 1


def test_checksums_in_another_order_are_corrupt():
    table, lease = summed()
    for wrong in (SUMS[::-1], (SUMS[0][::-1], SUMS[1]), (SUMS[0], SUMS[1][::-1])):
        assert table.commit(lease, READER, 2, 0, wrong, now_s=0) is CommitAnswer.CORRUPT


def test_nothing_is_ok_before_the_lender_has_summed_every_block():
    table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
    lease = table.grant(SeqId(1), TABLES, 32, sums=cut(0, 1), now_s=0)
    table.advance(lease, 32, TOKEN, now_s=0)
    assert table.commit(lease, READER, 2, 0, SUMS, now_s=0) is CommitAnswer.GONE
    assert table.commit(lease, READER, 2, 1, (), now_s=0) is CommitAnswer.GONE


def test_checksums_out_of_order_are_our_bug_and_late_ones_are_ignored():
    table, lease = summed()
    with pytest.raises(InternalBug):
        table.seal(lease, 0, SUMS, now_s=0)
    fresh = table.grant(SeqId(2), TABLES, 32, sums=((), ()), now_s=0)
    for sums in (SUMS[:1], (SUMS[0], SUMS[1][:1]), ()):
        with pytest.raises(InternalBug):
            table.seal(fresh, 0, sums, now_s=0)
    table.release(fresh, now_s=0)
    table.release(lease, now_s=0)
    table.seal(lease, 2, SUMS, now_s=0)


def test_only_who_has_the_ticket_may_ask_renew_commit_and_release():
    table, lease = summed()
    for proof in (b"", b"a guess"):
        assert not table.look(lease, proof, now_s=0).held, "no ticket is written yet"
    table.expect(lease, b"the proof")
    for proof in (b"", b"a guess"):
        assert not table.look(lease, proof, now_s=0).held
        assert not table.renew(lease, proof, now_s=9).held
        assert table.commit(lease, READER, 2, 0, SUMS, proof=proof, now_s=9) is CommitAnswer.GONE
        table.release(lease, proof, now_s=9)
        assert table.num_held == 1
    assert not table.look(lease, b"the proof", now_s=TTL_S).held, "a renewal without the ticket renews nothing"
    table, lease = summed()
    table.expect(lease, b"the proof")
    assert table.commit(lease, READER, 2, 0, SUMS, proof=b"the proof", now_s=0)
    assert not table.commit(lease, READER, 2, 0, SUMS, proof=b"a guess", now_s=0), "a repeat needs it too"
    assert table.commit(lease, READER, 2, 0, SUMS, proof=b"the proof", now_s=0)


def test_a_rotted_block_ends_only_leases_over_it_in_its_own_group():
    table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
    over = [table.grant(SeqId(i), tables, 16, now_s=0) for i, tables in enumerate([((0,), (1,)), ((1,), (2,))])]  # type: ignore[arg-type]
    table.release_all_over([(1, BlockId(1))], now_s=0)
    assert [table.held(lease) is None for lease in over] == [True, False]


def test_every_lease_over_a_rotted_block_ends():
    table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
    over = [table.grant(SeqId(i), (blocks,), 32, now_s=0) for i, blocks in enumerate([(0, 1), (0, 2), (3, 4)])]  # type: ignore[list-item]
    table.release_all_over([(0, BlockId(0))], now_s=0)
    assert [table.look(lease, now_s=0).held for lease in over] == [False, False, True]
    assert len(table.take_returned()) == 2


# --- every call in every state


PROOF, GUESS = b"the proof", b"a guess"
Call = Callable[[LeaseTable, LeaseId, float], object]
"""A call for a lease at a time in seconds."""

COMMITS: dict[str, Call] = {
    "by the reader": lambda t, i, s: t.commit(i, READER, 2, 0, SUMS, proof=PROOF, now_s=s),
    "by another": lambda t, i, s: t.commit(i, OTHER, 2, 0, SUMS, proof=PROOF, now_s=s),
    "a block short": lambda t, i, s: t.commit(i, READER, 1, 0, SUMS[:1], proof=PROOF, now_s=s),
    "a block short, by another": lambda t, i, s: t.commit(i, OTHER, 1, 0, SUMS[:1], proof=PROOF, now_s=s),
    "corrupt": lambda t, i, s: t.commit(i, READER, 2, 0, SUMS[::-1], proof=PROOF, now_s=s),
    "unproven": lambda t, i, s: t.commit(i, READER, 2, 0, SUMS, proof=GUESS, now_s=s),
}
OK, GONE, CORRUPT = CommitAnswer.OK, CommitAnswer.GONE, CommitAnswer.CORRUPT
ANSWERS: dict[LeaseState, list[CommitAnswer]] = {
    LeaseState.HELD: [OK, OK, GONE, GONE, CORRUPT, GONE],
    LeaseState.COMMITTED: [OK, GONE, OK, GONE, OK, GONE],
    LeaseState.RELEASED: [GONE] * 6,
    LeaseState.EXPIRED: [GONE] * 6,
}
"""The answers to `COMMITS`. A repeat by the reader that has committed gets OK again, whatever else it says."""
VIEWS: list[Call] = [
    lambda t, i, s: t.look(i, PROOF, now_s=s).held,
    lambda t, i, s: t.renew(i, PROOF, now_s=s).held,
    lambda t, i, s: t.advance(i, 32, TOKEN, now_s=s).held,
]
SILENT: list[Call] = [
    lambda t, i, s: t.seal(i, 2, ((), ()), now_s=s),
    lambda t, i, s: t.release(i, GUESS, now_s=s),
    lambda t, i, s: t.release(i, PROOF, now_s=s),
]


def in_state(state: LeaseState) -> tuple[LeaseTable, LeaseId, float]:
    """A lease by READER in this state, and the time, in seconds."""
    table, lease = summed()
    table.expect(lease, PROOF)
    now_s = TTL_S if state is LeaseState.EXPIRED else 0.0
    if state is LeaseState.COMMITTED:
        assert table.commit(lease, READER, 2, 0, SUMS, proof=PROOF, now_s=now_s)
    elif state is LeaseState.RELEASED:
        table.release(lease, PROOF, now_s=now_s)
    table.expire_due(now_s=now_s)
    return table, lease, now_s


def every_call_in_every_state() -> None:
    for state in LeaseState:
        for (name, commit), answer in zip(COMMITS.items(), ANSWERS[state], strict=True):
            table, lease, now_s = in_state(state)
            assert commit(table, lease, now_s) is answer, (state, name)
            still_held = state is LeaseState.HELD and answer is not OK
            assert table.num_held == still_held, (state, name)
            table.check_invariants()
        table, lease, now_s = in_state(state)
        for view in VIEWS:
            assert view(table, lease, now_s) == (state is LeaseState.HELD), state
        for call in SILENT:
            call(table, lease, now_s)
        assert len(table.take_returned()) == 1, "its blocks come back once"
        table.check_invariants()


def test_every_call_in_every_state_gets_its_answer():
    every_call_in_every_state()


def test_an_unknown_lease_is_gone_to_every_call():
    for commit in COMMITS.values():
        assert commit(LeaseTable(Incarnation(1), ttl_s=TTL_S), LeaseId(Incarnation(1), 9), 0) is GONE
    table = LeaseTable(Incarnation(1), ttl_s=TTL_S)
    assert not any(view(table, LeaseId(Incarnation(1), 9), 0) for view in VIEWS)
    assert [call(table, LeaseId(Incarnation(1), 9), 0) for call in SILENT] == [None] * 3
