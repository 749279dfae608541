"""File descriptors: each port has its share, so that no flood of connections to one of them locks others out."""

from __future__ import annotations

import logging
import resource
from typing import Final

from pdserve.core.errors import ConfigError

logger = logging.getLogger(__name__)

RESERVED: Final = 256
"""For links (one each), sockets that listen, logs, pipes, and connections that were accepted and are being refused."""
OWN: Final = 64
"""Of the reserved ones: what is no connection that a port has admitted."""
MAX_ADMINS: Final = 32
"""Connections of the admin port: people and their scripts."""
MIN_CONNECTIONS: Final = 16


def raise_limit() -> int:
    """Lift the process's own limit to what it may have, and return it. Shells commonly start processes with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def share_of_clients(limit: int, max_connections: int) -> int:
    """Connections that the HTTP port may have, and as many the gRPC port, of a process with `limit` descriptors.

    Raises `ConfigError` when hardly any is left.
    """
    share = min(max_connections, (limit - RESERVED) // 2)
    if share < MIN_CONNECTIONS:
        raise ConfigError(
            f"RLIMIT_NOFILE of {limit} leaves {max(0, share)} connections for each port of clients besides {RESERVED} "
            f"descriptors for workers; at least {MIN_CONNECTIONS} are needed: raise it (`ulimit -n`)"
        )
    if share < max_connections:
        logger.warning("router.max_connections %d is lowered to %d: RLIMIT_NOFILE is %d", max_connections, share, limit)
    return share


def share_of_links(limit: int, share_of_clients: int) -> int:
    """Connections that the link port may have: whatever the ports of clients and the admin port leave."""
    return limit - 2 * share_of_clients - MAX_ADMINS - OWN
