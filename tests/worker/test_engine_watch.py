"""The watch over the engine's steps: what it counts, and what it must not take for a hang."""

from __future__ import annotations

from pdserve.core.blocks import BlockCounts
from pdserve.core.worker import WorkerLoad
from pdserve.worker.engine_thread import LOOK_S, MAX_STEPS_LATE, EngineWatch, step_timeout_s
from pdserve.worker.messages import EngineSnapshot, StepEvents

TIMEOUT_S = 6.0
LOOKS = int(TIMEOUT_S / LOOK_S)
"""So many looks make up the bound; one more is past it."""


def events(*, taken: int, has_work: bool, waiting: int = 0) -> StepEvents:
    counts = BlockCounts(8, 8, 0, 0, 0)
    return StepEvents(snapshot=EngineSnapshot(WorkerLoad(counts, waiting), commands_taken=taken, has_work=has_work))


def looks(watch: EngineWatch, count: int) -> bool:
    """Whether the engine was found stuck by one of so many looks, each on time."""
    return any(watch.look(LOOK_S) for _ in range(count))


def test_a_command_that_is_never_taken_is_a_hang_after_the_bound() -> None:
    watch = EngineWatch(TIMEOUT_S)
    watch.submitted()
    assert not looks(watch, 1 + LOOKS), "the first look begins the count"
    assert watch.stalled_s == TIMEOUT_S
    assert looks(watch, 1)
    assert "no step for 6.5 s, of at most 6.0 s" in watch.reason


def test_a_step_that_never_ends_is_a_hang_although_all_commands_were_taken() -> None:
    watch = EngineWatch(TIMEOUT_S)
    watch.submitted()
    watch.heard(events(taken=1, has_work=True))
    assert looks(watch, 1 + LOOKS + 1)


def test_work_that_came_just_before_a_look_does_not_make_the_engine_late() -> None:
    """It counted from the look before, when the engine was idle: for half a second too long, which set a worker aside."""
    watch = EngineWatch(TIMEOUT_S)
    assert not looks(watch, 1)
    watch.submitted()
    assert not looks(watch, 1)
    assert watch.stalled_s == 0.0
    watch.heard(events(taken=1, has_work=True))
    assert not looks(watch, 1)
    assert watch.stalled_s == 0.0


def test_an_idle_engine_owes_nothing() -> None:
    watch = EngineWatch(TIMEOUT_S)
    assert not looks(watch, 100 * LOOKS)
    watch.submitted()
    watch.heard(events(taken=1, has_work=False))
    assert not looks(watch, 100 * LOOKS)
    assert watch.stalled_s == 0.0


def test_an_engine_whose_waiting_sequences_do_not_fit_owes_nothing() -> None:
    """It waits for a lease to end, which may take as long as it likes."""
    watch = EngineWatch(TIMEOUT_S)
    watch.submitted()
    watch.heard(events(taken=1, has_work=False, waiting=3))
    assert not looks(watch, 100 * LOOKS)


def test_long_steps_that_end_are_no_hang() -> None:
    """A command came meanwhile and waits for the step's end; what the engine says without a snapshot counts as well."""
    watch = EngineWatch(TIMEOUT_S)
    watch.submitted()
    for step in range(10):
        watch.submitted()
        assert not looks(watch, LOOKS)
        watch.heard(StepEvents() if step % 2 else events(taken=step, has_work=True))
        assert watch.stalled_s == 0.0


def test_a_process_that_stood_still_does_not_take_its_engine_for_hung() -> None:
    """Stopped for an hour, or its loop was: nobody was there to hear the engine, which gets its time again."""
    watch = EngineWatch(TIMEOUT_S)
    watch.submitted()
    assert not watch.look(LOOK_S)
    assert not watch.look(3600.0)
    assert watch.stalled_s == 2 * LOOK_S


def test_slow_steps_are_given_more_time_than_the_setting_says() -> None:
    """Thirty times what the slowest step took at the start: a worker beside busy others was 28 times as slow as alone."""
    assert step_timeout_s(60.0, 0.1) == 60.0
    assert step_timeout_s(60.0, 9.0) == 9.0 * MAX_STEPS_LATE == 270.0
