"""Workers on a virtual clock that keep to the rates that they tell: for tests of what the router predicts and decides."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace

from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import Handle, RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.slo import DEFAULT_CLASS, SloClass
from pdserve.core.worker import Role, WorkerLoad
from router.core import events as ev

from .core_peers import Outcome, Peer, Stage, row

LARGE = {"num_blocks": 100_000, "max_model_len": 100_000, "max_num_seqs": 64}


@dataclass
class TimedPeer:
    """A worker that computes one prompt after the other, and makes a decode step for all its sequences every `step_s`."""

    peer: Peer
    tokens_per_s: float
    step_s: float
    busy_until_s: float = 0.0
    queue: dict[Handle, tuple[float, float]] = field(default_factory=dict)
    """The time at which each prompt begins and ends."""

    def load(self, now_s: float) -> WorkerLoad:
        left_s = sum(end_s - max(begin_s, now_s) for begin_s, end_s in self.queue.values() if end_s > now_s)
        return WorkerLoad(
            BlockCounts(100_000, 100_000, 0, 0, 0),
            queued_tokens=round(left_s * self.tokens_per_s),
            running_sequences=len(self.peer.jobs),
            last_handle=max(self.peer.past, default=0),
            prompt_tokens_per_s=self.tokens_per_s,
            decode_step_s=self.step_s,
        )


class TimedStage(Stage):
    """A stage on which time passes: arrivals, ends of prompts, decode steps and heartbeats come in order."""

    def __init__(self, *, heartbeat_s: float = 1.0, **config: object) -> None:
        super().__init__(**config)
        self._heartbeat_s = heartbeat_s
        self._agenda: list[tuple[float, int, str, TimedPeer, Handle]] = []
        self._order = itertools.count()
        self.timed: list[TimedPeer] = []

    def worker(self, name: str, role: Role, *, tokens_per_s: float = 0.0, step_s: float = 0.02, **changes: object) -> TimedPeer:
        timed = TimedPeer(self.join(name, role, **(LARGE | changes)), tokens_per_s, step_s)
        self.timed.append(timed)
        self._beat(timed)
        self._plan(self.now_s + self._heartbeat_s, "beat", timed)
        if role is Role.DECODE:
            self._plan(self.now_s + step_s, "step", timed)
        return timed

    def arrive(
        self,
        name: str,
        *,
        prompt_len: int,
        max_tokens: int = 2,
        slo: SloClass = DEFAULT_CLASS,
        placement: Placement | None = None,
    ) -> Outcome:
        """Submit a request now. Raises what the core raises."""
        outcome = self.outcomes[RequestId(name)] = Outcome()
        spec = RequestSpec(tuple(range(prompt_len)), SamplingParams(max_tokens=max_tokens))
        submit = ev.Submit(RequestId(name), spec, self.now_s, self.now_s + 600.0, placement, slo=slo)
        try:
            self.tell(submit)
        except Exception:
            del self.outcomes[RequestId(name)]
            raise
        self._settle()
        return outcome

    def until(self, end_s: float) -> None:
        """Let time pass."""
        while self._agenda and self._agenda[0][0] <= end_s:
            self.now_s, _, what, timed, handle = heapq.heappop(self._agenda)
            if what == "beat":
                self._beat(timed)
                self._plan(self.now_s + self._heartbeat_s, "beat", timed)
            elif what == "step":
                self._step(timed)
                self._plan(self.now_s + timed.step_s, "step", timed)
            else:
                self._prompt_ends(timed, handle)
            self._settle()
        self.now_s = end_s

    def _plan(self, at_s: float, what: str, timed: TimedPeer, handle: Handle = Handle(0)) -> None:  # noqa: B008
        heapq.heappush(self._agenda, (at_s, next(self._order), what, timed, handle))

    def _beat(self, timed: TimedPeer) -> None:
        self.tell(ev.HeartbeatSeen(timed.peer.link, timed.load(self.now_s)))

    def _prompt_ends(self, timed: TimedPeer, handle: Handle) -> None:
        del timed.queue[handle]
        job = timed.peer.jobs.get(handle)
        if job is None:
            return
        last = job.next_index + 1 >= job.work.spec.sampling.max_tokens
        timed.peer.upward.append(ev.StepRows(timed.peer.link, [row(handle, job.next_index, last=last)]))
        job.next_index += 1
        if last or timed.peer.hello.role is Role.PREFILL:
            del timed.peer.jobs[handle]

    def _step(self, timed: TimedPeer) -> None:
        """Make a decode step. Sequences whose prompt is still to be computed here stand still."""
        held = {handle: timed.peer.jobs.pop(handle) for handle in timed.queue if handle in timed.peer.jobs}
        timed.peer.progress()
        for at, said in enumerate(timed.peer.upward):
            if isinstance(said, ev.KvCommitted):
                timed.peer.upward[at] = replace(said, kv_bytes=1 << 20, exposed_transfer_s=0.0)
        timed.peer.jobs.update(held)

    def _settle(self) -> None:
        """Deliver what was said, until nothing more is. Prompts that came get their time."""
        moved = True
        while moved:
            moved = False
            for timed in self.timed:
                moved = moved or bool(timed.peer.upward)
                self.deliver(timed.peer, len(timed.peer.upward))
                self._take_prompts(timed)

    def _take_prompts(self, timed: TimedPeer) -> None:
        for handle, job in timed.peer.jobs.items():
            if handle in timed.queue or not job.runs or job.attached or job.next_index > len(job.work.resumed):
                continue
            begin_s = max(self.now_s, timed.busy_until_s)
            tokens = len(job.work.spec.prompt_ids) + len(job.work.resumed)
            timed.busy_until_s = begin_s + tokens / timed.tokens_per_s
            timed.queue[handle] = begin_s, timed.busy_until_s
            self._plan(timed.busy_until_s, "prompt", timed, handle)
