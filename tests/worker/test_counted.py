"""Which commands a heartbeat's counts include."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import Handle, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.host import CountedCommands
from pdserve.worker.messages import AddLent

PARAMS = SamplingParams(max_tokens=5)


def engine() -> EngineSteps:
    pool = BlockPools(64)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 200, "eos_token_ids": ()}
    return EngineSteps(Scheduler(pool, 4, **limits), pool)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=12))
def test_counts_and_their_last_command_are_of_one_moment(history: list[tuple[bool, int]]) -> None:
    """Commands wait while a step runs. Whatever was sent is either in the counts or behind the last command they name."""
    steps, counted, waiting, sent = engine(), CountedCommands(), [], {}
    for number, (runs_step, length) in enumerate(history, start=1):
        seq_id, handle = SeqId(number), Handle(100 + 3 * number)
        counted.give(seq_id, handle)
        sent[handle] = length
        waiting.append(AddLent(seq_id, RequestSpec(tuple(range(length)), PARAMS)))
        if not runs_step:
            continue
        plan, events = steps.begin(waiting)
        waiting = []
        while plan.slices:
            events = steps.finish([(7, None) for _ in plan.specs])
            plan, more = steps.begin([])
            events = events if plan.slices or more is None else more
        assert events is not None
        assert events.snapshot is not None
        last = counted.last_handle(events.snapshot.last_seq_id)
        assert last == handle
        assert counted.last_handle(SeqId(0)) == last, "an older snapshot takes nothing back"
    behind = [h for h in sent if h > counted.last_handle(SeqId(0))]
    assert len(behind) == len(waiting)


def test_another_link_counts_its_handles_anew() -> None:
    """A router that was started again numbers from 1: what its predecessor had counted says nothing about its own work."""
    counted = CountedCommands()
    counted.give(SeqId(1), Handle(5000))
    assert counted.last_handle(SeqId(1)) == 5000
    counted.give(SeqId(2), Handle(5001))
    counted.forget()
    assert counted.last_handle(SeqId(2)) == 0
    counted.give(SeqId(3), Handle(1))
    assert counted.last_handle(SeqId(2)) == 0
    assert counted.last_handle(SeqId(3)) == 1
