"""A request that ends its workers ends at most three, takes no other request with it, and is told from its companions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.ids import RequestId
from pdserve.core.worker import Role
from router.core import events as ev
from router.core import suspects
from router.core.live_request import LiveRequest
from router.core.requests import Requests
from router.core.suspects import MAX_FORGIVEN, TRIAL_TOKENS, Suspects
from tests.router.core_peers import Outcome, Peer, Stage

TOKENS = 60
DEADLY = 20
"""The poison ends its worker as it computes this token."""


class Cluster:
    """Workers that die of a request named poison, and are started again at once under the same name. With `lives` their links
    break, and the same processes dial again."""

    def __init__(self, decode: int, seqs: int, *, prefill: int = 0, deadly: int = DEADLY, lives: bool = False) -> None:
        self.stage = Stage(recovery_wait_s=20.0)
        self.deadly = deadly
        self.lives = lives
        self.deaths: list[str] = []
        for n in range(prefill):
            self.join(f"prefill-{n}", Role.PREFILL, 64)
        for n in range(decode):
            self.join(f"decode-{n}", Role.DECODE, seqs)

    def join(self, name: str, role: Role, seqs: int, **more: Any) -> Peer:
        return self.stage.join(name, role, max_num_seqs=seqs, num_blocks=1 << 14, max_model_len=1024, **more)

    def submit(self, name: str) -> Outcome:
        return self.stage.submit(name, max_tokens=TOKENS, deadline_s=1e6)

    def step(self) -> None:
        stage = self.stage
        for peer in list(stage.peers.values()):
            if peer.link in stage.peers:
                if any(self.kills(job.work.request_id, job.next_index) and job.runs for job in peer.jobs.values()):
                    self.deaths.append(str(peer.hello.worker_id))
                    assert len(self.deaths) <= 6 + self.lives * MAX_FORGIVEN, "it ends one worker after the other"
                    self.restart(peer, **({"incarnation": peer.hello.incarnation} if self.lives else {}))
                else:
                    peer.progress()
                    stage.deliver(peer, len(peer.upward))
        stage.now_s += 0.1
        for peer in list(stage.peers.values()):
            stage.heartbeat(peer, free=1 << 14)
        stage.tell(ev.Tick())

    def kills(self, request_id: RequestId, index: int) -> bool:
        return request_id.startswith("poison") and index >= self.deadly

    def restart(self, peer: Peer, **more: Any) -> None:
        self.stage.leave(peer)
        self.join(str(peer.hello.worker_id), peer.hello.role, peer.hello.max_num_seqs, **more)

    def run(self, outcomes: list[Outcome], steps: int) -> None:
        for _ in range(steps):
            if all(o.ended for o in outcomes):
                break
            self.step()
        self.stage.run()


def served(outcomes: list[Outcome]) -> None:
    assert [o.ended for o in outcomes] == [["done"]] * len(outcomes)
    assert all(o.emitted == list(range(TOKENS)) for o in outcomes)


@pytest.mark.parametrize(
    ("decode", "prefill", "deadly"), [(1, 0, 0), (1, 0, DEADLY), (2, 0, DEADLY), (4, 1, DEADLY), (2, 1, 0)]
)
def test_a_poison_request_fails_and_its_companions_do_not(decode: int, prefill: int, deadly: int) -> None:
    cluster = Cluster(decode, 16, prefill=prefill, deadly=deadly)
    others = [cluster.submit(f"r{n}") for n in range(11)]
    poison = cluster.submit("poison")
    cluster.run([*others, poison], 3000)
    assert poison.ended == ["poison_request"]
    assert "3 workers died while they computed this request" in str(poison.error)
    assert "nothing else that ran on the last one was suspected" in str(poison.error)
    assert len(cluster.deaths) == 3
    assert [death.worker_id for death in cluster.stage.core.suspects.poisoned] == cluster.deaths[1:]
    served(others)
    assert cluster.stage.core.recovery.bucket.taken == 0
    cluster.stage.assert_empty()


def test_a_batch_of_64_that_died_twice_is_served_while_one_of_it_is_poison() -> None:
    cluster = Cluster(2, 64)
    others = [cluster.submit(f"r{n}") for n in range(63)]
    poison = cluster.submit("poison")
    cluster.run([*others, poison], 20_000)
    assert poison.ended == ["poison_request"]
    assert len(cluster.deaths) == 3
    served(others)
    cluster.stage.assert_empty()


def test_suspects_that_are_innocent_are_cleared_and_get_company_again() -> None:
    """Two accidents hit the same requests. Each runs alone only until it has come further."""
    cluster = Cluster(1, 16)
    outcomes = [cluster.submit(f"r{n}") for n in range(6)]
    for _ in range(2):
        for _ in range(3):
            cluster.step()
        cluster.restart(next(iter(cluster.stage.peers.values())))
    together = 0
    for _ in range(6 * (TRIAL_TOKENS + 6) + TOKENS):
        cluster.step()
        together = max([together, *(len(peer.jobs) for peer in cluster.stage.peers.values())])
    served(outcomes)
    assert together > 1
    assert not cluster.stage.core.suspects.poisoned
    cluster.stage.assert_empty()


def test_a_worker_that_dials_again_as_the_same_process_has_not_died() -> None:
    cluster = Cluster(1, 16)
    outcomes = [cluster.submit(f"r{n}") for n in range(4)]
    for _ in range(6):
        for _ in range(3):
            cluster.step()
        (peer,) = cluster.stage.peers.values()
        cluster.restart(peer, incarnation=peer.hello.incarnation)
        assert not any(r.deaths for r in cluster.stage.core.requests.of_clients())
    cluster.run(outcomes, 2 * TOKENS)
    served(outcomes)
    cluster.stage.assert_empty()


def test_a_request_that_breaks_the_links_of_workers_that_live_is_not_replayed_for_ever() -> None:
    """Each loss of a worker was forgiven as it dialled again, so one request broke links until its deadline."""
    cluster = Cluster(4, 16, prefill=1, lives=True)
    others = [cluster.submit(f"r{n}") for n in range(11)]
    poison = cluster.submit("poison")
    cluster.run([*others, poison], 3000)
    assert poison.ended == ["poison_request"]
    assert len(cluster.deaths) == MAX_FORGIVEN + 3
    served(others)
    cluster.stage.assert_empty()


def test_a_request_that_is_forgiven_during_its_trial_is_not_convicted_by_the_next_loss() -> None:
    """(1) Two workers of a request are lost, and it is tried alone. (2) Both dial again as the same processes. (3) The worker
    of the trial is lost: that is the first death of the request."""
    cluster = Cluster(3, 16)
    outcome = cluster.submit("r")
    (request,) = cluster.stage.core.requests.of_clients()
    gone = []
    for _ in range(2):
        while not any(peer.jobs and request.emitted for peer in cluster.stage.peers.values()):
            cluster.step()
        gone.append(next(peer for peer in cluster.stage.peers.values() if peer.jobs))
        cluster.stage.leave(gone[-1])
    while request.trial_from is None:
        cluster.step()
    for peer in gone:
        cluster.join(str(peer.hello.worker_id), Role.DECODE, 16, incarnation=peer.hello.incarnation)
    assert (request.suspect, request.trial_from, request.alone_on) == (False, None, None)
    cluster.restart(next(peer for peer in cluster.stage.peers.values() if peer.jobs))
    cluster.run([outcome], 4 * TOKENS)
    served([outcome])
    cluster.stage.assert_empty()


def test_a_worker_that_dials_again_before_its_link_is_lost_convicts_nobody() -> None:
    """A worker that gives its own link up dials again at once, mostly before the router has missed it."""
    cluster = Cluster(3, 16)
    outcome = cluster.submit("r")
    (request,) = cluster.stage.core.requests.of_clients()
    while request.trial_from is None:
        cluster.step()
        if request.emitted and len(request.deaths) < 2:
            cluster.restart(next(peer for peer in cluster.stage.peers.values() if peer.jobs))
    peer = next(peer for peer in cluster.stage.peers.values() if peer.jobs)
    cluster.join(str(peer.hello.worker_id), Role.DECODE, 16, incarnation=peer.hello.incarnation)
    assert len(request.deaths) == 2
    cluster.run([outcome], 4 * TOKENS)
    served([outcome])
    cluster.stage.assert_empty()


def test_a_worker_that_drains_and_ends_with_work_has_not_died_of_it() -> None:
    cluster = Cluster(1, 16)
    outcome = cluster.submit("r")
    for _ in range(3):
        cluster.step()
        cluster.step()
        (peer,) = cluster.stage.peers.values()
        cluster.stage.tell(ev.DrainAsked(peer.hello.worker_id))
        cluster.restart(peer)
    cluster.run([outcome], 2 * TOKENS)
    served([outcome])


def test_new_requests_are_served_beside_a_trial() -> None:
    cluster = Cluster(4, 16)
    poison = cluster.submit("poison")
    late: list[Outcome] = []
    for n in range(400):
        if n % 10 == 0 and len(late) < 12:
            late.append(cluster.submit(f"late{n}"))
        cluster.step()
    assert poison.ended == ["poison_request"]
    served(late)
    cluster.stage.assert_empty()


@given(decode=st.integers(1, 4), prefill=st.integers(0, 2), seqs=st.integers(2, 8), count=st.integers(0, 8),
       deadly=st.integers(0, TOKENS - 1), poisons=st.integers(1, 2))  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_poison_ends_three_workers_at_most_and_nobody_else_fails(
    decode: int, prefill: int, seqs: int, count: int, deadly: int, poisons: int
) -> None:
    cluster = Cluster(decode, seqs, prefill=prefill, deadly=deadly)
    others = [cluster.submit(f"r{n}") for n in range(count)]
    bad = [cluster.submit(f"poison{n}") for n in range(poisons)]
    cluster.run([*others, *bad], 6000)
    assert {tuple(o.ended) for o in bad} == {("poison_request",)}
    assert len(cluster.deaths) <= 3 * poisons
    served(others)
    cluster.stage.assert_empty()


# Mutants ---------------------------------------------------------------------------------------------------------------


def _never_suspects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveRequest, "suspect", property(lambda self: False))


def _condemns_all_companions(patch: pytest.MonkeyPatch) -> None:
    real = Suspects.worker_died

    def worker_died(self: Any, worker: Any) -> None:
        real(self, worker)
        for work in worker.work.values():
            work.request.convicted = work.request.convicted or len(work.request.deaths) >= 2

    patch.setattr(Suspects, "worker_died", worker_died)


def _tries_beside_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requests, "wait", lambda self, request: (self.waiting.add(request), self._limits.add(request)))


def _never_forgives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspects, "came_back", lambda self, incarnation: None)


def _blames_drains(patch: pytest.MonkeyPatch) -> None:
    real = Suspects.worker_died

    def worker_died(self: Any, worker: Any) -> None:
        worker.draining = False
        real(self, worker)

    patch.setattr(Suspects, "worker_died", worker_died)


def _never_clears(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspects, "look", lambda self, now_s: None)


def _forgives_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(suspects, "MAX_POISONED", 0)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (_forgives_nothing, lambda: test_a_poison_request_fails_and_its_companions_do_not(2, 0, DEADLY)),
        (_never_suspects, lambda: test_a_poison_request_fails_and_its_companions_do_not(2, 0, DEADLY)),
        (_condemns_all_companions, lambda: test_a_poison_request_fails_and_its_companions_do_not(2, 0, DEADLY)),
        (_tries_beside_others, lambda: test_a_poison_request_fails_and_its_companions_do_not(2, 0, DEADLY)),
        (_never_forgives, test_a_worker_that_dials_again_as_the_same_process_has_not_died),
        (_blames_drains, test_a_worker_that_drains_and_ends_with_work_has_not_died_of_it),
        (_never_clears, test_suspects_that_are_innocent_are_cleared_and_get_company_again),
    ],
)
def test_these_tests_find(
    mutant: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test()


def test_an_event_looks_at_no_suspect_that_must_wait_for_the_trials_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(8, 12)
    outcomes = [cluster.submit(f"r{n}") for n in range(96)]
    for _ in range(4):
        cluster.step()
    for _ in range(2):
        for name in ("decode-0", "decode-1"):
            cluster.restart(next(p for p in cluster.stage.peers.values() if p.hello.worker_id == name))
        for _ in range(4):
            cluster.step()
    waiting = cluster.stage.core.requests.waiting
    assert len(waiting.alone()) > 8
    looked: list[str] = []
    real = Suspects._place

    def place(self: Suspects, request: LiveRequest, now_s: float) -> Any:
        looked.append(request.request_id)
        return real(self, request, now_s)

    monkeypatch.setattr(Suspects, "_place", place)
    for _ in range(10):
        looked.clear()
        events = 1
        cluster.stage.now_s += 0.1
        cluster.stage.tell(ev.Tick())
        assert len(looked) <= 2 * events, "a quarter of the workers is kept"
    for _ in range(3000):
        if all(o.ended for o in outcomes):
            break
        cluster.step()
    assert {tuple(o.ended) for o in outcomes} == {("done",)}
