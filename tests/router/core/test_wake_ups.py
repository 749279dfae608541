"""The router looks at waiting requests only when something has changed. It must not miss a change."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.errors import PdserveError
from pdserve.core.ids import RequestId
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core import events as ev
from router.service.policies import BUILTINS

from ..core_peers import Stage


def test_a_request_that_came_while_a_worker_was_briefly_silent_is_placed_when_the_worker_is_heard() -> None:
    """The silence is so short that no tick has noted it."""
    stage = Stage()
    peer = stage.join("d", Role.DECODE)
    stage.now_s = 3.1
    outcome = stage.submit("r")
    assert not peer.jobs
    stage.heartbeat(peer)
    assert peer.jobs
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


@pytest.mark.parametrize("asked", [Placement.AUTO, Placement.COLOCATED])
def test_who_leaves_the_choice_open_does_not_wait_behind_who_insists_by_the_settings(asked: Placement) -> None:
    """Requests without a wish follow the settings, so they are of another kind than those that choose for themselves."""
    stage = Stage(placement="disaggregated")
    stage.join("d", Role.DECODE, max_num_seqs=1)
    stage.join("p", Role.PREFILL)
    stage.submit("first")
    for name, placement in (("settings", None), ("insists", Placement.DISAGGREGATED), ("other", asked)):
        stage.submit(name, placement=placement)
    kinds = {r.request_id: stage.core.placer.kind_of(r) for r in stage.core.waiting.all()}
    assert kinds[RequestId("settings")] == kinds[RequestId("insists")] != kinds[RequestId("other")]


def disturb(stage: Stage, random: Random, number: int) -> None:
    """Let one random thing happen."""
    peers = list(stage.peers.values())
    peer = random.choice(peers) if peers else None
    match random.randrange(14):
        case 0 if len(peers) < 7:
            shape = {"max_model_len": random.choice([16, 40, 64]), "num_blocks": 16}
            stage.join(f"more{number}", random.choice(list(Role)), max_num_seqs=random.randint(1, 3), **shape)
        case 1 if peer is not None and random.random() < 0.5:
            stage.leave(peer)
        case 2 if peer is not None and random.random() < 0.2:
            stage.tell(ev.DrainAsked(peer.hello.worker_id))
        case 3 if peer is not None:
            peer.refuse = 1
        case 4:
            stage.now_s += random.choice([0.1, 1.0, 2.9, 3.2])
            for other in [p for p in stage.peers.values() if random.random() < 0.7]:
                stage.heartbeat(other, free=random.randrange(17))
        case 5:
            stage.tell(ev.Tick())
        case 6 if peer is not None:
            stage.heartbeat(peer, free=random.randrange(17), queued_tokens=random.randrange(40))
        case 7 if stage.core.waiting.all():
            stage.tell(ev.ClientGone(random.choice(stage.core.waiting.all()).request_id))
        case 8 | 9 | 10:
            come(stage, f"r{number}", random)
        case _:
            for other in list(stage.peers.values()):
                other.progress()
                stage.deliver(other, random.randrange(1, 9))


def come(stage: Stage, name: str, random: Random) -> None:
    """Submit a request of random size, priority and placement, if somebody could serve it."""
    try:
        stage.submit(
            name,
            prompt_len=random.randint(1, 34),
            max_tokens=random.randint(1, 6),
            priority=random.choice([-100, -1, 0, 0, 1, 100]),
            placement=random.choice([None, None, Placement.AUTO, Placement.COLOCATED, Placement.DISAGGREGATED]),
            client=random.choice([(), ("a",), ("b", "1"), ("b", "2", "x"), ("b", "2", "y")]),
        )
    except PdserveError:
        pass


def found_anew(stage: Stage) -> list[RequestId]:
    """Look at everything that waits as if all workers had just joined, and return the requests that found room.

    A request that leaves a draining worker does not wait: it goes on there until a tick or a change moves it.
    """
    core = stage.core
    waiting = {request.request_id for request in core.waiting.all()}
    core._dispatcher._seen, core._dispatcher._seen_shifts = (-1, -1), -1
    bound = [effect.work.request_id for effect in core._place(stage.now_s) if isinstance(effect, ev.SendBind)]
    return [request_id for request_id in bound if request_id in waiting]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    steps=st.integers(10, 80),
    policy=st.sampled_from(list(BUILTINS)),
    placement=st.sampled_from(["auto", "disaggregated"]),
    probes=st.booleans(),
    broken=st.booleans(),
)
def test_whoever_could_be_placed_is_placed_at_once(
    seed: int, steps: int, policy: str, placement: str, probes: bool, broken: bool
) -> None:
    """After any history, a look at all that waits finds room for nobody. A pair that is usable again is noticed at a tick."""
    random = Random(seed)
    stage = Stage(
        prefill_policy=policy,
        decode_policy=policy,
        max_queued_requests=200,
        placement=placement,
        probe_workers=probes,
        recovery_wait_s=5.0,
    )
    decodes = [stage.join(f"d{n}", Role.DECODE, max_num_seqs=random.randint(1, 3)) for n in range(random.randint(1, 3))]
    prefills = [stage.join(f"p{n}", Role.PREFILL) for n in range(random.randint(1, 2))]
    if broken:
        for peer in decodes:
            peer.unreadable = {p.hello.incarnation for p in prefills if random.random() < 0.6}
    for n in range(steps):
        disturb(stage, random, n)
        stage.core.check_invariants()
        if random.random() < 0.3:
            if broken:
                stage.tell(ev.Tick())
            assert not found_anew(stage)


def test_the_wait_of_a_parked_request_ends_in_time_whoever_is_parked_before_it() -> None:
    """One waits for a long worker since 0 s. The other, whose turn is earlier, waits for a prefill worker since 20 s."""
    stage = Stage(recovery_wait_s=30.0)
    short = stage.join("short", Role.DECODE, max_num_seqs=1, max_model_len=16)
    long = stage.join("long", Role.DECODE, max_num_seqs=1)
    prefill = stage.join("p", Role.PREFILL)
    stage.submit("on short", max_tokens=10, placement=Placement.COLOCATED)
    stage.submit("on long", prompt_len=30, placement=Placement.COLOCATED, deadline_s=0.5)
    since_0_s = stage.submit("since 0 s", prompt_len=30, placement=Placement.COLOCATED)
    since_20_s = stage.submit("since 20 s", priority=5, placement=Placement.DISAGGREGATED)
    stage.leave(long)
    for _ in range(29):
        stage.now_s += 1.0
        if stage.now_s == 20.0:
            stage.leave(prefill)
        for peer in (short, prefill):
            if peer.link in stage.peers:
                stage.heartbeat(peer)
        stage.tell(ev.Tick())
    assert not since_0_s.ended
    stage.now_s += 1.0
    stage.heartbeat(short)
    stage.tell(ev.Tick())
    assert since_0_s.ended == ["unavailable"]
    assert not since_20_s.ended
