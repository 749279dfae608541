"""Two processes with one worker_id: the one that is linked stays, and a worker that was started anew gets its id back."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.errors import ErrorCode
from pdserve.core.ids import Incarnation
from pdserve.core.worker import Role
from router.core import events as ev
from testkit.fake_worker import DECODE, LightWorker

from .core_peers import Stage
from .local_cluster import TOKEN, LocalCluster, local_cluster

LOST_S = 5.0
WAIT_S = 60.0


def closed(stage: Stage) -> list[ev.CloseLink]:
    return [effect for effect in stage.effects if isinstance(effect, ev.CloseLink)]


def welcomed(stage: Stage) -> list[ev.LinkId]:
    return [effect.link for effect in stage.effects if isinstance(effect, ev.SendWelcome)]


def test_a_second_worker_with_the_id_of_a_live_one_is_refused_by_name_and_costs_it_nothing() -> None:
    """The later one took the id, the earlier one took it back, and so on: each time all requests of both were dropped."""
    stage = Stage(heartbeat_lost_s=LOST_S)
    first = stage.join("decode-0", Role.DECODE, address="10.0.0.1:1", pid=11)
    outcome = stage.submit("r", max_tokens=3)
    stage.now_s = 2.0
    second = stage.join("decode-0", Role.DECODE, address="10.0.0.2:1", pid=22)
    (refused,) = closed(stage)
    assert refused.link == second.link
    assert refused.error.code is ErrorCode.WORKER_ID_TAKEN
    said = ("'decode-0' is taken", "10.0.0.1:1", "pid 11", "heard 2.0 s ago", "10.0.0.2:1", "pid 22", "another worker_id")
    for words in said:
        assert words in refused.error.message
    assert welcomed(stage) == [first.link]
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert outcome.report.attempts == 1
    stage.assert_empty()


def test_the_id_of_a_live_worker_is_refused_to_the_other_role_too() -> None:
    stage = Stage()
    stage.join("w", Role.DECODE)
    stage.join("w", Role.PREFILL)
    assert [effect.error.code for effect in closed(stage)] == [ErrorCode.WORKER_ID_TAKEN]


def test_a_worker_that_was_started_anew_is_let_in_once_the_old_link_has_broken() -> None:
    stage = Stage(heartbeat_lost_s=LOST_S)
    old = stage.join("decode-0", Role.DECODE)
    outcome = stage.submit("r", max_tokens=3)
    stage.join("decode-0", Role.DECODE)
    assert welcomed(stage) == [old.link], "the router does not know yet that the old process has died"
    stage.leave(old)
    new = stage.join("decode-0", Role.DECODE)
    assert welcomed(stage) == [old.link, new.link]
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


@pytest.mark.parametrize("ticked", [False, True], ids=["before the tick", "after the tick"])
def test_a_worker_that_was_started_anew_is_let_in_once_the_old_one_is_silent_for_too_long(ticked: bool) -> None:
    """Its machine has gone, say, and no connection breaks."""
    stage = Stage(heartbeat_lost_s=LOST_S)
    old = stage.join("decode-0", Role.DECODE)
    outcome = stage.submit("r", max_tokens=3)
    stage.now_s = LOST_S
    stage.join("decode-0", Role.DECODE)
    assert welcomed(stage) == [old.link]
    stage.now_s = LOST_S + 0.1
    if ticked:
        stage.tell(ev.Tick())
    new = stage.join("decode-0", Role.DECODE)
    assert welcomed(stage) == [old.link, new.link]
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_a_process_that_dials_again_is_let_in_at_once() -> None:
    """Its link broke on its side, which the router need not have noticed."""
    stage = Stage()
    old = stage.join("decode-0", Role.DECODE, incarnation=Incarnation(7))
    outcome = stage.submit("r", max_tokens=3)
    again = stage.join("decode-0", Role.DECODE, incarnation=Incarnation(7))
    assert welcomed(stage) == [old.link, again.link]
    assert [effect.error.code for effect in closed(stage)] == [ErrorCode.REPLICA_LOST]
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def dialling(cluster: LocalCluster, pid: int) -> LightWorker:
    return LightWorker(
        DECODE, cluster.link_address, "decode-0", TOKEN, cluster.service.model.card.fingerprint, f"10.0.0.{pid}:1", pid,
        incarnation=pid, heartbeat_interval_s=0.1, router_lost_s=LOST_S,
    )  # fmt: skip


def test_two_processes_with_one_id_do_not_evict_each_other_over_real_links(caplog: pytest.LogCaptureFixture) -> None:
    """(1) The second is refused, again and again, and says why. (2) The first goes on without a loss. (3) It ends, and
    the second is let in."""

    def refusals() -> int:
        return sum("is taken" in record.getMessage() for record in caplog.records if record.name == "pdserve.worker.link")

    async def story() -> None:
        async with asyncio.timeout(WAIT_S), local_cluster(()) as cluster:
            second = dialling(cluster, 2)
            async with dialling(cluster, 1) as first:
                joins = asyncio.create_task(second.start())
                while refusals() < 3:  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.01)
                assert not second.link.connected.is_set()
                assert (first.losses, second.losses) == (0, 0)
                assert [w.hello.pid for w in cluster.service.snapshot().workers] == [1]
            await joins
            assert [w.hello.pid for w in cluster.service.snapshot().workers] == [2]
            await second.stop()

    asyncio.run(story())
