"""Staging blocks: who gets them, in which order, and what one peer cannot do to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.staging import SlotPool
from pdserve.core.ids import Incarnation

A, B, C = (Incarnation(number) for number in (1, 2, 3))


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_those_who_wait_are_served_in_order() -> None:
    """A smaller wish does not overtake a larger one of another peer: that one would wait for ever."""

    async def test() -> None:
        pool = SlotPool(8)
        first, second = pool.take(A, 4).result(), pool.take(B, 3).result()
        large, small = pool.take(C, 4), pool.take(B, 1)
        assert not large.done()
        assert not small.done()
        pool.give_back(B, second)
        assert large.done()
        assert not small.done()
        pool.give_back(A, first)
        assert small.done()

    run(test)


def test_a_peer_at_its_limit_waits_and_is_passed_over() -> None:
    async def test() -> None:
        pool = SlotPool(8)
        held = [pool.take(A, 2).result() for _ in range(2)]
        more, other = pool.take(A, 1), pool.take(B, 4)
        assert other.done(), "a lender that stands still holds up the others"
        assert not more.done()
        pool.give_back(A, held[0])
        assert more.done()

    run(test)


def test_one_that_leaves_lets_the_next_one_in() -> None:
    """Also when it had its blocks already."""

    async def test() -> None:
        pool = SlotPool(4)
        one = pool.take(A, 2)
        other = pool.take(B, 1)
        large, small = pool.take(C, 2), pool.take(C, 1)
        assert not large.done()
        assert not small.done()
        pool.leave(C, large)
        assert small.done()
        for peer, granted in ((A, one), (B, other), (C, small)):
            pool.leave(peer, granted)
        assert (pool.num_held, pool.num_waiting) == (0, 0)

    run(test)


@given(st.lists(st.tuples(st.sampled_from(["take", "leave", "give_back"]), st.integers(0, 2), st.integers(1, 5)), max_size=80))
def test_no_block_is_lost_or_lent_twice_and_everybody_is_served_in_the_end(steps: list[tuple[str, int, int]]) -> None:
    async def test() -> None:
        pool = SlotPool(10)
        asked: list[tuple[Incarnation, asyncio.Future[tuple[int, ...]]]] = []
        for step, number, count in steps:
            if step == "take":
                asked.append((Incarnation(number), pool.take(Incarnation(number), count)))
            elif asked:
                peer, granted = asked.pop(count % len(asked))
                if step == "give_back" and granted.done():
                    pool.give_back(peer, granted.result())
                else:
                    pool.leave(peer, granted)
            check(pool, asked)
        while asked:
            peer, granted = next(one for one in asked if one[1].done())  # StopIteration: nobody can go on
            asked.remove((peer, granted))
            pool.give_back(peer, granted.result())
            check(pool, asked)
        assert (pool.num_held, pool.num_waiting) == (0, 0)

    run(test)


def check(pool: SlotPool, asked: list[tuple[Incarnation, asyncio.Future[tuple[int, ...]]]]) -> None:
    held = [slot for _, granted in asked if granted.done() for slot in granted.result()]
    assert len(set(held)) == len(held) == pool.num_held
    for peer in {peer for peer, _ in asked}:
        assert sum(len(granted.result()) for one, granted in asked if one == peer and granted.done()) <= pool.max_per_peer
    assert pool.num_waiting == sum(not granted.done() for _, granted in asked)
