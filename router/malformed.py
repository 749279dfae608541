"""Requests whose bytes are no message of ours: the client's fault, so it is told INVALID_ARGUMENT.

gRPC itself would answer UNKNOWN and log a traceback for each, which is a gift to whoever sends garbage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.core.errors import InvalidRequest
from pdserve.rpc import status


class MalformedGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """For one service, whose methods all take one message and are coroutines."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        return handler._replace(
            request_deserializer=_lenient(handler.request_deserializer), **{name: _checked(getattr(handler, name))}
        )


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_error(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return InvalidRequest("is not a message of the type that this method takes", field="request")

    return parse_or_error


def _checked(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def run(request: Any, context: Any) -> Any:
        if isinstance(request, InvalidRequest):
            await status.abort(context, request)
        return await method(request, context)

    return run
