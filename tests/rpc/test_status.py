"""The table of errors: total over our codes and the wire's reasons, and back again."""

from __future__ import annotations

import grpc
import pytest

from pdserve.core import errors
from pdserve.core.errors import (
    ConfigError,
    ErrorCode,
    IllegalTransition,
    InvalidRequest,
    OutOfMemory,
    OutOfThreads,
    Overloaded,
    PdserveError,
    ReplicaLost,
)
from pdserve.core.structured.constraint import FIELD
from pdserve.rpc.status import (
    CLASSES,
    DEFAULT_RETRY_AFTER_S,
    REASON_METADATA,
    RETRY_AFTER_METADATA,
    TABLE,
    from_reason,
    retry_after_s,
    to_reason,
    trailing_metadata,
)
from pdserve.rpc.v1 import common_pb2

CLIENT_FAULTS = (ErrorCode.INVALID_REQUEST, ErrorCode.UNKNOWN_MODEL, ErrorCode.REQUEST_TOO_LARGE, ErrorCode.UNKNOWN_WORKER)


def test_every_code_has_a_row_and_a_wire_reason() -> None:
    assert set(TABLE) == set(ErrorCode)
    reasons = {to_reason(code) for code in ErrorCode}
    assert reasons == set(common_pb2.ErrorReason.values()) - {common_pb2.ERROR_REASON_UNSPECIFIED}
    assert len(reasons) == len(ErrorCode)


@pytest.mark.parametrize("code", ErrorCode)
def test_rows_agree_with_each_other(code: ErrorCode) -> None:
    row = TABLE[code]
    assert grpc.StatusCode[row.grpc] is not grpc.StatusCode.OK
    assert 400 <= row.http < 600
    assert row.client_retries == (row.http in (429, 503))
    if code in CLIENT_FAULTS:
        assert row.http < 500
        assert row.openai_type == "invalid_request_error"


@pytest.mark.parametrize("code", ErrorCode)
def test_a_peers_reason_comes_back_as_its_error(code: ErrorCode) -> None:
    error = from_reason(to_reason(code), "it said so")
    assert error.code is code
    assert type(error) is CLASSES[code]
    assert "it said so" in error.message


def test_every_class_of_error_can_cross_the_wire_or_never_does() -> None:
    """A class that is added without a row here would reach the other side as somebody else's error."""
    # Told as InternalBug; two that end their worker; one that ends a process at its start; told as Unavailable and as
    # InvalidRequest.
    never = {IllegalTransition, OutOfMemory, OutOfThreads, ConfigError, errors.RouterStopping, errors.ContextOverflow}
    ours = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, PdserveError)}
    assert {type(from_reason(reason, "x")) for reason in map(to_reason, ErrorCode)} == ours - never - {PdserveError}
    assert all(CLASSES[cls.code] is cls for cls in ours - never - {PdserveError})
    assert {cls.code for cls in never} <= set(CLASSES)


@pytest.mark.parametrize("reason", [common_pb2.ERROR_REASON_UNSPECIFIED, 999, -1])
def test_a_reason_of_a_newer_peer_is_a_bug_not_a_crash(reason: int) -> None:
    assert from_reason(reason, "odd").code is ErrorCode.INTERNAL_BUG


def test_a_client_is_told_when_to_come_back_exactly_when_that_helps() -> None:
    assert dict(trailing_metadata(Overloaded("full", retry_after_s=2.5))) == {
        REASON_METADATA: "overloaded",
        RETRY_AFTER_METADATA: "2.500",
    }
    assert retry_after_s(ReplicaLost("gone")) == DEFAULT_RETRY_AFTER_S
    assert dict(trailing_metadata(InvalidRequest("bad", field="x"))) == {REASON_METADATA: "invalid_request"}
    for code in ErrorCode:
        told = dict(trailing_metadata(from_reason(to_reason(code), "x")))
        assert (RETRY_AFTER_METADATA in told) == TABLE[code].client_retries
        assert told[REASON_METADATA] == code.value


def test_a_grammar_that_fails_on_a_worker_names_the_field_of_the_client() -> None:
    """Other fields of a worker's errors are those of the link, which no client knows."""
    reason = to_reason(ErrorCode.INVALID_REQUEST)
    broken = from_reason(reason, InvalidRequest("the mask needs too much work", field=FIELD).message)
    assert isinstance(broken, InvalidRequest)
    assert (broken.field, broken.message) == (FIELD, f"{FIELD}: the mask needs too much work")
    other = from_reason(reason, InvalidRequest("is empty", field="prompt_ids").message)
    assert isinstance(other, InvalidRequest)
    assert (other.field, other.message) == ("request", "request: prompt_ids: is empty")
