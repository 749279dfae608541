"""Each entry of each state table fires in some run, so no table says what cannot happen.

Runs are the properties of each machine, which random examples drive, and every state of small handoffs. The examples follow
from the numbers of the rounds. A table that is silent in one round gets the next one, up to a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from pdserve.core import blocks, lease, reader
from pdserve.engine.schedule import sequence
from router.core import request_machine, work_machine
from router.core.events import Tick
from tests.core import test_blocks, test_blocks_prefix, test_lease, test_reader
from tests.engine.schedule import test_scheduler_machine
from tests.router.core import test_core_faults, test_core_machine
from tests.router.core.recovery import stages, test_lost_workers, test_migration, test_worker_states
from tests.search.explorer import explore
from tests.search.handoff import Handoff
from tests.search.test_handoff_model import MAX_STATES, SMALL

ROUNDS = 50
"""The bound. Ten rounds were enough for each table when this was written."""
HANDOFFS = ("prefix hits on both sides", "a block of the lender rots, and a copy goes wrong", "changed tickets")


class Recorded(dict[tuple[Enum, Enum], Any]):
    """A table that notes which of its entries were asked for."""

    def __init__(self, table: dict[tuple[Enum, Enum], Any]) -> None:
        super().__init__(table)
        self.silent = set(table)

    def get(self, key: tuple[Enum, Enum], default: Any = None) -> Any:
        self.silent.discard(key)
        return super().get(key, default)


def play(*machines: type[RuleBasedStateMachine]) -> Callable[[int], None]:
    """Return a run of these machines, whose examples follow from the number of the round."""
    fixed = settings(
        max_examples=30,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )

    def run(number: int) -> None:
        for machine in machines:
            run_state_machine_as_test(seed(number)(type(machine.__name__, (machine,), {})), settings=fixed)

    return run


def search(_: int) -> None:
    for name in HANDOFFS:
        assert explore(Handoff(SMALL[name]), max_states=MAX_STATES).counterexample is None


def serve(number: int) -> None:
    for machine in (test_core_machine.CoreMachine, test_core_machine.ProbingCoreMachine):
        test_core_machine.long_random_run(number, machine)
    test_core_faults.run(test_core_faults.FaultyMachine, number)


def rare_moves(_: int) -> None:
    """Do what random runs do only now and then."""
    test_worker_states.test_a_worker_that_turns_requests_away_is_not_asked_again_before_its_heartbeat()
    test_lost_workers.test_a_decode_worker_lost_in_the_handoff_is_rebound_to_the_same_lease(stages.in_handoff)
    test_migration.test_prompts_of_a_draining_prefill_worker_are_computed_elsewhere_also_where_no_slot_is_free(flip=False)
    for reach in (stages.binding, stages.in_handoff, stages.decoding):
        stage = stages.pools()
        outcome = stage.submit("late", max_tokens=6, deadline_s=2.0)
        reach(stage)
        stage.now_s = 2.01
        stage.tell(Tick())
        assert outcome.ended == ["deadline_exceeded"]


RUNS: dict[ModuleType, tuple[Callable[[int], None], Callable[[int], None]]] = {
    lease: (search, lambda _: test_lease.every_call_in_every_state()),
    reader: (search, play(test_reader.ReaderMachine)),
    blocks: (search, play(test_blocks.PoolMachine, test_blocks_prefix.PrefixMachine)),
    sequence: (lambda _: None, play(test_scheduler_machine.SchedulerMachine)),
    request_machine: (rare_moves, serve),
    work_machine: (lambda _: None, serve),
}
"""What each table gets first, and then in each round."""


def rounds(module: ModuleType) -> Iterator[None]:
    first, again = RUNS[module]
    yield first(0)
    for number in range(ROUNDS):
        yield again(number)


@pytest.mark.quick("lease", "blocks", "sequence", "work_machine")
@pytest.mark.parametrize("module", RUNS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_entry_of_the_table_fires(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Recorded(module.TRANSITIONS)
    monkeypatch.setattr(module, "TRANSITIONS", table)
    for _ in rounds(module):
        if not table.silent:
            return
    pytest.fail(f"these never fire: {sorted((state.name, event.name) for state, event in table.silent)}")


def test_an_entry_that_cannot_fire_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = (lease.LeaseState.EXPIRED, lease.LeaseEvent.COMMIT_CORRUPT)
    table = Recorded({**lease.TRANSITIONS, silent: (lease.LeaseState.EXPIRED, lease.CommitAnswer.GONE)})
    monkeypatch.setattr(lease, "TRANSITIONS", table)
    for run in RUNS[lease]:
        run(0)
    assert table.silent == {silent}
