"""File descriptors: clients get what workers do not need, so that no flood of connections locks a worker out."""

from __future__ import annotations

import logging
import resource
from typing import Final

from pdserve.core.errors import ConfigError

logger = logging.getLogger(__name__)

RESERVED: Final = 256
"""For links (one each), sockets that listen, logs, pipes, and connections that were accepted and are being refused."""
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
