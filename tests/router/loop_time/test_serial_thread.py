"""Work in turns on a thread: who leaves while waiting leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from pdserve.core.errors import Overloaded, Unavailable
from router.service.loop_time import SerialThread

MANY = 64


class Body:
    """Stands for the bytes of a request."""


def using(body: Body) -> Callable[[], Body]:
    return lambda: body


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_those_brought_who_left_is_let_go_while_the_thread_is_busy() -> None:
    async def story() -> None:
        turns, gate = SerialThread("test", MANY), threading.Event()
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
        turns, gate = SerialThread("test", MANY), threading.Event()
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


def test_light_work_of_a_newcomer_passes_heavy_work_that_came_before() -> None:
    """30 prompts of 2 MB held the thread for 21 s, and a prompt of 6 KB waited behind them all."""

    async def story() -> None:
        turns, gate = SerialThread("test", MANY), threading.Event()
        try:
            heavy = [asyncio.create_task(turns.run(lambda: gate.wait(30), ("a", str(i)), 2_000_000)) for i in range(30)]
            await settle()
            light = asyncio.create_task(turns.run(lambda: sum(task.done() for task in heavy), ("a", "light"), 6_000))
            await settle()
            gate.set()
            assert await light <= 1
            assert all(await asyncio.gather(*heavy))
        finally:
            gate.set()
            turns.close()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_where_too_many_wait_the_client_that_has_most_gives_way_and_nobody_else() -> None:
    """Whoever sent 64 long prompts locked all others out."""

    async def story() -> None:
        turns, gate = SerialThread("test", 4), threading.Event()
        try:
            greedy = [asyncio.create_task(turns.run(lambda: gate.wait(30), ("greedy", str(i)), 100)) for i in range(5)]
            await settle()
            other = [asyncio.create_task(turns.run(lambda: 7, ("other", "0"), 100)) for _ in range(2)]
            await settle()
            refused = [task for task in greedy if task.done()]
            assert [type(task.exception()) for task in refused] == [Overloaded] * 2
            assert refused == greedy[3:]  # its newest ones
            gate.set()
            assert await asyncio.gather(*other) == [7, 7]
            assert await asyncio.gather(*greedy[:3]) == [True] * 3
            assert len(turns._turns) == len(turns._asked) == 0
        finally:
            gate.set()
            turns.close()

    asyncio.run(asyncio.wait_for(story(), 30))
