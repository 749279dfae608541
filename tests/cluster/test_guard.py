"""Who ends a worker's process, and whether it is started again: told apart without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.cluster.keeping.guard import Guard

WAIT_S = 60.0


@dataclass
class Worker:
    """Ends when a test sets its status."""

    status: int | None = None
    healthy: bool = True
    ended: Callable[[], object] | None = None

    def on_end(self, call: Callable[[], object]) -> None:
        self.ended = call

    def wait(self, timeout_s: float | None) -> int | None:
        return self.status


@dataclass
class Guarded:
    worker: Worker = field(default_factory=Worker)
    node_leaves: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    drained: list[bool] = field(default_factory=list)
    interval_s: float = 0.01

    def __post_init__(self) -> None:
        self.guard = Guard(
            self.worker, node_leaves=lambda: self.node_leaves, end_process=self.ended.set, interval_s=self.interval_s
        )
        self.waiter = threading.Thread(target=lambda: self.drained.append(self.guard.wait()))
        self.waiter.start()

    def finish(self) -> None:
        self.guard.stop()
        self.waiter.join(WAIT_S)
        assert not self.waiter.is_alive()


def test_a_drained_worker_says_so_and_its_process_stays_for_whoever_removes_it() -> None:
    guarded = Guarded()
    guarded.worker.healthy = False  # as a worker is that has ended
    guarded.worker.status = 0
    guarded.waiter.join(WAIT_S)
    guarded.finish()
    assert guarded.drained == [True]
    assert not guarded.ended.is_set()


def test_a_worker_that_broke_ends_its_process() -> None:
    guarded = Guarded()
    guarded.worker.status = 1
    assert guarded.ended.wait(WAIT_S)
    guarded.finish()
    assert guarded.drained == [False]


def test_a_worker_that_breaks_between_two_looks_ends_its_process_at_once() -> None:
    """Until then the router holds it for alive."""
    guarded = Guarded(interval_s=2 * WAIT_S)
    guarded.worker.status = 1
    assert guarded.worker.ended is not None
    guarded.worker.ended()
    assert guarded.ended.wait(WAIT_S)
    guarded.finish()


def test_an_unhealthy_worker_ends_its_process_though_it_still_runs() -> None:
    guarded = Guarded()
    guarded.worker.healthy = False
    assert guarded.ended.wait(WAIT_S)
    guarded.finish()


def test_a_worker_that_drained_because_its_node_leaves_waits_to_be_lost_with_it() -> None:
    """Ended by itself it would be started again at once, on the node that leaves; removed, it would never come back."""
    guarded = Guarded(node_leaves=True)
    guarded.worker.status = 0
    guarded.guard._thread.join(WAIT_S)
    assert not guarded.guard._thread.is_alive()
    assert guarded.waiter.is_alive()
    guarded.finish()
    assert guarded.drained == [False]
    assert not guarded.ended.is_set()


def test_a_worker_that_is_stopped_has_neither_drained_nor_broken() -> None:
    guarded = Guarded()
    guarded.guard.stop()
    guarded.worker.status = 0
    guarded.finish()
    assert guarded.drained == [False]
    assert not guarded.ended.is_set()
