"""File descriptors. Each port has its share, so that a flood of connections to one port does not lock out the others."""

from __future__ import annotations

import logging
import resource
from typing import Final

from pdserve.core.errors import ConfigError

logger = logging.getLogger(__name__)

RESERVED: Final = 256
"""These descriptors are for links (one each), listening sockets, logs, pipes, and accepted connections that are being
refused."""
OWN: Final = 64
"""This part of the reserved descriptors is for everything but admitted connections."""
MAX_ADMINS: Final = 1024
"""The admin port takes at most this many connections: those of people, their scripts, the actuator, and a hook for each worker
of a large cluster that goes down at once."""
ADMIN_SHARE: Final = 32
"""It takes at most this part of the descriptors, so that a low limit leaves the others theirs."""
ADMIN_DESCRIPTORS: Final = 3
"""A connection to it needs so many: its own, and both ends of the one behind the gate."""
MIN_CONNECTIONS: Final = 16
MOST_CONNECTIONS: Final = 1 << 16  # of each port, where the settings name no number


def raise_limit() -> int:
    """Raise the process's soft limit to its hard limit, and return it. Shells commonly start processes with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def share_of_clients(limit: int, max_connections: int | None) -> int:
    """Return how many connections the HTTP port and the gRPC port may each have in a process with `limit` descriptors.

    `max_connections` None: as many as make sense; half of the descriptors that both could have stay for workers.

    Raises `ConfigError` when fewer than `MIN_CONNECTIONS` are left.
    """
    if max_connections is None:
        max_connections = max(MIN_CONNECTIONS, min(MOST_CONNECTIONS, (limit - RESERVED) // 4))
    share = min(max_connections, (limit - RESERVED) * 2 // 5)  # twice, and half of it again, as `share_of_links` says
    if share < MIN_CONNECTIONS:
        raise ConfigError(
            f"RLIMIT_NOFILE of {limit} leaves {max(0, share)} connections for each port of clients besides {RESERVED} "
            f"descriptors for workers; at least {MIN_CONNECTIONS} are needed: raise it (`ulimit -n`)"
        )
    if share < max_connections:
        logger.warning("router.max_connections %d is lowered to %d: RLIMIT_NOFILE is %d", max_connections, share, limit)
    return share


def share_of_admins(limit: int) -> int:
    """Return how many connections the admin port may have."""
    return min(MAX_ADMINS, limit // ADMIN_SHARE)


def share_of_links(limit: int, share_of_clients: int) -> int:
    """Return how many connections the link port may have: those that the client ports and the admin port leave. The HTTP port
    has half of its share again, for connections that get the answer that the port is full."""
    return limit - 2 * share_of_clients - share_of_clients // 2 - ADMIN_DESCRIPTORS * share_of_admins(limit) - OWN
