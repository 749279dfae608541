from pdserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Bind(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_ids", "sampling", "deadline_s", "priority", "local_prefill", "resumed", "cache_salt")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_ids: bytes
    sampling: _common_pb2.SamplingParams
    deadline_s: float
    priority: int
    local_prefill: bool
    resumed: int
    cache_salt: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., priority: _Optional[int] = ..., local_prefill: _Optional[bool] = ..., resumed: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class NoRoom(_message.Message):
    __slots__ = ("handle", "blocks_needed")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    blocks_needed: int
    def __init__(self, handle: _Optional[int] = ..., blocks_needed: _Optional[int] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("handle", "lease_id", "ticket")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    handle: int
    lease_id: _common_pb2.LeaseId
    ticket: bytes
    def __init__(self, handle: _Optional[int] = ..., lease_id: _Optional[_Union[_common_pb2.LeaseId, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class KvCommitted(_message.Message):
    __slots__ = ("handle", "kv_bytes", "transfer_s", "commit_s", "exposed_transfer_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    kv_bytes: int
    transfer_s: float
    commit_s: float
    exposed_transfer_s: float
    def __init__(self, handle: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ...) -> None: ...
