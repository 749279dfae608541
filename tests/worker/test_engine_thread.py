"""The engine thread with the production scheduler and a model that adds one to the last token."""

import queue
import threading
from collections.abc import Sequence

import pytest

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import BlockId, BlockSum, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.step_plan import Sampled, StepPlan
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps, EngineThread
from pdserve.worker.messages import Abort, Activate, AddLent, EndQuarantine, Rehash, Rehashed, Reserve, ReturnLease, StepEvents

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
WAIT_S = 60.0


class CountingRunner:
    """Token = last token + 1. Waits for a permit before each step when `gate` is set."""

    def __init__(self) -> None:
        self.steps = 0
        self.fail = False

    def launch(self, plan: StepPlan) -> list[Sampled]:
        self.steps += 1
        if self.fail:
            raise RuntimeError("planted")
        return [(s.token_ids[-1] + 1, None) for s in plan.slices if s.samples]

    def collect(self, pending: list[Sampled]) -> list[Sampled]:
        return pending


class Engine:
    def __init__(self, num_blocks: int = 10, *, lends: bool = False) -> None:
        """`lends`: shares prefixes and sums its blocks, as a prefill worker does."""
        self.lends = lends
        self.events: queue.Queue[StepEvents] = queue.Queue()
        self.deaths: queue.Queue[BaseException] = queue.Queue()
        self.runner = CountingRunner()
        self.pool = BlockPools(num_blocks)
        self.memory = {BlockId(block): BlockSum(100 + block) for block in range(num_blocks)}
        """What each block is summed to."""
        self.summed: list[BlockId] = []
        self.thread = EngineThread(
            lambda: (self.runner, self._scheduler(), self.pool),
            self.events.put,
            self.deaths.put,
            lambda: [self.sums] if lends else None,
        )

    def sums(self, block_ids: Sequence[BlockId]) -> tuple[BlockSum, ...]:
        self.summed += block_ids
        return tuple(self.memory[block_id] for block_id in block_ids)

    def _scheduler(self) -> Scheduler:
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 32}
        return Scheduler(self.pool, 4, **sizes, eos_token_ids=(0,), prefix_salt=b"test" if self.lends else None)

    def __enter__(self) -> "Engine":
        self.thread.start(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.thread.stop(WAIT_S)

    def until(self, predicate) -> list[StepEvents]:
        seen = [self.events.get(timeout=WAIT_S)]
        while not predicate(seen):
            seen.append(self.events.get(timeout=WAIT_S))
        return seen

    def settled(self) -> StepEvents:
        """The level state once the engine has gone idle."""
        self.thread.submit(Abort(SeqId(999)))
        return self.until(lambda seen: seen[-1].snapshot is not None and seen[-1].snapshot.load.running_sequences == 0)[-1]


def tokens(seen: list[StepEvents]) -> list[int]:
    return [t.token_id for events in seen for t in events.tokens]


def test_a_colocated_request_runs_to_its_end_and_frees_its_blocks():
    with Engine() as engine:
        engine.thread.submit(Reserve(SeqId(1), RequestSpec((5, 6), GREEDY), local_prefill=True))
        seen = engine.until(lambda seen: any(t.finish_reason for e in seen for t in e.tokens))
        assert seen[0].reserved[0].block_tables is not None
        assert tokens(seen) == [7, 8, 9, 10]
        assert engine.settled().snapshot.load.blocks.free == 10


def test_an_idle_engine_takes_no_steps_and_a_stuck_one_does_not_spin():
    with Engine(num_blocks=8) as engine:
        engine.thread.submit(AddLent(SeqId(1), RequestSpec(tuple(range(1, 29)), GREEDY)))
        engine.until(lambda seen: any(e.tokens for e in seen))
        engine.thread.submit(AddLent(SeqId(2), RequestSpec(tuple(range(1, 29)), GREEDY)))  # cannot fit: the lease holds 7 of 8
        engine.until(lambda seen: seen[-1].snapshot is not None and seen[-1].snapshot.load.queued_requests == 1)
        threading.Event().wait(0.2)
        assert engine.events.qsize() <= 1, "a plan that is empty stays empty until a command arrives"
        engine.thread.submit(ReturnLease(SeqId(1)))
        engine.until(lambda seen: any(lent.seq_id == 2 for e in seen for lent in e.lent))


def test_lent_blocks_outlive_the_sequence_until_the_lease_returns():
    with Engine() as engine:
        engine.thread.submit(AddLent(SeqId(1), RequestSpec(tuple(range(1, 21)), GREEDY)))
        seen = engine.until(lambda seen: any(e.tokens for e in seen))
        assert len(seen[0].lent[0].block_tables[0]) == 5
        assert [computed for e in seen for _, computed in e.advanced][:2] == [8, 16], "chunks of the token budget"
        assert engine.settled().snapshot.load.blocks.held == 5
        engine.thread.submit(ReturnLease(SeqId(1)))
        assert engine.settled().snapshot.load.blocks.free == 10


def test_each_lent_block_is_summed_once_when_it_is_final_and_after_the_step_was_told():
    """(1) Chunks of 8 tokens: two blocks each; the last one is not full; (2) whoever shares them inherits the sums."""
    with Engine(lends=True) as engine:
        engine.thread.submit(AddLent(SeqId(1), RequestSpec(tuple(range(1, 19)), GREEDY)))
        seen = engine.until(lambda seen: sum(len(s.sums[0]) for e in seen for s in e.sealed) == 5)
        blocks = seen[0].lent[0].block_tables[0]
        assert seen[0].lent[0].sums == ((),)
        kinds = ["sealed" if e.sealed else "told" for e in seen if e.sealed or e.advanced or e.tokens]
        assert kinds == ["told", "sealed"] * 3, "a reader need not wait for a sum"
        sealed = [s for e in seen for s in e.sealed]
        assert [(s.seq_id, s.first, s.sums[0]) for s in sealed] == [
            (1, first, tuple(engine.memory[b] for b in blocks[first : first + 2])) for first in (0, 2, 4)
        ]
        engine.thread.submit(AddLent(SeqId(2), RequestSpec(tuple(range(1, 19)), GREEDY)))
        seen = engine.until(lambda seen: any(e.sealed for e in seen))
        lent = next(lent for e in seen for lent in e.lent)
        assert lent.block_tables[0][:4] == blocks[:4]
        assert lent.sums == (tuple(engine.memory[b] for b in blocks[:4]),)
        assert sorted(engine.summed) == sorted({*blocks, *lent.block_tables[0]}), "once each"


def test_a_rotted_block_is_found_and_never_shared_again_nor_what_came_after_it():
    with Engine(lends=True) as engine:
        engine.thread.submit(AddLent(SeqId(1), RequestSpec(tuple(range(1, 19)), GREEDY)))
        blocks = engine.until(lambda seen: sum(len(s.sums[0]) for e in seen for s in e.sealed) == 5)[0].lent[0].block_tables[0]
        engine.thread.submit(Rehash(SeqId(1)))
        assert engine.until(lambda seen: bool(seen[-1].rehashed))[-1].rehashed == (Rehashed(SeqId(1), ()),)
        engine.memory[blocks[1]] = BlockSum(7)
        engine.thread.submit(Rehash(SeqId(1)))
        engine.thread.submit(ReturnLease(SeqId(1)))
        seen = engine.until(lambda seen: any(e.rehashed for e in seen))
        assert seen[-1].rehashed == (Rehashed(SeqId(1), ((0, blocks[1]),)),)
        engine.thread.submit(AddLent(SeqId(2), RequestSpec(tuple(range(1, 19)), GREEDY)))
        lent = engine.until(lambda seen: any(e.lent for e in seen))[-1].lent[0]
        assert lent.sums == ((engine.memory[blocks[0]],),), "only the block before it is shared"


def test_every_group_is_summed_and_one_rotted_group_withdraws_the_prefix_from_all():
    """(1) Two groups, summed apart; (2) block 2 rots in the second one; (3) only the two blocks before it are shared."""
    pools = BlockPools(10, 12)
    memory = [{BlockId(block): BlockSum(100 * group + block) for block in range(12)} for group in (1, 2)]
    sums = [lambda blocks, group=group: tuple(memory[group][block] for block in blocks) for group in (0, 1)]
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 32}
    steps = EngineSteps(Scheduler(pools, 4, **sizes, eos_token_ids=(0,), prefix_salt=b"test"), pools, sums)
    _, early = steps.begin([AddLent(SeqId(1), RequestSpec(tuple(range(1, 19)), GREEDY))])
    tables = early.lent[0].block_tables
    assert [len(table) for table in tables] == [5, 5]
    steps.finish([(7, None)])
    assert steps.seal().sealed[0].sums == tuple(
        tuple(memory[group][block] for block in table) for group, table in enumerate(tables)
    )
    memory[1][tables[1][2]] = BlockSum(7)
    _, events = steps.begin([Rehash(SeqId(1))])
    assert events.rehashed == (Rehashed(SeqId(1), ((1, tables[1][2]),)),)
    _, early = steps.begin([AddLent(SeqId(2), RequestSpec(tuple(range(1, 19)), GREEDY))])
    shared = tuple(table[:2] for table in tables)
    assert tuple(table[:2] for table in early.lent[0].block_tables) == shared
    assert early.lent[0].sums == tuple(tuple(memory[g][block] for block in table) for g, table in enumerate(shared))


def test_a_lease_that_has_gone_back_has_nothing_to_look_at():
    with Engine(lends=True) as engine:
        engine.thread.submit(Rehash(SeqId(1)))
        assert engine.until(lambda seen: bool(seen[-1].rehashed))[-1].rehashed == (Rehashed(SeqId(1), ()),)


def test_an_inbound_request_decodes_from_token_1_after_activation():
    with Engine() as engine:
        engine.thread.submit(Reserve(SeqId(1), RequestSpec((5, 6), GREEDY), local_prefill=False))
        engine.until(lambda seen: bool(seen[-1].reserved))
        engine.thread.submit(Activate(SeqId(1), 7))
        seen = engine.until(lambda seen: any(t.finish_reason is FinishReason.LENGTH for e in seen for t in e.tokens))
        assert [(t.output_index, t.token_id) for e in seen for t in e.tokens] == [(1, 8), (2, 9), (3, 10)]


def test_an_aborted_inbound_request_with_a_read_in_flight_is_quarantined_until_it_stops():
    with Engine() as engine:
        engine.thread.submit(Reserve(SeqId(1), RequestSpec((5, 6), GREEDY), local_prefill=False))
        engine.thread.submit(Abort(SeqId(1), read_in_flight=True))
        assert engine.settled().snapshot.load.blocks.quarantined == 2
        engine.thread.submit(EndQuarantine(SeqId(1)))
        assert engine.settled().snapshot.load.blocks.free == 10


def test_a_request_without_room_holds_nothing():
    with Engine(num_blocks=8) as engine:
        engine.thread.submit(Reserve(SeqId(1), RequestSpec(tuple(range(24)), GREEDY), local_prefill=False))
        engine.thread.submit(Reserve(SeqId(2), RequestSpec(tuple(range(24)), GREEDY), local_prefill=False))
        seen = engine.until(lambda seen: sum(len(e.reserved) for e in seen) == 2)
        results = {r.seq_id: r.block_tables for e in seen for r in e.reserved}
        assert results[1] is not None
        assert results[2] is None
        engine.thread.submit(Abort(SeqId(1)))
        assert engine.settled().snapshot.load.blocks.free == 8


def test_what_build_raises_is_raised_by_start():
    def build():
        raise ValueError("no such model")

    thread = EngineThread(build, print, print)
    with pytest.raises(ValueError, match="no such model"):
        thread.start(WAIT_S)


def test_a_dying_model_is_reported_once_and_the_thread_ends():
    with Engine() as engine:
        engine.runner.fail = True
        engine.thread.submit(Reserve(SeqId(1), RequestSpec((5, 6), GREEDY), local_prefill=True))
        assert "planted" in str(engine.deaths.get(timeout=WAIT_S))
