"""The door refuses by the head of a request alone, whatever its route: web pages that nobody has allowed, and encoded bodies.

A browser lets any page send requests to loopback, and names the page's origin in them. A page can also point a name of its own
at loopback, and is then of the same origin as the server; the name stands in Host. Clients that are no browsers send no Origin.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.config import RouterConfig
from pdserve.core.settings.types import is_loopback
from router.http import refusal
from router.http.body import header
from router.http.exchange import EXTENSION, ConnectionExchange, Headers
from router.http.refusal import Refusal

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
        origin = header(scope, "origin")
        why = self._refused(scope, origin)
        if why is not None:
            headers = {"accept-encoding": "identity"} if why.status == 415 else None
            await Response(why.body, why.status, headers, media_type="application/json")(scope, receive, send)
            return
        if origin is None:
            await self._app(scope, receive, send)
            return
        exchange: ConnectionExchange = scope["extensions"][EXTENSION]
        exchange.add_headers(self._shared_with(origin))
        if scope["method"] == "OPTIONS" and header(scope, "access-control-request-method") is not None:
            await Response(None, 204, _preflight(scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refused(self, scope: Scope, origin: str | None) -> Refusal | None:
        """Return why the request is refused. None: it is not."""
        host = header(scope, "host")
        if self._checks_hosts and host is not None and not self._is_local(host):
            return refusal.foreign_host(host)
        if origin is not None and not self._is_allowed(origin, host):
            return refusal.foreign_origin(origin)
        encoding = header(scope, "content-encoding")
        if encoding is not None and encoding.strip().lower() not in ("", "identity"):
            return refusal.encoded_body(encoding)
        transfer = header(scope, "transfer-encoding")
        if transfer is not None and transfer.strip().lower() != "chunked":
            return refusal.encoded_transfer(transfer)
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


def _preflight(scope: Scope) -> dict[str, str]:
    """Return the headers that tell a browser which requests a page may send: all that it asks for."""
    asked = header(scope, "access-control-request-headers")
    return {
        "access-control-allow-methods": METHODS,
        **({} if asked is None else {"access-control-allow-headers": asked}),
        "access-control-max-age": str(PREFLIGHT_AGE_S),
    }
