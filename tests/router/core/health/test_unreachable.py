"""A worker between which and many others KV does not pass is the end at fault, and is placed nothing."""

from __future__ import annotations

import pytest

from pdserve.core.errors import TransferFailed
from pdserve.core.ids import Incarnation
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.health import Pairs

from ...core_peers import Stage, hello
from .sick import check_half_stays, later, out, peer_of, pools, serve

PREFILL = [hello(f"prefill-{n}", Role.PREFILL, incarnation=Incarnation(n + 1)) for n in range(4)]
DECODE = [hello(f"decode-{n}", Role.DECODE, incarnation=Incarnation(n + 11)) for n in range(4)]


def fresh() -> Pairs:
    return Pairs(aside_s=5.0, aside_max_s=60.0)


def test_partners_count_once_until_kv_passes_anywhere() -> None:
    pairs = fresh()
    for _ in range(3):
        pairs.in_a_row(PREFILL[0], DECODE[0])
    pairs.in_a_row(PREFILL[1], DECODE[0])
    assert [pairs.partners(w) for w in (PREFILL[0], PREFILL[1], DECODE[0])] == [1, 1, 2]
    pairs.succeeded(PREFILL[0], DECODE[1])
    assert [pairs.partners(w) for w in (PREFILL[0], PREFILL[1], DECODE[0])] == [0, 1, 2]
    pairs.succeeded(PREFILL[2], DECODE[0])
    assert pairs.partners(DECODE[0]) == 0


def test_two_failed_pairs_show_their_common_end_only_if_kv_passes_between_others() -> None:
    pairs = fresh()
    pairs.in_a_row(PREFILL[0], DECODE[0])
    pairs.in_a_row(PREFILL[1], DECODE[0])
    assert not pairs.at_fault(DECODE[0])
    pairs.succeeded(PREFILL[1], DECODE[1])
    assert pairs.at_fault(DECODE[0])
    assert not pairs.at_fault(PREFILL[0])
    pairs.check_invariants()


def test_the_partners_of_the_end_at_fault_are_not_blamed() -> None:
    pairs = fresh()
    pairs.in_a_row(PREFILL[0], DECODE[0])
    pairs.in_a_row(PREFILL[1], DECODE[0])
    pairs.in_a_row(PREFILL[1], DECODE[2])
    pairs.blamed(DECODE[0])
    assert [pairs.partners(w) for w in (PREFILL[0], PREFILL[1], DECODE[0], DECODE[2])] == [0, 1, 0, 1]


def test_a_worker_that_left_is_forgotten() -> None:
    pairs = fresh()
    pairs.in_a_row(PREFILL[0], DECODE[0])
    pairs.forget({PREFILL[0].incarnation}, now_s=0.0)
    assert (pairs.partners(DECODE[0]), pairs.partners(PREFILL[0])) == (0, 1)


def cut_off(stage: Stage, name: str) -> None:
    """No KV passes to or from this worker any more."""
    bad = peer_of(stage, name)
    for peer in stage.peers.values():
        if peer.hello.role is not bad.hello.role:
            (peer if bad.hello.role is Role.PREFILL else bad).unreadable.add(
                bad.hello.incarnation if bad.hello.role is Role.PREFILL else peer.hello.incarnation
            )


@pytest.mark.parametrize("bad", ["decode-3", "prefill-2"])
def test_two_failed_pairs_show_the_end_that_they_share(bad: str) -> None:
    stage = pools(6, 6)
    cut_off(stage, bad)
    outcomes = serve(stage, 60)
    assert out(stage) == [bad]
    assert sum(o.report.attempts - 1 for o in outcomes if o.report) == 2
    assert {tuple(o.ended) for o in outcomes} == {("done",)}
    worker = stage.core.registry.get(peer_of(stage, bad).link)
    assert worker is not None
    why = stage.core.placer.not_ready_reason(worker, now_s=stage.now_s)
    assert why.startswith("ejected: KV did not pass between this")
    stage.assert_empty()


def test_one_broken_path_ejects_nobody() -> None:
    stage = pools(4, 4)
    peer_of(stage, "decode-3").unreadable.add(peer_of(stage, "prefill-2").hello.incarnation)
    serve(stage, 60)
    assert not out(stage)
    assert len(list(stage.core.pairs.set_aside(now_s=stage.now_s))) <= 1


def test_a_partition_between_both_pools_ejects_nobody() -> None:
    stage = pools(4, 4, retry_burst=100)
    for n in range(4):
        cut_off(stage, f"decode-{n}")
    outcomes = serve(stage, 60, check=lambda: check_half_stays(stage))
    assert {tuple(o.ended) for o in outcomes} == {("done",)}, "prompts are computed where they are decoded"
    assert not stage.core.health.ejections


def test_pairs_of_workers_that_are_only_being_probed_blame_no_worker_that_serves() -> None:
    """Two new workers fail with the same idle decode worker. They are the broken ones."""
    stage = Stage(probe_workers=True)
    decode = stage.join("decode-0", Role.DECODE)
    stage.join("decode-1", Role.DECODE)
    stage.run()
    for n in range(3):
        broken = stage.join(f"prefill-{n}", Role.PREFILL)
        for peer in stage.peers.values():
            peer.unreadable.add(broken.hello.incarnation)
        stage.run()
        later(stage, 3.0)
    assert not out(stage)
    worker = stage.core.registry.get(decode.link)
    assert worker is not None
    assert worker.serves


class BrokenNic:
    """A decode worker whose reads of clients' KV end 6 s later, and whose probes pass. Time is virtual."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.stage = pools(prefill, decode)
        self.bad = peer_of(self.stage, f"decode-{decode - 1}")
        self.due: list[tuple[float, ev.Event]] = []
        self.lost_at: list[float] = []
        real = self.bad.obey

        def obey(effect: ev.Effect) -> None:
            if isinstance(effect, ev.SendAttach):
                self.bad.jobs.pop(effect.handle, None)
                self.lost_at.append(self.stage.now_s)
                failed = ev.RequestFailed(self.bad.link, effect.handle, TransferFailed("past its deadline"), True)
                self.due.append((self.stage.now_s + 6.0, failed))
            else:
                real(effect)

        self.bad.obey = obey  # type: ignore[method-assign]

    def run(self, seconds: float, per_s: int) -> None:
        stage = self.stage
        for n in range(round(seconds * per_s)):
            stage.now_s += 1.0 / per_s
            if n % per_s == 0:
                for peer in list(stage.peers.values()):
                    stage.heartbeat(peer)
            stage.tell(ev.Tick())
            while self.due and self.due[0][0] <= stage.now_s:
                stage.tell(self.due.pop(0)[1])
            stage.submit(f"r{n}", max_tokens=2)
            stage.run()


def test_a_decode_worker_that_reads_from_nobody_loses_no_attempt_after_the_first_minute() -> None:
    """It passes probes, and comes back after half a minute. Then one more failed pair is enough for a long time."""
    cluster = BrokenNic(8, 6)
    cluster.run(240.0, 5)
    assert 0 < len(cluster.lost_at) <= 60
    assert max(cluster.lost_at) < 60.0
    assert {tuple(o.ended) for o in cluster.stage.outcomes.values()} == {("done",)}
