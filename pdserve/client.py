"""A blocking client of the gRPC API, for the command line and for whoever waits for a cluster to be ready.

A failed call raises `CallFailed` with one line that a person can act on.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc

from pdserve.core.errors import PdserveError
from pdserve.rpc import status
from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc

Message = TypeVar("Message")
Metadata = tuple[tuple[str, str], ...]

CALL_TIMEOUT_S: Final = 10.0  # of calls that only look something up
# A generation has no deadline of its own here: a router that hangs is found by pings. Its transport answers them
# however busy it is. While gRPC's own bandwidth probe is unanswered no keep-alive is sent, so that has the same limit.
OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
NOTHING_LISTENS: Final = ("failed to connect", "Connection refused", "DNS resolution failed", "Name or service not known")


class CallFailed(PdserveError):
    """A call did not succeed. `status` is its gRPC status, `reason` our own name of it when the server gave one."""

    def __init__(self, message: str, *, status: grpc.StatusCode, reason: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Stream(Generic[Message]):
    """One streaming call. Iterate it to its end or `cancel` it, from any thread."""

    def __init__(self, call: Any, address: str, hint: str) -> None:
        self._call = call
        self._address = address
        self._hint = hint

    def __iter__(self) -> Iterator[Message]:
        try:
            yield from self._call
        except grpc.RpcError as exc:
            raise _explain(exc, self._address, self._hint) from exc

    def cancel(self) -> None:
        self._call.cancel()


Answer = Stream[inference_pb2.GenerateResponse]


class _Client:
    """One connection to a port of a router, at host:port. Thread-safe; close it."""

    def __init__(self, address: str, hint: str) -> None:
        """`hint`: what to do when nothing answers there, or something else."""
        self.address = address
        self._hint = hint
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still running."""
        self._channel.close()

    def _look_up(self, method: Any, request: Any, timeout_s: float, metadata: Metadata = ()) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as exc:
            raise _explain(exc, self.address, self._hint) from exc


class InferenceClient(_Client):
    """Calls on the port for clients."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "is `pdserve up` running there, and this its gRPC port? (--address HOST:PORT)")
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def generate(self, request: inference_pb2.GenerateRequest) -> Answer:
        return Answer(self._stub.Generate(request), self.address, self._hint)

    def model_info(self, timeout_s: float = CALL_TIMEOUT_S) -> inference_pb2.GetModelInfoResponse:
        request = inference_pb2.GetModelInfoRequest()
        response: inference_pb2.GetModelInfoResponse = self._look_up(self._stub.GetModelInfo, request, timeout_s)
        return response


class AdminClient(_Client):
    """Calls on the port for administration."""

    def __init__(self, address: str, cluster_token: str = "") -> None:
        """`cluster_token`: needed where the router listens for others than its own machine."""
        super().__init__(address, "is `pdserve up` running there, and this its admin port? (--address HOST:PORT)")
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._metadata: Metadata = ((status.CLUSTER_TOKEN_METADATA, cluster_token),) if cluster_token else ()

    def drain(self, worker_id: str) -> Stream[inference_pb2.DrainProgress]:
        """Begins with the call; ending the stream does not end the drain."""
        request = inference_pb2.DrainRequest(worker_id=worker_id)
        return Stream(self._stub.Drain(request, metadata=self._metadata), self.address, self._hint)

    def cluster_state(self, timeout_s: float = CALL_TIMEOUT_S) -> inference_pb2.GetClusterStateResponse:
        request = inference_pb2.GetClusterStateRequest()
        response: inference_pb2.GetClusterStateResponse = self._look_up(
            self._stub.GetClusterState, request, timeout_s, self._metadata
        )
        return response


def _explain(exc: Any, address: str, hint: str) -> CallFailed:
    """One line out of a gRPC error (a `grpc.Call` as well), with the hint where it helps."""
    code: grpc.StatusCode = exc.code()
    details = " ".join((exc.details() or "").split())
    trailing = dict(exc.trailing_metadata() or ())
    reason = trailing.get(status.REASON_METADATA)
    if code is grpc.StatusCode.UNAVAILABLE and any(sign in details for sign in NOTHING_LISTENS):
        message = f"nothing answers at {address}; {hint}"
    elif code is grpc.StatusCode.UNIMPLEMENTED and reason is None:
        message = f"what answers at {address} is another port or another server; {hint}"
    elif code is grpc.StatusCode.UNAUTHENTICATED:
        message = f"{details}; set PDSERVE_CLUSTER_TOKEN to the same secret here and for `pdserve up`"
    elif code is grpc.StatusCode.UNAVAILABLE and reason is None:
        message = f"the connection to {address} broke: {details}"
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED and reason is None:
        message = f"{address} did not answer in time"
    else:
        message = f"{details or 'no details'} ({code.name})"
    if wait := trailing.get(status.RETRY_AFTER_METADATA):
        message += f"; retry in {float(wait):g} s"
    return CallFailed(message, status=code, reason=reason)
