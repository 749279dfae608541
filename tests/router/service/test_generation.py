"""The buffer between the core and one client, without either."""

from __future__ import annotations

import asyncio

from pdserve.core.errors import Cancelled
from pdserve.core.sampling import FinishReason
from router.api.answer import Delta
from router.service.buffered_generation import BufferedGeneration

LIMIT_S = 30.0
LAST = Delta(0, (7,), "a", FinishReason.LENGTH)


def test_a_client_that_stops_reading_at_the_last_delta_stalls_too() -> None:
    """Nothing waits in the buffer any more, yet its task waits inside a write for ever."""

    async def story() -> None:
        released: list[BufferedGeneration] = []
        generation = BufferedGeneration("r", 1, released.append)
        generation.push(LAST)
        assert await anext(generation) == LAST
        stalls = [generation.stalls(now_s=now_s, limit_s=LIMIT_S) for now_s in (0.0, 1.0, 1.0 + LIMIT_S)]
        assert stalls == [False, False, True]
        generation.drop_client(Cancelled("the client took nothing"))
        assert released == [generation]

    asyncio.run(story())


def test_a_client_that_waits_for_the_next_delta_does_not_stall() -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", 1, lambda _: None)
        generation.push(Delta(0, (7,), "a", None))
        await anext(generation)
        waiting = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)  # lets it begin to wait
        assert not any(generation.stalls(now_s=now_s, limit_s=LIMIT_S) for now_s in (0.0, 1.0, 100.0, 200.0))
        generation.push(LAST)
        assert await waiting == LAST

    asyncio.run(story())
