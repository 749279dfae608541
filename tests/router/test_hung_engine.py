"""A worker that beats and whose engine makes no step: nothing new goes there, and what is there ends elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.errors import ErrorCode
from pdserve.core.worker import Role, WorkerLoad
from router.core import events as ev
from testkit.fake_worker import DECODE, PREFILL

from .core_peers import Stage
from .local_cluster import LocalCluster, local_cluster, right_ids

STEP_TIMEOUT_S = 60.0
WAIT_S = 60.0
BEAT_S = 0.02


def stalled(stage: Stage, worker_id: str, stalled_s: float) -> None:
    worker = stage.core.registry.find(worker_id)
    assert worker is not None
    stage.tell(ev.HeartbeatSeen(worker.link, WorkerLoad(worker.load.blocks, engine_stalled_s=stalled_s)))


def bound_to(stage: Stage) -> list[ev.LinkId]:
    return [effect.link for effect in stage.effects if isinstance(effect, ev.SendBind)]


@pytest.mark.parametrize("share", [0.09, 0.11])
def test_a_worker_without_steps_gets_nothing_new_long_before_it_is_lost(share: float) -> None:
    stage = Stage()
    hung, other = (stage.join(f"decode-{i}", Role.DECODE, step_timeout_s=STEP_TIMEOUT_S) for i in range(2))
    stalled(stage, "decode-0", share * STEP_TIMEOUT_S)
    for i in range(6):
        stage.submit(f"r{i}", prompt_len=2, max_tokens=2)
    suspected = share > 0.1
    assert set(bound_to(stage)) == ({other.link} if suspected else {hung.link, other.link})
    reason = stage.core.placer.not_ready_reason(stage.core.registry.get(hung.link), now_s=0.0)
    assert reason == ("its engine has made no step for 6.6 s while work waits" if suspected else "")
    stage.run()
    stage.assert_empty()


def test_a_worker_whose_step_ends_after_all_is_placed_on_again() -> None:
    stage = Stage()
    stage.join("decode-0", Role.DECODE, step_timeout_s=STEP_TIMEOUT_S)
    stalled(stage, "decode-0", 30.0)
    outcome = stage.submit("r")
    assert not bound_to(stage)
    stalled(stage, "decode-0", 0.0)
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


@pytest.mark.parametrize("role", Role)
def test_a_worker_without_steps_is_lost_when_its_own_bound_passes(role: Role) -> None:
    stage = Stage()
    for i in range(2):
        stage.join(f"prefill-{i}", Role.PREFILL, step_timeout_s=STEP_TIMEOUT_S)
        stage.join(f"decode-{i}", Role.DECODE, step_timeout_s=STEP_TIMEOUT_S)
    outcome = stage.submit("r", max_tokens=4)
    for peer in list(stage.peers.values()):
        stage.deliver(peer, 1)
    (busy,) = [w for w in stage.core.registry if w.hello.role is role and w.work]
    stalled(stage, busy.hello.worker_id, STEP_TIMEOUT_S + 0.1)
    assert stage.core.registry.get(busy.link) is None
    (closed,) = [effect for effect in stage.effects if isinstance(effect, ev.CloseLink)]
    assert (closed.link, closed.error.code) == (busy.link, ErrorCode.REPLICA_LOST)
    assert f"the engine of {busy.name} has made no step for 60.1 s" in closed.error.message
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.emitted == [0, 1, 2, 3]
    stage.assert_empty()


def test_a_worker_that_gives_itself_up_is_lost_with_its_reason() -> None:
    stage = Stage()
    peers = [stage.join(f"decode-{i}", Role.DECODE) for i in range(2)]
    outcome = stage.submit("r", max_tokens=4)
    busy = next(peer for peer in peers if peer.jobs)
    stage.deliver(busy)  # it has reserved
    stage.tell(ev.WorkerLost(busy.link, "a read never stopped"))
    stage.tell(ev.WorkerLost(busy.link, "said twice"))
    (closed,) = [effect for effect in stage.effects if isinstance(effect, ev.CloseLink)]
    assert closed.error.code is ErrorCode.REPLICA_LOST
    assert closed.error.message.endswith("gave itself up: a read never stopped")
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert outcome.report.retry_reasons == ("replica_lost",)
    stage.assert_empty()


def test_requests_on_a_hung_worker_end_elsewhere_over_real_links() -> None:
    """(1) A decode worker stops computing and beats on. (2) It says so: nothing new is bound there. (3) Its bound passes:
    what it had ends on the other, with the same tokens, long before any deadline."""

    async def ask(cluster: LocalCluster, i: int) -> list[int]:
        return (await cluster.generate((1, 2, i), 5)).ids

    async def story() -> None:
        beats = {"heartbeat_interval_s": BEAT_S, "step_timeout_s": STEP_TIMEOUT_S}
        async with asyncio.timeout(WAIT_S), local_cluster((PREFILL, DECODE, DECODE), worker=lambda: beats) as cluster:
            hung = cluster.decode
            hung.gate.clear()
            asking = [asyncio.create_task(ask(cluster, i)) for i in range(8)]
            await hung.wait_for(lambda: "attach" in hung.commands)
            hung.engine_stalled_s = 0.2 * STEP_TIMEOUT_S
            while all(w.ready for w in cluster.service.snapshot().workers):  # noqa: ASYNC110 - polled as an operator does
                await asyncio.sleep(BEAT_S)
            (why,) = [w.not_ready_reason for w in cluster.service.snapshot().workers if not w.ready]
            assert why == "its engine has made no step for 12.0 s while work waits"
            binds = hung.commands.count("bind")
            assert [await ask(cluster, i) for i in range(8, 14)] == [right_ids((1, 2, i), 5) for i in range(8, 14)]
            assert hung.commands.count("bind") == binds
            hung.engine_stalled_s = 1.1 * STEP_TIMEOUT_S
            assert await asyncio.gather(*asking) == [right_ids((1, 2, i), 5) for i in range(8)]
            await hung.wait_for(lambda: not hung.connected)
            assert hung.refused is not None
            assert "has made no step for 66.0 s" in (hung.refused.details() or "")
            hung.gate.set()

    asyncio.run(story())
