"""RouterCore under random events, in any order that two links allow, with stale and repeated messages."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.errors import Overloaded, ReplicaLost, Unavailable
from pdserve.core.ids import Handle, LeaseId, RequestId
from pdserve.core.sampling import Placement
from router import events as ev

from .core_peers import Peer, Stage, row

PICK = st.integers(0, 1 << 16)


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(max_queued_requests=4, colocate_below_tokens=3)
        self.names = 0
        self.incarnations = 0
        self.heard: list[ev.Event] = []
        self.hints: list[float] = []

    def _peer(self, pick: int) -> Peer:
        peers = list(self.stage.peers.values())
        return peers[pick % len(peers)]

    @rule(role=st.sampled_from(ev.Role), number=st.integers(0, 1), restarted=st.booleans())
    def join(self, role: ev.Role, number: int, restarted: bool) -> None:
        self.incarnations += restarted
        worker_id = f"{role.value}-{number}"
        self.stage.join(worker_id, role, incarnation=self.incarnations)

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        self.stage.leave(self._peer(pick))

    @rule(
        prompt_len=st.integers(1, 40),
        max_tokens=st.integers(1, 6),
        deadline_s=st.floats(0.5, 20.0),
        priority=st.integers(-1, 1),
        placement=st.sampled_from([None, *Placement]),
    )
    def submit(self, prompt_len: int, max_tokens: int, deadline_s: float, priority: int, placement: Placement | None) -> None:
        self.names += 1
        try:
            self.stage.submit(
                f"r{self.names}",
                prompt_len=prompt_len,
                max_tokens=max_tokens,
                deadline_s=deadline_s,
                priority=priority,
                placement=placement,
            )
        except Unavailable:
            pass  # nobody there to serve it as asked
        except Overloaded as exc:
            self.hints.append(exc.retry_after_s)

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def client_gone(self, pick: int) -> None:
        self.stage.tell(ev.ClientGone(RequestId(f"r{pick % self.names + 1}")))

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK)
    def work(self, pick: int) -> None:
        self._peer(pick).progress()

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, count=st.integers(1, 5))
    def hear(self, pick: int, count: int) -> None:
        peer = self._peer(pick)
        self.heard.extend(list(peer.upward)[:count])
        self.stage.deliver(peer, count)

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, count=st.integers(1, 3))
    def refuse(self, pick: int, count: int) -> None:
        self._peer(pick).refuse = count

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, free=st.integers(0, 16))
    def heartbeat(self, pick: int, free: int) -> None:
        self.stage.heartbeat(self._peer(pick), free=free, queued_tokens=free)

    @precondition(lambda self: self.heard)
    @rule(pick=PICK)
    def repeat_rows(self, pick: int) -> None:
        rows = [e for e in self.heard if isinstance(e, ev.StepRows)]
        if rows:
            self.stage.tell(rows[pick % len(rows)])

    @precondition(lambda self: self.heard)
    @rule(pick=PICK)
    def repeat_anything(self, pick: int) -> None:
        """Nobody's link does this; it may fail that request, and no other."""
        self.stage.tell(self.heard[pick % len(self.heard)])

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, handle=st.integers(0, 60), kind=st.integers(0, 4))
    def stale(self, pick: int, handle: int, kind: int) -> None:
        peer = self._peer(pick)
        stale = Handle(handle)
        if stale in peer.jobs:
            return
        link = peer.link if kind else ev.LinkId(10_000)
        self.stage.tell(
            [
                ev.Reserved(link, stale),
                ev.NoRoom(link, stale, 1, 0),
                ev.PrefillStarted(link, stale, LeaseId(peer.hello.incarnation, 1), 1.0, b""),
                ev.RequestFailed(link, stale, ReplicaLost("stale")),
                ev.StepRows(link, [row(handle, 0)]),
            ][kind]
        )

    @rule(pick=PICK)
    def one_fails(self, pick: int) -> None:
        jobs = [(p, h) for p in self.stage.peers.values() for h in p.jobs]
        if jobs:
            peer, handle = jobs[pick % len(jobs)]
            del peer.jobs[handle]
            peer.upward.append(ev.RequestFailed(peer.link, handle, ReplicaLost("told to fail")))

    @rule(seconds=st.floats(0.01, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.stage.now_s += seconds
        self.stage.tell(ev.Tick())

    @invariant()
    def books_agree(self) -> None:
        self.stage.core.check_invariants()
        assert all(0 < hint <= 30 for hint in self.hints)
        for outcome in self.stage.outcomes.values():
            assert len(outcome.ended) <= 1
            if outcome.ended == ["done"]:
                assert outcome.report is not None
                assert outcome.report.output_tokens == len(outcome.emitted)

    def teardown(self) -> None:
        """All work, all clients served or timed out: nothing may be left."""
        for peer in self.stage.peers.values():
            peer.refuse = 0
            self.stage.heartbeat(peer)
        self.stage.run()
        self.stage.now_s += 100.0
        self.stage.tell(ev.Tick())
        self.stage.assert_empty()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
