"""What happens to the router's core, and what it wants done. Immutable values; the shell translates and performs.

Every event of a worker names the link it came by, so that what an earlier link of the same worker said late is told
apart, and a handle, which names one (request, attempt, bind) on that link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import PdserveError
from pdserve.core.ids import Handle, Incarnation, LeaseId, RequestId, WorkerId
from pdserve.core.logprobs import PackedLogprobs
from pdserve.core.sampling import Placement, SamplingParams
from router.api.answer import Delta, Report

LinkId = NewType("LinkId", int)
"""One connection of one worker; never used twice by a router."""


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """How a worker introduced itself."""

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
    """How long its engine may make no step while work waits; 0: it does not say."""
    niceness: int = 0  # of its process: above 0, ordinary processes of its machine go first
    quantization: str = ""
    """How its weights are quantised; empty: they are not."""

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits the worker's pool."""
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A heartbeat: level state."""

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
    """The last command that these counts include."""
    kv_corrupt_blocks: int = 0
    kv_rotted_blocks: int = 0


# Events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A checked request. `arrived_s` and `deadline_s` are times of the core's clock."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrived_s: float
    deadline_s: float
    priority: int = 0
    placement: Placement | None = None
    cache_salt: str = ""
    correlation_id: str = ""


@dataclass(frozen=True, slots=True)
class ClientGone:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: deadlines and silent workers are looked at."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    link: LinkId
    hello: WorkerHello


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    link: LinkId


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker itself says that it is stuck, and that it ends its process."""

    link: LinkId
    message: str


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    link: LinkId
    load: WorkerLoad


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator takes this worker out of service: it gets nothing new, and what it has goes on."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Reserved:
    link: LinkId
    handle: Handle


@dataclass(frozen=True, slots=True)
class NoRoom:
    link: LinkId
    handle: Handle
    blocks_needed: int


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    link: LinkId
    handle: Handle
    lease_id: LeaseId
    ticket: bytes


@dataclass(frozen=True, slots=True)
class KvCommitted:
    link: LinkId
    handle: Handle
    kv_bytes: int
    transfer_s: float
    commit_s: float
    exposed_transfer_s: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    link: LinkId
    handle: Handle
    error: PdserveError
    pair_failed: bool = False
    """Of a decode worker: KV did not come from its lender, by the fault of either or of the way between them."""


class Row(Protocol):
    """One request's part of an engine step; the wire's StepRow as it is, since a copy per token would cost more
    than all else that the router does with it."""

    @property
    def handle(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> bytes: ...
    @property
    def finish_reason(self) -> int: ...
    @property
    def logprobs(self) -> PackedLogprobs: ...


@dataclass(frozen=True, slots=True)
class StepRows:
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
"""What a link may deliver."""

Event = Submit | ClientGone | Tick | DrainAsked | WorkerEvent

# Effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What both kinds of worker are told of a request.

    The last `resumed` of `prompt_ids` are output that an earlier attempt drew: the first token drawn now has that index
    among the output. `sampling` is the original request's.
    """

    handle: Handle
    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    resumed: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class SendBind:
    """`deadline_s` is the time that remains."""

    link: LinkId
    work: Work
    deadline_s: float
    local_prefill: bool


@dataclass(frozen=True, slots=True)
class SendPrefill:
    link: LinkId
    work: Work


@dataclass(frozen=True, slots=True)
class SendAttach:
    link: LinkId
    handle: Handle
    lease_id: LeaseId
    ticket: bytes


@dataclass(frozen=True, slots=True)
class SendCancel:
    link: LinkId
    handle: Handle


@dataclass(frozen=True, slots=True)
class SendWelcome:
    """The worker was accepted."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendAlive:
    """The answer to a heartbeat: the router is there, and its half of the link works."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class SendDrain:
    link: LinkId


@dataclass(frozen=True, slots=True)
class CloseLink:
    """The worker at its other end is refused, silent, or has dialled again."""

    link: LinkId
    error: PdserveError


@dataclass(frozen=True, slots=True)
class EmitDelta:
    request_id: RequestId
    delta: Delta


@dataclass(frozen=True, slots=True)
class EmitDone:
    request_id: RequestId
    report: Report


@dataclass(frozen=True, slots=True)
class EmitFailed:
    """`report` says how far it came."""

    request_id: RequestId
    error: PdserveError
    report: Report


Command = SendBind | SendPrefill | SendAttach | SendCancel | SendAlive | SendDrain
Effect = SendWelcome | Command | CloseLink | EmitDelta | EmitDone | EmitFailed
