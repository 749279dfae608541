"""Any server with OpenAI's HTTP API as a target: `/v1/completions` or `/v1/chat/completions`, streamed."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.load.target import (
    BAD_HTTP,
    BAD_JSON,
    BAD_UTF8,
    BROKEN_STREAM,
    CHAT_NEEDS_TEXT,
    CONNECT_FAILED,
    CONNECTION_REFUSED,
    HEAD_TOO_LONG,
    LINE_TOO_LONG,
    REDIRECTED,
    TARGET_BUG,
    TOO_MANY_TOKENS,
    LoadAnswer,
    LoadCall,
    RequestOptions,
    served_of_timeline,
)
from pdserve_bench.load.watch import one_line
from pdserve_bench.row import Served

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


# One HTTP/1.1 connection of the load generator. It takes the time of each answer where the bytes come in.
#
# A connection serves one request at a time and is kept for the next one. httptools bounds neither a head nor trailers, so both
# are counted here; the reader bounds what it keeps of a body.


MAX_HEAD_BYTES: Final = 64 << 10
MAX_BETWEEN_BYTES: Final = 64 << 10
"""The most bytes of trailers and chunk extensions in a row."""
LINGER_S: Final = 1.0
"""The longest time between the end of an answer and the end of its HTTP message."""


_log = logging.getLogger(__name__)


class ResponseReader(Protocol):
    """The reader of one answer."""

    done: bool
    """The answer has come whole."""

    @property
    def failed(self) -> bool:
        """The answer has failed, and the connection is of no use any more."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take the status and the headers, with names in lower case."""

    def body(self, data: bytes, now_s: float) -> None:
        """Take a part of the body."""

    def end(self, now_s: float) -> None:
        """Note the end of the message or of the connection."""


class HttpConnection(asyncio.Protocol):
    """One connection. Its target owns it, and closes it by `abort`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: ResponseReader | None = None
        self._over: asyncio.Future[str] | None = None  # the end of the present request: "", or its failure
        self._timer: asyncio.TimerHandle | None = None
        self._now_s = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._in_head = True
        self._uncounted = 0  # bytes in a row that are no part of a body
        self._body_came = False
        self.received = False
        """A byte of the present answer has come."""
        self.usable = True
        """The connection may take a further request when this one is over."""

    async def request(self, data: bytes, reader: ResponseReader) -> str:
        """Send a request and wait for the end of its answer. Return the reason of a failure, or nothing.

        A cancellation aborts the connection.
        """
        assert self._transport is not None
        assert self._over is None
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._begin_message()
        self.received = False
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            return await self._over
        finally:
            if not self._over.done() or self._over.cancelled():
                self.abort()
            self._over = self._reader = None

    def abort(self) -> None:
        """Close the connection at once."""
        self.usable = False
        self._disarm()
        if self._transport is not None:
            self._transport.abort()

    # Calls of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is no subclass

    def data_received(self, data: bytes) -> None:
        """Parse what was read. The time of all that it holds is now."""
        self._now_s = time.perf_counter()
        reader, parser = self._reader, self._parser
        if reader is None or parser is None:  # nobody asked for it
            self.abort()
            return
        self.received = True
        self._body_came = False
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError:  # a bug here, since readers raise nothing
            _log.exception("an answer could not be read")
            self._fail(TARGET_BUG)
            return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(BAD_HTTP)
            return
        self._uncounted = 0 if self._body_came else self._uncounted + len(data)
        if self._uncounted > (MAX_HEAD_BYTES if self._in_head else MAX_BETWEEN_BYTES):
            self._fail(HEAD_TOO_LONG if self._in_head else BAD_HTTP)
        elif reader.failed:
            self._fail("")
        elif reader.done and self._timer is None and self._waits:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that runs. An answer may end with its connection."""
        self.usable = False
        self._disarm()
        if self._reader is not None and self._waits:
            whole = exc is None and self.received and not self._in_head
            if whole or self._reader.done:
                self._reader.end(time.perf_counter())
            self._resolve("" if whole or self._reader.done else BROKEN_STREAM)

    # Calls of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are only counted."""
        if self._in_head:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Hand the head to the reader, unless it only announces another one."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if self._reader is None:  # a second answer to one request
            self.usable = False
        elif status >= 200:
            self._in_head = False
            self._reader.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Hand a part of the body to the reader."""
        reader = self._reader
        if reader is not None and not reader.failed and not reader.done:
            self._body_came = True
            reader.body(data, self._now_s)

    def on_message_complete(self) -> None:
        """End the request. The connection stays if both sides allow it."""
        assert self._parser is not None
        if self._parser.get_status_code() < 200:  # it only announces the answer
            self._begin_message()
            return
        if self._reader is not None:
            self._reader.end(self._now_s)
            self._reader = None
        self.usable = self.usable and self._parser.should_keep_alive()
        self._disarm()
        self._resolve("")

    @property
    def _waits(self) -> bool:
        return self._over is not None and not self._over.done()

    def _begin_message(self) -> None:
        self._headers = {}
        self._in_head = True
        self._uncounted = 0

    def _fail(self, reason: str) -> None:
        self.usable = False
        self._resolve(reason)
        self.abort()

    def _resolve(self, reason: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# The events of a streamed OpenAI answer, whoever sends them, become the times and tokens of an `LoadAnswer`.
#
# A server says how many tokens a chunk has only where it sends its usage with each chunk (`continuous_usage_stats` of vLLM and
# of pdserve). Otherwise a chunk with text counts as one token until the usage at the end gives the sum. Nothing here is kept
# that grows with what a hostile server sends.


MAX_LINE_BYTES: Final = 1 << 20
MAX_ERROR_BYTES: Final = 64 << 10
"""An answer that is an error is read so far. The rest is dropped."""
MAX_REASON_CHARS: Final = 64
SPARE_CHUNKS: Final = 16
"""Chunks beyond `max_tokens` that a request may have: servers send an empty one first, or repeat the last one."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _SseChunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    pdserve: Served | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_SseChunk)


class SseReader:
    """Reads one answer. The connection calls it as the answer comes; `failed` then says that the connection is of no use."""

    def __init__(self, call: LoadCall, answer: LoadAnswer) -> None:
        self._answer = answer
        self._max_tokens = call.max_tokens
        self._rest = bytearray()  # the beginning of a line
        self._status = 0
        self._error_body = bytearray()
        self._counted = 0
        self._chunks = 0
        self._finished = False  # a finish reason has come
        self.done = False
        """The answer has come whole. Only the end of the HTTP message may still follow."""

    @property
    def failed(self) -> bool:
        """The answer has failed in a way that ends the connection."""
        return bool(self._answer.error)

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take the status and the headers, with names in lower case."""
        self._status = status
        if timeline := headers.get(b"pdserve-timeline"):
            self._answer.served = served_of_timeline(timeline)
        if 300 <= status < 400:
            self._answer.error = REDIRECTED

    def body(self, data: bytes, now_s: float) -> None:
        """Take a part of the body, which arrived at `now_s`."""
        if self._status != 200:
            self._error_body += data[: MAX_ERROR_BYTES - len(self._error_body)]
            return
        if b"\n" not in data:
            self._rest += data
        else:
            if self._rest:
                data = bytes(self._rest) + data
            lines = data.split(b"\n")
            self._rest = bytearray(lines.pop())
            for line in lines:
                if len(line) > MAX_LINE_BYTES:
                    self._answer.error = LINE_TOO_LONG
                elif line.startswith(b"data:"):
                    self._event(line[5:].strip(), now_s)
                if self.failed or self.done:
                    return
        if len(self._rest) > MAX_LINE_BYTES:
            self._answer.error = LINE_TOO_LONG

    def end(self, now_s: float) -> None:
        """Note the end of the message or of the connection."""
        answer = self._answer
        if self.done or answer.error:
            return
        answer.ended_s = now_s
        if self._status and self._status != 200:
            answer.error, answer.message = error_reason(self._status, bytes(self._error_body))
        elif self._finished:  # some servers send no [DONE]
            self.done = True
        else:
            answer.error = BROKEN_STREAM

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            self._answer.ended_s = now_s
            return
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._answer.error = BAD_JSON
            return
        answer = self._answer
        if chunk.error is not None:
            answer.error, answer.message = _named(chunk.error) or "error_in_stream", _message(chunk.error)
        text = ""
        for choice in chunk.choices:
            text += choice.text or ""
            if delta := choice.delta:
                text += delta.content or delta.reasoning_content or delta.reasoning or ""
            self._finished = self._finished or choice.finish_reason is not None
        if text:
            answer.texts.append(text)
        self._count(chunk, text, now_s)
        if chunk.pdserve is not None:
            answer.served = replace(chunk.pdserve, cached_prompt_tokens=answer.served.cached_prompt_tokens)

    def _count(self, chunk: _SseChunk, text: str, now_s: float) -> None:
        """Count the tokens of a chunk, by its usage where it has one, else as one token if it has text."""
        answer, usage = self._answer, chunk.usage
        tokens = 1 if text else 0
        if usage is not None:
            answer.prompt_tokens, answer.output_tokens = max(0, usage.prompt_tokens), max(0, usage.completion_tokens)
            if usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None:
                answer.served = Served(cached_prompt_tokens=usage.prompt_tokens_details.cached_tokens)
            if chunk.choices:
                tokens = max(0, usage.completion_tokens - self._counted)
        if tokens:
            self._counted += tokens
            self._chunks += 1
            answer.arrivals.append((now_s, tokens))
        if max(answer.output_tokens or 0, self._counted) > self._max_tokens + SPARE_CHUNKS:
            answer.error = TOO_MANY_TOKENS


def error_reason(status: int, body: bytes) -> tuple[str, str]:
    """Return the reason of an HTTP error, and its message: the code in OpenAI's error object where it is a name, else the
    status; its message, else the whole body."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = None
    error = told.get("error") if isinstance(told, dict) else None
    return _named(error) or f"http_{status}", _message(error) or body.decode("utf-8", "replace")


def _message(error: Any) -> str:
    """Return the message in an OpenAI error object. Empty: it has none."""
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _named(error: Any) -> str:
    """Return the code in an OpenAI error object if it is a short name. Empty: it has none."""
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and len(code) <= MAX_REASON_CHARS and code.replace("_", "").isalnum() and code.isascii():
        return code
    return ""


# The questions to an HTTP server before a run: which model it has, who it is, and whether it can serve.


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
