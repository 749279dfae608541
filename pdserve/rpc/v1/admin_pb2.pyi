from pdserve.rpc.v1 import common_pb2 as _common_pb2
from pdserve.rpc.v1 import inference_pb2 as _inference_pb2
from pdserve.rpc.v1 import scaling_pb2 as _scaling_pb2
from pdserve.rpc.v1 import story_pb2 as _story_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SetBudgetRequest(_message.Message):
    __slots__ = ("worker_ids", "role", "max_num_batched_tokens", "max_num_seqs")
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    role: _common_pb2.Role
    max_num_batched_tokens: int
    max_num_seqs: int
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ...) -> None: ...

class SetBudgetResponse(_message.Message):
    __slots__ = ("worker_ids",)
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...
