"""Reading a request body from a client that is not trusted: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Receive, Scope

from pdserve.core.errors import Cancelled, Overloaded, PdserveError, RequestTimeout, RequestTooLarge
from router.http.reply import Reply
from router.service.body_budget import BodyShare

BODY_TIMEOUT_S: Final = 60.0  # 8 MiB at 1 Mbit/s
SILENCE_S: Final = 10.0  # of a client in the middle of its body: a link that is lost for so long is lost
LINGER_S: Final = 2.0
"""How long a refused body is read and thrown away after the answer. Closing at once would reset the connection, and
the client, still sending, would see the reset instead of the answer."""


class BodyRefused(Exception):
    """The body was not read to its end, so the connection cannot carry another request."""

    def __init__(self, error: PdserveError) -> None:
        super().__init__(error.message)
        self.error = error


async def read_body(scope: Scope, receive: Receive, max_bytes: int, share: BodyShare) -> bytes:
    """The whole body. Raises `BodyRefused` for one that is too large, for which there is no room, or that comes too slowly,
    as soon as that is known."""
    declared = _header(scope, b"content-length")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        if declared.isdigit():
            share.grow(int(declared))  # whole, or not at all: nobody who has begun is turned away for who comes later
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more = True
            while more:
                more = await _read_part_in_time(receive, body)
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                share.grow(len(body))
    except TimeoutError as exc:
        raise BodyRefused(RequestTimeout(f"body: not complete after {BODY_TIMEOUT_S:g} s")) from exc
    except Overloaded as exc:
        raise BodyRefused(exc) from exc
    return bytes(body)


async def refuse_body(scope: Scope, receive: Receive, reply: Reply, error: PdserveError) -> None:
    """Answer, then close the connection without the answer being lost. Nothing that is still read is kept."""
    await reply.fail(error, more=True, headers=[(b"connection", b"close")])
    if _header(scope, b"expect").lower() != b"100-continue":  # else the client waits for our leave to send
        await _discard(receive)
    await reply.end()


async def _read_part_in_time(receive: Receive, body: bytearray) -> bool:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await _read_part(receive, body)
    except TimeoutError as exc:
        raise BodyRefused(RequestTimeout(f"body: nothing came for {SILENCE_S:g} s")) from exc


async def _read_part(receive: Receive, body: bytearray) -> bool:
    """Append what has arrived; True while more is to come."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Cancelled("the client left while it sent the body")
    body += message.get("body", b"")
    return bool(message.get("more_body", False))


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while await _read_part(receive, bytearray()):
                pass
    except (TimeoutError, Cancelled):
        pass  # it has our answer, or does not want it


def _too_large(max_bytes: int) -> BodyRefused:
    return BodyRefused(RequestTooLarge(f"body: is over the limit of {max_bytes} bytes", field="body"))


def _header(scope: Scope, name: bytes) -> bytes:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""
