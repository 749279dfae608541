"""Answers of the protocol itself, given before there is a request that a route could answer. They have OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from router.openai.errors import encode_json


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal: the HTTP status, and the code and message of OpenAI's error object."""

    status: HTTPStatus
    code: str
    message: str

    def encode(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the whole response, after which the connection ends. `headers` are added to its own, such as Date."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        body = encode_json({"error": error})
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


def no_tunnel() -> Refusal:
    """Refuse CONNECT: this server is no proxy."""
    return Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", "CONNECT: Method Not Allowed")
