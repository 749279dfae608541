"""One worker over its processes, without Ray: what counts against its restarts, and what is said of its waiting."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pdserve.cluster import plan
from pdserve.cluster.keeping.order import NodePlace
from pdserve.cluster.member import FIRST_WAIT_S, LONGEST_WAIT_S, Member, MemberState
from pdserve.config import ClusterConfig, PoolConfig

DAY_S = 86_400.0


def member(restarts: int) -> Member:
    config = ClusterConfig(prefill=PoolConfig(replicas=0), decode=PoolConfig(max_restarts_per_hour=restarts))
    (planned,) = plan.plan_workers(config, router_address="h:1", cluster_token="t", log_dir=Path("logs"))
    return Member(planned)


def start(worker: Member, now_s: float) -> None:
    """Its calls go to an actor that answers nothing: what comes back is handed in."""
    worker.asked(MagicMock(), None, now_s)
    worker.placed(NodePlace("node", "host"), now_s)
    worker.loaded(MagicMock(), now_s)


def test_a_worker_that_crashed_once_a_day_was_lost_on_the_fourth() -> None:
    worker = member(restarts=1)
    for day in range(100):
        start(worker, day * DAY_S)
        assert worker.died(day * DAY_S + 60.0, counts=True) == FIRST_WAIT_S
        assert worker.state is MemberState.BACKING_OFF


def test_a_crash_loop_waits_longer_each_time_and_ends() -> None:
    worker, now_s, waits = member(restarts=8), 0.0, []
    while worker.state is not MemberState.GONE:
        start(worker, now_s)
        wait_s = worker.died(now_s, counts=True)
        waits.append(wait_s)
        now_s += wait_s or 0.0
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_WAIT_S, LONGEST_WAIT_S, None]
    assert (worker.actor, worker.pending, worker.report, worker.node_id) == (None, None, None, None)


def test_nodes_that_leave_cost_no_restart() -> None:
    worker = member(restarts=0)
    for now_s in range(10):
        start(worker, now_s)
        assert worker.died(now_s, counts=False) == FIRST_WAIT_S
    start(worker, 11.0)
    assert worker.died(11.0, counts=True) is None


def test_one_look_that_is_late_by_a_moment_says_nothing() -> None:
    worker = member(restarts=0)
    worker.asked(MagicMock(), None, 0.0)
    looks = ["others use it", None, "none offers", "none offers", "none offers", "others use it", "others use it"]
    assert [worker.waits_for_now(why) for why in looks] == [False, False, False, True, False, False, True]


def test_what_is_gone_does_not_come_back() -> None:
    worker = member(restarts=0)
    start(worker, 0.0)
    worker.gone(1.0)
    with pytest.raises(AssertionError, match="decode-0: gone -> placing"):
        worker.asked(MagicMock(), None, 2.0)
