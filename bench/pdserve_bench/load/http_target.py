"""Any server with OpenAI's HTTP API as a target: `/v1/completions` or `/v1/chat/completions`, streamed."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.load.failures import BAD_UTF8, CHAT_NEEDS_TEXT, CONNECT_FAILED, CONNECTION_REFUSED
from pdserve_bench.load.http_connection import HttpConnection, ResponseReader
from pdserve_bench.load.options import RequestOptions
from pdserve_bench.load.sse import SseReader
from pdserve_bench.load.target import LoadAnswer, LoadCall

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_ENCODER: Final = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """The address of a server: `http://host:port/prefix`, or with https."""

    tls: bool
    host: str
    port: int
    prefix: str

    @staticmethod
    def parse(text: str) -> BaseUrl:
        """Parse a URL. A last part `/v1` is left out. Raises `ConfigError`."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"base-url: {text!r} is no URL: {exc}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"base-url: {text!r} is not of the form http://HOST:PORT or https://HOST:PORT")
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(f"base-url: {text!r} has characters that no URL has")
        tls = parts.scheme == "https"
        default = 443 if tls else 80
        return BaseUrl(tls, parts.hostname, default if port is None else port, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The requests of an HTTP target, as far as they do not differ from call to call."""

    chat: bool = False
    ours: bool = False
    """The server is a pdserve router, so requests may name their class and session."""
    continuous_usage: bool = False
    """The server is asked for its usage with each chunk, which tells the tokens of each. It is not a field of OpenAI."""
    api_key: str = ""


class HttpTarget:
    """One server. Connections are kept, and there are as many as requests at the same time."""

    def __init__(self, url: BaseUrl, options: RequestOptions, http: HttpOptions) -> None:
        self.url = url
        self._options = options
        self._http = http
        self._connections = ConnectionPool(url)
        path = url.prefix + (CHAT if http.chat else COMPLETIONS)
        self._head = request_head("POST", path, url, http.api_key)

    async def send(self, call: LoadCall, answer: LoadAnswer) -> None:
        """Send the call and fill the answer. See `Target.send`."""
        if self._http.chat and not isinstance(call.prompt, str):
            answer.error = CHAT_NEEDS_TEXT
            return
        try:
            body = request_body(call, self._options, self._http)
        except (UnicodeEncodeError, msgspec.MsgspecError):
            answer.error = BAD_UTF8
            return
        data = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n" % (self._head, len(body))
        if self._http.ours:
            data += _header("X-Slo-Class", call.slo_class) + _header("X-Session-Id", call.session)
        reader = SseReader(call, answer)
        reason, message = await self._connections.request(b"%b\r\n%b" % (data, body), reader)
        answer.error, answer.message = answer.error or reason, answer.message or message

    async def close(self) -> None:
        """Close all connections."""
        self._connections.close()


class ConnectionPool:
    """The connections to one server. The one that was used last is used first."""

    def __init__(self, url: BaseUrl) -> None:
        self._url = url
        self._tls = ssl.create_default_context() if url.tls else None
        self._idle: list[HttpConnection] = []
        self._open: set[HttpConnection] = set()

    async def request(self, data: bytes, reader: ResponseReader) -> tuple[str, str]:
        """Send a request on a connection. Return the reason of a failure and what the system said of it, or nothing.

        A server may close a kept connection at the moment of a request. Such a request is sent again, on a new connection.
        """
        while True:
            reused = self._take()
            try:
                connection = reused or await self._connect()
            except (ConnectionRefusedError, socket.gaierror) as exc:
                return CONNECTION_REFUSED, str(exc)
            except (OSError, UnicodeError) as exc:  # ssl.SSLError is an OSError; a name may be too long for DNS
                return CONNECT_FAILED, str(exc)
            try:
                reason = await connection.request(data, reader)
            finally:
                self._give_back(connection)
            if not (reason and reused and not connection.received):
                return reason, ""

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.abort()
        self._open.clear()
        self._idle.clear()

    def _take(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            self._open.discard(connection)
        return None

    def _give_back(self, connection: HttpConnection) -> None:
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.abort()
            self._open.discard(connection)

    async def _connect(self) -> HttpConnection:
        url = self._url
        _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, url.host, url.port, ssl=self._tls)
        self._open.add(connection)
        return connection


def request_head(method: str, path: str, url: BaseUrl, api_key: str) -> bytes:
    """Return the head of all requests, without its last lines."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {url.authority}\r\nAccept: */*\r\nUser-Agent: pdserve-bench\r\n"
    return head.encode() + _header("Authorization", f"Bearer {api_key}" if api_key else "")


def request_body(call: LoadCall, options: RequestOptions, http: HttpOptions) -> bytes:
    """Return the JSON body of a call. Raises `UnicodeEncodeError` for a text that UTF-8 cannot hold."""
    usage: dict[str, bool] = {"include_usage": True}
    if http.continuous_usage:
        usage["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": call.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": usage,
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    body |= {name: value for name in ("cache_salt", "placement") if (value := getattr(options, name))}
    if http.chat:
        body["messages"] = [{"role": "user", "content": call.prompt}]
    else:
        body["prompt"] = call.prompt
    return _ENCODER.encode(body)


def _header(name: str, value: str) -> bytes:
    """Return one header line. A value that would break the head is left out of it, and so is an empty one."""
    return f"{name}: {value}\r\n".encode() if value and value.isascii() and value.isprintable() else b""
