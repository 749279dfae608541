"""Choices of one prompt in the router's core: siblings wait for the KV of their leader and go to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.errors import Overloaded, ReplicaLost
from pdserve.core.ids import RequestId
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core import events as ev

from ..core_peers import Outcome, Peer, Stage

PROMPT_LEN = 10
KEYS = (1, 2)  # of its full blocks, which have four tokens
SHARED = 8


def stage_of(decode: int = 1, *, sharing: bool = True, **config: object) -> Stage:
    stage = Stage(**config)
    stage.join("prefill-0", Role.PREFILL)
    for i in range(decode):
        peer = stage.join(f"decode-{i}", Role.DECODE)
        if sharing:
            stage.share(peer)
    return stage


def ask(stage: Stage, name: str, leader: str = "", **fields: object) -> Outcome:
    return stage.submit(name, **({"prompt_len": PROMPT_LEN, "keys": KEYS, "leader": leader} | fields))  # type: ignore[arg-type]


def group(stage: Stage, n: int = 4, **fields: object) -> list[Outcome]:
    return [ask(stage, "r0", **fields), *(ask(stage, f"r{i}", "r0", **fields) for i in range(1, n))]


def binds(stage: Stage) -> list[tuple[str, ev.LinkId, bool]]:
    """The binds so far: whose, where, and whether the prompt is computed there."""
    return [(str(e.work.request_id), e.link, e.local_prefill) for e in stage.effects if isinstance(e, ev.SendBind)]


def decoders(stage: Stage) -> list[Peer]:
    return [p for p in stage.peers.values() if p.hello.role is Role.DECODE]


def kinds(stage: Stage, name: str) -> list[str]:
    (story,) = stage.core.stories_of(name)
    return [entry.kind for entry in story.entries]


def until(stage: Stage, done: Callable[[], bool]) -> None:
    for _ in range(100):
        if done():
            return
        for peer in list(stage.peers.values()):
            peer.progress()
            if peer.upward and not done():
                stage.deliver(peer)
    raise AssertionError("it never came to that")


def has_kv(stage: Stage, name: str = "r0") -> Callable[[], bool]:
    def is_there() -> bool:
        request = stage.core.requests.get(RequestId(name))
        return request is not None and request.kv_link is not None

    return is_there


def test_siblings_go_to_the_kv_of_their_leader_as_soon_as_it_is_there() -> None:
    """(1) Only the leader is bound. (2) Its KV is committed: in the same event all siblings are bound beside it, and the ledger
    charges them only what they do not share. (3) All end, and say how they were placed."""
    stage = stage_of(decode=2)
    outcomes = group(stage)
    assert [name for name, _, _ in binds(stage)] == ["r0"]
    assert len(stage.core.waiting) == 3
    until(stage, has_kv(stage))
    first, *others = binds(stage)
    assert not first[2]
    assert others == [(f"r{i}", first[1], True) for i in (1, 2, 3)]
    whole = PROMPT_LEN + 3
    assert stage.core.ledger.charged(first[1]) == whole + 3 * (whole - SHARED)
    stage.run()
    reports = [outcome.report for outcome in outcomes]
    assert [r and (r.placement, r.placement_reason) for r in reports[1:]] == [(Placement.COLOCATED, "sibling")] * 3
    assert reports[0] is not None
    assert reports[0].placement is Placement.DISAGGREGATED
    assert kinds(stage, "r1")[:4] == ["queued", "behind", "follows", "placed"]
    stage.assert_empty()


def test_a_colocated_leader_frees_its_siblings_with_its_first_token() -> None:
    stage = stage_of(decode=2)
    group(stage, placement=Placement.COLOCATED)
    (peer,) = [p for p in decoders(stage) if p.jobs]
    stage.deliver(peer)
    assert len(binds(stage)) == 1
    peer.progress()
    stage.deliver(peer)
    assert [(link, local) for _, link, local in binds(stage)] == [(peer.link, True)] * 4
    stage.run()
    stage.assert_empty()


def test_a_sibling_that_comes_when_the_kv_is_there_does_not_wait() -> None:
    stage = stage_of(decode=2)
    ask(stage, "r0", max_tokens=6)
    until(stage, has_kv(stage))
    ask(stage, "r1", "r0")
    assert binds(stage)[1] == ("r1", binds(stage)[0][1], True)
    stage.run()
    stage.assert_empty()


def lose_its_client(stage: Stage) -> None:
    stage.tell(ev.ClientGone(RequestId("r0")))


def let_it_fail(stage: Stage) -> None:
    (prefill,) = [p for p in stage.peers.values() if p.hello.role is Role.PREFILL]
    stage.deliver(decoders(stage)[0])
    (handle,) = prefill.jobs
    prefill.jobs.clear()
    stage.tell(ev.RequestFailed(prefill.link, handle, ReplicaLost("told to fail")))


def let_its_time_pass(stage: Stage) -> None:
    stage.now_s = 50.0
    for peer in stage.peers.values():
        stage.heartbeat(peer)
    stage.tell(ev.Tick())


@pytest.mark.parametrize("end", [lose_its_client, let_it_fail, let_its_time_pass], ids=lambda end: end.__name__)
def test_each_end_of_the_leader_frees_its_siblings(end: Callable[[Stage], None]) -> None:
    """They are then placed as any other request, by the prefill pool."""
    stage = stage_of(max_attempts=1)
    leader, *siblings = [ask(stage, "r0", deadline_s=40.0), ask(stage, "r1", "r0"), ask(stage, "r2", "r0")]
    end(stage)
    assert leader.ended
    assert leader.ended != ["done"]
    assert [(name, local) for name, _, local in binds(stage)] == [("r0", False), ("r1", False), ("r2", False)]
    stage.run()
    assert [sibling.ended for sibling in siblings] == [["done"], ["done"]]
    stage.assert_empty()


def test_a_leader_that_its_first_token_ends_frees_its_siblings() -> None:
    stage = stage_of()
    outcomes = group(stage, max_tokens=1)
    stage.run()
    assert [outcome.ended for outcome in outcomes] == [["done"]] * 4
    stage.assert_empty()


def test_siblings_wait_on_while_their_leader_is_replayed() -> None:
    """(1) The leader's decode worker is lost in the handoff, and so is the lender: the leader starts over. (2) Its siblings
    wait for its new KV and go there."""
    stage = stage_of(decode=2)
    outcomes = group(stage)
    (first,) = [p for p in decoders(stage) if p.jobs]
    stage.deliver(first)
    (prefill,) = [p for p in stage.peers.values() if p.hello.role is Role.PREFILL]
    stage.leave(prefill)
    stage.leave(first)
    stage.join("prefill-0", Role.PREFILL)
    assert {name for name, _, _ in binds(stage)} == {"r0"}
    stage.run()
    (second,) = decoders(stage)
    assert [(link, local) for name, link, local in binds(stage) if name != "r0"] == [(second.link, True)] * 3
    assert [outcome.ended for outcome in outcomes] == [["done"]] * 4
    stage.assert_empty()


def test_a_sibling_whose_leader_has_no_room_beside_it_goes_elsewhere() -> None:
    """A worker with two slots takes the leader and one sibling; the others are handed over to the other worker."""
    stage = Stage()
    stage.join("prefill-0", Role.PREFILL)
    for i in range(2):
        stage.share(stage.join(f"decode-{i}", Role.DECODE, max_num_seqs=2))
    outcomes = group(stage)
    until(stage, has_kv(stage))
    first, beside, *elsewhere = binds(stage)
    assert beside == ("r1", first[1], True)
    assert {link for _, link, _ in elsewhere} == {p.link for p in decoders(stage)} - {first[1]}
    assert not any(local for _, _, local in elsewhere)
    stage.run()
    assert [outcome.ended for outcome in outcomes] == [["done"]] * 4
    stage.assert_empty()


def test_a_sibling_whose_leader_is_on_a_draining_worker_goes_elsewhere() -> None:
    stage = stage_of(decode=2)
    group(stage, max_tokens=6)
    (peer,) = [p for p in decoders(stage) if p.jobs]
    stage.tell(ev.DrainAsked(peer.hello.worker_id))
    stage.run()
    assert {link for name, link, _ in binds(stage) if name != "r0"} == {p.link for p in decoders(stage)} - {peer.link}
    stage.assert_empty()


def test_a_worker_that_shares_no_blocks_is_no_better_than_another() -> None:
    """The prefill worker shares blocks, so siblings wait for the leader; decode does not, so they are handed over."""
    stage = stage_of(sharing=False)
    stage.share(next(iter(stage.peers.values())))
    group(stage)
    assert len(stage.core.waiting) == 3
    stage.run()
    assert not any(local for _, _, local in binds(stage))
    stage.assert_empty()


def test_without_a_shared_block_nobody_waits_for_the_leader() -> None:
    stage = stage_of()
    group(stage, prompt_len=3, keys=())
    assert len(binds(stage)) == 4
    stage.run()
    stage.assert_empty()


def test_a_full_queue_refuses_a_group_and_never_a_part_of_it() -> None:
    """(1) The queue may hold two requests. (2) A group of four comes in whole, and its siblings are counted. (3) So the next
    request is refused, and comes in when the group has gone."""
    stage = stage_of(max_queued_requests=2, max_queued_tokens=3 * PROMPT_LEN)
    group(stage)
    assert len(stage.core.waiting) == 3
    assert stage.core.demand(now_s=0.0, uptime_s=1.0).queued_prompt_tokens == 0
    with pytest.raises(Overloaded, match="3 requests with 0 prompt tokens are waiting"):
        ask(stage, "other")
    stage.run()
    ask(stage, "other")
    stage.run()
    stage.assert_empty()


def test_a_sibling_that_waits_may_be_cancelled_and_expires() -> None:
    stage = stage_of()
    _, gone, late, last = [
        ask(stage, "r0"), ask(stage, "r1", "r0"), ask(stage, "r2", "r0", deadline_s=1.0), ask(stage, "r3", "r0")
    ]  # fmt: skip
    stage.tell(ev.ClientGone(RequestId("r1")))
    stage.now_s = 2.0
    stage.tell(ev.Tick())
    assert (gone.ended, late.ended, last.ended) == (["cancelled"], ["deadline_exceeded"], [])
    stage.run()
    assert last.ended == ["done"]
    stage.assert_empty()


def test_a_leader_may_be_a_sibling_itself() -> None:
    stage = stage_of()
    outcomes = [ask(stage, "r0"), ask(stage, "r1", "r0"), ask(stage, "r2", "r1")]
    until(stage, has_kv(stage, "r1"))
    stage.run()
    assert [outcome.ended for outcome in outcomes] == [["done"]] * 3
    stage.assert_empty()


def test_a_sibling_of_a_leader_that_has_ended_waits_for_nobody() -> None:
    stage = stage_of()
    ask(stage, "r0")
    stage.run()
    ask(stage, "r1", "r0")
    assert [name for name, _, _ in binds(stage)] == ["r0", "r1"]
    stage.run()
    stage.assert_empty()
