"""What the router remembers of one running request and of its work on a worker. Owner: the router's core."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.core.ids import Handle, RequestId, WorkerId
from pdserve.core.request import RequestMachine
from pdserve.core.sampling import Placement, SamplingParams
from router.api import Report
from router.events import KvCommitted, LinkId, Role, Submit, Work
from router.output import OrderedOutput


@dataclass(slots=True, eq=False)
class RemoteWork:
    """One (request, attempt, bind) on one worker: named by its handle, live until either side ended it."""

    handle: Handle
    link: LinkId
    role: Role
    request: LiveRequest


@dataclass(slots=True)
class Times:
    """On the router's clock; None until it happened."""

    arrived_s: float
    bind_sent_s: float | None = None
    reserved_s: float | None = None
    prefill_sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


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
    placement: Placement = Placement.AUTO
    placement_reason: str = ""
    prefill: RemoteWork | None = None
    decode: RemoteWork | None = None
    prefill_worker: WorkerId = field(default=WorkerId(""))
    decode_worker: WorkerId = field(default=WorkerId(""))
    attached: bool = False
    committed: KvCommitted | None = None

    @classmethod
    def of(cls, submit: Submit, arrival: int) -> LiveRequest:
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
        )

    @property
    def max_len(self) -> int:
        """Prompt and output tokens at most."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    def work(self, handle: Handle, *, now_s: float) -> Work:
        return Work(
            handle=handle,
            request_id=self.request_id,
            attempt=self.machine.attempt,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            deadline_s=max(0.0, self.deadline_s - now_s),
            priority=self.priority,
        )

    def report(self, *, now_s: float) -> Report:
        """How far it came; complete once it is finished."""
        times, kv = self.times, self.committed
        tokens = self.output.next_index
        return Report(
            placement=self.placement,
            placement_reason=self.placement_reason,
            prompt_tokens=len(self.prompt_ids),
            output_tokens=tokens,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            queue_s=_span(times.arrived_s, times.bind_sent_s),
            reserve_s=_span(times.bind_sent_s, times.reserved_s),
            prefill_s=_span(times.prefill_sent_s, times.first_token_s),
            ttft_s=_span(times.arrived_s, times.first_token_s),
            tpot_s=_span(times.first_token_s, times.last_token_s) / (tokens - 1) if tokens > 1 else 0.0,
            total_s=now_s - times.arrived_s,
            kv_bytes=kv.kv_bytes if kv else 0,
            transfer_s=kv.transfer_s if kv else 0.0,
            commit_s=kv.commit_s if kv else 0.0,
            exposed_transfer_s=kv.exposed_transfer_s if kv else 0.0,
            attempts=self.machine.attempt,
            binds=self.machine.bind,
        )


def _span(start_s: float | None, end_s: float | None) -> float:
    """0 while either end is still to come."""
    return 0.0 if start_s is None or end_s is None else end_s - start_s
