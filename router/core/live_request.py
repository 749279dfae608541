"""The router's record of one running request and of its work on workers. Owner: the router's core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from pdserve.core.errors import ErrorCode, InternalBug, PdserveError, UnknownRequest
from pdserve.core.ids import Handle, Incarnation, RequestId, WorkerId
from pdserve.core.report import Report
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FINISH_BY_NUMBER, Placement, unpack_logprobs
from pdserve.core.slo import DEFAULT_CLASS, SloClass
from pdserve.core.speculation import DraftCounts, ToldCounts, total
from pdserve.core.worker import Role, WorkerHello
from pdserve.observe.story import Story, StoryRing
from router.api.answer import Delta
from router.core.events import KvCommitted, LinkId, PrefillStarted, Row, Submit, Work
from router.core.request_machine import RequestMachine, RequestState
from router.core.turns import Line, Path
from router.core.work_machine import WorkMachine

# Stories --------------------------------------------------------------------------------------------------------------
#
# The stories of requests in the router's core: what was decided about each request, and why. Pure.
#
# Each part of the core adds an entry where it decides. Tokens after the first token make no entry. A request that ends
# leaves its story here, and failures are kept apart, so that a flood of good requests does not push them out.


MAX_STORIES: Final = 512
MAX_ENTRIES: Final = 8192
"""Both bounds hold for the failed requests and, separately, for all others. Most stories have 9 entries, so there is room for
512 stories; their entries take about 3 MiB."""


class StoryKind(Enum):
    """The things that may happen to a request in the router."""

    QUEUED = "queued"
    BEHIND = "behind"
    """The request waits for the KV of its leader, which has the same prompt."""
    FOLLOWS = "follows"
    """The leader's KV is on the named decode worker. If no worker is named, the leader has ended or shares no blocks."""
    NO_WORKER = "no_worker"
    WAITS = "waits"
    SHED = "shed"
    PLACED = "placed"
    RESERVED = "reserved"
    NO_ROOM = "no_room"
    REFUSED = "refused"
    REQUEUED = "requeued"
    PREFILL_SENT = "prefill_sent"
    LEASE_GRANTED = "lease_granted"
    ATTACHED = "attached"
    FIRST_TOKEN = "first_token"
    COMMITTED = "committed"
    LOST = "lost"
    REBOUND = "rebound"
    CLEARED = "cleared"
    """The request was suspected of ending its workers, and has run alone without doing so."""
    MIGRATED = "migrated"
    """The worker was to be empty, and the request goes on elsewhere."""
    RETRIED = "retried"
    ENDED = "ended"


class RequestStory(Story):
    """The story of one request, and the workers that took part in it."""

    __slots__ = ("arrived_s", "correlation_id", "outcome", "request_id", "workers")

    def __init__(self, submit: Submit) -> None:
        super().__init__()
        self.request_id = submit.request_id
        self.correlation_id = submit.correlation_id
        self.arrived_s = submit.arrived_s
        self.outcome: RequestState | None = None
        """The state in which the request has ended. None: it runs."""
        self.workers: dict[tuple[WorkerId, Incarnation], Role] = {}

    def waits(self, now_s: float, workers: int) -> None:
        """Write down that none of the `workers` that could serve the request has room. Repeated calls are one entry."""
        if self.last_kind is not StoryKind.WAITS:
            self.note(now_s, StoryKind.WAITS, workers=workers)

    def took_part(self, hello: WorkerHello) -> None:
        """Note that the request was placed on a worker."""
        self.workers[hello.worker_id, hello.incarnation] = hello.role


class Stories:
    """The stories of requests that have ended, bounded in number and in entries."""

    def __init__(self, *, max_stories: int = MAX_STORIES, max_entries: int = MAX_ENTRIES) -> None:
        self._max_stories = max_stories
        self._failed: StoryRing[RequestStory] = StoryRing(max_stories=max_stories, max_entries=max_entries)
        self._others: StoryRing[RequestStory] = StoryRing(max_stories=max_stories, max_entries=max_entries)

    def ended(self, story: RequestStory, outcome: RequestState) -> None:
        """Take in the story of a request that has just ended."""
        story.outcome = outcome
        ring = self._failed if outcome is RequestState.FAILED else self._others
        ring.keep(story.request_id, story)

    def get(self, request_id: RequestId) -> RequestStory | None:
        """Return the story of a request that has ended. None: no story is kept."""
        return self._failed.get(request_id) or self._others.get(request_id)

    def find(self, name: str, live: Iterable[RequestStory]) -> list[RequestStory]:
        """Return the stories that belong to an id, the newest first. `name` is the id of a request or a correlation id.

        A request's own id goes before correlation ids. `live` are the stories of requests that run. Raises `UnknownRequest`
        when no story has the id.
        """
        known = [*live, *self]
        found = [s for s in known if s.request_id == name] or [s for s in known if s.correlation_id == name and name]
        if not found:
            raise UnknownRequest(
                f"this router keeps no story of {name!r}: it keeps those of running requests, and of the last "
                f"{self._max_stories} that failed and {self._max_stories} that did not, since its start",
                field="request_id",
            )
        return sorted(found, key=lambda story: story.arrived_s, reverse=True)

    def __iter__(self) -> Iterator[RequestStory]:
        yield from self._failed
        yield from self._others

    def check_invariants(self) -> None:
        """Assert that both rings keep their bounds, and that every story here has ended."""
        for ring in (self._failed, self._others):
            ring.check_invariants()
        assert all(story.outcome is not None for story in self)


# Output ----------------------------------------------------------------------------------------------------------
#
# One request's output in order of index: duplicates are dropped, and tokens after a gap are held until the gap closes.


class OrderedOutput:
    """Accepts deltas in any order and gives them out in order. Holds at most `max_tokens` of them."""

    __slots__ = ("_held", "_max_tokens", "next_index")

    def __init__(self, max_tokens: int) -> None:
        self.next_index = 0
        self._max_tokens = max_tokens
        self._held: dict[int, Delta] = {}

    def is_repeat(self, index: int, count: int) -> bool:
        """Tell whether the delta has tokens and all of them went out already."""
        return index + count <= self.next_index and count > 0

    def pass_first(self, index: int) -> None:
        """Count the first token of an attempt as gone out. Raises `InternalBug` if its index is not the next one."""
        if index != self.next_index:
            raise InternalBug(f"the first token has index {index}, expected {self.next_index}")
        self.next_index += 1

    def restart(self) -> None:
        """Drop the deltas that are held. Their attempt is over, and the next one draws these tokens again."""
        self._held.clear()

    def hold(self, delta: Delta, *, after: int = 0) -> None:
        """Keep a delta for later. Raises `InternalBug` if it begins before index `after` or ends past `max_tokens`."""
        end = delta.index + len(delta.ids)
        if delta.index < after or end > self._max_tokens:
            raise InternalBug(f"tokens [{delta.index}, {end}), expected within [{after}, {self._max_tokens})")
        self._held.setdefault(delta.index, delta)

    def accept(self, delta: Delta) -> Sequence[Delta]:
        """Take a delta and return the deltas that may go out now. Raises `InternalBug` for tokens past the limit, or for a
        delta of which only a part went out."""
        count = len(delta.ids)
        if delta.index == self.next_index and not self._held and delta.index + count <= self._max_tokens:
            self.next_index += count
            return (delta,)
        if self.is_repeat(delta.index, count):
            return ()
        if delta.index < self.next_index:
            raise InternalBug(f"tokens [{delta.index}, {delta.index + count}) overlap the {self.next_index} that went out")
        self.hold(delta)
        return self.drain()

    def drain(self) -> Sequence[Delta]:
        """Return the held deltas that are next in order, up to the first gap or the end of the output."""
        ready: list[Delta] = []
        while (delta := self._held.pop(self.next_index, None)) is not None:
            self.next_index += len(delta.ids)
            ready.append(delta)
            if delta.finish_reason is not None:
                break
        return ready


def delta_of(row: Row, spec: RequestSpec) -> Delta:
    """Return the delta of a row, with the log-probabilities that the request asks for. Raises `InternalBug` for text that is
    not UTF-8, an unknown finish reason or stop string, or log-probabilities of another number of tokens."""
    try:
        ids = tuple(row.ids[:])  # the slice is a list, which is read faster than the message's container
        found = unpack_logprobs(row.logprobs, len(ids)) if spec.sampling.logprobs is not None else ()
        delta = Delta(row.index, ids, row.text.decode(), FINISH_BY_NUMBER[row.finish_reason], found)
        if delta.finish_reason is not None and row.stop_string:
            if row.stop_string > len(spec.sampling.stop):
                raise ValueError(f"there is no stop string {row.stop_string}")
            delta = msgspec.structs.replace(delta, stop_string=row.stop_string)
        if row.index == 0 and spec.sampling.prompt_logprobs is not None:
            scores = unpack_logprobs(row.prompt_logprobs, len(spec.prompt_ids) - 1)
            return msgspec.structs.replace(delta, prompt_logprobs=scores)
        return delta
    except (ValueError, KeyError) as exc:
        raise InternalBug(f"row {row.index} of handle {row.handle} cannot be read: {type(exc).__name__}: {exc}") from exc


# Live requests ---------------------------------------------------------------------------------------------------


class Reason(Enum):
    """The reason for a placement, as reports and metrics name it."""

    REQUESTED = "requested"
    CONFIGURED = "configured"
    PREFILL_POOL_EMPTY = "prefill_pool_empty"
    PAIRS_SET_ASIDE = "pairs_set_aside"
    VERSIONS_DIFFER = "versions_differ"
    """No two workers speak a common version of the protocol between workers."""
    SHORT_PROMPT = "short_prompt"
    PREFILL_QUEUE = "prefill_queue"
    """The prompt would wait too long on the prefill worker."""
    PREFILL_SLOW = "prefill_slow"
    """The prefill worker computes too slowly."""
    CACHED_SUFFIX = "cached_suffix"
    """The decode worker has the KV of most of the prompt, so it computes the rest quickly."""
    UNDIVIDED = "undivided"
    """The engines of the workers serve a feature of the request only where one worker computes all of it."""
    SIBLING = "sibling"
    """The decode worker has the KV of the request's leader, which has the same prompt."""
    TRANSFER = "transfer"
    """The KV would take too long to move."""
    SUSPECT = "suspect"
    """Workers died while they computed the request, so one decode worker computes the whole request, and no other request."""
    DEFAULT = "default"


class PlacementDecision(NamedTuple):
    """The decision where the prompt of a request is computed."""

    placement: Placement
    """Disaggregated or colocated, never AUTO."""
    reason: Reason
    made: tuple[float, int, int]
    """What the decision depended on: the time, the changes of the pools, and the tokens to compute."""


@dataclass(slots=True, eq=False)
class RemoteWork:
    """One (request, attempt, bind) on one worker. A handle names it. It lives until the router or the worker ends it."""

    handle: Handle
    link: LinkId
    role: Role
    request: LiveRequest
    machine: WorkMachine


@dataclass(slots=True)
class AttemptTimes:
    """Times of the running attempt on the router's clock. None: it has not happened yet."""

    bind_sent_s: float | None = None
    reserved_s: float | None = None
    prefill_sent_s: float | None = None
    prefill_started_s: float | None = None
    prefill_ended_s: float | None = None
    kv_committed_s: float | None = None
    first_decode_s: float | None = None


@dataclass(slots=True)
class Times:
    """Times of a request on the router's clock. None: it has not happened yet."""

    arrived_s: float
    had_room_s: float | None = None
    """The time at which the first bind that found room was sent."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    attempt: AttemptTimes = field(default_factory=AttemptTimes)
    drew_first: AttemptTimes | None = None
    """The times of the attempt that drew the first token. A later attempt or a move leaves them as they are."""
    leader: Times | None = None
    """The times of a sibling's leader, once the sibling has waited for it."""
    freed_s: float | None = None
    """The time at which that wait ended."""

    @property
    def first_gap_s(self) -> float | None:
        """Return the time between the first token and the first decoded token. None: the attempt that drew the first token
        decoded no token."""
        decoded_s = None if self.drew_first is None else self.drew_first.first_decode_s
        return None if self.first_token_s is None or decoded_s is None else decoded_s - self.first_token_s

    @property
    def transfer_gap_s(self) -> float:
        """Return for how long the KV came after the first token. It is 0 where the KV was there or had not to be read."""
        kv_s = None if self.drew_first is None else self.drew_first.kv_committed_s
        return max(0.0, _span(self.first_token_s, kv_s))


@dataclass(frozen=True, slots=True)
class Probe:
    """The mark of a request that the router makes itself to see whether KV passes. `prefill` is None when the decode worker
    computes the prompt itself."""

    decode: LinkId
    prefill: LinkId | None


@dataclass(slots=True)
class Charge:
    """A failed attempt of a request, and the workers that may be the reason."""

    workers: tuple[WorkerId, ...]
    code: ErrorCode
    bind: int
    """The bind with which the attempt failed. A later bind is on another worker, or on the same worker a second time."""
    tokens: int
    """The tokens that the attempt had given when it failed."""
    weight: float
    """1, or less where many requests failed by one event."""
    judged: bool = False
    """A later attempt went further, so the request was not at fault."""
    counted: tuple[WorkerId, ...] = ()
    """The workers against which the charge counts, once it is judged."""


class Death(NamedTuple):
    """The death of a worker on which a request was running."""

    worker_id: WorkerId
    incarnation: Incarnation
    pid: int


DEATHS_TO_SUSPECT: Final = 2
"""One death is an accident of its worker. A second death on another worker is hardly a coincidence for most requests."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request or probe that has not ended yet."""

    request_id: RequestId
    spec: RequestSpec
    deadline_s: float
    asked: Placement | None
    arrival: int
    """The number of requests that were added before. It orders requests whose turn is the same."""
    max_len: int
    """The tokens that prompt and output may have together."""
    work_len: int
    """The number of ids that this attempt computes first: those of the prompt and the output of earlier attempts."""
    new_prompt_tokens: int
    """The prompt tokens that the request adds to the load. The prompt of a sibling counts for its leader."""
    machine: RequestMachine
    output: OrderedOutput
    times: Times
    story: RequestStory
    probe: Probe | None = None
    correlation_id: str = ""
    slo: SloClass = DEFAULT_CLASS
    session_id: str = ""
    prefix_keys: tuple[int, ...] = ()
    leader: RequestId = field(default=RequestId(""))
    """The request with the same prompt whose KV this one shares, also after it has ended. Empty: there is none."""
    client: tuple[str, ...] = ()
    """The names of the client, its connection and its call. Empty: the client is not known."""
    open_ended: bool = False
    """The client named no `max_tokens`."""
    charged_tokens: int | None = None
    """The tokens that the client has been charged for this request. None: the client has not been charged yet."""
    charged_to: tuple[Line, Path] | None = None
    """The flows that were charged. A replay waits elsewhere, and its client still pays for the output."""
    beside: LinkId | None = None
    """The decode worker that has the leader's KV, until this request is placed for the first time. None: there is none."""
    decision: PlacementDecision | None = None
    """The last decision where the prompt is computed, which holds while its workers stay as they are. None: there was none."""
    placement: Placement = Placement.AUTO
    placement_reason: str = ""
    emitted: list[int] = field(default_factory=list)
    """The output ids that the client has. A replay does not draw them again."""
    resumed: tuple[int, ...] = ()
    """The emitted ids with which this attempt started. They follow the prompt."""
    loss: PdserveError | None = None
    """The last error that the router tried to recover from."""
    no_room: str = ""
    """The last decode worker that had no room, and what it lacked. Empty: no worker refused, or a worker has reserved since
    then."""
    retry_reasons: tuple[str, ...] = ()
    """The error codes that made each attempt after the first necessary."""
    charged: int = 0
    """The attempts that were made necessary by something else than a worker that this router has lost."""
    rebinds: int = 0
    avoid: tuple[WorkerId, ...] = ()
    """The workers with which an attempt has failed. The request gets them again only if no other worker can serve it."""
    charges: list[Charge] = field(default_factory=list)
    """The attempts that have failed by a fault of the request or of a worker."""
    deaths: tuple[Death, ...] = ()
    """The workers that died while the request was running there, since it was last cleared."""
    forgiven: int = 0
    """The number of deaths that were none, as the same process came back, since the request was last cleared."""
    convicted: bool = False
    """The last of these workers computed no other suspect."""
    cleared: bool = False
    """No worker has died under the request since it ran alone and came further than before."""
    alone_on: LinkId | None = None
    """The decode worker that is kept for this request alone, which is suspected of ending its workers. None: there is none."""
    kept_alone_s: float = 0.0
    """The time since which that worker is kept."""
    trial_from: int | None = None
    """The number of tokens that the client had when the request began to run alone. None: it does not."""
    migrations: int = 0
    """How often the request left a worker that had to become empty. Such a move uses up no attempt."""
    predicted_ttft_s: float = 0.0
    """The predicted time from arrival to the first token, made when the request was queued. 0: the class has no target for it,
    or the time was unknown."""
    numerics: str = ""
    """The numerics of the workers that have computed parts of this request. Empty: none has."""
    exact: bool = True
    """True while all of these have the same numerics, and none has numerics without a name."""
    foreign: bool = False
    """True once a worker whose engine is not pdserve's own has got a part of this request."""
    keeps: LinkId | None = None
    """The decode worker whose next room this waiting request has claimed. None: it has no claim."""
    passed_by: int = 0
    """The number of later requests that ran on workers which this request had claimed."""
    unplaceable_since_s: float | None = None
    """The time since which no linked worker could serve this queued request. None: some worker can."""
    prefill: RemoteWork | None = None
    decode: RemoteWork | None = None
    prefill_worker: WorkerId = field(default=WorkerId(""))
    decode_worker: WorkerId = field(default=WorkerId(""))
    lease: PrefillStarted | None = None
    """The lease of this attempt, as the prefill worker reported it. The machine of its work says when it may come."""
    cached_tokens: int | None = None
    """The prompt tokens that the attempt which drew the first output token did not compute. None: no worker has reported
    them."""
    speculation: DraftCounts | None = None
    """The drafts of all attempts that came to their last token. None: no worker has told of drafts."""
    committed: KvCommitted | None = None
    """The report that decode has the KV of this attempt. The machine of its work says when it may come."""

    @classmethod
    def of(cls, submit: Submit, arrival: int, probe: Probe | None = None) -> LiveRequest:
        """Make the record of a submitted request, in its first attempt."""
        return cls(
            request_id=submit.request_id,
            spec=submit.spec,
            deadline_s=submit.deadline_s,
            asked=submit.placement,
            arrival=arrival,
            max_len=len(submit.spec.prompt_ids) + submit.spec.sampling.max_tokens,
            work_len=len(submit.spec.prompt_ids),
            new_prompt_tokens=0 if submit.leader else len(submit.spec.prompt_ids),
            machine=RequestMachine(submit.request_id),
            output=OrderedOutput(submit.spec.sampling.max_tokens),
            times=Times(submit.arrived_s),
            story=RequestStory(submit),
            probe=probe,
            correlation_id=submit.correlation_id,
            slo=submit.slo,
            session_id=submit.session_id,
            prefix_keys=submit.prefix_keys,
            leader=submit.leader,
            client=submit.client,
            open_ended=submit.open_ended,
        )

    def start_over(self) -> None:
        """Prepare the next attempt, which begins after the tokens that the client has. Tokens of the last attempt that could
        not go out yet are dropped. The caller has cancelled the remote work."""
        assert self.prefill is None
        assert self.decode is None
        self.output.restart()
        self.resume_after(tuple(self.emitted))
        self.lease = self.committed = None
        self.times.attempt = AttemptTimes()

    def resume_after(self, ids: tuple[int, ...]) -> None:
        """Let the work of this attempt begin after these ids of the output."""
        self.resumed = ids
        self.work_len = len(self.spec.prompt_ids) + len(ids)

    def cached(self, tokens: int | None) -> None:
        """Take how many tokens of its work a worker had already. A replay after the first output token changes nothing."""
        if not self.emitted:
            self.cached_tokens = None if tokens is None else min(tokens, len(self.spec.prompt_ids))

    def told(self, counts: ToldCounts) -> None:
        """Add the drafts of an attempt, as its worker tells them with the last token. None of them is told as none."""
        if counts.num_drafts:
            self.speculation = total((self.speculation, DraftCounts.told(counts)))

    @property
    def suspect(self) -> bool:
        """The request must run alone, because several workers died under it."""
        return len(self.deaths) >= DEATHS_TO_SUSPECT

    @property
    def replay(self) -> bool:
        """The request has been placed anew after a loss, or has been migrated."""
        return self.machine.attempt + self.migrations > 1

    @property
    def tries(self) -> int:
        """Return how often the request began with its prompt, this time included."""
        return self.machine.attempt + self.migrations

    @property
    def kv_link(self) -> LinkId | None:
        """Return the decode worker that has the KV of the prompt. None: no worker has all of it."""
        local = self.placement is Placement.COLOCATED and self.times.attempt.prefill_ended_s is not None
        return self.decode.link if self.decode is not None and (local or self.committed is not None) else None

    @property
    def remaining_tokens(self) -> int:
        """Return how many output tokens may still follow the tokens that the client has."""
        return self.spec.sampling.max_tokens - len(self.emitted)

    def work(self, handle: Handle) -> Work:
        """Return the fields of this request that a command sends to a worker."""
        return Work(handle, self.request_id, self.spec, self.resumed)

    def report(self, *, now_s: float) -> Report:
        """Return how the request was served so far. The report is complete once the request has ended."""
        times, last, kv = self.times, self.times.attempt, self.committed
        arrived_s = times.arrived_s
        tokens = self.output.next_index
        tpot_s = _span(times.first_token_s, times.last_token_s) / (tokens - 1) if tokens > 1 else 0.0
        return Report(
            placement=self.placement,
            placement_reason=self.placement_reason,
            prompt_tokens=len(self.spec.prompt_ids),
            output_tokens=tokens,
            cached_tokens=self.cached_tokens,
            speculation=self.speculation,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            queue_s=_span(arrived_s, times.had_room_s),
            reserve_s=_span(last.bind_sent_s, last.reserved_s),
            prefill_s=_span(last.prefill_sent_s, last.prefill_ended_s),
            ttft_s=_span(arrived_s, times.first_token_s),
            tpot_s=tpot_s,
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
            migrations=self.migrations,
            request_id=self.request_id,
            correlation_id=self.correlation_id,
            exact=self.exact,
            foreign=self.foreign,
            predicted_ttft_s=self.predicted_ttft_s,
            slo_class=self.slo.name,
            ttft_met=self._ttft_met(now_s),
            tpot_met=self._tpot_met(tpot_s, tokens),
        )

    def computed_by(self, hello: WorkerHello) -> None:
        """Note that this worker computes a part of this request."""
        numerics = hello.numerics
        self.exact = self.exact and numerics != "" and self.numerics in ("", numerics)
        self.foreign = self.foreign or hello.foreign
        self.numerics = numerics

    def _ttft_met(self, now_s: float) -> bool | None:
        """Tell whether the target for the first token was met. A failed request without a token has missed the target; a
        cancelled request has missed it if it waited for longer than the target."""
        first_s = self.times.first_token_s
        if self.slo.ttft_s is None:
            return None
        if first_s is not None:
            return self.slo.ttft_met(first_s - self.times.arrived_s)
        late = now_s - self.times.arrived_s > self.slo.ttft_s
        return False if late or self.machine.state is RequestState.FAILED else None

    def _tpot_met(self, tpot_s: float, tokens: int) -> bool | None:
        """Tell whether the target for the gaps between tokens was met. A failed request has missed it, and an output of one
        token has met it."""
        if self.slo.tpot_s is None or (tokens < 2 and self.machine.state is RequestState.CANCELLED):
            return None
        return self.machine.state is not RequestState.FAILED and self.slo.tpot_met(tpot_s)


def _span(start_s: float | None, end_s: float | None) -> float:
    """Return the seconds between two times, or 0 while one of them is unknown."""
    return 0.0 if start_s is None or end_s is None else end_s - start_s
