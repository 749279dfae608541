"""Work in turns on a thread: who leaves while waiting leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from pdserve.core.errors import Unavailable
from router.service.loop_time.serial_thread import SerialThread


class Body:
    """Stands for the bytes of a request."""


def using(body: Body) -> Callable[[], Body]:
    return lambda: body


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_those_brought_who_left_is_let_go_while_the_thread_is_busy() -> None:
    async def story() -> None:
        turns, gate = SerialThread("test"), threading.Event()
        try:
            busy = asyncio.create_task(turns.run(lambda: gate.wait(30)))
            await settle()
            bodies = [Body() for _ in range(4)]
            seen = [weakref.ref(body) for body in bodies]
            waiting = [asyncio.create_task(turns.run(using(body))) for body in bodies]
            del bodies
            await settle()
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            waiting.clear()
            del task
            await settle()
            gc.collect()
            assert [ref() for ref in seen] == [None] * 4
            gate.set()
            assert await busy
            assert await turns.run(lambda: 7) == 7
        finally:
            gate.set()
            turns.close()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_the_next_waits_for_work_whose_caller_has_left_and_closing_tells_it() -> None:
    async def story() -> None:
        turns, gate = SerialThread("test"), threading.Event()
        try:
            left = asyncio.create_task(turns.run(lambda: gate.wait(30)))
            await settle()
            left.cancel()
            waiting = asyncio.create_task(turns.run(lambda: 7))
            await settle()
            assert left.cancelled()
            assert not waiting.done()
            turns.close()
            gate.set()
            with pytest.raises(Unavailable):
                await waiting
        finally:
            gate.set()
            turns.close()

    asyncio.run(asyncio.wait_for(story(), 30))
