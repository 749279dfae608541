from pdserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Prefill(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_ids", "sampling", "priority", "resumed", "cache_salt")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_ids: bytes
    sampling: _common_pb2.SamplingParams
    priority: int
    resumed: int
    cache_salt: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., resumed: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("handle", "lease_id", "ticket")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    handle: int
    lease_id: _common_pb2.LeaseId
    ticket: bytes
    def __init__(self, handle: _Optional[int] = ..., lease_id: _Optional[_Union[_common_pb2.LeaseId, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...
