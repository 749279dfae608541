"""Workers that differ: in length, in size, in whom they reach. Each gets the work that it can do, and holds up no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from pdserve.core.errors import IncompatiblePeer, Unavailable
from pdserve.core.ids import Handle
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.registry import Registry, Worker
from router.service.model import LengthLimit
from testkit.fake_worker import DECODE, PREFILL

from .core_peers import FINGERPRINT, Peer, Stage, hello, row
from .local_cluster import generate_request, local_cluster, read_answer, tiny_model


def worker_of(stage: Stage, peer: Peer) -> Worker:
    worker = stage.core.registry.get(peer.link)
    assert worker is not None
    return worker


# Credit ----------------------------------------------------------------------------------------------------------------


def test_a_heartbeat_does_not_zero_the_credit_of_work_that_is_still_on_its_way() -> None:
    """(1) Two prompts are sent. (2) A heartbeat counts the first alone. (3) The second is still held against the worker."""
    stage = Stage()
    stage.join("decode-0", Role.DECODE)
    prefill = stage.join("prefill-0", Role.PREFILL)
    for name in ("first", "second"):
        stage.submit(name, prompt_len=10)
    for peer in list(stage.peers.values()):
        stage.deliver(peer, 4)
    worker, (first, second) = worker_of(stage, prefill), sorted(prefill.jobs)
    assert worker.queued_tokens == 20
    stage.heartbeat(prefill, queued_tokens=10, last=first)
    assert worker.queued_tokens == 20, "10 that it counted, 10 on their way"
    stage.heartbeat(prefill, queued_tokens=20, last=second)
    assert worker.queued_tokens == 20
    stage.heartbeat(prefill, queued_tokens=0, last=Handle(0))
    assert worker.queued_tokens == 0, "what was counted once is not counted anew by an older number"
    stage.run()
    stage.assert_empty()


def test_heartbeats_that_know_nothing_yet_do_not_herd_prompts_onto_one_worker() -> None:
    """Each beat says idle, since the engine of either has not taken its commands yet."""
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE, num_blocks=1000, max_num_seqs=32)
    prefills = [stage.join(f"prefill-{n}", Role.PREFILL, num_blocks=1000, max_num_seqs=32) for n in range(2)]
    for n in range(16):
        stage.submit(f"r{n}", prompt_len=30)
        stage.deliver(decode, 1)
        stage.heartbeat(prefills[n % 2], last=Handle(0))
    assert [len(peer.jobs) for peer in prefills] == [8, 8]
    assert [worker_of(stage, peer).queued_tokens for peer in prefills] == [240, 240]
    stage.run()
    stage.assert_empty()


def test_the_credit_of_withdrawn_work_goes_with_it() -> None:
    stage = Stage()
    stage.join("decode-0", Role.DECODE)
    prefill = stage.join("prefill-0", Role.PREFILL)
    outcome = stage.submit("r", prompt_len=10, deadline_s=1.0)
    stage.deliver(next(iter(stage.peers.values())))
    assert worker_of(stage, prefill).queued_tokens == 10
    stage.now_s = 1.5
    stage.tell(ev.Tick())
    assert outcome.ended == ["deadline_exceeded"]
    assert worker_of(stage, prefill).queued_tokens == 0
    stage.assert_empty()


# Lengths ---------------------------------------------------------------------------------------------------------------


def test_requests_without_max_tokens_spread_over_slightly_different_decode_workers() -> None:
    async def main() -> None:
        async with local_cluster((PREFILL,)) as cluster:
            decodes = [
                cluster.worker(DECODE, num_blocks=blocks, max_model_len=16 * blocks, eos_after=5, token_interval_s=0.005)
                for blocks in (16, 15)
            ]
            for worker in decodes:
                await worker.start()
            asked = [generate_request([1, 2, n + 3], 1) for n in range(16)]
            for request in asked:
                request.sampling.ClearField("max_tokens")
            answers = await asyncio.gather(*(read_answer(cluster.stub.Generate(request)) for request in asked))
            used = Counter(answer.report.decode_worker for answer in answers)
            assert set(used) == {"decode-0", "decode-1"}
            assert min(used.values()) >= 4
            await cluster.assert_idle()
            for worker in decodes:
                await worker.stop()

    asyncio.run(main())


@given(lengths=st.lists(st.integers(2, 300), min_size=1, max_size=5), prompt_len=st.integers(1, 255))
def test_an_open_end_costs_at_most_a_quarter_of_the_longest_answer(lengths: list[int], prompt_len: int) -> None:
    registry = Registry(FINGERPRINT)
    limit = LengthLimit(tiny_model(), registry)
    for n, length in enumerate(lengths):
        registry.join(ev.LinkId(n), hello(f"decode-{n}", Role.DECODE, max_model_len=length), now_s=0.0)
    longest = limit.max_model_len - prompt_len
    if longest < 1:
        return  # refused: no worker takes it
    room = limit.open_ended_room(prompt_len, limit.max_model_len)
    assert 0.75 * longest <= room <= longest
    takers = [length for length in lengths if length >= prompt_len + room]
    assert takers, "somebody must take it"
    near = [length for length in lengths if min(length, limit.max_model_len) - prompt_len >= 0.75 * longest]
    assert len(takers) == len(near), "and all that are about as long"


def test_a_worker_that_cuts_an_answer_short_is_told_of_and_not_passed_on_as_an_end() -> None:
    """A worker of another version, whose own limit is shorter than it said: LENGTH before max_tokens is no end."""
    stage = Stage()
    decode = stage.join("decode-0", Role.DECODE)
    outcome = stage.submit("r", max_tokens=9)
    stage.deliver(decode)
    (handle,) = decode.jobs
    del decode.jobs[handle]
    stage.tell(ev.StepRows(decode.link, [row(handle, 0, last=True)]))
    assert outcome.ended == ["internal_bug"]
    assert "1 of 9 tokens" in str(outcome.error)
    stage.assert_empty()


# Pairs -----------------------------------------------------------------------------------------------------------------


def cut_off(slots: int = 2) -> tuple[Stage, Peer, Peer]:
    """prefill-0's KV reaches decode-0 and not decode-1, which is known already."""
    stage = Stage(max_queued_requests=200, retry_burst=100)
    prefill = stage.join("prefill-0", Role.PREFILL, num_blocks=1000, max_num_seqs=64)
    near, far = (stage.join(f"decode-{n}", Role.DECODE, num_blocks=100, max_num_seqs=slots) for n in range(2))
    stage.core.pairs.failed(prefill.hello, far.hello, "no route", now_s=0.0)
    stage.replayable = False
    return stage, near, far


def test_a_decode_worker_that_is_cut_off_gets_colocated_work_while_others_are_full() -> None:
    stage, near, far = cut_off()
    outcomes = [stage.submit(f"r{n}") for n in range(5)]
    assert (len(near.jobs), len(far.jobs), len(stage.core.waiting)) == (2, 2, 1)
    stage.run()
    assert all(outcome.ended == ["done"] for outcome in outcomes)
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    placed = {(r.decode_worker, r.placement, r.placement_reason) for r in reports}
    assert ("decode-0", Placement.DISAGGREGATED, "default") in placed
    assert ("decode-1", Placement.COLOCATED, "pairs_set_aside") in placed
    assert not far.attached_to
    stage.assert_empty()


def test_requests_that_insist_on_a_full_pair_do_not_hold_up_what_the_cut_off_worker_can_do() -> None:
    stage, near, far = cut_off()
    insisting = [stage.submit(f"d{n}", placement=Placement.DISAGGREGATED) for n in range(6)]
    behind = stage.submit("c", placement=Placement.COLOCATED)
    assert (len(near.jobs), len(far.jobs)) == (2, 1)
    stage.run()
    assert all(outcome.ended == ["done"] for outcome in [*insisting, behind])
    stage.assert_empty()


def test_a_large_request_at_the_head_holds_up_only_workers_that_it_could_use() -> None:
    """(1) The large worker is busy, the small one idle. (2) A small request passes the large one, onto the small worker
    alone. (3) As soon as the large worker has room, it is the large request's, though small ones wait."""
    stage = Stage()
    small = stage.join("decode-small", Role.DECODE, max_model_len=16, num_blocks=100, max_num_seqs=1)
    large = stage.join("decode-large", Role.DECODE, max_model_len=64, num_blocks=100, max_num_seqs=1)
    stage.submit("first", prompt_len=40)
    head = stage.submit("head", prompt_len=40)
    passing, last = stage.submit("passing"), stage.submit("last")
    assert [[stage.placed[handle][0] for handle in peer.jobs] for peer in (small, large)] == [["passing"], ["first"]]
    while not head.emitted:
        large.progress()
        stage.deliver(large)
    assert not last.emitted
    stage.run()
    assert passing.ended == last.ended == head.ended == ["done"]
    stage.assert_empty()


def test_a_pair_that_can_never_work_is_not_waited_for() -> None:
    stage = Stage()
    prefill, decode = stage.join("prefill-0", Role.PREFILL), stage.join("decode-0", Role.DECODE)
    stage.core.pairs.never(prefill.hello, decode.hello, str(IncompatiblePeer("layouts differ")))
    stage.replayable = False
    assert not stage.core.pairs.usable(prefill.hello, decode.hello, now_s=float("inf"))
    with pytest.raises(Unavailable):
        stage.submit("insists", placement=Placement.DISAGGREGATED)
    assert stage.submit("free to choose").ended == []
    stage.run()
    stage.assert_empty()


# Any pools -------------------------------------------------------------------------------------------------------------

SHAPES = st.tuples(st.sampled_from([5, 12, 13, 30, 64]), st.integers(4, 40), st.integers(1, 3))
"""max_model_len, blocks of four tokens, slots."""


def idle_and_wanted(stage: Stage) -> list[tuple[str, str]]:
    """Requests that wait while a decode worker with nothing to do could serve them. A request that failed on a worker rightly
    waits for another one."""
    core, found = stage.core, []
    for request in core.waiting.all():
        lenders = [p for p in core.registry.of_role(Role.PREFILL) if p.hello.max_model_len > request.work_len]
        able = []
        for worker in core.registry.of_role(Role.DECODE):
            paired = any(core.pairs.usable(p.hello, worker.hello, now_s=stage.now_s) for p in lenders)
            if worker.hello.max_model_len >= request.max_len and (paired or request.asked is not Placement.DISAGGREGATED):
                able.append(worker)
        others = [worker for worker in able if worker.hello.worker_id not in request.avoid]
        idle = [worker for worker in others or able if not worker.work and worker.has_room]
        found += [(request.request_id, worker.hello.worker_id) for worker in idle]
    return found


@example(
    prefills=[(5, 4, 1)] * 3, decodes=[(5, 4, 1), (5, 4, 2)], cuts={(0, 1)}, never=False, probing=False, seed=53702
)  # a second try waits for decode-0 while decode-1, where the first has failed, is idle
@settings(max_examples=60, deadline=None)
@given(
    prefills=st.lists(SHAPES, max_size=3),
    decodes=st.lists(SHAPES, min_size=1, max_size=3),
    cuts=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5),
    never=st.booleans(),
    probing=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_any_pools_serve_whole_answers_and_leave_no_able_worker_idle(
    prefills: list[tuple[int, int, int]],
    decodes: list[tuple[int, int, int]],
    cuts: set[tuple[int, int]],
    never: bool,
    probing: bool,
    seed: int,
) -> None:
    """Lengths, sizes, slots, partitions and priorities of any kind. Peers assert that nothing is too long for them."""
    random = Random(seed)
    stage = Stage(max_queued_requests=200, retry_burst=1000, probe_workers=probing, recovery_wait_s=30.0)
    pools = [(Role.PREFILL, shape) for shape in prefills] + [(Role.DECODE, shape) for shape in decodes]
    peers: dict[Role, list[Peer]] = {role: [] for role in Role}
    for role, (length, blocks, slots) in pools:
        name = f"{role.value}-{len(peers[role])}"
        length = min(length, 4 * blocks)
        peers[role].append(stage.join(name, role, max_model_len=length, num_blocks=blocks, max_num_seqs=slots))
    for lender, reader in cuts:
        if lender < len(prefills) and reader < len(decodes):
            prefill, decode = peers[Role.PREFILL][lender], peers[Role.DECODE][reader]
            decode.unreadable.add(prefill.hello.incarnation)
            if never:
                stage.core.pairs.never(prefill.hello, decode.hello, "layouts differ")
                stage.replayable = False
    outcomes = []
    for n in range(30):
        placement = random.choice([None, None, *Placement])
        prompt_len, max_tokens = random.choice([1, 3, 9, 11, 12, 25]), random.choice([1, 2, 3, 20])
        try:
            asked = {"placement": placement, "priority": random.randint(-2, 2), "deadline_s": 1e6}
            outcome = stage.submit(f"r{n}", prompt_len=prompt_len, max_tokens=max_tokens, **asked)  # type: ignore[arg-type]
            outcomes.append((outcome, max_tokens))
        except Unavailable:
            pass  # nobody is there who could serve it as asked
        stage.core.check_invariants()
        if not probing:
            assert not idle_and_wanted(stage)
        for peer in random.sample(list(stage.peers.values()), k=1):
            peer.progress()
            stage.deliver(peer, random.randrange(4))
    for second in range(400):
        stage.run(20)
        if all(outcome.ended for outcome, _ in outcomes) and second > 20:
            break
        stage.now_s += 1.0
        for peer in list(stage.peers.values()):
            stage.heartbeat(peer)
        stage.tell(ev.Tick())
    for outcome, max_tokens in outcomes:
        if outcome.ended == ["done"]:
            assert len(outcome.emitted) == max_tokens, "cut short in silence"
        else:
            assert outcome.ended in (["unavailable"], ["transfer_failed"]), outcome.ended
            assert cuts or probing, "nothing was at fault"
    stage.assert_empty()
