"""The questions to an HTTP server before a run: which model it has, who it is, and whether it can serve."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.load.http_target import BaseUrl, ConnectionPool, request_head
from pdserve_bench.load.sse import error_reason
from pdserve_bench.load.watch import one_line

MAX_ANSWER_BYTES: Final = 1 << 20
MAX_CONTEXT: Final = 1 << 24
"""A larger number of tokens is no word of a server that means it."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's word on itself, by `/v1/models`."""

    model: str = ""
    owner: str = ""
    max_model_len: int | None = None
    """The most tokens of a prompt together with its answer. None: it does not say."""
    vocab_size: int | None = None
    """The size of the model's vocabulary. Only a pdserve router says it."""

    @property
    def ours(self) -> bool:
        """The server is a pdserve router."""
        return self.owner == "pdserve"

    @property
    def knows_continuous_usage(self) -> bool:
        """The server is known to send its usage with each chunk when it is asked to."""
        return self.owner in ("pdserve", "vllm")


async def ask_server(url: BaseUrl, api_key: str = "", *, timeout_s: float = 10.0) -> ServerInfo:
    """Ask the server which model it has, and who it is. A server that does not say gives an empty answer.

    Raises `ConfigError` when nothing answers, when the key is refused, and when the server says that it is not ready.
    """
    pool = ConnectionPool(url)
    try:
        async with asyncio.timeout(timeout_s):
            models = await _get(pool, url, "/v1/models", api_key)
            health = await _get(pool, url, "/health", api_key)
    except TimeoutError:
        raise ConfigError(_silent(url, f"no answer within {timeout_s:g} s")) from None
    finally:
        pool.close()
    if models.status in (401, 403):
        said = one_line(error_reason(models.status, bytes(models.data))[1])
        raise ConfigError(f"api-key: {url.authority} refuses it with status {models.status} ({said}); set OPENAI_API_KEY")
    if health.status == 503:
        said = one_line(bytes(health.data).decode("utf-8", "replace"))
        raise ConfigError(f"base-url: {url.authority} is not ready ({said}); wait until its /health says so, or start workers")
    return _info(bytes(models.data))


async def _get(pool: ConnectionPool, url: BaseUrl, path: str, api_key: str) -> _JsonReader:
    reader = _JsonReader()
    reason, message = await pool.request(request_head("GET", url.prefix + path, url, api_key) + b"\r\n", reader)
    if reader.failed:
        raise ConfigError(f"base-url: {url.authority} answers {path} with more than {MAX_ANSWER_BYTES} bytes")
    if reason and path == "/v1/models":
        raise ConfigError(_silent(url, f"{reason}: {one_line(message)}" if message else reason))
    return reader


def _silent(url: BaseUrl, why: str) -> str:
    return f"base-url: {url.authority} does not answer ({why}); is the server up, and is this its HTTP port?"


def _info(body: bytes) -> ServerInfo:
    try:
        card = msgspec.json.decode(body)["data"][0]
        words = (str(card["id"]), str(card.get("owned_by", "")))
        return ServerInfo(*words, _count(card.get("max_model_len")), _count(card.get("vocab_size")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return ServerInfo()


def _count(value: Any) -> int | None:
    """Return a number of tokens. None: it is none that can be believed."""
    return value if type(value) is int and 16 <= value <= MAX_CONTEXT else None


class _JsonReader:
    """Reads a whole answer of bounded size."""

    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()
        self.done = False

    @property
    def failed(self) -> bool:
        return len(self.data) > MAX_ANSWER_BYTES

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def body(self, data: bytes, now_s: float) -> None:
        self.data += data

    def end(self, now_s: float) -> None:
        self.done = True
