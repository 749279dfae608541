from pdserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "automatic")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    automatic: bool
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., automatic: _Optional[bool] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("order",)
    ORDER_FIELD_NUMBER: _ClassVar[int]
    order: int
    def __init__(self, order: _Optional[int] = ...) -> None: ...

class FlipRequest(_message.Message):
    __slots__ = ("worker_id", "role", "incarnation", "term")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    incarnation: int
    term: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., incarnation: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class ActuateRequest(_message.Message):
    __slots__ = ("actuator", "term", "report")
    ACTUATOR_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    actuator: str
    term: int
    report: ScalingReport
    def __init__(self, actuator: _Optional[str] = ..., term: _Optional[int] = ..., report: _Optional[_Union[ScalingReport, _Mapping]] = ...) -> None: ...

class ActuateResponse(_message.Message):
    __slots__ = ("term", "order")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    term: int
    order: ScaleOrder
    def __init__(self, term: _Optional[int] = ..., order: _Optional[_Union[ScaleOrder, _Mapping]] = ...) -> None: ...

class ScaleOrder(_message.Message):
    __slots__ = ("number", "sizes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    number: int
    sizes: ScaleRequest
    def __init__(self, number: _Optional[int] = ..., sizes: _Optional[_Union[ScaleRequest, _Mapping]] = ...) -> None: ...

class ScalingReport(_message.Message):
    __slots__ = ("mode", "prefill", "decode", "order", "reasons", "members", "events", "refused", "plan")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    mode: str
    prefill: int
    decode: int
    order: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    members: _containers.RepeatedCompositeFieldContainer[ScalingMember]
    events: _containers.RepeatedCompositeFieldContainer[ScalingEvent]
    refused: str
    plan: ScalingPlan
    def __init__(self, mode: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., order: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ..., members: _Optional[_Iterable[_Union[ScalingMember, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[ScalingEvent, _Mapping]]] = ..., refused: _Optional[str] = ..., plan: _Optional[_Union[ScalingPlan, _Mapping]] = ...) -> None: ...

class ScalingPlan(_message.Message):
    __slots__ = ("age_s", "reasons", "pools")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    reasons: _containers.RepeatedScalarFieldContainer[str]
    pools: _containers.RepeatedCompositeFieldContainer[PoolNeed]
    def __init__(self, age_s: _Optional[float] = ..., reasons: _Optional[_Iterable[str]] = ..., pools: _Optional[_Iterable[_Union[PoolNeed, _Mapping]]] = ...) -> None: ...

class PoolNeed(_message.Message):
    __slots__ = ("role", "demand_tokens_per_s", "worker_tokens_per_s", "correction", "raw_workers", "wanted", "size", "limits")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEMAND_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    RAW_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    demand_tokens_per_s: float
    worker_tokens_per_s: float
    correction: float
    raw_workers: float
    wanted: int
    size: int
    limits: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ..., demand_tokens_per_s: _Optional[float] = ..., worker_tokens_per_s: _Optional[float] = ..., correction: _Optional[float] = ..., raw_workers: _Optional[float] = ..., wanted: _Optional[int] = ..., size: _Optional[int] = ..., limits: _Optional[_Iterable[str]] = ...) -> None: ...

class ScalingMember(_message.Message):
    __slots__ = ("worker_id", "role", "phase", "detail")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    phase: str
    detail: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., phase: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ScalingEvent(_message.Message):
    __slots__ = ("age_s", "text", "prefill", "decode")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    text: str
    prefill: int
    decode: int
    def __init__(self, age_s: _Optional[float] = ..., text: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class ScalingState(_message.Message):
    __slots__ = ("actuator", "term", "age_s", "report", "history")
    ACTUATOR_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    actuator: str
    term: int
    age_s: float
    report: ScalingReport
    history: _containers.RepeatedCompositeFieldContainer[ScalingEvent]
    def __init__(self, actuator: _Optional[str] = ..., term: _Optional[int] = ..., age_s: _Optional[float] = ..., report: _Optional[_Union[ScalingReport, _Mapping]] = ..., history: _Optional[_Iterable[_Union[ScalingEvent, _Mapping]]] = ...) -> None: ...
