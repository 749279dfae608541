"""Workers of two releases side by side: who is let in, and who is paired."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.errors import CannotFlip, IncompatiblePeer, Unavailable
from pdserve.core.sampling import Placement
from pdserve.core.worker import LINK_VERSIONS, Role, VersionRange, WorkerHello
from router.core import events as ev

from ..core.recovery.stages import sent
from ..core.test_pairs import served_by
from ..core_peers import Peer, Stage, hello

OLD = {"oldest_peer_version": 0, "peer_version": 1}
NEW = {"oldest_peer_version": 2, "peer_version": 3}
BETWEEN = {"oldest_peer_version": 1, "peer_version": 2}
RANGES = st.builds(VersionRange, st.integers(0, 4), st.integers(0, 4))


@given(one=RANGES, other=RANGES)
def test_the_common_version_is_the_newest_that_both_speak(one: VersionRange, other: VersionRange) -> None:
    both = set(range(one.oldest, one.newest + 1)) & set(range(other.oldest, other.newest + 1))
    assert one.common(other) == other.common(one) == (max(both) if both else None)
    reader = hello("d", Role.DECODE, oldest_peer_version=other.oldest, peer_version=other.newest)
    lender = hello("p", Role.PREFILL, oldest_peer_version=one.oldest, peer_version=one.newest)
    if one.oldest <= one.newest and other.oldest <= other.newest:
        assert lender.may_pair(reader) == bool(both)


def test_a_range_says_itself_in_words() -> None:
    assert [str(VersionRange(0, 1)), str(VersionRange(2, 2))] == ["0 to 1", "2"]


def closed(stage: Stage) -> list[IncompatiblePeer]:
    return [effect.error for effect in sent(stage, ev.CloseLink)]


def test_a_worker_without_versions_is_served_as_ever() -> None:
    """It is of a release before versions, so both sides speak version 0."""
    stage = Stage()
    stage.join("decode-0", Role.DECODE, link_version=0, peer_version=0)
    stage.join("prefill-0", Role.PREFILL, link_version=0, peer_version=0)
    assert [effect.link_version for effect in sent(stage, ev.SendWelcome)] == [0, 0]
    outcome = stage.submit("r", placement=Placement.DISAGGREGATED)
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_both_ends_speak_the_older_ones_newest_version() -> None:
    stage = Stage()
    stage.join("decode-0", Role.DECODE, link_version=LINK_VERSIONS.newest + 3)
    stage.join("decode-1", Role.DECODE, link_version=LINK_VERSIONS.newest)
    stage.join("decode-2", Role.DECODE, link_version=0)
    assert [effect.link_version for effect in sent(stage, ev.SendWelcome)] == [LINK_VERSIONS.newest, LINK_VERSIONS.newest, 0]


def test_a_worker_whose_link_the_router_cannot_speak_is_refused_by_name_with_both_ranges() -> None:
    stage = Stage()
    newest = LINK_VERSIONS.newest
    stage.join("decode-7", Role.DECODE, oldest_link_version=newest + 1, link_version=newest + 2)
    (error,) = closed(stage)
    assert isinstance(error, IncompatiblePeer)
    assert error.message == (
        f"decode worker decode-7 speaks version {newest + 1} to {newest + 2} of the link's protocol, this router speaks "
        f"{LINK_VERSIONS}: upgrade the older one of the two"
    )
    assert not len(stage.core.registry)


def test_a_worker_whose_release_has_no_flips_is_not_told_to_flip() -> None:
    """It would ignore the message, and the router would wait for a worker that goes on as before."""
    stage = Stage()
    stage.join("decode-0", Role.DECODE)
    old = stage.join("decode-1", Role.DECODE, link_version=0)
    with pytest.raises(CannotFlip, match=r"decode-1 speaks version 0 .* has no flips: upgrade it to version 1"):
        stage.tell(ev.FlipAsked(old.hello.worker_id, Role.PREFILL, old.hello.incarnation))
    assert not old.draining


def side_by_side(**config: object) -> Stage:
    stage = Stage(**config)
    for release, versions in (("old", OLD), ("new", NEW)):
        for number in range(2):
            stage.join(f"prefill-{release}-{number}", Role.PREFILL, **versions)
            stage.join(f"decode-{release}-{number}", Role.DECODE, **versions)
    return stage


def test_only_workers_with_a_common_version_are_paired() -> None:
    """The stage checks each pair. All workers get work, and no pair has failed."""
    stage = side_by_side()
    outcomes = [stage.submit(f"r{n}", max_tokens=4, placement=Placement.DISAGGREGATED) for n in range(16)]
    stage.run()
    assert [o.ended for o in outcomes] == [["done"]] * 16
    reports = [o.report for o in outcomes if o.report]
    assert {r.decode_worker for r in reports} == {
        p.hello.worker_id for p in stage.peers.values() if p.hello.role is Role.DECODE
    }
    assert all(r.prefill_worker.split("-")[1] == r.decode_worker.split("-")[1] for r in reports)
    assert (len(stage.core.pairs), {r.attempts for r in reports}) == (0, {1})
    stage.assert_empty()


def test_workers_whose_ranges_overlap_are_paired() -> None:
    stage = Stage()
    stage.join("prefill-old", Role.PREFILL, **OLD)
    stage.join("decode-between", Role.DECODE, **BETWEEN)
    outcome = stage.submit("r", placement=Placement.DISAGGREGATED)
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_probes_too_run_only_between_workers_with_a_common_version() -> None:
    """A prefill worker without a partner stays not ready, and says so; a decode worker is probed alone."""
    stage = Stage(probe_workers=True)
    stage.join("prefill-new", Role.PREFILL, **NEW)
    stage.join("decode-old", Role.DECODE, **OLD)
    stage.run()
    assert not sent(stage, ev.SendPrefill)
    workers = {w.hello.worker_id: w.readiness for w in stage.core.registry}
    assert workers["decode-old"].ready
    assert not workers["prefill-new"].ready
    assert workers["prefill-new"].reason == (
        "waiting for a KV round trip: no decode worker speaks a version of its protocol between workers (2 to 3)"
    )
    stage.join("decode-new", Role.DECODE, **NEW)
    stage.now_s += 1.0
    stage.tell(ev.Tick())
    stage.run()
    assert workers["prefill-new"].ready
    stage.assert_empty()


def test_without_a_common_version_requests_are_colocated_and_told_why() -> None:
    stage = Stage()
    stage.join("prefill-new", Role.PREFILL, **NEW)
    stage.join("decode-old", Role.DECODE, **OLD)
    assert served_by(stage, "r") == ("", "decode-old", "versions_differ")
    with pytest.raises(Unavailable, match="no prefill worker and decode worker speak a common version"):
        stage.submit("apart", placement=Placement.DISAGGREGATED)
    stage.assert_empty()


def test_a_decode_worker_without_a_partner_computes_prompts_while_others_are_paired() -> None:
    stage = Stage()
    for versions, name in ((OLD, "old"), (NEW, "new")):
        stage.join(f"decode-{name}", Role.DECODE, max_num_seqs=1, **versions)
    stage.join("prefill-old", Role.PREFILL, **OLD)
    reports = [stage.submit(name, max_tokens=4) for name in ("first", "second")]
    stage.run()
    served = [(o.report.prefill_worker, o.report.decode_worker, o.report.placement_reason) for o in reports if o.report]
    assert served == [("prefill-old", "decode-old", "default"), ("", "decode-new", "versions_differ")]
    stage.assert_empty()


def test_a_rebind_goes_only_to_a_worker_that_speaks_the_lenders_version() -> None:
    stage = side_by_side()
    outcome = stage.submit("r", max_tokens=6, placement=Placement.DISAGGREGATED)
    decode = next(p for p in stage.peers.values() if p.jobs)
    stage.deliver(decode)
    lender = next(p for p in stage.peers.values() if p.jobs and p is not decode)
    stage.deliver(lender)
    stage.leave(decode)
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    assert (outcome.report.rebinds, outcome.report.attempts) == (1, 1)
    assert outcome.report.decode_worker.split("-")[1] == lender.hello.worker_id.split("-")[1]
    stage.assert_empty()


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_rolling_upgrade_costs_no_request(data: st.DataObject) -> None:
    """New workers join beside the old ones, and the old ones leave one by one, in any order, while requests run. The stage
    checks each pair; no request is tried twice."""
    stage = Stage(max_attempts=1, retry_share=0.0, retry_burst=0)
    old = [stage.join(f"{role.value}-{n}", role, **OLD) for role in Role for n in range(2)]
    names = iter(range(1000))
    outcomes = []

    def bustle() -> None:
        lengths = data.draw(st.lists(st.integers(1, 4), max_size=2))
        outcomes.extend(stage.submit(f"r{next(names)}", max_tokens=length) for length in lengths)
        for peer in list(stage.peers.values()):
            for _ in range(data.draw(st.integers(0, 2))):
                peer.progress()
                stage.deliver(peer)

    for role in data.draw(st.permutations([*Role, *Role])):
        stage.join(f"{role.value}-new-{next(names)}", role, **NEW)
        bustle()
    for peer in data.draw(st.permutations(old)):
        stage.tell(ev.DrainAsked(peer.hello.worker_id))
        bustle()
        worker = stage.core.linked(peer.hello.worker_id)
        while worker.work:  # a prefill worker waits for the readers of what it lends
            _serve_all(stage)
        stage.leave(peer)
    stage.run()
    assert [(o.ended, o.report and o.report.attempts) for o in outcomes] == [(["done"], 1)] * len(outcomes)
    stage.assert_empty()


def _serve_all(stage: Stage) -> None:
    peers: list[Peer] = list(stage.peers.values())
    for peer in peers:
        peer.progress()
        stage.deliver(peer, len(peer.upward))


def test_the_stage_finds_a_pair_without_a_common_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerHello, "may_pair", lambda self, other: True)
    with pytest.raises(AssertionError, match="paired without a common version"):
        test_only_workers_with_a_common_version_are_paired()
