"""The kept orders against a slow oracle that filters all workers, and what placement promises whatever the policy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.errors import PdserveError
from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.slo import BUILT_IN
from pdserve.core.worker import Role
from router.core import events as ev
from router.core import pools
from router.core.policy import EVERYONE, Shortlist
from router.core.pools import Ask
from router.core.registry import Worker
from router.core.turns import FIRST, Turn
from router.service.policies import BUILTINS

from ..core_peers import Outcome, Peer, Stage

LISTS = (
    EVERYONE,
    Shortlist(least_loaded=4, holders=4),
    Shortlist(least_loaded=1),
    Shortlist(least_recent=1),
    Shortlist(drawn=2),
    Shortlist(session=True, least_loaded=1),
)
SILENT_S = 3.0


def may_take(stage: Stage, worker: Worker, ask: Ask) -> bool:
    """The rule of placement, said once more and slowly."""
    return has_room(stage, worker, ask) and (worker.kept_for is None or ask.turn <= worker.kept_for)


def may_pass(stage: Stage, worker: Worker, ask: Ask) -> bool:
    """The rule by which a request may pass one that has claimed the worker, and would have no room if nobody had passed it."""
    if worker.kept_for is None or worker.kept_tokens is None:
        return False
    entries = [entry for entry in stage.core.ledger._entries.values() if entry.link == worker.link]
    passed, others = (sum(one.tokens for one in entries if one.passed is which) for which in (True, False))
    kv_tokens, need_tokens = worker.hello.kv_tokens, worker.kept_tokens
    leaves_room = passed + ask.kv_tokens + need_tokens <= kv_tokens
    return has_room(stage, worker, ask) and others + need_tokens > kv_tokens and leaves_room


def has_room(stage: Stage, worker: Worker, ask: Ask) -> bool:
    promised = stage.core.ledger.charged(worker.link)
    prefills = worker.hello.role is Role.PREFILL
    return (
        worker.readiness.ready
        and not worker.draining
        and not worker.turned_away
        and worker.refused_blocks is None
        and not worker.stalled
        and worker.last_seen_s >= stage.now_s - SILENT_S
        and not worker.claimed
        and worker.hello.max_model_len >= ask.length
        and (prefills or len(worker.work) < worker.hello.max_num_seqs)
        and (prefills or promised == 0 or promised + ask.kv_tokens <= worker.hello.kv_tokens)
    )


def check_shortlists(stage: Stage, random: Random) -> None:
    """A shortlist has only workers that may take the request, and at least one if there is one."""
    pools = stage.core.pools
    pools.refresh()
    since_s = stage.now_s - SILENT_S
    for role in Role:
        turn = random.choice([FIRST, Turn(stage.now_s, stage.now_s, 3), Turn(1e9, 1e9, 1 << 30)])
        need = random.choice([1, 10, 60]) if role is Role.DECODE else 0
        ask = Ask(random.choice([1, 20, 64]), need, since_s, turn=turn)
        able = {w.link for w in stage.core.registry.of_role(role) if may_take(stage, w, ask)}
        able = able or {w.link for w in stage.core.registry.of_role(role) if may_pass(stage, w, ask)}
        near = random.sample([worker.link for worker in stage.core.registry], k=min(2, len(list(stage.core.registry))))
        for which in LISTS:
            found = pools.by_role[role].shortlist(which, ask, near, 7)
            assert len(found) == len(set(found))
            assert set(found) <= able
            assert bool(found) == bool(able)
            assert not which.everyone or set(found) == able


def disturb(stage: Stage, random: Random) -> None:
    """Let one random thing happen to the workers."""
    peers = list(stage.peers.values())
    peer = random.choice(peers) if peers else None
    match random.randrange(9):
        case 0 if len(peers) < 8:
            shape = {"max_model_len": random.choice([16, 40, 64]), "num_blocks": random.choice([8, 16])}
            number = random.randrange(6)
            if all(p.hello.worker_id != f"w{number}" for p in peers):
                stage.join(f"w{number}", random.choice(list(Role)), max_num_seqs=random.randint(1, 3), **shape)
        case 1 if peer is not None and random.random() < 0.2:
            stage.leave(peer)
        case 2 if peer is not None and random.random() < 0.2:
            stage.tell(ev.DrainAsked(peer.hello.worker_id))
        case 3 if peer is not None:
            peer.refuse = 1
        case 4:
            stage.now_s += random.choice([0.1, 1.0, 3.5])
            if random.random() < 0.5:
                stage.tell(ev.Tick())
        case 5 if peer is not None:
            stage.heartbeat(peer, free=random.randrange(17), queued_tokens=random.randrange(40))
        case _ if peer is not None:
            peer.progress()
            stage.deliver(peer, random.randrange(4))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), policy=st.sampled_from(list(BUILTINS)), looks=st.sampled_from([1, 32]))
def test_a_shortlist_has_only_workers_that_may_take_the_request(seed: int, policy: str, looks: int) -> None:
    """Whatever happens: the kept orders equal new ones, and what they give equals what the oracle gives."""
    with patch.object(pools, "MAX_LOOKS", looks):
        disturbed(Random(seed), policy)


def disturbed(random: Random, policy: str) -> None:
    """Let many things happen, and check the books after each."""
    stage = Stage(prefill_policy=policy, decode_policy=policy, max_queued_requests=200)
    for n in range(6):
        stage.join(f"w{n}", Role.DECODE if n < 4 else Role.PREFILL, num_blocks=16, max_num_seqs=3)
    for n in range(60):
        disturb(stage, random)
        if n % 2:
            try_submit(stage, f"r{n}", random)
        stage.core.check_invariants()
        check_shortlists(stage, random)


def try_submit(stage: Stage, name: str, random: Random) -> None:
    """Submit a request of random size, if somebody could serve it."""
    try:
        stage.submit(name, prompt_len=random.randint(1, 30), max_tokens=random.randint(1, 6), priority=random.randint(-1, 1))
    except PdserveError:
        pass


@settings(max_examples=30, deadline=None)
@given(
    workers=st.integers(1, 7),
    requests=st.integers(1, 40),
    policy=st.sampled_from(["prefix_aware", "least_loaded", "round_robin"]),
)
def test_equal_requests_spread_evenly_over_equal_idle_workers(workers: int, requests: int, policy: str) -> None:
    """No heartbeat comes in between: what is on its way counts already."""
    stage = Stage(prefill_policy=policy, decode_policy=policy)
    decodes = [stage.join(f"d{n}", Role.DECODE, num_blocks=1000, max_num_seqs=64) for n in range(workers)]
    prefills = [stage.join(f"p{n}", Role.PREFILL, num_blocks=1000, max_num_seqs=64) for n in range(workers)]
    for n in range(requests):
        stage.submit(f"r{n}", prompt_len=9)
        for peer in decodes:
            stage.deliver(peer, 9)
    for peers in (decodes, prefills):
        counts = [len(peer.past) for peer in peers]
        assert sum(counts) == requests
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("policy", ["random", "power_of_two"])
def test_draws_come_from_the_seed(policy: str) -> None:
    def placed() -> list[ev.LinkId]:
        stage = Stage(prefill_policy=policy, decode_policy=policy)
        for n in range(8):
            stage.join(f"d{n}", Role.DECODE, max_num_seqs=64, num_blocks=1000)
        for n in range(64):
            stage.submit(f"r{n}")
        assert not stage.notes.problems()
        return [effect.link for effect in stage.effects if isinstance(effect, ev.SendBind)]

    assert placed() == placed()
    assert len(set(placed())) == 8


def test_a_prompt_goes_to_the_worker_that_holds_it_until_the_queue_there_outweighs_it() -> None:
    """Two waves of one prompt: the holder takes requests until the others wait shorter. The work on its way counts as held."""
    stage = Stage()
    stage.join("decode", Role.DECODE, num_blocks=10_000, max_num_seqs=64, max_model_len=1000)
    prefills = [stage.join(f"p{n}", Role.PREFILL, num_blocks=1000, max_num_seqs=64, max_model_len=1000) for n in range(4)]
    for link in stage.peers:
        stage.tell(ev.PrefixSeen(link, PrefixDelta(1, (), (), 0, full=True)))  # it shares blocks, and has none yet
    keys = tuple(range(1, 26))
    for n in range(12):
        spec = RequestSpec(tuple(range(101)), SamplingParams(max_tokens=3))
        name = RequestId(f"r{n}")
        stage.outcomes[name] = Outcome()
        stage.tell(ev.Submit(name, spec, arrived_s=0.0, deadline_s=100.0, prefix_keys=keys))
        for peer in list(stage.peers.values()):
            stage.deliver(peer, 4)
        if n == 0:
            assert sum(len(peer.past) for peer in prefills) == 1
    stories = [story for n in range(12) for story in stage.core.stories_of(f"r{n}")]
    whys = Counter(value for s in stories for e in s.entries if e.kind == "prefill_sent" for k, value in e.fields if k == "why")
    assert whys["cached_prefix"] > 0
    assert whys["least_loaded"] >= 1
    stage.run()
    stage.assert_empty()


def test_a_request_without_room_claims_one_worker_and_holds_up_nobody_elsewhere() -> None:
    """(1) Both workers are busy; the large request needs an empty one, and claims it. (2) Small ones go on at the other worker
    alone. (3) The large request gets the first of the two that empties."""
    stage = Stage()
    peers = [stage.join(f"d{n}", Role.DECODE, num_blocks=16, max_num_seqs=4) for n in range(2)]
    for n in range(4):
        stage.submit(f"first{n}", prompt_len=20, max_tokens=4)
    large = stage.submit("large", prompt_len=50, max_tokens=14)  # all of a worker: nothing passes it there
    (kept,) = [w for w in stage.core.registry if w.kept_for is not None]
    other = next(peer for peer in peers if peer.link != kept.link)
    small = [stage.submit(f"small{n}", prompt_len=2, max_tokens=2) for n in range(6)]
    names = [stage.placed[handle][0] for handle in other.jobs]
    assert names[2:] == ["small0", "small1"]
    assert len(stage.peers[kept.link].jobs) == 2
    while not large.ended:
        for peer in list(stage.peers.values()):
            peer.progress()
            stage.deliver(peer, 9)
    stage.run()
    assert all(outcome.ended == ["done"] for outcome in small)
    stage.assert_empty()


def claimed(stage: Stage) -> ev.LinkId:
    """Return the worker that is claimed. There is one."""
    (worker,) = [worker for worker in stage.core.registry if worker.kept_for is not None]
    return worker.link


def test_a_claim_stays_where_it_is_and_moves_when_its_worker_will_not_serve() -> None:
    """(1) The other worker has more room later, which small requests would fill again. (2) The claimed one drains."""
    stage = Stage()
    peers = [stage.join(f"d{n}", Role.DECODE, num_blocks=16, max_num_seqs=4) for n in range(2)]
    for n in range(4):
        stage.submit(f"first{n}", prompt_len=20, max_tokens=2 if n < 2 else 9)
    large = stage.submit("large", prompt_len=50, max_tokens=10)
    kept = claimed(stage)
    other = next(peer for peer in peers if peer.link != kept)
    step(stage, other, 3)
    assert len(other.jobs) == 1
    assert claimed(stage) == kept
    stage.tell(ev.DrainAsked(stage.peers[kept].hello.worker_id))
    assert claimed(stage) == other.link
    stage.run()
    assert large.ended == ["done"]
    stage.assert_empty()


def step(stage: Stage, peer: Peer, count: int = 1) -> None:
    """Let a worker make steps, and the router hear them."""
    for _ in range(count):
        peer.progress()
        stage.deliver(peer, 9)


def test_small_requests_that_overlap_for_ever_do_not_keep_a_large_one_out() -> None:
    """Two slots whose requests never end together: without a claim the worker would never be empty enough."""
    stage = Stage(max_queued_requests=1000)
    peer = stage.join("d", Role.DECODE, num_blocks=16, max_num_seqs=2)
    stage.submit("first", prompt_len=2, max_tokens=4)
    step(stage, peer, 2)
    stage.submit("second", prompt_len=2, max_tokens=4)
    large = stage.submit("large", prompt_len=50, max_tokens=10)
    seconds = 0
    while not large.ended:
        while len(stage.core.waiting) < 4:
            stage.submit(f"small{len(stage.outcomes)}", prompt_len=2, max_tokens=4)
        step(stage, peer)
        stage.now_s += 1.0
        stage.heartbeat(peer)
        seconds += 1
        assert seconds < 30
    assert peer.past


SHAPES = st.tuples(st.sampled_from([24, 40, 64]), st.integers(6, 30), st.integers(1, 3))


@settings(max_examples=25, deadline=None)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), seed=st.integers(0, 1 << 32), policy=st.sampled_from(list(BUILTINS)))
def test_no_request_starves_whatever_comes_after_it(shapes: list[tuple[int, int, int]], seed: int, policy: str) -> None:
    """One request waits, and others of all lengths and classes keep coming faster than they are served. Only those that are due
    before it may go first, and each takes a bounded time."""
    random = Random(seed)
    stage = Stage(max_queued_requests=10_000, prefill_policy=policy, decode_policy=policy)
    for n, (length, blocks, slots) in enumerate(shapes):
        stage.join(f"d{n}", Role.DECODE, max_model_len=min(length, 4 * blocks), num_blocks=blocks, max_num_seqs=slots)
    longest = max(min(length, 4 * blocks) for length, blocks, _ in shapes)
    slots = sum(slots for _, _, slots in shapes)
    for n in range(2 * slots):
        come(stage, f"before{n}", random, longest)
    victim = stage.submit("victim", prompt_len=longest - 4, max_tokens=4, deadline_s=1e6)
    seconds, number = 0, 0
    while not victim.ended:
        while len(stage.core.waiting) < 12:
            number += 1
            come(stage, f"after{number}", random, longest)
        for peer in list(stage.peers.values()):
            peer.progress()
            stage.deliver(peer, 9)
        stage.now_s += 1.0
        seconds += 1
        for peer in list(stage.peers.values()):
            stage.heartbeat(peer)
        stage.core.check_invariants()
        assert seconds < 120, "those before it take 3 s of turns and 4 tokens each"


def come(stage: Stage, name: str, random: Random, longest: int) -> None:
    """Submit a request of any class that some worker is long enough for."""
    prompt_len = random.randint(1, max(1, longest - 4))
    slo = dataclasses.replace(random.choice(list(BUILT_IN.values())), priority=random.randint(-1, 1))
    name_ = RequestId(name)
    stage.outcomes[name_] = Outcome()
    spec = RequestSpec(tuple(range(prompt_len)), SamplingParams(max_tokens=random.randint(1, 4)), slo.priority)
    stage.tell(ev.Submit(name_, spec, arrived_s=stage.now_s, deadline_s=stage.now_s + 1e6, slo=slo))


def test_a_heartbeat_and_a_token_look_at_no_request_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(max_queued_requests=100)
    decode = stage.join("d", Role.DECODE, max_num_seqs=1)
    outcomes = [stage.submit(f"r{n}", max_tokens=4) for n in range(20)]
    looked = Counter[str]()
    place = stage.core.placer.place
    monkeypatch.setattr(stage.core.placer, "place", lambda request, **more: looked.update(["place"]) or place(request, **more))
    for _ in range(10):
        stage.heartbeat(decode)
    decode.progress()
    stage.deliver(decode, 2)
    assert not looked
    stage.run(6)
    ended = sum(bool(outcome.ended) for outcome in outcomes)
    assert ended
    assert looked["place"] <= 3 * ended + 3, "the first of a line, and the next one once it is placed"
