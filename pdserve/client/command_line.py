"""A blocking client of the gRPC API, for the command line and for code that waits until a cluster is ready.

A failed call raises `CallFailed` with one line that a person can act on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc

from pdserve.core.errors import PdserveError
from pdserve.rpc import status
from pdserve.rpc.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc, scaling_pb2, story_pb2

Message = TypeVar("Message")
Metadata = tuple[tuple[str, str], ...]

CALL_TIMEOUT_S: Final = 10.0  # the limit of calls that only look something up
# The client sets no deadline for a generation, because pings find a router that hangs: the transport of a living router
# answers them even when it is busy. gRPC sends no ping while its bandwidth probe is unanswered, so the probe has the
# same limit.
OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)
PAGE_WORKERS: Final = 500  # 0.25 MiB, which a router of 1,000 workers makes in 10 ms
MAX_PAGES: Final = 64  # several times the workers that a cluster may have
NOTHING_LISTENS: Final = (
    "failed to connect",
    "Connection refused",
    "DNS resolution failed",
    "errors resolving",
    "Name or service not known",
)
NO_GRPC: Final = ("http1.x server", "Failed parsing HTTP/2")
"""What gRPC says of a server that answers it in HTTP/1, or not at all in HTTP."""
TAKES_NO_MORE: Final = ("HTTP status 503", "Socket closed", "Connection reset by peer")
"""A port that is full answers or closes a new connection, which one where nothing listens does not."""


class CallFailed(PdserveError):
    """A call failed. `status` is its gRPC status. `reason` is our name of the error, or None when the server gave none."""

    def __init__(self, message: str, *, status: grpc.StatusCode, reason: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class PrintedStream(Generic[Message]):
    """One streaming call. Iterate over it to its end, or `cancel` it. Any thread may do so."""

    def __init__(self, call: Any, address: str, hint: str) -> None:
        self._call = call
        self._address = address
        self._hint = hint

    def __iter__(self) -> Iterator[Message]:
        try:
            yield from self._call
        except grpc.RpcError as exc:
            raise explain(exc, self._address, self._hint) from exc

    def cancel(self) -> None:
        """End the call. Idempotent."""
        self._call.cancel()


Answer = PrintedStream[inference_pb2.GenerateResponse]


class _Client:
    """One connection to a port of a router, at host:port. It is safe for threads. The caller closes it."""

    def __init__(self, address: str, hint: str) -> None:
        """Prepare the connection; the first call opens it. `hint`: advice for the case that no router answers there."""
        self.address = address
        self._hint = hint
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls that still run, and close the connection."""
        self._channel.close()

    def _look_up(self, method: Any, request: Any, timeout_s: float, metadata: Metadata = ()) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as exc:
            raise explain(exc, self.address, self._hint) from exc


class InferenceClient(_Client):
    """A client of the port for inference."""

    def __init__(self, address: str) -> None:
        super().__init__(address, "is `pdserve up` running there, and is this its gRPC port? (--address HOST:PORT)")
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def generate(self, request: inference_pb2.GenerateRequest) -> Answer:
        """Start a request. The answer streams its tokens and raises `CallFailed` when the request fails."""
        return Answer(self._stub.Generate(request), self.address, self._hint)

    def model_info(self, timeout_s: float = CALL_TIMEOUT_S) -> inference_pb2.GetModelInfoResponse:
        """Ask which model is served, and with which limits. Raises `CallFailed`."""
        request = inference_pb2.GetModelInfoRequest()
        response: inference_pb2.GetModelInfoResponse = self._look_up(self._stub.GetModelInfo, request, timeout_s)
        return response


class AdminClient(_Client):
    """A client of the port for administration."""

    def __init__(self, address: str, cluster_token: str = "") -> None:
        """Prepare the connection. `cluster_token` is needed where other machines reach the admin port."""
        super().__init__(address, "is `pdserve up` running there, and is this its admin port? (--address HOST:PORT)")
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._metadata: Metadata = ((status.CLUSTER_TOKEN_METADATA, cluster_token),) if cluster_token else ()

    def drain(
        self, worker_id: str, *, incarnation: int = 0, term: int = 0, force: bool = False, timeout_s: float | None = None
    ) -> PrintedStream[inference_pb2.DrainProgress]:
        """Start to drain a worker and stream the progress. Ending the stream, also by `timeout_s`, does not end the drain.

        incarnation: the worker must have it; 0 accepts any. term: of the actuator that calls; 0 for an operator. force: drain
        also the last worker of a role that serves.
        """
        request = inference_pb2.DrainRequest(worker_id=worker_id, incarnation=incarnation, term=term, force=force)
        call = self._stub.Drain(request, metadata=self._metadata, timeout=timeout_s)
        return PrintedStream(call, self.address, self._hint)

    def flip(
        self,
        worker_id: str,
        role: common_pb2.Role,
        *,
        incarnation: int = 0,
        term: int = 0,
        timeout_s: float | None = None,
    ) -> PrintedStream[inference_pb2.DrainProgress]:
        """Let a worker change its role and stream the progress. Ending the stream does not end the flip. See `drain`."""
        request = scaling_pb2.FlipRequest(worker_id=worker_id, role=role, incarnation=incarnation, term=term)
        call = self._stub.Flip(request, metadata=self._metadata, timeout=timeout_s)
        return PrintedStream(call, self.address, self._hint)

    def scale(self, sizes: scaling_pb2.ScaleRequest, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """Leave an order about the sizes of the pools and return its number. Raises `CallFailed`."""
        return int(self._look_up(self._stub.Scale, sizes, timeout_s, self._metadata).order)

    def actuate(self, request: scaling_pb2.ActuateRequest, timeout_s: float = CALL_TIMEOUT_S) -> scaling_pb2.ActuateResponse:
        """Report what the actuator does, and ask for the last order. Raises `CallFailed`."""
        response: scaling_pb2.ActuateResponse = self._look_up(self._stub.Actuate, request, timeout_s, self._metadata)
        return response

    def set_budget(
        self,
        worker_ids: Sequence[str],
        role: common_pb2.Role,
        tokens: int = 0,
        *,
        max_num_seqs: int = 0,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> list[str]:
        """Let each step of these workers, or of all workers of a role, have at most `tokens` tokens, and at most `max_num_seqs`
        of their sequences run. 0: the limit stays as it is, but not both.

        `worker_ids` empty: those of `role`. Return the workers that got the budget. Raises `CallFailed`.
        """
        request = admin_pb2.SetBudgetRequest(
            worker_ids=worker_ids, role=role, max_num_batched_tokens=tokens, max_num_seqs=max_num_seqs
        )
        return list(self._look_up(self._stub.SetBudget, request, timeout_s, self._metadata).worker_ids)

    def explain(self, request_id: str, timeout_s: float = CALL_TIMEOUT_S) -> story_pb2.ExplainRequestResponse:
        """Ask for the story of a request, by the router's id of it or by the client's own. Raises `CallFailed`."""
        request = story_pb2.ExplainRequestRequest(request_id=request_id)
        response: story_pb2.ExplainRequestResponse = self._look_up(
            self._stub.ExplainRequest, request, timeout_s, self._metadata
        )
        return response

    def cluster_state(self, timeout_s: float = CALL_TIMEOUT_S) -> inference_pb2.GetClusterStateResponse:
        """Ask for the present state of the workers and queues. Workers come in pages, each of its own moment; the rest is of
        the first page's. `timeout_s` bounds each page. Raises `CallFailed`."""
        request = inference_pb2.GetClusterStateRequest(page_size=PAGE_WORKERS)
        state: inference_pb2.GetClusterStateResponse | None = None
        for _ in range(MAX_PAGES):
            page: inference_pb2.GetClusterStateResponse = self._look_up(
                self._stub.GetClusterState, request, timeout_s, self._metadata
            )
            if state is None:
                state = page
            else:
                state.workers.extend(page.workers)
                state.set_aside_counts.extend(page.set_aside_counts)
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert state is not None
        state.ClearField("next_page_token")
        return state


def explain(exc: Any, address: str, hint: str) -> CallFailed:
    """Make one line out of a gRPC error, with the hint where it helps. `exc` is also the call that failed."""
    code: grpc.StatusCode = exc.code()
    details = " ".join((exc.details() or "").split())
    trailing = dict(exc.trailing_metadata() or ())
    reason = trailing.get(status.REASON_METADATA)
    if _is_full(code, details):
        message = f"{address} takes no more connections now; try again, and close those that are not needed"
    elif reason is None and (found := wrong_address(exc, address)) is not None:
        message = f"{found}; {hint}"
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
    if request_id := _accepted_id(trailing.get(status.TIMELINE_METADATA)):
        message += f"; `pdserve explain {request_id}` tells its story"
    return CallFailed(message, status=code, reason=reason)


def wrong_address(exc: Any, address: str) -> str | None:
    """Say what is at an address where no router seems to be. None: there may be one.

    exc: the failed call, for which the server gave no reason of ours.
    """
    code, details = exc.code(), exc.details() or ""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {address} is another port or another server"
    if code is not grpc.StatusCode.UNAVAILABLE or _is_full(code, details):
        return None
    if any(sign in details for sign in NO_GRPC):
        return f"what answers at {address} speaks no gRPC, and may be the HTTP port"
    return f"nothing answers at {address}" if any(sign in details for sign in NOTHING_LISTENS) else None


def _is_full(code: grpc.StatusCode, details: str) -> bool:
    """Tell whether a server that takes no more connections refused one."""
    refused = code is grpc.StatusCode.UNAVAILABLE and NOTHING_LISTENS[0] in details
    return refused and any(sign in details for sign in TAKES_NO_MORE)


def _accepted_id(timeline: str | bytes | None) -> str:
    """Return the id of a request that was accepted and then failed, from its timeline. Empty: it was refused at once."""
    try:
        told = json.loads(timeline or "{}")
        return str(told.get("request_id", ""))
    except (ValueError, AttributeError):  # the timeline of another version
        return ""
