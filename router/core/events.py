"""Events that the router's core takes, and effects that it returns. All are immutable values. The shell makes events from
messages and performs effects. Events and effects that occur once for each token are msgspec structs: to make a struct takes a
sixth of the time of a frozen dataclass.

Every event of a worker names the link on which it came. The core thus recognises late messages of an earlier link of the same
worker. An event about one request also carries a handle, which names one (request, attempt, bind) on that link.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol, TypeVar

import msgspec

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.errors import PdserveError
from pdserve.core.ids import Handle, Incarnation, LeaseId, RequestId, WorkerId
from pdserve.core.kv_layout import Shortage
from pdserve.core.report import Report
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import PackedLogprobs, Placement
from pdserve.core.slo import DEFAULT_CLASS, SloClass
from pdserve.core.speculation import ToldCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from router.api.answer import Delta

LinkId = NewType("LinkId", int)
"""One connection of one worker. A router never uses an id twice."""


# Events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A checked request. `arrived_s` and `deadline_s` are times of the core's clock."""

    request_id: RequestId
    spec: RequestSpec
    arrived_s: float
    deadline_s: float
    placement: Placement | None = None
    correlation_id: str = ""
    slo: SloClass = DEFAULT_CLASS
    session_id: str = ""
    """The client's name for a conversation, within `spec.cache_salt`. Its turns go to the same workers where that costs little.
    Empty: the request belongs to none."""
    prefix_keys: tuple[int, ...] = ()
    """The keys of the prompt's full blocks, in order. Empty: nothing is known of them."""
    leader: RequestId = field(default=RequestId(""))
    """The request with the same prompt whose KV this one shares. Empty: there is none."""
    client: tuple[str, ...] = ()
    """The names of the client, its connection and its call, between which turns are fair. Empty: the client is not known."""
    open_ended: bool = False
    """The client named no `max_tokens`, so `spec.max_tokens` says nothing about the length of the output."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client cancelled its request, or has left."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The core looks for passed deadlines and silent workers."""

    alive: tuple[LinkId, ...] = ()
    """The links whose workers have shown since the last tick that they live: by beats beside the stream, or by events that the
    core has not got yet."""
    late_s: float = 0.0
    """The time by which this router was itself late with the tick, which counts against no worker."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker dialled and introduced itself."""

    link: LinkId
    hello: WorkerHello


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The link of a worker has ended."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker reports that it is stuck and that its process ends."""

    link: LinkId
    message: str


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """A worker sent a heartbeat."""

    link: LinkId
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class PrefixSeen:
    """A worker reported a change of the set of blocks that it shares."""

    link: LinkId
    delta: PrefixDelta


@dataclass(frozen=True, slots=True)
class BudgetAsked:
    """An operator sets how many tokens a step of this worker may have, and how many sequences may run. 0: as it is."""

    worker_id: WorkerId
    max_num_batched_tokens: int
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """This worker is taken out of service. It gets nothing new; its requests move or end. `spare_last` refuses to take the
    last worker of a role that serves."""

    worker_id: WorkerId
    spare_last: bool = False


@dataclass(frozen=True, slots=True)
class FlipAsked:
    """This worker shall change into the other role. It gets nothing new, finishes its work, and comes back in the new role.
    `incarnation` None: the worker may have any."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """A decode worker holds all blocks that a bind needs."""

    link: LinkId
    handle: Handle
    cached_tokens: int | None = None
    """The tokens of the work whose KV the worker has already, so it does not compute them. None: the worker computes no prompt,
    or does not report the number."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A decode worker refused a bind: it lacks free blocks or sequence slots, or it drains."""

    link: LinkId
    handle: Handle
    blocks_needed: int
    shortage: Shortage | None = None
    """The KV group that has no room. None: a sequence slot is lacking, the worker drains, or it is of an older release."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker refused work because it drains. It has not begun the work."""

    link: LinkId
    handle: Handle


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """A prefill worker allocated all prompt blocks and granted a lease on them. The router forwards the ticket unread."""

    link: LinkId
    handle: Handle
    lease_id: LeaseId
    ticket: bytes
    cached_tokens: int | None = None
    """As in `Reserved`."""


@dataclass(frozen=True, slots=True)
class KvCommitted:
    """A decode worker read all blocks, and the lease was still held afterwards. `exposed_transfer_s` is the time from token 0
    until the worker may use the KV."""

    link: LinkId
    handle: Handle
    kv_bytes: int
    transfer_s: float
    commit_s: float
    exposed_transfer_s: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A worker gave up one request and released everything that the request held there."""

    link: LinkId
    handle: Handle
    error: PdserveError
    pair_failed: bool = False
    """Only a decode worker sets this. KV did not arrive from the prefill worker: one of the two or the path between them is at
    fault."""


class Row(Protocol):
    """One request's part of an engine step. It is the StepRow of the wire itself: a copy for each token would cost more than
    all else that the router does with it."""

    @property
    def handle(self) -> int:
        """The handle of the work that the row belongs to."""

    @property
    def index(self) -> int:
        """The position of the first id in the request's output."""

    @property
    def ids(self) -> Sequence[int]:
        """The token ids that this step drew."""

    @property
    def text(self) -> bytes:
        """The text that became certain with these ids, as UTF-8 of whole characters."""

    @property
    def finish_reason(self) -> int:
        """The number of the finish reason on the wire."""

    @property
    def stop_string(self) -> int:
        """1 + the index, in the request's list, of the stop string that ended the output. 0: no stop string did, or an older
        worker does not report it."""

    @property
    def logprobs(self) -> PackedLogprobs:
        """The packed log-probabilities of the ids."""

    @property
    def prompt_logprobs(self) -> PackedLogprobs:
        """The log-probabilities of all prompt tokens but the first. They come with output token 0, if the request asks for
        them."""

    @property
    def speculation(self) -> ToldCounts:
        """The drafts of the request on this worker, with its last token. Without any there is no slice."""


class StepRows(msgspec.Struct, frozen=True):
    """The rows of one engine step of a worker."""

    link: LinkId
    rows: Sequence[Row]


WorkerEvent = (
    WorkerJoined
    | WorkerLeft
    | WorkerLost
    | HeartbeatSeen
    | PrefixSeen
    | Reserved
    | NoRoom
    | Refused
    | PrefillStarted
    | KvCommitted
    | RequestFailed
    | StepRows
)
"""The events that a link may deliver."""

Event = Submit | ClientGone | Tick | DrainAsked | FlipAsked | BudgetAsked | WorkerEvent

# Effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """The part of a command that both kinds of worker get: the request, and the ids with which this attempt starts."""

    handle: Handle
    request_id: RequestId
    spec: RequestSpec
    resumed: tuple[int, ...] = ()
    """The output of earlier attempts. It follows the prompt, and the first token that is drawn now comes after it."""


@dataclass(frozen=True, slots=True)
class SendBind:
    """Ask a decode worker to reserve blocks. `deadline_s` is the time that remains. With `local_prefill` the worker also
    computes the prompt."""

    link: LinkId
    work: Work
    deadline_s: float
    local_prefill: bool


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Ask a prefill worker to compute a prompt and its first token."""

    link: LinkId
    work: Work


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Tell a decode worker which lease it reads."""

    link: LinkId
    handle: Handle
    lease_id: LeaseId
    ticket: bytes


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a worker to drop one request and everything that the request holds there."""

    link: LinkId
    handle: Handle


@dataclass(frozen=True, slots=True)
class SendWelcome:
    """Tell a worker that it was accepted. `link_version` is the version of the link's protocol that both will speak."""

    link: LinkId
    link_version: int = 0


@dataclass(frozen=True, slots=True)
class SendAlive:
    """Answer a heartbeat: the router lives, and its direction of the link works."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendPrefixResync:
    """Ask a worker for all keys of the blocks that it shares, because its reports did not agree."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendDrain:
    """Tell a worker to finish its work and leave."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendFlip:
    """Tell a worker to finish its work and to come back in this role."""

    link: LinkId
    role: Role


@dataclass(frozen=True, slots=True)
class SendBudget:
    """Tell a worker how many tokens its steps may have from now on, and how many sequences may run. Its heartbeats then report
    these numbers. 0: the number stays as it is."""

    link: LinkId
    max_num_batched_tokens: int
    max_num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link of a worker that is refused, is lost, or has dialled again."""

    link: LinkId
    error: PdserveError


class EmitDelta(msgspec.Struct, frozen=True):
    """Give tokens to the client."""

    request_id: RequestId
    delta: Delta


@dataclass(frozen=True, slots=True)
class EmitDone:
    """Tell the client that its request has finished."""

    request_id: RequestId
    report: Report


@dataclass(frozen=True, slots=True)
class EmitFailed:
    """Tell the client that its request has failed. `report` says how far the request came."""

    request_id: RequestId
    error: PdserveError
    report: Report


@dataclass(frozen=True, slots=True)
class ReportBug:
    """Report a bug in the router that broke off an action. The effects before this one belong to the work that was done before
    the bug. If the action concerned one request, this request has failed; otherwise the books may disagree."""

    bug: Exception


_T = TypeVar("_T")

Command = SendBind | SendPrefill | SendAttach | SendCancel | SendAlive | SendPrefixResync | SendDrain | SendFlip | SendBudget
Effect = SendWelcome | Command | CloseLink | EmitDelta | EmitDone | EmitFailed | ReportBug

EffectsThen = Generator[Effect, None, _T]
"""An action of the core: it gives out its effects, in order, and then a value for its caller. It runs while they are taken."""
Effects = EffectsThen[None]
"""An action of the core without a value."""
