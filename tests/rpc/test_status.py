"""The table of errors: total over our codes and the wire's reasons, and back again."""

from __future__ import annotations

import grpc
import pytest

from pdserve.core.errors import ErrorCode, InvalidRequest, Overloaded
from pdserve.rpc.status import REASON_METADATA, RETRY_AFTER_METADATA, TABLE, from_reason, to_reason, trailing_metadata
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
    assert row.grpc is not grpc.StatusCode.OK
    assert 400 <= row.http < 600
    assert row.client_retries == (row.http in (429, 503))
    if code in CLIENT_FAULTS:
        assert row.http < 500
        assert row.openai_type == "invalid_request_error"


@pytest.mark.parametrize("code", ErrorCode)
def test_a_peers_reason_comes_back_as_its_error(code: ErrorCode) -> None:
    error = from_reason(to_reason(code), "it said so")
    if code in CLIENT_FAULTS:  # a worker names no field of the client's
        assert isinstance(error, InvalidRequest)
    else:
        assert error.code is code
    assert "it said so" in error.message


@pytest.mark.parametrize("reason", [common_pb2.ERROR_REASON_UNSPECIFIED, 999, -1])
def test_a_reason_of_a_newer_peer_is_a_bug_not_a_crash(reason: int) -> None:
    assert from_reason(reason, "odd").code is ErrorCode.INTERNAL_BUG


def test_only_overload_says_when_to_come_back() -> None:
    assert dict(trailing_metadata(Overloaded("full", retry_after_s=2.5))) == {
        REASON_METADATA: "overloaded",
        RETRY_AFTER_METADATA: "2.500",
    }
    assert dict(trailing_metadata(InvalidRequest("bad", field="x"))) == {REASON_METADATA: "invalid_request"}
