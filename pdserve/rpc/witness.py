"""Evidence that a process has ended, for the end of a link whose stream broke."""

from __future__ import annotations

import asyncio
from typing import Final

READ_BYTES: Final = 4096


async def ended(address: str) -> None:
    """Return once the process that listens at `address` (host:port) has ended: nothing listens there, or a connection to it is
    closed. An address that gives no answer proves nothing, so this may wait for ever; the caller bounds it."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return
    except (OSError, ValueError):  # unreachable from here, or no address
        await asyncio.Event().wait()
        return
    try:
        while await reader.read(READ_BYTES):
            pass
    except OSError:
        pass
    finally:
        writer.close()
