"""Evidence that a process has ended, for the end of a link whose stream broke."""

from __future__ import annotations

import asyncio
from typing import Final, NoReturn

READ_BYTES: Final = 4096
MAX_PORT: Final = 65535  # of TCP


async def ended(address: str) -> None:
    """Return once the process that listens at `address` (host:port) has ended: nothing listens there, or a connection to it is
    closed. An address that gives no answer, or is none, proves nothing, so this may wait for ever; the caller bounds it."""
    host, _, port = address.rpartition(":")
    number = int(port) if port.isdecimal() and len(port) <= len(str(MAX_PORT)) else 0
    if not host or not 0 < number <= MAX_PORT:
        await _never()
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), number)
    except ConnectionRefusedError:
        return
    except (OSError, ValueError):  # unreachable from here, or no name
        await _never()
    try:
        while await reader.read(READ_BYTES):
            pass
    except OSError:
        pass
    finally:
        writer.close()


async def _never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")
