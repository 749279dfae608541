"""Requests are received as bytes. Bytes that are no message of the method are the client's fault, and the client is told
INVALID_ARGUMENT.

gRPC itself would answer UNKNOWN and log a traceback for each, which is a gift to whoever sends garbage. A large message is
handed on unread, as `LargeMessage`, to the methods that parse it elsewhere; other methods refuse it.

gRPC also waits for a message for as long as the client likes, while the call takes up a place. On the wire a call with one
message is a stream of one message, so the guard reads it as a stream and bounds the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.core.errors import InvalidRequest, PdserveError, RequestTimeout, RequestTooLarge
from pdserve.rpc import status

RECEIVE_TIMEOUT_S: Final = 60.0  # as in router.http.reply: 8 MiB at 1 Mbit/s


@dataclass(frozen=True, slots=True)
class LargeMessage:
    """The bytes of a message that is too large to be parsed on the loop."""

    data: bytes


class MalformedGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Guards one service, whose methods are coroutines. A method that takes a stream gets an error or a `LargeMessage` in the
    place of a message, and bounds its waits itself; all others take one message."""

    def __init__(self, service: str, large: frozenset[str] = frozenset(), *, inline_bytes: int) -> None:
        """Methods in `large` take a `LargeMessage` for a message of more than `inline_bytes`."""
        self._inline_bytes = inline_bytes
        self._prefix = f"/{service}/"
        self._large = large
        self._handlers: dict[str, Any] = {}  # the guarded ones by method, made at its first call

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return a handler that checks the message before the method of the guarded service gets it."""
        known = self._handlers.get(details.method)
        if known is not None:
            return known
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        takes_large = details.method.removeprefix(self._prefix) in self._large
        parse = _lenient(handler.request_deserializer, self._inline_bytes, takes_large=takes_large)
        if handler.request_streaming:
            make, method = grpc.stream_stream_rpc_method_handler, handler.stream_stream
        elif handler.response_streaming:
            make, method = grpc.stream_stream_rpc_method_handler, _checked(handler.unary_stream)
        else:
            make, method = grpc.stream_unary_rpc_method_handler, _checked(handler.unary_unary)
        guarded = make(method, parse, handler.response_serializer)
        self._handlers[details.method] = guarded
        return guarded


def _lenient(parse: Callable[[bytes], Any], inline_bytes: int, *, takes_large: bool) -> Callable[[bytes], Any]:
    too_large = f"is over the limit of {inline_bytes} bytes of this method"

    def parse_or_error(data: bytes) -> Any:
        if len(data) > inline_bytes:
            return LargeMessage(data) if takes_large else RequestTooLarge(too_large, field="request")
        try:
            return parse(data)
        except DecodeError:
            return InvalidRequest("is not a message of the type that this method takes", field="request")

    return parse_or_error


def _checked(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def run(_: Any, context: Any) -> Any:
        request = await _received(context)
        if isinstance(request, PdserveError):
            await status.abort(context, request)
        return await method(request, context)

    return run


async def _received(context: Any) -> Any:
    """Return the one message, or an error in its place."""
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):  # `wait_for` would lose a cancel that comes with the message
            request = await context.read()
    except TimeoutError:
        return RequestTimeout(f"request: not complete after {RECEIVE_TIMEOUT_S:g} s")
    if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
        return InvalidRequest("is missing: this method takes one message", field="request")
    return request
