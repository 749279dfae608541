"""Events that the router's core takes, and effects that it returns. All are immutable values. The shell makes events from
messages and performs effects.

Every event of a worker names the link on which it came. The core thus recognises late messages of an earlier link of the same
worker. An event about one request also carries a handle, which names one (request, attempt, bind) on that link.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol, TypeVar

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import PdserveError
from pdserve.core.ids import Handle, Incarnation, LeaseId, RequestId, WorkerId
from pdserve.core.logprobs import PackedLogprobs
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement
from router.api.answer import Delta, Report

LinkId = NewType("LinkId", int)
"""One connection of one worker. A router never uses an id twice."""


class Role(Enum):
    """The pool that a worker belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The message with which a worker introduces itself."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    address: str
    model_fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    kv_bytes_per_token: int
    pid: int = 0
    step_timeout_s: float = 0.0
    """The worker gives itself up after this time without an engine step while work waits. 0: the worker does not watch its
    engine."""
    niceness: int = 0  # of the worker process; above 0, ordinary processes of its machine run first
    quantization: str = ""
    """The format of the quantised weights. Empty: the weights are not quantised."""

    @property
    def kv_tokens(self) -> int:
        """The worker's pool holds the KV of this many tokens."""
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The state of a worker in a heartbeat. Each heartbeat replaces the last one."""

    blocks: BlockCounts
    queued_requests: int = 0
    queued_tokens: int = 0
    running_sequences: int = 0
    leases_held: int = 0
    loop_lag_ms: float = 0.0
    draining: bool = False
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    engine_stalled_s: float = 0.0
    numerical_errors: int = 0
    last_handle: int = 0
    """The handle of the last command that these counts include. 0: they include none."""
    kv_corrupt_blocks: int = 0
    kv_rotted_blocks: int = 0


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


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client cancelled its request, or has left."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The core looks for passed deadlines and silent workers."""


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
class DrainAsked:
    """An operator takes this worker out of service. The worker gets nothing new and finishes the work that it has."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Reserved:
    """A decode worker holds all blocks that a bind needs."""

    link: LinkId
    handle: Handle


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A decode worker refused a bind: it lacks free blocks or sequence slots, or it drains."""

    link: LinkId
    handle: Handle
    blocks_needed: int


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """A prefill worker allocated all prompt blocks and granted a lease on them. The router forwards the ticket unread."""

    link: LinkId
    handle: Handle
    lease_id: LeaseId
    ticket: bytes


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
    def logprobs(self) -> PackedLogprobs:
        """The packed log-probabilities of the ids."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one engine step of a worker."""

    link: LinkId
    rows: Sequence[Row]


WorkerEvent = (
    WorkerJoined
    | WorkerLeft
    | WorkerLost
    | HeartbeatSeen
    | Reserved
    | NoRoom
    | PrefillStarted
    | KvCommitted
    | RequestFailed
    | StepRows
)
"""The events that a link may deliver."""

Event = Submit | ClientGone | Tick | DrainAsked | WorkerEvent

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
    """Tell a worker that it was accepted."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendAlive:
    """Answer a heartbeat: the router lives, and its direction of the link works."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendDrain:
    """Tell a worker to finish its work and leave."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link of a worker that is refused, is lost, or has dialled again."""

    link: LinkId
    error: PdserveError


@dataclass(frozen=True, slots=True)
class EmitDelta:
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
    """Report a bug in the router that broke off an action. The effects before this one are those of all that was done. If the
    action concerned one request, this request has failed; otherwise the books may disagree."""

    bug: Exception


_T = TypeVar("_T")

Command = SendBind | SendPrefill | SendAttach | SendCancel | SendAlive | SendDrain
Effect = SendWelcome | Command | CloseLink | EmitDelta | EmitDone | EmitFailed | ReportBug

EffectsThen = Generator[Effect, None, _T]
"""An action of the core: it gives out its effects, in order, and then a value for its caller. It runs while they are taken."""
Effects = EffectsThen[None]
"""An action of the core without a value."""
