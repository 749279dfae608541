"""What a decode worker takes for evidence that KV does not pass between it and its lender."""

from __future__ import annotations

import pytest

from decode_worker.role import speaks_against_pair
from kvtransfer.pull import PrefillStalled
from pdserve.core.errors import (
    Cancelled,
    DeadlineExceeded,
    IncompatiblePeer,
    KvCorrupt,
    KvRotted,
    LeaseGone,
    PdserveError,
    ReplicaLost,
    TransferFailed,
)
from pdserve.core.ids import Handle
from pdserve.rpc.v1 import common_pb2
from pdserve.worker.host import failed


@pytest.mark.parametrize(
    ("error", "speaks"),
    [
        (TransferFailed("a read took more than 5 s"), True),
        (ReplicaLost("no answer for 5 s"), True),
        (KvCorrupt("a block did not arrive as it was sent"), True),
        (KvRotted("a block changed where it was lent"), False),
        (PrefillStalled("16 of 64 tokens, no progress for 60 s"), False),
        (DeadlineExceeded("16 of 64 tokens after 0.3 s"), False),
        (LeaseGone("expired"), False),
        (Cancelled("its client left"), False),
        (IncompatiblePeer("other layout"), False),  # told by its code, and final
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PdserveError) else "",
)
def test_only_kv_that_did_not_come_speaks_against_a_pair(error: PdserveError, speaks: bool) -> None:
    assert speaks_against_pair(error) is speaks
    message = failed(Handle(7), error, pair_failed=speaks_against_pair(error)).request_failed
    assert (message.handle, message.pair_failed) == (7, speaks)
    expected = "TRANSFER_FAILED" if isinstance(error, TransferFailed) else error.code.name
    assert common_pb2.ErrorReason.Name(message.reason) == f"ERROR_REASON_{expected}"
