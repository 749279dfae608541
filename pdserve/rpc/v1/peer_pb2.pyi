from pdserve.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_HELD: _ClassVar[LeaseState]
    LEASE_STATE_GONE: _ClassVar[LeaseState]

class CommitResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_RESULT_UNSPECIFIED: _ClassVar[CommitResult]
    COMMIT_RESULT_OK: _ClassVar[CommitResult]
    COMMIT_RESULT_GONE: _ClassVar[CommitResult]
    COMMIT_RESULT_CORRUPT: _ClassVar[CommitResult]
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_HELD: LeaseState
LEASE_STATE_GONE: LeaseState
COMMIT_RESULT_UNSPECIFIED: CommitResult
COMMIT_RESULT_OK: CommitResult
COMMIT_RESULT_GONE: CommitResult
COMMIT_RESULT_CORRUPT: CommitResult

class HandshakeRequest(_message.Message):
    __slots__ = ("transport", "oldest_peer_version", "peer_version", "model_digest")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    transport: str
    oldest_peer_version: int
    peer_version: int
    model_digest: str
    def __init__(self, transport: _Optional[str] = ..., oldest_peer_version: _Optional[int] = ..., peer_version: _Optional[int] = ..., model_digest: _Optional[str] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("incarnation", "agent_metadata", "transport", "oldest_peer_version", "peer_version", "model_digest")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    agent_metadata: bytes
    transport: str
    oldest_peer_version: int
    peer_version: int
    model_digest: str
    def __init__(self, incarnation: _Optional[int] = ..., agent_metadata: _Optional[bytes] = ..., transport: _Optional[str] = ..., oldest_peer_version: _Optional[int] = ..., peer_version: _Optional[int] = ..., model_digest: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("lease_id", "proof")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    lease_id: _common_pb2.LeaseId
    proof: bytes
    def __init__(self, lease_id: _Optional[_Union[_common_pb2.LeaseId, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class LeaseStatus(_message.Message):
    __slots__ = ("lease_id", "state", "watermark", "first_token")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    lease_id: _common_pb2.LeaseId
    state: LeaseState
    watermark: int
    first_token: FirstToken
    def __init__(self, lease_id: _Optional[_Union[_common_pb2.LeaseId, _Mapping]] = ..., state: _Optional[_Union[LeaseState, str]] = ..., watermark: _Optional[int] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("id", "finish_reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    finish_reason: _common_pb2.FinishReason
    def __init__(self, id: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids", "proofs")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedCompositeFieldContainer[_common_pb2.LeaseId]
    proofs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_ids: _Optional[_Iterable[_Union[_common_pb2.LeaseId, _Mapping]]] = ..., proofs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[LeaseStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[LeaseStatus, _Mapping]]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("lease_id", "reader_id", "blocks", "first", "proof", "group_sums")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    GROUP_SUMS_FIELD_NUMBER: _ClassVar[int]
    lease_id: _common_pb2.LeaseId
    reader_id: _common_pb2.ReaderId
    blocks: int
    first: int
    proof: bytes
    group_sums: _containers.RepeatedCompositeFieldContainer[GroupSums]
    def __init__(self, lease_id: _Optional[_Union[_common_pb2.LeaseId, _Mapping]] = ..., reader_id: _Optional[_Union[_common_pb2.ReaderId, _Mapping]] = ..., blocks: _Optional[int] = ..., first: _Optional[int] = ..., proof: _Optional[bytes] = ..., group_sums: _Optional[_Iterable[_Union[GroupSums, _Mapping]]] = ...) -> None: ...

class GroupSums(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sums: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("result", "rotted_blocks", "first_token")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ROTTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    result: CommitResult
    rotted_blocks: int
    first_token: FirstToken
    def __init__(self, result: _Optional[_Union[CommitResult, str]] = ..., rotted_blocks: _Optional[int] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "proof")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    lease_id: _common_pb2.LeaseId
    proof: bytes
    def __init__(self, lease_id: _Optional[_Union[_common_pb2.LeaseId, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
