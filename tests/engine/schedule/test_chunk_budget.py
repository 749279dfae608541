"""The prompt tokens of a step beside sequences with a target: the function, and a worker that decodes on virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from pdserve.engine.schedule.step_rates import TARGET_SHARE, StepCost, chunk_budget

BLOCK, BUDGET, STREAMS, PROMPT = 16, 512, 8, 2048
COST = StepCost(0.020, 0.0006)  # a decode step takes 25 ms, and one that is full of a prompt 0.33 s
TARGET_S = 0.05

costs = st.none() | st.builds(StepCost, st.floats(0, 1), st.floats(0, 0.1))
targets = st.floats(0, 2)
sizes = st.integers(0, 1000)


@given(target_s=targets, cost=costs, decodes=sizes, floor=st.integers(1, 64), ceiling=sizes)
def test_it_stays_between_a_block_and_the_budget_and_meets_the_target_there(target_s, cost, decodes, floor, ceiling):
    tokens = chunk_budget(target_s, cost, decodes=decodes, floor=floor, ceiling=ceiling)
    assert min(floor, ceiling) <= tokens <= ceiling
    if cost is None or target_s == 0:
        assert tokens == ceiling
    elif tokens > floor:
        assert cost.step_s(decodes + tokens) <= target_s * TARGET_SHARE * (1 + 1e-9)
    if cost is not None and target_s > 0 and tokens < ceiling:
        assert cost.step_s(decodes + tokens + 1) >= target_s * TARGET_SHARE * (1 - 1e-9), "more would fit"


@given(one=targets, other=targets, cost=costs, decodes=sizes, ceiling=sizes)
def test_a_looser_target_never_makes_a_step_smaller(one, other, cost, decodes, ceiling):
    tight, loose = sorted(max(target_s, 1e-9) for target_s in (one, other))
    sizes = [chunk_budget(target_s, cost, decodes=decodes, floor=BLOCK, ceiling=ceiling) for target_s in (tight, loose)]
    assert sizes == sorted(sizes)


class Worker:
    """A scheduler whose steps take virtual time. It knows the gaps between the tokens of each sequence, in seconds."""

    def __init__(self, tpot_s: float, growth: float = 0.0) -> None:
        """`growth`: the last token of a prompt costs so much more than the first, as a share of it."""
        self.growth = growth
        self.scheduler = Scheduler(
            BlockPools(512), BLOCK, max_num_seqs=64, max_num_batched_tokens=BUDGET, max_model_len=4096, eos_token_ids=()
        )
        self.gaps: dict[SeqId, list[float]] = {}
        self.now_s = 0.0
        self.last_s: dict[SeqId, float] = {}
        self.chunks: list[int] = []
        for i in range(STREAMS):
            self.add(i, 32, tpot_s)
        self.run(lambda: len(self.last_s) == STREAMS)

    def add(self, seq_id: int, tokens: int, tpot_s: float = 0.0) -> None:
        spec = RequestSpec(tuple(range(tokens)), SamplingParams(max_tokens=1500), tpot_s=tpot_s)
        self.scheduler.add(SeqId(seq_id), spec, kind=SequenceKind.LOCAL)

    def run(self, done) -> None:
        for _ in range(3000):
            if done():
                return
            plan = self.scheduler.plan()
            self.chunks.append(plan.num_tokens - plan.decodes)
            before = max([piece.start for piece in plan.slices[plan.decodes :]], default=0)
            step_s = COST.step_s(plan.num_tokens) * (1 + self.growth * before / PROMPT)
            self.now_s += step_s
            self.scheduler.took(step_s)
            for token in self.scheduler.collect([(7, None)] * len(plan.specs)).tokens:
                before_s = self.last_s.get(token.seq_id)
                if before_s is not None:
                    self.gaps.setdefault(token.seq_id, []).append(self.now_s - before_s)
                self.last_s[token.seq_id] = self.now_s
        pytest.fail("a step was always missing")

    def prompt(self, seq_id: int) -> None:
        """Compute a long prompt beside the streams, and forget the gaps before it."""
        self.add(seq_id, PROMPT)
        self.gaps.clear()
        self.chunks.clear()
        self.run(lambda: SeqId(seq_id) in self.last_s)
        self.scheduler.abort(SeqId(seq_id))

    def worst_tpot_s(self) -> float:
        return max(sum(self.gaps[SeqId(i)]) / len(self.gaps[SeqId(i)]) for i in range(STREAMS))


def test_streams_with_a_target_keep_it_beside_a_long_prompt():
    free, bound = Worker(0.0), Worker(TARGET_S)
    for worker in (free, bound):
        worker.prompt(100)  # the cost of steps is learned
        worker.prompt(101)
    assert free.worst_tpot_s() > 5 * TARGET_S
    assert max(max(gaps) for gaps in bound.gaps.values()) <= TARGET_S
    assert len(bound.chunks) <= -(-PROMPT // BLOCK), "a step computes at least a block of a prompt"
    assert all(count % BLOCK == 0 for count in bound.chunks[:-1]), "chunks end at the ends of blocks"


def test_a_target_is_kept_while_the_tokens_of_a_prompt_cost_more_and_more():
    """The end of the prompt costs two and a half times as much as its beginning, which no line through steps tells."""
    target_s = 0.2
    worker = Worker(target_s, growth=1.5)
    worker.prompt(100)
    worker.prompt(101)
    assert max(max(gaps) for gaps in worker.gaps.values()) <= target_s
    assert max(worker.chunks) > 2 * BLOCK, "the floor does not bind"


def test_a_prompt_goes_on_beside_a_target_that_nothing_meets():
    worker = Worker(0.001)
    worker.prompt(100)
    worker.prompt(101)
    assert worker.chunks[:-1] == [BLOCK] * (PROMPT // BLOCK - 1)


def test_an_operator_bounds_the_step_and_takes_the_bound_back():
    worker = Worker(0.0)
    worker.scheduler.set_budget(64)
    worker.prompt(100)
    assert max(worker.chunks) <= 64 - STREAMS
    worker.scheduler.set_budget(BUDGET)
    worker.prompt(101)
    assert max(worker.chunks) > 64
    for refused in (0, 63, BUDGET + 1):
        with pytest.raises(AssertionError):
            worker.scheduler.set_budget(refused)


prompts = st.lists(st.tuples(st.integers(1, 200), st.integers(-2, 2), st.integers(0, 4)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    prompts=prompts, streams=st.integers(0, 8), budget=st.integers(8 + BLOCK, 80), tpot_s=st.sampled_from([0.0, 0.001, 0.03])
)
def test_every_step_computes_a_block_of_prompts_and_a_target_cuts_none(prompts, streams, budget, tpot_s):
    """Prompts of all priorities come beside streams with a tight target, a loose one or none. The budget is at its lower limit,
    a block beside all other slots, or above."""
    scheduler = Scheduler(
        BlockPools(512), BLOCK, max_num_seqs=9, max_num_batched_tokens=512, max_model_len=4096, eos_token_ids=()
    )
    scheduler.set_budget(budget)
    for number in range(streams):
        spec = RequestSpec((number,) * 4, SamplingParams(max_tokens=3000), tpot_s=tpot_s)
        scheduler.add(SeqId(number), spec, kind=SequenceKind.LOCAL)
    coming, left = list(enumerate(prompts, start=100)), sum(tokens for tokens, _, _ in prompts)
    due = 8  # all streams decode by then
    for number in range(600):
        while coming and due <= number:
            seq_id, (tokens, priority, pause) = coming.pop(0)
            due = number + pause
            spec = RequestSpec((seq_id,) * tokens, SamplingParams(max_tokens=1), priority)
            scheduler.add(SeqId(seq_id), spec, kind=SequenceKind.LOCAL)
        queued = scheduler.queued_tokens
        plan = scheduler.plan()
        chunks = [piece for piece in plan.slices if piece.seq_id >= 100]
        tokens = sum(len(piece.token_ids) for piece in chunks)
        if number >= 8:
            assert tokens > 0 or not queued, "prompts go on in every step"
            assert tokens + sum(piece.seq_id < 100 for piece in plan.slices) <= budget
        for piece in chunks:
            end = piece.start + len(piece.token_ids)
            whole = end % BLOCK == 0 or end == prompts[piece.seq_id - 100][0]
            assert whole or not (tpot_s and streams)
            assert whole or piece.seq_id != chunks[0].seq_id or len(chunks) > 1 or tokens >= BLOCK
        left -= tokens
        if plan.slices:
            scheduler.took(COST.step_s(plan.num_tokens))
            scheduler.collect([(7, None)] * len(plan.specs))
        elif not coming:
            break
        if not left:
            break
    assert not left


def test_an_overtaken_prompt_goes_on_beside_a_share_of_one_block():
    """The share cannot be divided, so the two prompts take turns."""
    worker = Worker(0.001)
    worker.prompt(100)
    worker.add(200, 640)
    worker.run(lambda: len(worker.scheduler._prefilling) == 1)
    before = worker.scheduler._sequences[SeqId(200)].computed
    spec = RequestSpec(tuple(range(320)), SamplingParams(max_tokens=1500), 5)
    worker.scheduler.add(SeqId(201), spec, kind=SequenceKind.LOCAL)
    steps = len(worker.chunks)
    worker.run(lambda: SeqId(201) in worker.last_s)
    assert len(worker.chunks) - steps <= 2 * 320 // BLOCK + 1
    assert worker.scheduler._sequences[SeqId(200)].computed - before >= 320 - BLOCK
    assert set(worker.chunks[steps:]) == {BLOCK}
