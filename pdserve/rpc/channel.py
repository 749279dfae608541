"""grpc.aio between workers and router: options, the cluster token, and the translation of failed calls to our errors."""

from __future__ import annotations

import hmac
from typing import Any, Final

import grpc
import grpc.aio

from pdserve.core import errors
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc.status import CLUSTER_TOKEN_METADATA, REASON_METADATA, from_reason, to_reason

Options = list[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]

MAX_MESSAGE_BYTES: Final = 16 << 20  # a prompt of a million ids has 4 MiB, and its ticket less than 1 MiB
KEEPALIVE_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000

_COMMON: Final[Options] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # a stream without messages is pinged for as long as it lives
]


def channel_options() -> Options:
    """Return the options of a channel.

    It uses no proxy, since peers are addressed directly. Channels share neither connections nor the back-off of these.
    """
    return [
        *_COMMON,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def server_options() -> Options:
    """Return the options of a server. It accepts the pings of `channel_options`, at which a default server hangs up."""
    return [
        *_COMMON,
        ("grpc.so_reuseport", 0),  # two processes on one port would share its calls
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to `host:port`. It connects at the first call. The caller closes it."""
    return grpc.aio.insecure_channel(address, options=channel_options())


def token_metadata(cluster_token: str) -> Metadata:
    """Return the metadata that every internal call carries."""
    return ((CLUSTER_TOKEN_METADATA, cluster_token),)


async def require_token(context: Any, cluster_token: str) -> None:
    """Abort a grpc.aio call with UNAUTHENTICATED, which raises, unless the call carries the token of this cluster."""
    presented = _as_dict(context.invocation_metadata()).get(CLUSTER_TOKEN_METADATA, "")
    presented_bytes = presented if isinstance(presented, bytes) else presented.encode()
    if not hmac.compare_digest(presented_bytes, cluster_token.encode()):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{CLUSTER_TOKEN_METADATA} does not match this cluster")


def translate(error: grpc.aio.AioRpcError, peer: str) -> PdserveError:
    """Translate the failure of a call to `peer` (host:port) to one of our errors.

    The reason in the trailing metadata, which the peer itself gave, decides. Without one the gRPC status decides.
    """
    status = error.code()
    message = f"{peer}: {error.details() or status.name}"
    reason = _as_dict(error.trailing_metadata()).get(REASON_METADATA)
    if reason in {code.value for code in ErrorCode}:
        return from_reason(to_reason(ErrorCode(reason)), message)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.Overloaded(message, retry_after_s=1.0)
    return _BY_STATUS.get(status, errors.InternalBug)(message)


def _as_dict(metadata: Any) -> dict[str, Any]:
    """Return the metadata of a call as a dict. `metadata` is pairs of key and value, or None. The last of equal keys wins."""
    return dict(metadata or ())


_S = grpc.StatusCode

_BY_STATUS: Final[dict[grpc.StatusCode, type[PdserveError]]] = {
    _S.UNAVAILABLE: errors.ReplicaLost,
    _S.CANCELLED: errors.ReplicaLost,  # the peer cancelled, because it shuts down; our own cancellation is CancelledError
    _S.ABORTED: errors.ReplicaLost,
    _S.DEADLINE_EXCEEDED: errors.TransferFailed,  # the deadline of this call, not of the client's request: retry
    _S.UNAUTHENTICATED: errors.IncompatiblePeer,
    _S.PERMISSION_DENIED: errors.IncompatiblePeer,
    _S.UNIMPLEMENTED: errors.IncompatiblePeer,
    _S.FAILED_PRECONDITION: errors.IncompatiblePeer,
}
"""The error for each gRPC status. Any other status is a bug of one of the two sides."""
