"""Broken workers leave their pool, come back on trial, and cost clients nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role, WorkerHello
from router.core import events as ev
from router.core.policy import Candidate, Rankings, RequestView, ranking_of

from ...core_peers import Peer, Stage
from .sick import BUG, NO_NUMBERS, break_down, check_half_stays, later, out, peer_of, poison, pools, serve

POLICIES = ("prefix_aware", "least_loaded", "power_of_two", "round_robin", "random", "session_affinity", "goodput")


class Seen:
    """Who was ever ejected, and how many at one time."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.names: set[str] = set()
        self.most = 0

    def note(self) -> None:
        check_half_stays(self._stage)
        self.names.update(out(self._stage))
        self.most = max(self.most, len(out(self._stage)))


def reason(stage: Stage, name: str) -> str:
    worker = stage.core.registry.get(peer_of(stage, name).link)
    assert worker is not None
    return stage.core.placer.not_ready_reason(worker, now_s=stage.now_s)


@pytest.mark.parametrize(("policy", "error"), [("prefix_aware", BUG), *((policy, NO_NUMBERS) for policy in POLICIES)])
def test_a_worker_that_fails_all_it_gets_costs_no_request_and_is_ejected(policy: str, error: PdserveError) -> None:
    """With the default budget of retries. It is always the emptiest."""
    stage = pools(1, 4, decode_policy=policy)
    break_down(stage, "decode-3", error=error)
    outcomes = []
    while not out(stage):
        outcomes += serve(stage, 1, each_s=1.0)
        assert len(outcomes) < 200
    outcomes += serve(stage, 20)
    assert {tuple(o.ended) for o in outcomes} == {("done",)}
    assert out(stage) == ["decode-3"]
    assert sum(o.report.attempts - 1 for o in outcomes if o.report) == 5
    assert "others served them" in reason(stage, "decode-3")
    assert "tried again in" in reason(stage, "decode-3")
    stage.assert_empty()


@pytest.mark.parametrize("longer", [1, 2])
def test_one_worker_that_takes_the_longest_requests_stays(longer: int) -> None:
    """The others of its pool serve, but not these requests, which nobody would take for as long as it is away."""
    stage = pools(1, 4)
    for n in range(longer):
        stage.join(f"longer-{n}", Role.DECODE, max_model_len=128)
    break_down(stage, "longer-0", error=BUG)
    serve(stage, 60)
    assert out(stage) == ["longer-0"][: longer - 1]
    stage.leave(peer_of(stage, f"longer-{longer - 1}"))
    if longer == 2:
        later(stage, 1.0)
        assert out(stage) == []


def test_a_worker_that_breaks_under_a_full_queue_costs_no_request_and_no_retry_of_the_budget() -> None:
    """All others are full, so it swallows the queue until second tries have gone further elsewhere."""
    stage = pools(1, 4, retry_burst=1)
    outcomes = [stage.submit(f"r{n}", max_tokens=6) for n in range(100)]
    for _ in range(4):
        for peer in list(stage.peers.values()):
            peer.progress()
            stage.deliver(peer, 99)
    break_down(stage, "decode-3")
    for _ in range(60):
        stage.now_s += 0.05
        stage.tell(ev.Tick())
        stage.run(1)
    stage.run()
    assert [o.ended for o in outcomes] == [["done"]] * 100
    assert out(stage) == ["decode-3"]
    stage.assert_empty()


def test_a_second_try_costs_the_budget_if_the_request_was_at_fault() -> None:
    stage = pools(1, 4, retry_burst=2, retry_share=0.0)
    poison(stage)
    outcomes = serve(stage, 4, name="poison")
    assert [o.report.attempts for o in outcomes if o.report] == [2, 2, 1, 1]
    assert "retries are used up" in str(outcomes[3].error)
    stage.assert_empty()


def test_a_second_try_waits_for_another_worker_rather_than_go_to_the_same_one() -> None:
    """The other worker is full, and the broken one is empty."""
    stage = pools(1, 2)
    full = [stage.submit(f"full{n}", max_tokens=9) for n in range(8)]
    for peer in list(stage.peers.values()):
        stage.deliver(peer, len(peer.upward))
    good, bad = peer_of(stage, "decode-0"), peer_of(stage, "decode-1")
    assert len(good.jobs) == len(bad.jobs) == 4
    bad.fault = lambda job: NO_NUMBERS
    stage.run()
    assert [o.ended for o in full] == [["done"]] * 8
    served = {o.report.decode_worker for o in full if o.report}
    assert served == {"decode-0"}
    assert max(o.report.attempts for o in full if o.report) == 2
    stage.assert_empty()


def test_the_story_says_whom_the_second_try_avoids() -> None:
    stage = pools(1, 2, decode_policy="round_robin")
    break_down(stage, "decode-0")
    serve(stage, 2)
    stories = [story for story in stage.core.requests.stories if any(e.kind == "retried" for e in story.entries)]
    (entry,) = [e for e in stories[0].entries if e.kind == "retried"]
    assert dict(entry.fields)["avoids"] == "decode-0, prefill-0"


def test_with_one_pair_the_second_try_goes_to_the_same_workers_and_nobody_is_ejected() -> None:
    stage = pools(1, 1)
    calls = iter([NO_NUMBERS, None, None, None, None])
    peer_of(stage, "decode-0").fault = lambda job: next(calls, None)
    (outcome,) = serve(stage, 1, max_tokens=4)
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert outcome.report.attempts == 2
    break_down(stage, "decode-0")
    failed = serve(stage, 20)
    assert {tuple(o.ended) for o in failed} == {("numerical_error",)}
    assert not out(stage)
    stage.assert_empty()


def test_a_workers_own_bug_is_tried_once_elsewhere_and_not_twice() -> None:
    stage = pools(1, 3)
    break_down(stage, "decode-0", "decode-1", "decode-2", error=BUG)
    (outcome,) = serve(stage, 1)
    assert outcome.ended == ["internal_bug"]
    assert outcome.report is not None
    assert outcome.report.attempts == 2
    assert "the same failure came twice" in str(outcome.error)
    stage.assert_empty()


def test_a_prefill_worker_whose_kv_makes_no_numbers_anywhere_is_the_one_that_goes() -> None:
    """Decode workers report it, all alike; only the prefill worker is in all of the failures."""
    stage = pools(4, 4, retry_burst=1000, prefill_policy="round_robin", decode_policy="round_robin")
    bad = peer_of(stage, "prefill-2").hello.incarnation
    for peer in stage.peers.values():
        peer.fault = lambda job: NO_NUMBERS if job.lender == bad else None
    seen = Seen(stage)
    outcomes = serve(stage, 120, each_s=0.5, check=seen.note)
    assert [o.ended for o in outcomes] == [["done"]] * 120
    assert seen.names == {"prefill-2"}
    stage.assert_empty()


@pytest.mark.parametrize(("bad", "stay"), [(1, 3), (2, 2), (3, 2), (4, 2)])
def test_at_least_half_of_a_pool_stays_however_many_fail(bad: int, stay: int) -> None:
    stage = pools(1, 4, retry_burst=1000)
    break_down(stage, *(f"decode-{n}" for n in range(bad)))
    seen = Seen(stage)
    serve(stage, 100, each_s=0.5, check=seen.note)
    assert 4 - seen.most >= stay
    assert seen.names == {f"decode-{n}" for n in range(bad)} or bad > 2


def test_a_worker_comes_back_on_trial_and_stays_out_longer_when_it_fails_again() -> None:
    stage = pools(1, 4)
    break_down(stage, "decode-3")
    serve(stage, 80, each_s=0.3)
    began_s, absences = stage.now_s, []
    for _ in range(3):
        assert out(stage) == ["decode-3"]
        left_s = stage.now_s
        while out(stage):
            later(stage, 1.0, 1.0)
        absences.append(stage.now_s - left_s)
        outcomes = []
        while not out(stage):
            outcomes += serve(stage, 1)
            assert len(outcomes) < 200
        assert [o.ended for o in outcomes] == [["done"]] * len(outcomes)
        assert sum(o.report.attempts - 1 for o in outcomes if o.report) == 1, "one failure ends a trial"
    assert absences[0] <= 30 < 290 < absences[1] <= 301 < 590 < absences[2] <= 601
    assert stage.now_s > began_s
    peer_of(stage, "decode-3").fault = lambda job: None
    while out(stage):
        later(stage, 10.0, 2.0)
    served = Counter(o.report.decode_worker for o in serve(stage, 400, each_s=1.0) if o.report)
    assert served["decode-3"] > 50, "it is whole again, and has its share"
    assert not out(stage)


def test_an_ejected_worker_comes_back_by_a_probe_and_not_before_its_time() -> None:
    stage = pools(1, 4, probe_workers=True)
    later(stage, 2.0)
    break_down(stage, "decode-3")
    serve(stage, 80, each_s=0.3)
    assert out(stage) == ["decode-3"]
    later(stage, 60.0)
    assert out(stage) == ["decode-3"], "its probes fail"
    assert "KV round trip" in reason(stage, "decode-3")
    peer_of(stage, "decode-3").fault = lambda job: None
    later(stage, 10.0)
    assert not out(stage)
    assert reason(stage, "decode-3") == ""
    stage.assert_empty()


def test_a_pool_that_shrinks_takes_ejected_workers_back() -> None:
    stage = pools(1, 3)
    break_down(stage, "decode-2")
    serve(stage, 80, each_s=0.3)
    assert out(stage) == ["decode-2"]
    stage.leave(peer_of(stage, "decode-0"))
    check_half_stays(stage)
    stage.tell(ev.DrainAsked(peer_of(stage, "decode-1").hello.worker_id))
    later(stage, 0.5)
    assert not out(stage)
    peer_of(stage, "decode-2").fault = lambda job: None
    assert serve(stage, 1)[0].ended == ["done"], "a doubtful worker is better than none"


def told_to_drain(stage: Stage, peer: Peer) -> None:
    stage.tell(ev.DrainAsked(peer.hello.worker_id))


def says_that_it_drains(stage: Stage, peer: Peer) -> None:
    worker = stage.core.registry.get(peer.link)
    assert worker is not None
    stage.tell(ev.HeartbeatSeen(peer.link, replace(worker.load, draining=True)))


def refuses_since_it_drains(stage: Stage, peer: Peer) -> None:
    peer.draining = True
    stage.submit("refused")
    stage.deliver(peer)
    assert peer.refused


def leaves(stage: Stage, peer: Peer) -> None:
    stage.leave(peer)


@pytest.mark.parametrize("shrink", [told_to_drain, says_that_it_drains, refuses_since_it_drains, leaves])
def test_the_ejected_come_back_in_the_event_that_makes_their_pool_too_small(shrink: Callable[[Stage, Peer], None]) -> None:
    stage = pools(1, 2)
    break_down(stage, "decode-1")
    serve(stage, 80, each_s=0.3)
    assert out(stage) == ["decode-1"]
    shrink(stage, peer_of(stage, "decode-0"))
    assert not out(stage)
    assert reason(stage, "decode-1") == ""


def test_a_process_that_is_started_anew_at_the_same_place_keeps_its_account() -> None:
    stage = pools(1, 4)
    break_down(stage, "decode-3")
    serve(stage, 80, each_s=0.3)
    stage.leave(peer_of(stage, "decode-3"))
    stage.join("decode-3", Role.DECODE)
    assert out(stage) == ["decode-3"]
    stage.leave(peer_of(stage, "decode-3"))
    stage.join("decode-3", Role.DECODE, address="10.0.0.9:1")
    assert not out(stage), "another machine is another device"
    later(stage, 0.5)
    assert reason(stage, "decode-3") == ""


def test_a_worker_that_dies_with_work_again_and_again_is_ejected_and_a_planned_end_counts_nothing() -> None:
    for drains in (False, True):
        stage = pools(1, 4, retry_burst=1000)
        for n in range(12):
            victim = peer_of(stage, "decode-3") if n else None
            for k in range(4):
                stage.submit(f"r{n}-{k}", max_tokens=6)
            for peer in list(stage.peers.values()):
                stage.deliver(peer, 9)
            if victim is not None and victim.jobs and "decode-3" not in out(stage):
                if drains:
                    stage.tell(ev.DrainAsked(victim.hello.worker_id))
                stage.leave(victim)
                stage.join("decode-3", Role.DECODE)
            stage.run()
            later(stage, 60.0, 4.0)
        assert ("decode-3" in out(stage)) == (not drains)
        assert {tuple(o.ended) for o in stage.outcomes.values()} == {("done",)}


def own_policy(candidate: Candidate, request: RequestView) -> float:
    """An operator's, which looks at nothing."""
    return 1.0


@pytest.mark.quick("prefix_aware", "round_robin", "own")
@pytest.mark.parametrize("policy", [*POLICIES, "own"])
def test_a_recent_failure_counts_as_load_under_every_policy(policy: str) -> None:
    """Nobody is ejected here; the worker has failed once, and gets a fraction of what it got."""
    stage = pools(1, 4, eject_workers=False, **({} if policy == "own" else {"decode_policy": policy}))
    if policy == "own":
        ranking = ranking_of("own", own_policy)
        rankings = Rankings(prefill=ranking, decode=ranking)
        stage.core.placer._rankings = {Role.PREFILL: rankings.prefill, Role.DECODE: rankings.decode}
        stage.replayable = False
    worker = stage.core.registry.get(peer_of(stage, "decode-1").link)
    assert worker is not None
    before = Counter(o.report.decode_worker for o in serve(stage, 80, each_s=0.01) if o.report)
    calls = iter([NO_NUMBERS])
    peer_of(stage, "decode-1").fault = lambda job: next(calls, None)
    serve(stage, 40, each_s=0.01)
    after = Counter(o.report.decode_worker for o in serve(stage, 80, each_s=0.01) if o.report)
    assert before["decode-1"] >= 10
    assert after["decode-1"] < before["decode-1"] / 2
    later(stage, 100.0, 2.0)
    again = Counter(o.report.decode_worker for o in serve(stage, 80, each_s=0.01) if o.report)
    assert again["decode-1"] >= 10, "and it is forgotten"


def test_ejection_can_be_turned_off_and_second_tries_still_go_elsewhere() -> None:
    stage = pools(1, 4, eject_workers=False)
    break_down(stage, "decode-3")
    outcomes = serve(stage, 80, each_s=0.3)
    assert [o.ended for o in outcomes] == [["done"]] * 80
    assert not out(stage)


def beat(stage: Stage, name: str, *, step_s: float, sequences: int, steps: float) -> None:
    """A heartbeat after so many steps of this length."""
    peer = peer_of(stage, name)
    worker = stage.core.registry.get(peer.link)
    assert worker is not None
    load = worker.load
    told = replace(
        load,
        uptime_s=stage.now_s,
        decode_step_s=step_s,
        running_sequences=sequences,
        decode_busy_s=load.decode_busy_s + steps * step_s,
        decode_read_bytes=load.decode_read_bytes + steps * (1e9 + 1e7 * sequences),
    )
    stage.tell(ev.HeartbeatSeen(peer.link, told))


def beats(stage: Stage, seconds: int, paces: dict[str, tuple[float, int]]) -> None:
    for _ in range(seconds):
        stage.now_s += 1.0
        for name, (step_s, sequences) in paces.items():
            beat(stage, name, step_s=step_s, sequences=sequences, steps=0.9 / step_s)
        stage.heartbeat(peer_of(stage, "prefill-0"))
        stage.tell(ev.Tick())


def test_a_worker_whose_steps_take_ten_times_as_long_is_ejected_and_a_busier_one_is_not() -> None:
    stage = pools(1, 4)
    usual = {f"decode-{n}": (0.02, 4) for n in range(4)}
    beats(stage, 40, usual | {"decode-0": (0.16, 60)})
    assert not out(stage), "a step of 60 sequences may take eight times as long"
    beats(stage, 29, usual | {"decode-0": (0.2, 4)})
    assert out(stage) == ["decode-0"]
    assert "times as long" in reason(stage, "decode-0")
    stage = pools(1, 2)
    beats(stage, 60, {"decode-0": (0.02, 4), "decode-1": (0.2, 4)})
    assert not out(stage), "of two, either may be the odd one"


def test_an_unequal_device_is_not_slow() -> None:
    stage = Stage()
    stage.join("prefill-0", Role.PREFILL)
    for n in range(4):
        stage.join(f"decode-{n}", Role.DECODE, peak_bytes_per_s=3e11 if n == 0 else 3e12)
    beats(stage, 60, {f"decode-{n}": (0.2 if n == 0 else 0.02, 4) for n in range(4)})
    assert not out(stage)


def test_a_hello_tells_the_place() -> None:
    from router.core.outliers import place_of

    from ...core_peers import hello

    one: WorkerHello = hello("decode-0", Role.DECODE, address="[::1]:4000")
    assert place_of(one) == ("decode-0", "[::1]")
