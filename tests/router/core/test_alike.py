"""A mixed cluster: a request keeps to workers of equal numerics where that costs nothing, and only there."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.events import LinkId
from router.core.live_request import LiveRequest
from router.core.outliers import Account
from router.core.policy import Candidate
from router.core.registry import Worker
from router.core.turns import Turn

from ..core_peers import Outcome, Peer, Stage

KEYS = (1, 2, 3)
LATER = Turn(1.0, 1.0, 1)


def cluster(*names: str, **config: object) -> Stage:
    """Workers by names such as "p-a-0": the role, the numerics ("" before a second dash: none), and what tells them apart."""
    stage = Stage(**config)
    for name in names:
        role, numerics, _ = name.split("-")
        stage.join(name, Role.PREFILL if role == "p" else Role.DECODE, numerics=numerics)
    return stage


def peer(stage: Stage, name: str) -> Peer:
    (found,) = [one for one in stage.peers.values() if one.hello.worker_id == name]
    return found


def hold(stage: Stage, name: str) -> None:
    """A worker tells that it holds the blocks of `KEYS`."""
    stage.tell(ev.PrefixSeen(peer(stage, name).link, PrefixDelta(1, KEYS, (), 1 ^ 2 ^ 3, full=True)))


def ended(outcome: Outcome) -> tuple[str, str, bool]:
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    return outcome.report.prefill_worker, outcome.report.decode_worker, outcome.report.exact


def served(stage: Stage, name: str, **fields: object) -> tuple[str, str, bool]:
    outcome = stage.submit(name, **fields)  # type: ignore[arg-type]
    stage.run()
    return ended(outcome)


# Where it costs nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded", "goodput", "session_affinity", "round_robin"])
def test_the_pairs_of_an_idle_cluster_are_alike_and_all_have_their_turns(policy: str) -> None:
    names = ("p-a-0", "p-b-0", "d-b-0", "d-b-1", "d-b-2", "d-a-0")
    stage = cluster(*names, prefill_policy=policy, decode_policy=policy)
    used = set()
    for n in range(12):
        prefill, decode, exact = served(stage, f"r{n}")
        assert exact
        used |= {prefill, decode}
    assert used == set(names)
    stage.assert_empty()


def test_a_prefill_worker_is_like_the_decode_worker_that_had_room() -> None:
    """The decode workers that are like the next prefill worker in turn are busy."""
    stage = cluster("p-a-0", "p-b-0", "d-a-0", "d-b-0")
    stage.submit("first", max_tokens=20, placement=Placement.COLOCATED)
    assert peer(stage, "d-a-0").upward, "it is bound there"
    assert served(stage, "r") == ("p-b-0", "d-b-0", True)
    stage.run()
    stage.assert_empty()


@pytest.mark.parametrize("placement", [Placement.COLOCATED, Placement.DISAGGREGATED])
def test_a_replay_goes_to_a_worker_like_the_one_that_is_lost(placement: Placement) -> None:
    """It is neither the one whose turn it is, nor among those that the policy compares."""
    stage = cluster("p-a-0", "p-b-0", "d-a-0", "d-b-0", "d-b-1", "d-b-2", "d-a-1")
    outcome = stage.submit("r", max_tokens=8, placement=placement)
    while len(outcome.emitted) < 3:
        stage.run(1)
    stage.leave(peer(stage, "d-a-0"))
    stage.run()
    prefill, decode, exact = ended(outcome)
    assert (prefill, decode, exact) == ("p-a-0" * (placement is Placement.DISAGGREGATED), "d-a-1", True)
    stage.assert_empty()


def test_another_decode_worker_that_reads_the_lease_is_like_the_lender() -> None:
    stage = cluster("p-a-0", "d-a-0", "d-b-0", "d-b-1", "d-b-2", "d-a-1")
    outcome = stage.submit("r")
    stage.deliver(peer(stage, "d-a-0"))
    stage.deliver(peer(stage, "p-a-0"))
    stage.leave(peer(stage, "d-a-0"))
    stage.run()
    assert outcome.report is not None
    assert outcome.report.rebinds == 1
    assert ended(outcome) == ("p-a-0", "d-a-1", True)
    stage.assert_empty()


def test_a_decode_worker_is_like_the_only_prefill_worker() -> None:
    stage = cluster("p-a-0", "d-b-0", "d-b-1", "d-b-2", "d-a-0")
    assert {served(stage, f"r{n}") for n in range(6)} == {("p-a-0", "d-a-0", True)}
    stage.assert_empty()


def test_a_like_worker_that_holds_the_prompt_goes_before_a_like_one_that_does_not() -> None:
    stage = cluster("p-a-0", "p-b-0", "p-a-1", "d-a-0")
    for name in ("p-b-0", "p-a-1"):
        hold(stage, name)
    assert served(stage, "r", prompt_len=13, keys=KEYS) == ("p-a-1", "d-a-0", True)
    stage.assert_empty()


# Where it would cost something -----------------------------------------------------------------------------------------


def test_an_idle_worker_goes_before_a_like_one_that_has_work() -> None:
    stage = cluster("p-a-0", "d-a-0", "d-b-0")
    stage.submit("first", max_tokens=20, placement=Placement.COLOCATED)
    assert peer(stage, "d-a-0").upward, "it is bound there"
    assert served(stage, "r") == ("p-a-0", "d-b-0", False)
    stage.assert_empty()


@pytest.mark.parametrize("policy", ["prefix_aware", "round_robin"])
def test_an_idle_prefill_worker_goes_before_a_like_one_with_a_queue(policy: str) -> None:
    """Also where the policy looks at no load."""
    stage = cluster("p-b-0", "p-a-0", "d-a-0", prefill_policy=policy)
    stage.heartbeat(peer(stage, "p-a-0"), queued_tokens=1)
    assert served(stage, "r") == ("p-b-0", "d-a-0", False)
    stage.assert_empty()


def test_a_longer_beginning_that_is_held_goes_before_likeness() -> None:
    stage = cluster("p-a-0", "p-b-0", "d-a-0")
    hold(stage, "p-b-0")
    assert served(stage, "r", prompt_len=13, keys=KEYS) == ("p-b-0", "d-a-0", False)
    stage.assert_empty()


def test_a_like_worker_that_another_request_has_claimed_is_left_to_it() -> None:
    stage = cluster("p-a-0", "d-b-0", "d-a-0")
    claimed = stage.core.registry.get(peer(stage, "d-a-0").link)
    assert claimed is not None
    for name in ("d-b-0", "d-a-0"):
        hold(stage, name)
    claimed.kept_for, claimed.kept_tokens = LATER, 4
    claimed.touch()
    stage.replayable = False
    assert served(stage, "r", prompt_len=13, keys=KEYS)[1] == "d-b-0"


def test_a_worker_with_more_kv_goes_before_a_like_one() -> None:
    """Both are idle, and the request takes a smaller share of the larger one."""
    stage = cluster("p-a-0", "d-a-0")
    stage.join("d-b-0", Role.DECODE, numerics="b", num_blocks=32)
    assert served(stage, "r") == ("p-a-0", "d-b-0", False)
    stage.assert_empty()


NAMES = st.sampled_from(["a", "b"])
WORKERS = st.lists(st.tuples(st.sampled_from(Role), NAMES, st.integers(0, 2), st.integers(0, 3), st.integers(0, 4)), max_size=9)
SOME = [(Role.PREFILL, "a", 0, 0, 0), (Role.DECODE, "a", 0, 0, 0), (Role.DECODE, "b", 0, 0, 0)]


@settings(deadline=None)
@given(WORKERS, NAMES | st.just(""), st.sampled_from(["prefix_aware", "least_loaded", "goodput", "power_of_two"]))
def test_likeness_costs_no_load_and_no_prefix_and_no_claim_and_no_health(
    workers: list[tuple[Role, str, int, int, int]], computed: str, policy: str
) -> None:
    """Each pick is compared with that of a router which does not look at numerics."""
    stage = cluster(prefill_policy=policy, decode_policy=policy)
    placer, registry = stage.core.placer, stage.core.registry
    for n, (role, numerics, work, held, state) in enumerate(workers + SOME):
        one = stage.join(f"{role.value}-{n}", role, numerics=numerics)
        stage.heartbeat(one, queued_tokens=work)
        stage.tell(ev.PrefixSeen(one.link, PrefixDelta(1, KEYS[:held], (), [0, 1, 3, 0][held], full=True)))
        if work and role is Role.DECODE:
            stage.core.ledger.take(RequestId(f"on-{n}"), one.link, work)
        worker = registry.get(one.link)
        assert worker is not None
        worker.account = Account(one.hello.worker_id, "", slowness=3.0) if state == 1 else None
        worker.kept_for, worker.kept_tokens = (LATER, 4) if state == 2 else (None, None)
        worker.turned_away = state == 3
        worker.touch()
    stage.core.health.handicaps_until_s = inf
    spec = RequestSpec(tuple(range(13)), SamplingParams(max_tokens=3))
    request = LiveRequest.of(ev.Submit(RequestId("r"), spec, 0.0, 100.0, prefix_keys=KEYS), 0)
    if computed:
        request.computed_by(replace(one.hello, numerics=computed))
    stage.core.pools.refresh()
    reader = LinkId(len(stage.peers))
    for role in Role:

        def picked(role: Role = role) -> tuple[Candidate, Worker]:
            decode = role is Role.DECODE
            found = placer.place(request, now_s=0.0) if decode else placer.prefill_worker(request, reader, now_s=0.0)
            assert found is not None
            assert found.row is not None
            return found.row, found.worker

        registry.mixed_numerics = False
        usual_row, usual = picked()
        registry.mixed_numerics = True
        row, worker = picked()
        if worker is not usual:
            assert worker.hello.numerics != usual.hello.numerics
            assert worker.hello.numerics == computed or (role is Role.DECODE and not computed)
            assert row.load <= usual_row.load
            assert row.cached_tokens >= usual_row.cached_tokens
            assert worker.kept_for is None
            assert worker.has_room
            assert worker.account is None


# Where likeness says nothing ---------------------------------------------------------------------------------------------


def turns(*names: str) -> list[tuple[str, str]]:
    stage = cluster(*names)
    return [served(stage, f"r{n}")[:2] for n in range(8)]


def test_without_numerics_and_with_equal_ones_workers_take_their_turns() -> None:
    """A request that a worker without numerics has computed prefers nobody either."""
    names = ("p-{}-0", "p-{}-1", "d-{}-0", "d-{}-1", "d-{}-2")
    unnamed, named = [turns(*(name.format(numerics) for name in names)) for numerics in ("", "a")]
    assert [tuple(name.replace("-a-", "--") for name in pair) for pair in named] == unnamed
    assert len(set(unnamed)) == 6
    stage = cluster("p--0", "d--0", "d-a-0", "d--1")
    assert [served(stage, f"r{n}") for n in range(3)] == [("p--0", decode, False) for decode in ("d--0", "d-a-0", "d--1")]
    stage.assert_empty()


def test_a_request_that_is_not_exact_any_more_takes_the_worker_whose_turn_it_is() -> None:
    stage = cluster("p-a-0", "d-b-0", "d-c-0")
    outcome = stage.submit("r", max_tokens=8)
    stage.join("d-a-0", Role.DECODE, numerics="a")
    while len(outcome.emitted) < 3:
        stage.run(1)
    stage.leave(peer(stage, "d-b-0"))
    stage.run()
    assert ended(outcome) == ("p-a-0", "d-c-0", False)
    stage.assert_empty()
