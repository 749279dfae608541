from pdserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Bind(_message.Message):
    __slots__ = ("handle", "request_id", "deadline_s", "local_prefill", "spec", "resumed_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    deadline_s: float
    local_prefill: bool
    spec: _common_pb2.RequestSpec
    resumed_ids: bytes
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., local_prefill: _Optional[bool] = ..., spec: _Optional[_Union[_common_pb2.RequestSpec, _Mapping]] = ..., resumed_ids: _Optional[bytes] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("handle", "cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class NoRoom(_message.Message):
    __slots__ = ("handle", "blocks_needed", "shortage")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    SHORTAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    blocks_needed: int
    shortage: KvShortage
    def __init__(self, handle: _Optional[int] = ..., blocks_needed: _Optional[int] = ..., shortage: _Optional[_Union[KvShortage, _Mapping]] = ...) -> None: ...

class KvShortage(_message.Message):
    __slots__ = ("group", "blocks_needed", "blocks_free", "window")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    group: int
    blocks_needed: int
    blocks_free: int
    window: int
    def __init__(self, group: _Optional[int] = ..., blocks_needed: _Optional[int] = ..., blocks_free: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

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
