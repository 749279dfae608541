"""The buffer between the core and one client, without either."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import Cancelled
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import FinishReason
from router.api.answer import Delta
from router.service.buffered_generation import MAX_JOINED, BufferedGeneration

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


PIECES = st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3), st.integers(1, 400)), min_size=1, max_size=12)
"""Deltas of so many tokens with this text, and how many such deltas come before the client takes the next one."""


@given(pieces=PIECES, logprobs=st.booleans())
def test_what_piles_up_is_given_out_as_one_and_nothing_is_lost(pieces: list[tuple[int, str, int]], logprobs: bool) -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", 1, lambda _: None)
        taken: list[Delta] = []
        pushed: list[Delta] = []
        for number, (count, text, times) in enumerate(pieces):
            for turn in range(times):
                index = sum(len(delta.ids) for delta in pushed[-1:]) + (pushed[-1].index if pushed else 0)
                ids = tuple(range(index, index + count))
                told = tuple(TokenLogprobs(-0.5, ()) for _ in ids) if logprobs else ()
                last = number + 1 == len(pieces) and turn + 1 == times
                pushed.append(Delta(index, ids, text, FinishReason.LENGTH if last else None, told))
                generation.push(pushed[-1])
            taken.append(await anext(generation))
            assert len(taken[-1].ids) <= 3 * MAX_JOINED
        while taken[-1].finish_reason is None:
            taken.append(await anext(generation))

        assert "".join(delta.text for delta in taken) == "".join(delta.text for delta in pushed)
        assert [i for delta in taken for i in delta.ids] == list(range(sum(len(delta.ids) for delta in pushed)))
        assert [x for delta in taken for x in delta.logprobs] == [x for delta in pushed for x in delta.logprobs]
        assert all(delta.ids == tuple(range(delta.index, delta.index + len(delta.ids))) for delta in taken)
        assert [delta.finish_reason for delta in taken[:-1]] == [None] * (len(taken) - 1)
        if not logprobs:
            assert len(taken) <= len(pieces) + len(pushed) // MAX_JOINED + 1

    asyncio.run(story())


def test_deltas_with_logprobs_are_not_joined() -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", 1, lambda _: None)
        for index in range(3):
            generation.push(Delta(index, (index,), "a", None, (TokenLogprobs(-0.5, ()),)))
        assert [len((await anext(generation)).ids) for _ in range(3)] == [1, 1, 1]

    asyncio.run(story())
