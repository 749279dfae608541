"""Prompts of several clients take turns on a worker, in proportion to their tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.schedule.scheduler import KEPT_CLIENTS, STEPS_A_LEVEL, Scheduler, Turns
from pdserve.engine.schedule.sequence import SequenceKind

BUDGET = 16


class Worker:
    """A production scheduler that computes prompts and lends them, with room for everything."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            BlockPools(2_000), 4, max_num_seqs=16, max_num_batched_tokens=BUDGET, max_model_len=1000, eos_token_ids=()
        )
        self.client: dict[SeqId, int] = {}
        self.left: dict[SeqId, int] = {}
        self.done: list[SeqId] = []

    def add(self, client: int, tokens: int, priority: int = 0) -> SeqId:
        seq_id = SeqId(len(self.client))
        self.client[seq_id], self.left[seq_id] = client, tokens
        spec = RequestSpec((seq_id,) * tokens, SamplingParams(max_tokens=1), priority=priority, client=client)
        self.scheduler.add(seq_id, spec, kind=SequenceKind.LENT)
        return seq_id

    def step(self) -> dict[int, int]:
        """Compute a step. Return the prompt tokens of each client in it."""
        computed: dict[int, int] = {}
        plan = self.scheduler.plan()
        for one in plan.slices:
            client = self.client[one.seq_id]
            computed[client] = computed.get(client, 0) + len(one.token_ids)
            self.left[one.seq_id] -= len(one.token_ids)
        if plan.slices:
            self.scheduler.collect([(7, None) for _ in plan.specs])
        for seq_id in [seq_id for seq_id, left in self.left.items() if not left]:
            del self.left[seq_id]
            self.done.append(seq_id)
            self.scheduler.return_lease(seq_id)
        return computed

    def waiting(self) -> set[int]:
        return {self.client[seq_id] for seq_id in self.left}


PROMPTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 60)), min_size=2, max_size=40)


def most_unfair(prompts: list[tuple[int, int]]) -> float:
    """Return by how many tokens what was computed for two clients differed most while both had prompts from the start on,
    divided by the bound: two of the largest prompts, and a step."""
    worker = Worker()
    for client, tokens in prompts:
        worker.add(client, tokens)
    computed = dict.fromkeys(worker.waiting(), 0)
    worst, bound = 0.0, 2 * max(tokens for _, tokens in prompts) + BUDGET
    while worker.left:
        waited = worker.waiting()
        for client, tokens in worker.step().items():
            computed[client] += tokens
        told = [computed[client] for client in waited]
        worst = max(worst, (max(told) - min(told)) / bound)
    return worst


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_clients_are_served_equally_but_for_two_prompts_and_a_step(prompts: list[tuple[int, int]]) -> None:
    assert most_unfair(prompts) <= 1.0


def arrivals_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "tag", lambda self, client, tokens: 0.0)


def no_weights(patch: pytest.MonkeyPatch) -> None:
    real = Turns.tag
    patch.setattr(Turns, "tag", lambda self, client, tokens: real(self, client, min(1, tokens)))


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], list[tuple[int, int]]] = {
    arrivals_alone: [*[(1, 20)] * 12, *[(2, 20)] * 12],
    no_weights: [*[(1, 60)] * 12, *[(2, 2)] * 120],
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_bound_finds(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_unfair(MUTANTS[mutant]) <= 1.0
    mutant(monkeypatch)
    assert most_unfair(MUTANTS[mutant]) > 1.0


@pytest.mark.parametrize("steps", [0, 1, 40])
def test_a_prompt_waits_for_about_one_of_a_burst(steps: int) -> None:
    worker = Worker()
    for _ in range(64):
        worker.add(1, 30)
    for _ in range(steps):
        worker.step()
    light, before = worker.add(2, 5), len(worker.done)
    while light not in worker.done:
        worker.step()
    assert len(worker.done) - before <= 3


def test_clients_that_come_once_each_do_not_keep_a_busy_one_from_its_turn() -> None:
    worker = Worker()
    mine = [worker.add(1, 16) for _ in range(5)]
    for i in range(80):
        worker.add(100 + i, 16)
        worker.add(500 + i, 16) if i < 6 else None
        worker.step()
    assert all(seq_id in worker.done for seq_id in mine)


@pytest.mark.parametrize("waiting", [1, 16, 64])
def test_a_level_of_priority_is_worth_as_many_steps_whoever_waits(waiting: int) -> None:
    """One new prompt of a full step comes for each that is computed, each of a client of its own."""
    worker = Worker()
    low = [worker.add(1 + i, BUDGET, priority=-1) for i in range(waiting)]
    steps = 0
    while not any(seq_id in worker.done for seq_id in low):
        worker.add(1000 + steps, BUDGET)
        worker.step()
        steps += 1
        assert steps <= 3 * STEPS_A_LEVEL
    assert steps > STEPS_A_LEVEL


ARRIVALS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(before=ARRIVALS, after=ARRIVALS, level=st.integers(1, 2))
def test_a_prompt_is_overtaken_by_no_more_than_came_within_the_worth_of_its_level(
    before: list[tuple[int, int]], after: list[tuple[int, int]], level: int
) -> None:
    """Whose prompts these are, fair turns decide; how many there are, the clock."""
    worker = Worker()
    for client, tokens in before:
        worker.add(client, tokens)
    low = worker.add(9, 5, priority=-level)
    clock, in_time = 0, len(before)
    while low in worker.left:
        if after:
            client, tokens = after.pop()
            worker.add(client, tokens)
            in_time += clock <= level * STEPS_A_LEVEL * BUDGET
        clock += sum(worker.step().values())
    assert len(worker.done) - 1 <= in_time + BUDGET, "but for those of its own step"


def test_a_probe_goes_first_after_hours_of_load() -> None:
    worker = Worker()
    for step in range(3000):
        for client in range(1, 9):
            if step % 8 == client - 1:
                worker.add(client, BUDGET)
        worker.step()
    for client in range(1, 9):
        worker.add(client, 60)
    probe = worker.add(0, 5, priority=1000)
    worker.step()
    assert probe in worker.done


def test_clients_are_forgotten() -> None:
    turns = Turns(BUDGET)
    for client in range(1, 5 * KEPT_CLIENTS):
        turns.tag(client, 1)
    assert len(turns._ends) <= 2 * KEPT_CLIENTS
