"""Checksums over the lives of an engine: whoever lends has the checksum of every block that a lease inherits."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import InternalBug
from pdserve.core.ids import BlockSum, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.messages import Abort, AddLent, Command, Lent, Reserve, ReturnLease, SetLending

BLOCK = 2
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class Engine:
    """An engine whose lives follow each other. The checksum of a block is its id, so a wrong one is seen."""

    def __init__(self) -> None:
        self.pool = BlockPools(24)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 40, "eos_token_ids": ()}
        scheduler = Scheduler(self.pool, BLOCK, prefix_salt=b"s", **limits)  # type: ignore[arg-type]
        self.summed = 0
        self.steps = EngineSteps(scheduler, self.pool, [self._sums])
        self.lent: list[Lent] = []
        self._last = 0

    def _sums(self, blocks):
        self.summed += len(blocks)
        return tuple(BlockSum(1000 + block) for block in blocks)

    def run(self, *commands: Command) -> None:
        waiting = list(commands)
        while True:
            plan, early = self.steps.begin(waiting)
            waiting = []
            self.lent += early.lent if early is not None else ()
            if not plan.slices:
                return
            self.steps.finish([(7, None) for _ in plan.specs])
            self.steps.seal()

    def serve(self, prompt: tuple[int, ...], *, lends: bool) -> None:
        """One request from its arrival until nothing of it is held."""
        self._last += 1
        seq_id, spec = SeqId(self._last), RequestSpec(prompt, PARAMS)
        if lends:
            self.run(AddLent(seq_id, spec))
            self.run(Abort(seq_id), ReturnLease(seq_id))
        else:
            self.run(Reserve(seq_id, spec, local_prefill=True))


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


@given(st.lists(st.tuples(st.booleans(), st.lists(PROMPTS, max_size=5)), max_size=6))
def test_a_lease_has_the_checksum_of_each_of_its_hits_whichever_life_computed_it(lives) -> None:
    engine = Engine()
    for lends, prompts in lives:
        before = engine.summed
        engine.run(SetLending(lends))
        for prompt in prompts:
            engine.serve(prompt, lends=lends)
            if lends:
                lent = engine.lent.pop()
                assert lent.sums is not None
                assert lent.sums[0] == tuple(1000 + block for block in lent.block_tables[0][: len(lent.sums[0])])
        assert lends or engine.summed == before, "a worker that lends nothing pays nothing"
    engine.pool.check_invariants()


@given(PROMPTS.filter(lambda prompt: len(prompt) > 2 * BLOCK))
def test_hits_of_the_other_role_are_summed_before_they_are_lent(prompt) -> None:
    engine = Engine()
    engine.run(SetLending(False))
    engine.serve(prompt, lends=False)
    assert engine.summed == 0
    engine.run(SetLending(True))
    engine.serve(prompt, lends=True)
    (lent,) = engine.lent
    hits = (len(prompt) - 1) // BLOCK
    assert lent.sums is not None
    assert len(lent.sums[0]) == hits


def test_the_role_does_not_change_while_a_block_is_held() -> None:
    engine = Engine()
    engine.run(SetLending(True), AddLent(SeqId(1), RequestSpec((1, 2, 3), PARAMS)))
    with pytest.raises(InternalBug, match="blocks are held"):
        engine.run(SetLending(False))
