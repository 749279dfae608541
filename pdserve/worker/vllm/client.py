"""The connection of a worker to its server of vLLM: requests go out, and answers come back as parsed JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from pdserve.core.errors import InvalidRequest, ReplicaLost
from pdserve.core.structured.constraint import FIELD
from pdserve.worker.vllm.requests import MAX_LINE_BYTES, BadAnswer

CONNECT_S: Final = 5.0
KEEP_S: Final = 2.0
"""An idle connection is closed after so long, before the server closes it at 5 s: a request on a connection that closes is
lost."""
GENERATE: Final = "/inference/v1/generate"


class ConnectionLost(ReplicaLost):
    """The connection to the server broke, perhaps because the server has ended."""


class VllmClient:
    """Requests to one server. It belongs to the loop of the worker; `close` it.

    Every method raises `ConnectionLost`, `BadAnswer` for what is no answer, and `ReplicaLost` for an answer of the server's own
    failure. An answer may take as long as its computation: deadlines are the router's.
    """

    def __init__(self, url: str) -> None:
        self._session = aiohttp.ClientSession(
            base_url=url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._session.closed

    async def close(self) -> None:
        """Close all connections. Requests that run raise `ConnectionLost`. Idempotent."""
        await self._session.close()

    async def load_page(self, timeout_s: float) -> str:
        """Return the page `/metrics`. Raises `ConnectionLost` also when it does not come in time."""
        async with self._answer("GET", "/metrics", timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            return (await _content(response)).decode(errors="replace")

    async def ask(self, body: Mapping[str, Any]) -> Any:
        """Send a request and return its answer. Raises `InvalidRequest` where vLLM refuses it."""
        async with self._answer("POST", GENERATE, json=body) as response:
            return _json(await _content(response))

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """Send a request and yield the events of its answer. Raises `InvalidRequest` where vLLM refuses it."""
        async with self._answer("POST", GENERATE, json=body) as response:
            rest = b""
            async for piece in response.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield _json(line[6:])
                if len(rest) > MAX_LINE_BYTES:
                    raise BadAnswer(f"vLLM sent an event of more than {MAX_LINE_BYTES} bytes")

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and give its answer if its status is 200."""
        if self._session.closed:
            raise ConnectionLost("the server of vLLM starts again")
        try:
            async with self._session.request(method, path, allow_redirects=False, **request) as response:
                if response.status != 200:
                    raise _refusal(response.status, await _content(response))
                yield response
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise ConnectionLost(f"the connection to vLLM broke: {str(exc) or type(exc).__name__}") from exc


async def _content(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > MAX_LINE_BYTES:
            raise BadAnswer(f"vLLM sent an answer of more than {MAX_LINE_BYTES} bytes")
    return bytes(content)


def _refusal(status: int, content: bytes) -> InvalidRequest | ReplicaLost:
    """Return `InvalidRequest` for a request that vLLM refuses, and `ReplicaLost` for its own failures."""
    try:
        message = str(json.loads(content)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = content[:200].decode(errors="replace")
    if 400 <= status < 500 and status not in (404, 408, 429):
        field = FIELD if "gramm" in message or "schema" in message else "request"
        return InvalidRequest(f"vLLM refuses it: {message}", field=field)
    return ReplicaLost(f"vLLM answered with status {status}: {message}")


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as exc:  # the latter: it is nested too deeply
        raise BadAnswer(f"vLLM sent what is not JSON: {content[:80]!r}") from exc
