from pdserve.rpc.v1 import common_pb2 as _common_pb2
from pdserve.rpc.v1 import prefill_pb2 as _prefill_pb2
from pdserve.rpc.v1 import decode_pb2 as _decode_pb2
from pdserve.rpc.v1 import story_pb2 as _story_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("number", "takes_bundles", "bundle", "received", "hello", "heartbeat", "step_batch", "prefill_started", "reserved", "no_room", "kv_committed", "request_failed", "worker_lost", "work_explained", "prefix_delta", "refused", "resume")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TAKES_BUNDLES_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STEP_BATCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STARTED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    KV_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FAILED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    WORK_EXPLAINED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DELTA_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    number: int
    takes_bundles: bool
    bundle: _containers.RepeatedScalarFieldContainer[bytes]
    received: int
    hello: _common_pb2.WorkerHello
    heartbeat: _common_pb2.WorkerLoad
    step_batch: StepBatch
    prefill_started: _prefill_pb2.PrefillStarted
    reserved: _decode_pb2.Reserved
    no_room: _decode_pb2.NoRoom
    kv_committed: _decode_pb2.KvCommitted
    request_failed: RequestFailed
    worker_lost: WorkerLost
    work_explained: _story_pb2.WorkExplained
    prefix_delta: PrefixDelta
    refused: Refused
    resume: Resume
    def __init__(self, number: _Optional[int] = ..., takes_bundles: _Optional[bool] = ..., bundle: _Optional[_Iterable[bytes]] = ..., received: _Optional[int] = ..., hello: _Optional[_Union[_common_pb2.WorkerHello, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.WorkerLoad, _Mapping]] = ..., step_batch: _Optional[_Union[StepBatch, _Mapping]] = ..., prefill_started: _Optional[_Union[_prefill_pb2.PrefillStarted, _Mapping]] = ..., reserved: _Optional[_Union[_decode_pb2.Reserved, _Mapping]] = ..., no_room: _Optional[_Union[_decode_pb2.NoRoom, _Mapping]] = ..., kv_committed: _Optional[_Union[_decode_pb2.KvCommitted, _Mapping]] = ..., request_failed: _Optional[_Union[RequestFailed, _Mapping]] = ..., worker_lost: _Optional[_Union[WorkerLost, _Mapping]] = ..., work_explained: _Optional[_Union[_story_pb2.WorkExplained, _Mapping]] = ..., prefix_delta: _Optional[_Union[PrefixDelta, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("number", "takes_bundles", "bundle", "received", "welcome", "prefill", "bind", "attach", "cancel", "drain", "alive", "explain_work", "prefix_resync", "set_budget", "flip", "resumed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TAKES_BUNDLES_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    BIND_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_WORK_FIELD_NUMBER: _ClassVar[int]
    PREFIX_RESYNC_FIELD_NUMBER: _ClassVar[int]
    SET_BUDGET_FIELD_NUMBER: _ClassVar[int]
    FLIP_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    number: int
    takes_bundles: bool
    bundle: _containers.RepeatedScalarFieldContainer[bytes]
    received: int
    welcome: Welcome
    prefill: _prefill_pb2.Prefill
    bind: _decode_pb2.Bind
    attach: _decode_pb2.Attach
    cancel: Cancel
    drain: Drain
    alive: Alive
    explain_work: _story_pb2.ExplainWork
    prefix_resync: PrefixResync
    set_budget: SetBudget
    flip: Flip
    resumed: Resumed
    def __init__(self, number: _Optional[int] = ..., takes_bundles: _Optional[bool] = ..., bundle: _Optional[_Iterable[bytes]] = ..., received: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., prefill: _Optional[_Union[_prefill_pb2.Prefill, _Mapping]] = ..., bind: _Optional[_Union[_decode_pb2.Bind, _Mapping]] = ..., attach: _Optional[_Union[_decode_pb2.Attach, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., explain_work: _Optional[_Union[_story_pb2.ExplainWork, _Mapping]] = ..., prefix_resync: _Optional[_Union[PrefixResync, _Mapping]] = ..., set_budget: _Optional[_Union[SetBudget, _Mapping]] = ..., flip: _Optional[_Union[Flip, _Mapping]] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router_incarnation", "link_version", "link_key")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LINK_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINK_KEY_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    link_version: int
    link_key: bytes
    def __init__(self, router_incarnation: _Optional[int] = ..., link_version: _Optional[int] = ..., link_key: _Optional[bytes] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("link_key",)
    LINK_KEY_FIELD_NUMBER: _ClassVar[int]
    link_key: bytes
    def __init__(self, link_key: _Optional[bytes] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Flip(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[StepRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[StepRow, _Mapping]]] = ...) -> None: ...

class StepRow(_message.Message):
    __slots__ = ("handle", "index", "ids", "text", "finish_reason", "logprobs", "prompt_logprobs", "stop_string", "speculation")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    text: bytes
    finish_reason: _common_pb2.FinishReason
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    stop_string: int
    speculation: _common_pb2.DraftCounts
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., text: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., stop_string: _Optional[int] = ..., speculation: _Optional[_Union[_common_pb2.DraftCounts, _Mapping]] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("handle", "reason", "message", "pair_failed")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PAIR_FAILED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: _common_pb2.ErrorReason
    message: str
    pair_failed: bool
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.ErrorReason, str]] = ..., message: _Optional[str] = ..., pair_failed: _Optional[bool] = ...) -> None: ...

class WorkerLost(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class PrefixDelta(_message.Message):
    __slots__ = ("number", "added", "removed", "digest", "full")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    number: int
    added: bytes
    removed: bytes
    digest: int
    full: bool
    def __init__(self, number: _Optional[int] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., digest: _Optional[int] = ..., full: _Optional[bool] = ...) -> None: ...

class PrefixResync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetBudget(_message.Message):
    __slots__ = ("max_num_batched_tokens", "max_num_seqs")
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    max_num_batched_tokens: int
    max_num_seqs: int
    def __init__(self, max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...
