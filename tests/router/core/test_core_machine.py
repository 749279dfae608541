"""RouterCore under random events, in any order that two links allow, with stale and repeated messages."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.errors import (
    CannotFlip,
    IncompatiblePeer,
    InvalidRequest,
    LeaseGone,
    Overloaded,
    ReplicaLost,
    TransferFailed,
    Unavailable,
)
from pdserve.core.ids import Handle, LeaseId, RequestId
from pdserve.core.report import Report
from pdserve.core.sampling import Placement
from pdserve.core.slo import DEFAULT_CLASS, ClassDemand, SloClass
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.migration import FINISH_TOKENS

from ..core_peers import Peer, Stage, row

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
PICK = st.integers(0, 1 << 16)
ERRORS = (ReplicaLost, LeaseGone, TransferFailed, IncompatiblePeer, Unavailable)
RECOVERY_WAIT_S = 8.0
DEADLINE_MAX_S = 20.0
CLASSES = (DEFAULT_CLASS, SloClass("half", tpot_s=0.1, queue_share=0.5), SloClass("high", ttft_s=1.0, priority=5))
CLIENTS = ((), ("a", "1", "x"), ("a", "2", "y"), ("b", "3", "z"), ("b", "3", "w"))
COUNTS = tuple(field.name for field in fields(ClassDemand))
BOUND_S = int(DEADLINE_MAX_S) + 2
"""After the last fault, every request has ended: by its deadline at the latest."""


class CoreMachine(RuleBasedStateMachine):
    probe_workers = False
    stage_type = Stage

    def __init__(self) -> None:
        super().__init__()
        self.stage = self.stage_type(
            max_queued_requests=4,
            colocate_below_tokens=3,
            probe_workers=self.probe_workers,
            recovery_wait_s=RECOVERY_WAIT_S,
            retry_burst=3,
            retry_share=0.5,
        )
        self.names = 0
        self.incarnations = 0
        self.heard: list[ev.Event] = []
        self.hints: list[float] = []
        self.bugs_allowed = 0
        self.stage.join("prefill-0", Role.PREFILL)
        self.stage.share(self.stage.join("decode-0", Role.DECODE))

    def _peer(self, pick: int) -> Peer:
        peers = list(self.stage.peers.values())
        return peers[pick % len(peers)]

    @rule(role=st.sampled_from(Role), number=st.integers(0, 1), restarted=st.booleans(), newer=st.integers(0, 5))
    def join(self, role: Role, number: int, restarted: bool, newer: int = 0) -> None:
        """A worker dials, perhaps again while its last link still stands. Its number decides its numerics. At times it is of a
        release that only workers of its own release read."""
        worker_id = f"{role.value}-{number}"
        before = next((p for p in self.stage.peers.values() if p.hello.worker_id == worker_id), None)
        self.incarnations += 1
        incarnation = self.incarnations if before is None or restarted else before.hello.incarnation
        versions = {"oldest_peer_version": 7, "peer_version": 8} if newer == 5 else {}
        # It has no jobs: a worker that loses its link drops its work.
        peer = self.stage.join(worker_id, role, incarnation=incarnation, numerics=("one", "other")[number], **versions)
        if self.incarnations % 2 and peer.link in self.stage.peers:
            self.stage.share(peer)

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        self.stage.leave(self._peer(pick))

    @rule(
        prompt_len=st.integers(1, 40),
        max_tokens=st.integers(1, 6) | st.just(FINISH_TOKENS + 16),
        deadline_s=st.floats(0.5, DEADLINE_MAX_S),
        priority=st.integers(-1, 1),
        placement=st.sampled_from([None, *Placement]),
        slo=st.sampled_from(CLASSES),
    )
    def submit(
        self, prompt_len: int, max_tokens: int, deadline_s: float, priority: int, placement: Placement | None, slo: SloClass
    ) -> None:
        self.names += 1
        try:
            self.stage.submit(
                f"r{self.names}",
                prompt_len=prompt_len,
                max_tokens=max_tokens,
                deadline_s=deadline_s,
                priority=priority,
                placement=placement,
                slo=slo,
                client=CLIENTS[self.names % len(CLIENTS)],
            )
        except Unavailable:
            pass  # nobody there to serve it as asked
        except Overloaded as exc:
            self.hints.append(exc.retry_after_s)

    @rule(
        n=st.integers(2, 4),
        prompt_len=st.integers(1, 40),
        max_tokens=st.integers(1, 6),
        deadline_s=st.floats(0.5, DEADLINE_MAX_S),
        placement=st.sampled_from([None, *Placement]),
        slo=st.sampled_from(CLASSES),
        late=st.integers(0, 30),
    )
    def submit_group(
        self, n: int, prompt_len: int, max_tokens: int, deadline_s: float, placement: Placement | None, slo: SloClass, late: int
    ) -> None:
        """Choices of one prompt: a leader, and siblings that come at once or when it has gone on. A leader that is refused has
        no siblings."""
        leader, keys = "", tuple(range(1, prompt_len // 4 + 1))
        for _ in range(n):
            self.names += 1
            name = f"r{self.names}"
            try:
                self.stage.submit(
                    name,
                    prompt_len=prompt_len,
                    max_tokens=max_tokens,
                    deadline_s=deadline_s,
                    placement=placement,
                    slo=slo,
                    leader=leader,
                    keys=keys,
                    client=("a", "1", f"group of {leader or name}"),
                )
            except Unavailable:
                pass
            except Overloaded as exc:
                assert not leader, "a group is half refused"
                self.hints.append(exc.retry_after_s)
            leader = leader or name
            if RequestId(leader) not in self.stage.outcomes:
                return
            self.bustle(late, late)

    @precondition(lambda self: self.names)
    @rule(pick=PICK)
    def client_gone(self, pick: int) -> None:
        self.stage.tell(ev.ClientGone(RequestId(f"r{pick % self.names + 1}")))

    def bustle(self, seed: int, moves: int) -> None:
        """In any order: a worker makes a step, or the router hears some of its messages."""
        random = Random(seed)
        for _ in range(moves if self.stage.peers else 0):
            peer = self._peer(random.randrange(1 << 16))
            count = random.randrange(3)
            if count == 0:
                peer.progress()
            self.heard.extend(list(peer.upward)[:count])
            self.stage.deliver(peer, count)
            self.stage.core.check_invariants()

    # Rules are drawn evenly: this one by several names, or little would ever get done.
    bustle_a = rule(seed=st.integers(0, 1 << 32), moves=st.integers(1, 30))(bustle)
    bustle_b = rule(seed=st.integers(0, 1 << 32), moves=st.integers(1, 4))(bustle)

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
        self.bugs_allowed += 1
        self.stage.tell(self.heard[pick % len(self.heard)])

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, handle=st.integers(0, 60), kind=st.integers(0, 4))
    def stale(self, pick: int, handle: int, kind: int) -> None:
        peer = self._peer(pick)
        stale = Handle(handle)
        worker = self.stage.core.registry.get(peer.link)
        if worker is not None and stale in worker.work:
            return  # live for the router, even where the worker has ended it and the router has not heard so yet
        link = peer.link if kind else ev.LinkId(10_000)
        self.stage.tell(
            [
                ev.Reserved(link, stale),
                ev.NoRoom(link, stale, 1),
                ev.PrefillStarted(link, stale, LeaseId(peer.hello.incarnation, 1), b""),
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
            error = ERRORS[pick % len(ERRORS)]("told to fail")
            peer.upward.append(ev.RequestFailed(peer.link, handle, error))

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, other=PICK)
    def partition(self, pick: int, other: int) -> None:
        """One worker cannot read the other's KV any more, or can again."""
        reader, lender = self._peer(pick), self._peer(other)
        reader.unreadable ^= {lender.hello.incarnation}

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK)
    def drain(self, pick: int) -> None:
        worker_id = self._peer(pick).hello.worker_id
        placed = len(self.stage.effects)
        self.stage.tell(ev.DrainAsked(worker_id))
        assert isinstance(self.stage.effects[placed], ev.SendDrain)

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK)
    def flip(self, pick: int) -> None:
        """A worker is told to change its role, or the core says why it cannot and changes nothing."""
        hello, placed = self._peer(pick).hello, len(self.stage.effects)
        worker = self.stage.core.linked(hello.worker_id)
        pool = self.stage.core.registry.of_role(hello.role)
        last = hello.role is Role.DECODE and not any(w.serves for w in pool if w is not worker)
        ask = ev.FlipAsked(hello.worker_id, OTHER[hello.role], hello.incarnation)
        if last or worker.draining:
            with pytest.raises(CannotFlip):
                self.stage.tell(ask)
            assert len(self.stage.effects) == placed
        else:
            self.stage.tell(ask)
            assert self.stage.effects[placed] == ev.SendFlip(worker.link, OTHER[hello.role])

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK)
    def flip_ends(self, pick: int) -> None:
        ready = [p for p in self.stage.peers.values() if p.next_role and not p.jobs and not p.upward]
        if ready:
            self.stage.flipped(ready[pick % len(ready)])

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK)
    def leave_in_order(self, pick: int) -> None:
        """A worker drains by itself, and the router hears of it by a refusal."""
        self._peer(pick).draining = True

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, tokens=st.integers(0, 80))
    def set_budget(self, pick: int, tokens: int) -> None:
        peer = self._peer(pick)
        placed = len(self.stage.effects)
        least = peer.hello.block_size + peer.hello.max_num_seqs - 1
        if least <= tokens <= peer.hello.max_num_batched_tokens:
            self.stage.tell(ev.BudgetAsked(peer.hello.worker_id, tokens))
            assert isinstance(self.stage.effects[placed], ev.SendBudget)
        else:
            with pytest.raises(InvalidRequest, match=f"max_num_batched_tokens: {tokens} .* from {least} to 64"):
                self.stage.tell(ev.BudgetAsked(peer.hello.worker_id, tokens))
            assert len(self.stage.effects) == placed

    @precondition(lambda self: self.stage.peers)
    @rule(pick=PICK, seqs=st.integers(1, 6))
    def set_max_num_seqs(self, pick: int, seqs: int) -> None:
        """The router hears of it by a heartbeat, and until then the worker may have no room where the router sees some."""
        peer = self._peer(pick)
        placed = len(self.stage.effects)
        if seqs <= peer.hello.max_num_seqs:
            self.stage.tell(ev.BudgetAsked(peer.hello.worker_id, 0, seqs))
            assert self.stage.effects[placed] == ev.SendBudget(peer.link, 0, seqs)
        else:
            with pytest.raises(InvalidRequest, match=f"max_num_seqs: {seqs} .* from 1 to {peer.hello.max_num_seqs}"):
                self.stage.tell(ev.BudgetAsked(peer.hello.worker_id, 0, seqs))

    @rule(seconds=st.floats(0.01, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.stage.now_s += seconds
        self.stage.tell(ev.Tick())

    @invariant()
    def books_agree(self) -> None:
        self.stage.core.check_invariants()
        bugs = sum(o.ended == ["internal_bug"] for o in self.stage.outcomes.values())
        assert bugs <= self.bugs_allowed
        assert all(0 < hint <= 30 for hint in self.hints)
        for report in [o.report for o in self.stage.outcomes.values() if o.report]:
            losses = self.stage.joins  # a link is lost at most once, and each loss makes at most one attempt necessary
            assert report.attempts - 1 <= losses + 3
        for outcome in self.stage.outcomes.values():
            assert len(outcome.ended) <= 1
            if outcome.ended == ["done"]:
                assert outcome.report is not None
                assert outcome.report.output_tokens == len(outcome.emitted)
                numbers = {name[-1] for name in (outcome.report.prefill_worker, outcome.report.decode_worker) if name}
                assert not outcome.report.exact or len(numbers) == 1

    @invariant()
    def demand_is_what_clients_saw(self) -> None:
        stage, waiting = self.stage, self.stage.core.waiting.all()
        demand = stage.core.demand(now_s=stage.now_s, uptime_s=stage.now_s)
        assert (demand.requests, demand.refused) == (len(stage.outcomes), len(self.hints))
        assert demand.output_tokens >= sum(len(o.emitted) for o in stage.outcomes.values())
        assert self.bugs_allowed or demand.output_tokens == sum(len(o.emitted) for o in stage.outcomes.values())
        assert demand.queued_prompt_tokens == sum(0 if r.leader else len(r.spec.prompt_ids) for r in waiting)
        assert demand.longest_wait_s == max([stage.now_s - r.times.arrived_s for r in waiting if not r.replay], default=0.0)
        ended = [(o.report, o.ended) for o in stage.outcomes.values() if o.report is not None]
        told = [r for r, how in ended if how != ["cancelled"] or False in (r.ttft_met, r.tpot_met)]
        assert (demand.ttft_met, demand.ttft_missed) == (sum(r.ttft_met is True for r in told), missed(told, "ttft_met"))
        assert (demand.tpot_met, demand.tpot_missed) == (sum(r.tpot_met is True for r in told), missed(told, "tpot_met"))
        assert demand.refused == sum(one.refused for one in demand.classes)
        for one in demand.classes:
            late, slow = (sum(getattr(one, name) for name in COUNTS if name.startswith(how)) for how in ("late_by", "slow_by"))
            assert (late, slow) == (one.ttft_missed, one.tpot_missed), "a missed target has not one cause"
            assert one.first_gap_s >= 0.0
            assert one.first_gaps <= sum(r.slo_class == one.slo_class and r.output_tokens > 1 for r in told)

    def teardown(self) -> None:
        """Faults stop, all work, time goes on: within its bounds every request ends, and nothing is left."""
        for peer in self.stage.peers.values():
            peer.refuse = 0
            peer.unreadable.clear()
        for _ in range(BOUND_S):
            self.stage.run()
            self.stage.now_s += 1.0
            for peer in list(self.stage.peers.values()):
                self.stage.heartbeat(peer)
            self.stage.tell(ev.Tick())
        self.stage.run()
        self.books_agree()
        self.stage.assert_empty()
        for worker in self.stage.core.registry:
            assert worker.draining or worker.readiness.ready or worker.hello.role is Role.PREFILL


def missed(reports: list[Report], target: str) -> int:
    return sum(getattr(report, target) is False for report in reports)


class ProbingCoreMachine(CoreMachine):
    """The same, with workers that must show first that KV passes."""

    probe_workers = True


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestProbingCoreMachine = ProbingCoreMachine.TestCase
TestProbingCoreMachine.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)


def chaos(machine: CoreMachine, random: Random) -> None:
    """One weighted random event; the state machine above shrinks better, this goes deeper."""
    pick = random.randrange(1 << 16)
    if not machine.stage.peers or random.random() < 0.03:
        machine.join(random.choice(list(Role)), random.randrange(2), random.random() < 0.5, random.randrange(40) // 7)
        return
    rules = {
        lambda: machine.submit(
            prompt_len=random.randint(1, 40),
            max_tokens=random.randint(1, 6) if random.random() < 0.85 else FINISH_TOKENS + 16,
            deadline_s=random.uniform(1, DEADLINE_MAX_S),
            priority=random.randint(-1, 1),
            placement=random.choice([None, None, *Placement]),
            slo=random.choice(CLASSES),
        ): 20,
        lambda: machine.submit_group(
            random.randint(2, 4),
            random.randint(1, 40),
            random.randint(1, 6),
            random.uniform(1, DEADLINE_MAX_S),
            random.choice([None, None, *Placement]),
            random.choice(CLASSES),
            random.choice([0, 0, random.randint(1, 20)]),
        ): 4,
        lambda: machine.bustle(pick, random.randint(1, 8)): 60,
        lambda: machine.client_gone(random.randrange(machine.names)) if machine.names else None: 3,
        lambda: machine.refuse(pick, random.randint(1, 3)): 3,
        lambda: machine.heartbeat(pick, random.randint(0, 16)): 20,
        lambda: machine.repeat_rows(pick) if machine.heard else None: 5,
        lambda: machine.repeat_anything(-1 - random.randrange(5)) if len(machine.heard) > 5 else None: 1,
        lambda: machine.stale(pick, random.randrange(200), random.randrange(5)): 3,
        lambda: machine.one_fails(pick): 2,
        lambda: machine.leave(pick): 1,
        lambda: machine.partition(pick, random.randrange(8)): 1,
        lambda: machine.drain(pick) if random.random() < 0.4 else None: 1,
        lambda: machine.leave_in_order(pick) if random.random() < 0.4 else None: 1,
        lambda: machine.time_passes(random.uniform(0.01, 1.0)): 5,
    }
    random.choices(list(rules), list(rules.values()))[0]()


def long_random_run(seed: int, kind: type[CoreMachine]) -> CoreMachine:
    """Return the machine after many events and its end."""
    machine, random = kind(), Random(seed)
    for _ in range(600):
        chaos(machine, random)
        machine.books_agree()
    machine.teardown()
    return machine


@pytest.mark.quick("0-*", "5-CoreMachine")
@pytest.mark.parametrize("kind", [CoreMachine, ProbingCoreMachine])
@pytest.mark.parametrize("seed", range(8))
def test_long_random_runs_leave_nothing(seed: int, kind: type[CoreMachine]) -> None:
    machine = long_random_run(seed, kind)
    assert sum(o.ended == ["done"] for o in machine.stage.outcomes.values()) > 10
