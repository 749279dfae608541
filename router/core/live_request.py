"""What the router remembers of one running request and of its work on a worker. Owner: the router's core."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.core.errors import PdserveError
from pdserve.core.ids import Handle, RequestId, WorkerId
from pdserve.core.request_machine import RequestMachine
from pdserve.core.sampling import Placement, SamplingParams
from router.api.answer import Report
from router.core.events import KvCommitted, LinkId, PrefillStarted, Role, Submit, Work
from router.core.output import OrderedOutput


@dataclass(slots=True, eq=False)
class RemoteWork:
    """One (request, attempt, bind) on one worker: named by its handle, live until either side ended it."""

    handle: Handle
    link: LinkId
    role: Role
    request: LiveRequest
    reserved: bool = False
    """Decode only: the blocks are held."""
    attached: bool = False
    """Decode only: it was told which lease to read."""


@dataclass(slots=True)
class AttemptTimes:
    """Of the running attempt, on the router's clock; None until it happened."""

    bind_sent_s: float | None = None
    reserved_s: float | None = None
    prefill_sent_s: float | None = None
    prefill_started_s: float | None = None
    prefill_ended_s: float | None = None
    kv_committed_s: float | None = None
    first_decode_s: float | None = None


@dataclass(slots=True)
class Times:
    """On the router's clock; None until it happened."""

    arrived_s: float
    had_room_s: float | None = None
    """The first bind that was not refused was sent."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    attempt: AttemptTimes = field(default_factory=AttemptTimes)


@dataclass(frozen=True, slots=True)
class Probe:
    """Marks a request of the router's own: KV goes from one worker to another, or from one to itself, once."""

    decode: LinkId
    prefill: LinkId | None


@dataclass(slots=True, eq=False)
class LiveRequest:
    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    deadline_s: float
    asked: Placement | None
    arrival: int
    """Counts submits: the order among equal priorities."""
    machine: RequestMachine
    output: OrderedOutput
    times: Times
    probe: Probe | None = None
    cache_salt: str = ""
    correlation_id: str = ""
    placement: Placement = Placement.AUTO
    placement_reason: str = ""
    emitted: list[int] = field(default_factory=list)
    """Output ids that the client has: what a replay must not draw again."""
    resumed: int = 0
    """How many of them this attempt started with."""
    work_ids: tuple[int, ...] = ()
    """What this attempt computes first: the prompt, and the output of earlier attempts."""
    loss: PdserveError | None = None
    """The last thing that went wrong and was recovered from."""
    retry_reasons: tuple[str, ...] = ()
    """Error codes: why each attempt but the first was needed."""
    rebinds: int = 0
    exact: bool = True
    """Whether all workers computed alike each time when a part of this request was placed."""
    unplaceable_since_s: float | None = None
    """Queued, and no worker is there that could serve it."""
    prefill: RemoteWork | None = None
    decode: RemoteWork | None = None
    prefill_worker: WorkerId = field(default=WorkerId(""))
    decode_worker: WorkerId = field(default=WorkerId(""))
    lease: PrefillStarted | None = None
    committed: KvCommitted | None = None

    @classmethod
    def of(cls, submit: Submit, arrival: int, probe: Probe | None = None) -> LiveRequest:
        return cls(
            request_id=submit.request_id,
            prompt_ids=submit.prompt_ids,
            sampling=submit.sampling,
            priority=submit.priority,
            deadline_s=submit.deadline_s,
            asked=submit.placement,
            arrival=arrival,
            machine=RequestMachine(submit.request_id),
            output=OrderedOutput(submit.sampling.max_tokens),
            times=Times(submit.arrived_s),
            probe=probe,
            cache_salt=submit.cache_salt,
            correlation_id=submit.correlation_id,
            work_ids=submit.prompt_ids,
        )

    def start_over(self) -> None:
        """The next attempt begins after what the client has; tokens of the last one that could not go out yet are lost
        with it. Its remote work was cancelled before."""
        assert self.prefill is None
        assert self.decode is None
        self.output.restart()
        self.resumed = len(self.emitted)
        self.work_ids = (*self.prompt_ids, *self.emitted)
        self.lease = self.committed = None
        self.times.attempt = AttemptTimes()

    @property
    def replay(self) -> bool:
        return self.machine.attempt > 1

    @property
    def remaining_tokens(self) -> int:
        """Output at most, after what the client has."""
        return self.sampling.max_tokens - len(self.emitted)

    @property
    def max_len(self) -> int:
        """Prompt and output tokens at most."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def work(self, handle: Handle) -> Work:
        return Work(
            handle=handle,
            request_id=self.request_id,
            prompt_ids=self.work_ids,
            sampling=self.sampling,
            priority=self.priority,
            resumed=self.resumed,
            cache_salt=self.cache_salt,
        )

    def report(self, *, now_s: float) -> Report:
        """How far it came; complete once it is finished."""
        times, last, kv = self.times, self.times.attempt, self.committed
        arrived_s = times.arrived_s
        tokens = self.output.next_index
        return Report(
            placement=self.placement,
            placement_reason=self.placement_reason,
            prompt_tokens=len(self.prompt_ids),
            output_tokens=tokens,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            queue_s=_span(arrived_s, times.had_room_s),
            reserve_s=_span(last.bind_sent_s, last.reserved_s),
            prefill_s=_span(last.prefill_sent_s, last.prefill_ended_s),
            ttft_s=_span(arrived_s, times.first_token_s),
            tpot_s=_span(times.first_token_s, times.last_token_s) / (tokens - 1) if tokens > 1 else 0.0,
            total_s=now_s - arrived_s,
            kv_bytes=kv.kv_bytes if kv else 0,
            transfer_s=kv.transfer_s if kv else 0.0,
            commit_s=kv.commit_s if kv else 0.0,
            exposed_transfer_s=kv.exposed_transfer_s if kv else 0.0,
            attempts=self.machine.attempt,
            binds=self.machine.bind,
            prefill_start_s=_span(arrived_s, last.prefill_started_s),
            prefill_end_s=_span(arrived_s, last.prefill_ended_s),
            kv_committed_s=_span(arrived_s, last.kv_committed_s),
            first_decode_s=_span(arrived_s, last.first_decode_s),
            retry_reasons=self.retry_reasons,
            rebinds=self.rebinds,
            request_id=self.request_id,
            correlation_id=self.correlation_id,
            exact=self.exact,
        )


def _span(start_s: float | None, end_s: float | None) -> float:
    """0 while either end is still to come."""
    return 0.0 if start_s is None or end_s is None else end_s - start_s
