from pdserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoryField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class StoryEntry(_message.Message):
    __slots__ = ("at_s", "kind", "fields")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    kind: str
    fields: _containers.RepeatedCompositeFieldContainer[StoryField]
    def __init__(self, at_s: _Optional[float] = ..., kind: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[StoryField, _Mapping]]] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("request_id", "correlation_id", "outcome", "entries", "left_out", "workers", "others")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    correlation_id: str
    outcome: str
    entries: _containers.RepeatedCompositeFieldContainer[StoryEntry]
    left_out: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerPart]
    others: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., correlation_id: _Optional[str] = ..., outcome: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[StoryEntry, _Mapping]]] = ..., left_out: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerPart, _Mapping]]] = ..., others: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerPart(_message.Message):
    __slots__ = ("worker_id", "role", "entries", "left_out", "missing")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    entries: _containers.RepeatedCompositeFieldContainer[StoryEntry]
    left_out: int
    missing: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., entries: _Optional[_Iterable[_Union[StoryEntry, _Mapping]]] = ..., left_out: _Optional[int] = ..., missing: _Optional[str] = ...) -> None: ...

class ExplainWork(_message.Message):
    __slots__ = ("question", "request_id")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    question: int
    request_id: str
    def __init__(self, question: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class WorkExplained(_message.Message):
    __slots__ = ("question", "entries", "left_out")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    question: int
    entries: _containers.RepeatedCompositeFieldContainer[StoryEntry]
    left_out: int
    def __init__(self, question: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[StoryEntry, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...
