"""Reads of another process's KV by the same transfer thread that a decode worker has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvtransfer.api import Region
from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.thread import TransferThread
from pdserve.core.ids import Incarnation, WorkerId

READER = Incarnation(1)
LENDERS = 2  # the incarnation of lender 0
READ_TIMEOUT_S = 60.0


def lend(region: Region, number: int = 0) -> NixlTransport:
    """Register the process's pool `number`, so that peers can read it until the transport is closed."""
    return NixlTransport(WorkerId("lender"), Incarnation(LENDERS + number), [region])


def described(transport: NixlTransport, region: Region, number: int = 0) -> dict[str, Any]:
    """Return the fields of a lent pool that `read_all` needs."""
    place = {"address": region.address, "num_blocks": region.num_blocks}
    return {"incarnation": LENDERS + number, "metadata": transport.metadata().hex(), **place}


def read_all(
    pool: Region, lent: dict[str, Any], remote_blocks: Sequence[int], local_blocks: Sequence[int], times: int = 1
) -> list[float]:
    """Read the same blocks `times` times, and return the seconds of each read. Raises `TransferFailed`."""
    return asyncio.run(_read_all(pool, lent, remote_blocks, local_blocks, times))


async def _read_all(
    pool: Region, lent: dict[str, Any], remote_blocks: Sequence[int], local_blocks: Sequence[int], times: int
) -> list[float]:
    thread = TransferThread(lambda: NixlTransport(WorkerId("reader"), READER, [pool]))
    lender = Incarnation(lent["incarnation"])
    remote = Region(lent["address"], lent["num_blocks"], pool.block_bytes, pool.device)
    try:
        await thread.start()
        await thread.connect(lender, bytes.fromhex(lent["metadata"]))
        found = []
        for _ in range(times):
            read = thread.read(lender, remote, remote_blocks, local_blocks, deadline_s=READ_TIMEOUT_S, into=pool)
            found.append((await read.result).duration_s)
        return found
    finally:
        await thread.close()
