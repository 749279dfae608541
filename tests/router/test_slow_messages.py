"""Calls whose message does not come: they are given up, so that they do not take the places of others for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pdserve.rpc import malformed
from pdserve.rpc.status import REASON_METADATA

from .local_cluster import local_cluster


@pytest.mark.parametrize("method", ["Generate", "GetModelInfo"])
def test_a_call_without_its_message_is_given_up(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malformed, "RECEIVE_TIMEOUT_S", 0.2)

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            call = cluster.channel.stream_stream(f"/pdserve.rpc.v1.Inference/{method}")(nothing())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert dict(caught.value.trailing_metadata() or ())[REASON_METADATA] == "request_timeout"
            assert "0.2 s" in (caught.value.details() or "")
            await cluster.assert_idle()

    asyncio.run(story())


def test_a_call_that_ends_before_its_message_is_invalid() -> None:
    async def none() -> AsyncIterator[bytes]:
        return
        yield b""

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            call = cluster.channel.stream_stream("/pdserve.rpc.v1.Inference/Generate")(none())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "request: is missing" in (caught.value.details() or "")

    asyncio.run(story())


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_leaves_as_its_message_comes_has_left(turns: int) -> None:
    """Its cancellation was lost in the wait, and its request was served to nobody."""

    class Context:
        def __init__(self) -> None:
            self.message: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def read(self) -> str:
            return await self.message

    async def story() -> None:
        context = Context()
        waiting = asyncio.create_task(malformed._received(context))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        context.message.set_result("request")
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() == cancelled

    asyncio.run(story())
