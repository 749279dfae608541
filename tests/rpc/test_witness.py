"""What counts as evidence that a process has ended, and what does not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from pdserve.rpc.witness import ended

WAIT_S = 60.0


def test_a_port_at_which_nobody_listens_is_evidence() -> None:
    async def story() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # nobody else gets the port
            async with asyncio.timeout(WAIT_S):
                await ended(f"127.0.0.1:{bound.getsockname()[1]}")

    asyncio.run(story())


def test_the_end_of_a_connection_is_evidence_and_the_connection_is_not() -> None:
    async def story() -> None:
        taken = asyncio.Queue[asyncio.StreamWriter]()
        server = await asyncio.start_server(lambda reader, writer: taken.put_nowait(writer), "127.0.0.1", 0)
        async with server, asyncio.timeout(WAIT_S):
            waits = asyncio.create_task(ended(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            writer = await taken.get()
            assert not waits.done()
            writer.close()
            await waits

    asyncio.run(story())


@pytest.mark.parametrize("address", ["", "h", "h:", ":80", "h:0", "h:-1", "h:65536", "h:99999999999", "h:http"])
def test_what_is_no_address_proves_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[Any] = []

    async def open_connection(*where: Any) -> None:
        dialled.append(where)
        raise ConnectionRefusedError

    async def story() -> None:
        waits = asyncio.create_task(ended(address))
        await asyncio.sleep(0)
        assert (waits.done(), dialled) == (False, [])
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    asyncio.run(story())
