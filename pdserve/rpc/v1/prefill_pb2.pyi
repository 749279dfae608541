from pdserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Prefill(_message.Message):
    __slots__ = ("handle", "request_id", "spec", "resumed_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    spec: _common_pb2.RequestSpec
    resumed_ids: bytes
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.RequestSpec, _Mapping]] = ..., resumed_ids: _Optional[bytes] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("handle", "lease_id", "ticket", "cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    lease_id: _common_pb2.LeaseId
    ticket: bytes
    cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., lease_id: _Optional[_Union[_common_pb2.LeaseId, _Mapping]] = ..., ticket: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
