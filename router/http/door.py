"""The door refuses by the head of a request alone, whatever its route: web pages that nobody has allowed, and encoded bodies.

A browser lets any page send requests to loopback, and names the page's origin in them. A page can also point a name of its own
at loopback, and is then of the same origin as the server; the name stands in Host. Clients that are no browsers send no Origin.

Refusals have OpenAI's shape, also those of the protocol and for unknown paths.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.config import RouterConfig
from pdserve.core.settings.types import is_loopback
from router.http.reply import Headers, exchange_of, first_headers
from router.openai.json import encode_json

LOCAL_NAMES: Final = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
"""Names of the own machine, the last two as Docker's and Podman's containers call it. None of them can be had in the public
DNS."""
PREFLIGHT_AGE_S: Final = 600  # for so long a browser need not ask again; Chromium's limit is 7200
METHODS: Final = "GET, HEAD, POST, OPTIONS"
EXPOSED: Final = (
    b"pdserve-request-id, pdserve-timeline, retry-after, x-pdserve-ignored-fields, x-request-id, x-should-retry"
    # the headers of answers that docs/api.md lists; a page sees no other one
)
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:\d{1,5})?")


class Door:
    """The application of one listening address, behind the check of each request's head. It needs this package's server."""

    def __init__(self, app: ASGIApp, settings: RouterConfig, host: str) -> None:
        """`host` is the address where the server listens."""
        self._app = app
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)
        self._checks_hosts = "*" not in self._hosts and (bool(self._hosts) or is_loopback(host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, answer a preflight, or let the request pass."""
        heads = first_headers(scope)
        origin = heads.get("origin")
        why = self._refused(heads, origin)
        if why is not None:
            headers = {"accept-encoding": "identity"} if why.status == 415 else None
            await Response(why.body, why.status, headers, media_type="application/json")(scope, receive, send)
            return
        if origin is None:
            await self._app(scope, receive, send)
            return
        exchange_of(scope).add_headers(self._shared_with(origin))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in heads:
            await Response(None, 204, _preflight(heads))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refused(self, heads: Mapping[str, str], origin: str | None) -> Refusal | None:
        """Return why the request is refused. None: it is not."""
        host = heads.get("host")
        if self._checks_hosts and host is not None and not self._is_local(host):
            return foreign_host(host)
        if origin is not None and not self._is_allowed(origin, host):
            return foreign_origin(origin)
        encoding = heads.get("content-encoding")
        if encoding is not None and encoding.strip().lower() not in ("", "identity"):
            return encoded_body(encoding)
        transfer = heads.get("transfer-encoding")
        if transfer is not None and transfer.strip().lower() != "chunked":
            return encoded_transfer(transfer)
        return None

    def _is_local(self, host: str) -> bool:
        """Tell whether a Host is the server's own. An IP address is: nobody can point one elsewhere."""
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1].removesuffix(".")
        if name in LOCAL_NAMES or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _is_allowed(self, origin: str, host: str | None) -> bool:
        """Tell whether pages of an origin may use the server. Its own may."""
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        return host is not None and origin.lower().partition("://")[2] == host.lower()

    def _shared_with(self, origin: str) -> Headers:
        """Return the headers by which the browser lets a page see the answer."""
        shared = (b"access-control-expose-headers", EXPOSED)
        if "*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), shared]
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"), shared]


def _preflight(heads: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that tell a browser which requests a page may send: all that it asks for."""
    asked = heads.get("access-control-request-headers")
    return {
        "access-control-allow-methods": METHODS,
        **({} if asked is None else {"access-control-allow-headers": asked}),
        "access-control-max-age": str(PREFLIGHT_AGE_S),
    }


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
