"""Request bodies are read from clients that are not trusted, so their bytes and their time are bounded."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Receive, Scope

from pdserve.core.errors import Cancelled, Overloaded, PdserveError, RequestTimeout, RequestTooLarge
from router.api.client_names import ClientNames
from router.http.exchange import Exchange
from router.http.reply import Reply
from router.parsing.body_budget import BodyShare

BODY_TIMEOUT_S: Final = 60.0  # 8 MiB at 1 Mbit/s
SILENCE_S: Final = 10.0  # the longest time for which a client may send nothing in the middle of its body
LINGER_S: Final = 2.0
"""A refused body is still read and dropped for this long after the answer. If the connection closed at once, it would be reset,
and a client that is still sending would see the reset instead of the answer."""


class BodyRefused(Exception):
    """A body was not read to its end, so its connection cannot carry another request."""

    def __init__(self, error: PdserveError) -> None:
        super().__init__(error.message)
        self.error = error


async def read_body(scope: Scope, receive: Receive, exchange: Exchange, max_bytes: int, share: BodyShare) -> bytes:
    """Return the whole body. Raises `BodyRefused` as soon as it is known that the body is too large, finds no room, or comes
    too slowly, and `Cancelled` when the client leaves."""
    declared = header(scope, "content-length") or ""
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        if declared.isdecimal():
            share.grow(int(declared))  # takes the whole length at once, so that a later body cannot end one that has begun
        whole = exchange.whole_body()
        if whole is not None:
            if len(whole) > max_bytes:
                raise _too_large(max_bytes)
            share.grow(len(whole))
            return whole
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
    """Answer with an error and close the connection so that the client still sees the answer. What is still read is dropped."""
    await reply.fail(error, more=True, headers=[(b"connection", b"close")])
    if (header(scope, "expect") or "").lower() != "100-continue":  # such a client sends nothing before it is told to
        await _discard(receive)
    await reply.end()


async def _read_part_in_time(receive: Receive, body: bytearray) -> bool:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await _read_part(receive, body)
    except TimeoutError as exc:
        raise BodyRefused(RequestTimeout(f"body: nothing came for {SILENCE_S:g} s")) from exc


async def _read_part(receive: Receive, body: bytearray) -> bool:
    """Append what has arrived. True: more is to come. Raises `Cancelled` when the client leaves."""
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
        pass  # the client has the answer, or does not want it


def _too_large(max_bytes: int) -> BodyRefused:
    return BodyRefused(RequestTooLarge(f"body: is over the limit of {max_bytes} bytes", field="body"))


def client_of(scope: Scope, clients: ClientNames) -> tuple[str, str, str]:
    """Return the names of the client, its connection and a new call."""
    host, port = scope.get("client") or ("", 0)
    return clients.of(host, f"{host} {port}", header(scope, clients.header) if clients.header else None)


def header(scope: Scope, name: str) -> str | None:
    """Return the value of the first header with this name, which is in lower case. None: there is none."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return str(value, "latin-1")
    return None
