"""The ports of a router stay its own while it is away: each is held by a socket that is bound and never listens.

The kernel gives a port that somebody has bound to no outgoing connection and to nobody who asks for any free port. A router
that starts binds beside the holding socket, since both set SO_REUSEADDR, which every server of ours does. Connections never
reach a socket that does not listen, and two routers cannot share a port: a port with a listener is refused to any other socket
without SO_REUSEPORT, which no server of ours sets. For the same reason a port is held before its router listens, or after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from typing import Any

from pdserve.config import RouterConfig

NAMES = ("http", "grpc", "link", "admin", "metrics")


def hosts_of(router: RouterConfig) -> dict[str, str]:
    """Return the host at which each port of a router is bound."""
    return {
        "http": router.host,
        "grpc": router.host,
        "link": router.link_host or router.host,
        "admin": router.admin_host,
        "metrics": router.metrics_host,
    }


def ports_of(router: RouterConfig) -> dict[str, int]:
    """Return the ports of a router's settings; 0 stands for any free one.

    The default port of metrics is not among them: it is a wish, and the router takes another one where it is taken.
    """
    ports = {
        "http": router.http_port,
        "grpc": router.grpc_port,
        "link": router.link_port,
        "admin": router.admin_port_or_default,
    }
    if router.metrics_port is not None or not router.grpc_port:
        ports["metrics"] = router.metrics_port or 0
    return ports


def at_ports(router: RouterConfig, ports: dict[str, int]) -> RouterConfig:
    """Return the settings with these ports."""
    real: dict[str, Any] = {f"{name}_port": port for name, port in ports.items()}
    return dataclasses.replace(router, **real)


class HeldPorts:
    """The ports of one router. `hold` may be called again and again; `close` gives all of them back."""

    def __init__(self, router: RouterConfig) -> None:
        self.router = router  # any free port becomes a real one at the first `hold`
        self._sockets: dict[str, socket.socket] = {}

    def learn(self, router: RouterConfig) -> None:
        """Know the ports that the router has taken, for the next `hold`."""
        self.router = router

    def hold(self) -> RouterConfig:
        """Hold each port that can be held now, and return the settings with the real ports.

        A port on which somebody listens, and a host that is none of this machine's, are left to the router, which says
        clearly what is wrong.
        """
        ports, hosts = ports_of(self.router), hosts_of(self.router)
        for name, port in ports_of(self.router).items():
            if name not in self._sockets and (held := _bound(hosts[name], port)) is not None:
                self._sockets[name] = held
                ports[name] = held.getsockname()[1]
        self.router = at_ports(self.router, ports)
        return self.router

    def close(self) -> None:
        """Give the ports back. Idempotent."""
        for held in self._sockets.values():
            held.close()
        self._sockets.clear()


def _bound(host: str, port: int) -> socket.socket | None:
    """Return a socket that is bound and does not listen; None when it cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        return None
    try:
        held = socket.socket(family, kind, protocol)
    except OSError:  # no descriptor is free
        return None
    with contextlib.suppress(OSError):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        return held
    held.close()
    return None
