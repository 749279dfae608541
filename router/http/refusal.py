"""Answers to requests that no route sees: of the protocol, the door, and for unknown paths. They have OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from router.openai.errors import encode_json

MAX_QUOTED_CHARS: Final = 200  # of what an error quotes from the head, such as its path


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal: the HTTP status, and the code and message of OpenAI's error object."""

    status: HTTPStatus
    code: str
    message: str

    @property
    def body(self) -> bytes:
        """The error object as JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return encode_json({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}})

    def encode(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the whole response, after which the connection ends. `headers` are added to its own, such as Date."""
        body = self.body
        own = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            own.append((b"retry-after", b"1"))
        lines = [name + b": " + value for name, value in [*own, *headers]]
        return b"\r\n".join([f"HTTP/1.1 {self.status.value} {self.status.phrase}".encode(), *lines, b"", body])


def malformed(message: str) -> Refusal:
    """Refuse what is not HTTP."""
    return Refusal(HTTPStatus.BAD_REQUEST, "invalid_request", message)


def head_too_large(limit: str) -> Refusal:
    """Refuse a head over `limit`, which is written with its unit."""
    return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "request_too_large", f"head: is over the limit of {limit}")


def trailers_too_large(limit_bytes: int) -> Refusal:
    """Refuse trailers over the limit."""
    message = f"trailers: are over the limit of {limit_bytes} bytes"
    return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "request_too_large", message)


def head_too_slow(limit_s: float) -> Refusal:
    """Refuse a head that was not complete in time."""
    return Refusal(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", f"head: not complete after {limit_s:g} s")


def too_many_connections(limit: int) -> Refusal:
    """Refuse a connection because all places serve requests."""
    message = f"connections: all {limit} serve requests (router.max_connections)"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "overloaded", message)


def other_version(version: str) -> Refusal:
    """Refuse a version of HTTP that this server does not speak."""
    message = f"HTTP/{version} is not spoken here; HTTP/1.1 and HTTP/1.0 are"
    return Refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "http_version_not_supported", message)


def no_tunnel() -> Refusal:
    """Refuse CONNECT: this server is no proxy."""
    return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", "CONNECT: Method Not Allowed")


def foreign_host(host: str) -> Refusal:
    """Refuse a name that is not this machine's: a web page may have pointed a name of its own here."""
    message = f"Host: {shortened(host)!r} is no name of this machine; add it to router.allowed_hosts if clients call it so"
    return Refusal(HTTPStatus.FORBIDDEN, "forbidden", message)


def foreign_origin(origin: str) -> Refusal:
    """Refuse a web page that no setting allows."""
    message = (
        f"Origin: web pages of {shortened(origin)!r} may not use this server; add it to router.allowed_origins "
        "(--allowed-origins) if they are to"
    )
    return Refusal(HTTPStatus.FORBIDDEN, "forbidden", message)


def encoded_body(encoding: str) -> Refusal:
    """Refuse a compressed body, because its size is known only after work on it."""
    message = f"Content-Encoding: {shortened(encoding)!r} is not supported; send the body as it is"
    return Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def encoded_transfer(encoding: str) -> Refusal:
    """Refuse a body that is encoded for its way (RFC 9112 section 6.1)."""
    message = f"Transfer-Encoding: {shortened(encoding)!r} is not supported; only 'chunked' is"
    return Refusal(HTTPStatus.NOT_IMPLEMENTED, "not_implemented", message)


def shortened(text: str) -> str:
    """Return what a client wrote, cut to a length that an error may quote."""
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."
