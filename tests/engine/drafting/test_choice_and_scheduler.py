"""The choice of drafts beside a real scheduler: what it asks its drafters for, and what it remembers of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import StepPlan
from pdserve.engine.drafting.api import Draft, DraftView
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.drafting.costs import StepCosts
from pdserve.engine.drafting.lookup import LookupDrafter
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.messages import Reserve

LONG = 240  # a model is tried after about 160 steps
NEARLY_FREE = [(1, 0.01), (16, 0.0101)]
DEAR = [(1, 0.01), (2, 0.02), (16, 0.2)]


class NextNumber:
    """A model that drafts the number after the last token, over blocks of the sequences."""

    kind, most, needs_blocks, spent_s = "next", 4, True, 4e-5

    def __init__(self) -> None:
        self.asked: list[SeqId] = []

    def place_s(self, sequences: int, read: int) -> float:
        return 1e-5

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        self.asked += [view.seq_id for view in views]
        assert all(len(table) * 4 >= len(view.tokens) + view.most for view in views for table in view.block_tables)
        return [Draft(tuple(view.tokens[-1] + 1 + i for i in range(view.most)), self.kind) for view in views]

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        pass


def counting(plan: StepPlan) -> list[tuple[int, None]]:
    """The token after each row is one more than the row's."""
    return [(i + 1, None) for piece in plan.slices for i in piece.token_ids[-len(piece.samples) :] if piece.samples]


def steps_of(choice: DraftChoice, specs: list[RequestSpec]) -> tuple[EngineSteps, Scheduler]:
    pool = BlockPools(64)
    scheduler = Scheduler(
        pool, 4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=250, eos_token_ids=(0,), prefix_salt=None
    )
    steps = EngineSteps(scheduler, pool, choice=choice)
    commands = [Reserve(SeqId(i), spec, True) for i, spec in enumerate(specs)]
    plan, _ = steps.begin(commands)
    while plan.slices:
        steps.finish(counting(plan), 0.01)
        plan, _ = steps.begin(())
    return steps, scheduler


def greedy(prompt: tuple[int, ...], max_tokens: int, draft_limit: int | None = None) -> RequestSpec:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return RequestSpec(prompt, params, draft_limit=draft_limit)


@pytest.mark.parametrize("by_rows", [NEARLY_FREE, DEAR], ids=["verified", "not verified"])
def test_a_sequence_that_ends_with_its_drafts_is_not_remembered(by_rows: list[tuple[int, float]]) -> None:
    """It is forgotten when its step is collected, and the odds learn from that step afterwards."""
    lookup = LookupDrafter()
    choice = DraftChoice((lookup,), StepCosts(by_rows), most=8)
    prompt = (*range(10, 30), 5, *range(10, 13))
    _, scheduler = steps_of(choice, [greedy(prompt, length) for length in range(1, 9)])
    assert not scheduler.num_live
    assert choice._odds._kinds or by_rows is DEAR
    assert not choice._odds._own
    assert not lookup._live


def test_a_model_is_not_tried_while_no_sequence_may_have_drafts() -> None:
    """A model that has not drafted for a while is tried with the first sequence that may have drafts: there was none, and the
    engine died."""
    model = NextNumber()
    choice = DraftChoice((), StepCosts(NEARLY_FREE), most=4, model=model)
    _, scheduler = steps_of(choice, [greedy((3, 4), LONG, 0)])
    assert not scheduler.num_live
    assert not model.asked
    steps_of(choice, [greedy((3, 4), LONG, 0), greedy((3, 4), LONG, 3)])
    assert set(model.asked) == {SeqId(1)}
