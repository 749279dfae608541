"""The buffer between the core and one client, without either."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import Cancelled
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, Placement, SamplingParams, TokenLogprobs
from router.api.answer import Delta
from router.service.buffered_generation import MAX_JOINED, MAX_JOINED_CHARS, BufferedGeneration, Deliveries, slow_clients

LIMIT_S = 30.0
REPORT = Report(Placement.COLOCATED, "auto", 1, 1)
LAST = Delta(0, (7,), "a", FinishReason.LENGTH)


def test_a_client_that_stops_reading_at_the_last_delta_stalls_too() -> None:
    """Nothing waits in the buffer any more, yet its task waits inside a write for ever."""

    async def story() -> None:
        released: list[BufferedGeneration] = []
        generation = BufferedGeneration("r", (1,), released.append)
        generation.push(LAST)
        assert await anext(generation) == LAST
        stalls = [generation.stalls(now_s=now_s, limit_s=LIMIT_S) for now_s in (0.0, 1.0, 1.0 + LIMIT_S)]
        assert stalls == [False, False, True]
        generation.drop_client(Cancelled("the client took nothing"))
        assert released == [generation]

    asyncio.run(story())


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (Delta(1, (8,), "", FinishReason.STOP, stop_string=2), "two"),
        (Delta(1, (8,), "", FinishReason.STOP), 8),
        (Delta(1, (9,), "", FinishReason.STOP), None),
        (Delta(1, (8,), "", FinishReason.LENGTH), None),
    ],
)
def test_the_last_delta_says_what_stopped_the_output(last: Delta, reason: object, joined: bool) -> None:
    """It is a stop string, or a stop token that the client named; not the model's own end token, nor the length."""

    async def story() -> None:
        sampling = SamplingParams(stop=("one", "two"), stop_token_ids=(7, 8))
        generation = BufferedGeneration("r", (1,), lambda _: None, sampling=sampling)
        generation.push(Delta(0, (7,), "a", None))
        if not joined:
            assert (await anext(generation)).stop_reason is None
        generation.push(last)
        assert (await anext(generation)).stop_reason == reason

    asyncio.run(story())


def test_a_client_that_waits_for_the_next_delta_does_not_stall() -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", (1,), lambda _: None)
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
        generation = BufferedGeneration("r", (1,), lambda _: None)
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


def test_a_client_that_reads_a_pile_of_text_at_once_lets_others_run_in_between() -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", (1,), lambda _: None)
        text = "a" * (MAX_JOINED_CHARS // 4)
        for index in range(40):
            generation.push(Delta(index, (index,), text, FinishReason.LENGTH if index == 39 else None))
        turns: list[int] = []
        sizes: list[int] = []

        async def other() -> None:
            while len(sizes) < 10:
                turns.append(len(sizes))
                await asyncio.sleep(0)

        others = asyncio.ensure_future(other())
        for _ in range(10):
            taken = await anext(generation)
            sizes.append(len(taken.text))
        await others
        assert sizes == [MAX_JOINED_CHARS] * 10
        assert turns == list(range(1, 10)), "another task runs between two pieces"

    asyncio.run(story())


def test_what_a_taker_leaves_behind_goes_to_the_task() -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", (1,), lambda _: None)
        took: list[Delta] = []
        generation.take_by(lambda delta: took.append(delta) or True)  # type: ignore[func-returns-value]
        waiting = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)  # lets it begin to wait
        for index in range(MAX_JOINED + 1):
            generation.push(Delta(index, (index,), "a", None))
        assert (await waiting).ids == (MAX_JOINED,)
        assert [len(delta.ids) for delta in took] == [MAX_JOINED]

    asyncio.run(story())


def test_slow_clients_together_kept_any_number_of_tokens_in_the_router() -> None:
    """Each of them took something now and then. Those go that have most to take, until the others fit."""

    async def story() -> None:
        slow = [BufferedGeneration(str(index), (1,), lambda _: None) for index in range(4)]
        told = TokenLogprobs(-0.5, tuple((token, -1.0) for token in range(20)))
        for index, generation in enumerate(slow[:3]):
            for at in range(10 * (index + 1)):
                generation.push(Delta(at, (at,), "a", None, (told,)))
        owed = [generation.owed_bytes for generation in slow]
        assert (owed[1], owed[2], owed[3]) == (2 * owed[0], 3 * owed[0], 0)
        assert not slow_clients(slow, 0.0, LIMIT_S, sum(owed))
        dropped = slow_clients(slow, 0.0, LIMIT_S, sum(owed) - 1)
        assert list(dropped) == [slow[2]]
        assert "router.max_inflight_answer_bytes" in dropped[slow[2]]
        assert list(slow_clients(slow, LIMIT_S, LIMIT_S, owed[0])) == slow[:3]  # these took nothing for so long
        for generation in slow[1:]:
            generation.drop_client(Cancelled("slow"))
        assert not slow_clients(slow, LIMIT_S - 1, LIMIT_S, owed[0])

    asyncio.run(story())


def test_deltas_with_logprobs_are_not_joined() -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", (1,), lambda _: None)
        for index in range(3):
            generation.push(Delta(index, (index,), "a", None, (TokenLogprobs(-0.5, ()),)))
        assert [len((await anext(generation)).ids) for _ in range(3)] == [1, 1, 1]

    asyncio.run(story())


@given(
    turns=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=20),
    fails=st.booleans(),
)
def test_each_delta_goes_to_the_taker_or_to_the_task_in_order(turns: list[tuple[int, bool, bool]], fails: bool) -> None:
    """In each turn some deltas come, the taker is willing or not (or raises), and the task is slow or not."""

    async def story() -> None:
        generation = BufferedGeneration("r", (1,), lambda _: None)
        willing = slow = False
        got: list[Delta] = []

        def taker(delta: Delta) -> bool:
            if not willing:
                if fails:
                    raise ValueError("a bug")
                return False
            assert delta.finish_reason is None
            got.append(delta)
            return True

        async def task() -> None:
            async for delta in generation:
                got.append(delta)
                generation.take_by(taker)
                while slow:  # noqa: ASYNC110 - until the next turn
                    await asyncio.sleep(0)

        client = asyncio.create_task(task())
        index = 0
        for count, willing, slow in turns:  # noqa: B007 - the taker and the task read them
            for _ in range(count):
                generation.push(Delta(index, (index,), f"{index} ", None))
                index += 1
            for _ in range(4):
                await asyncio.sleep(0)
        slow = False
        generation.push(Delta(index, (index,), f"{index} ", FinishReason.LENGTH))
        generation.end(REPORT, None)
        async with asyncio.timeout(60):
            await client
        assert [i for delta in got for i in delta.ids] == list(range(index + 1))
        assert "".join(delta.text for delta in got) == "".join(f"{i} " for i in range(index + 1))
        assert [delta.finish_reason for delta in got if delta.finish_reason] == [FinishReason.LENGTH]

    asyncio.run(story())


def test_a_step_of_many_requests_costs_one_wake_up() -> None:
    """The taker of each gets its delta in the next turn, and what comes in one turn is one delta."""

    async def story() -> None:
        deliveries = Deliveries()
        loop = asyncio.get_running_loop()
        generations = [BufferedGeneration(str(n), (1,), lambda _: None, deliveries) for n in range(5)]
        taken: list[tuple[int, Delta]] = []
        tasks = [asyncio.ensure_future(anext(generation)) for generation in generations]
        await asyncio.sleep(0)
        for number, generation in enumerate(generations):
            generation.take_by(lambda delta, number=number: not taken.append((number, delta)))  # type: ignore[misc]
        calls: list[object] = []
        soon, loop.call_soon = loop.call_soon, lambda *call, **_: calls.append(call)  # type: ignore[method-assign,assignment]
        try:
            for generation in generations:
                generation.push(Delta(1, (1,), "a", None))
                generation.push(Delta(2, (2,), "b", None))
        finally:
            loop.call_soon = soon  # type: ignore[method-assign]
        assert len(calls) == 1
        deliveries._serve()
        assert taken == [(number, Delta(1, (1, 2), "ab", None)) for number in range(5)]
        for generation in generations:
            generation.push(LAST)
        assert [await task for task in tasks] == [LAST] * 5

    asyncio.run(story())


def test_a_client_whose_taker_takes_does_not_stall() -> None:
    async def story() -> None:
        generation = BufferedGeneration("r", (1,), lambda _: None)
        waiting = asyncio.ensure_future(anext(generation))
        await asyncio.sleep(0)
        generation.take_by(lambda _: True)
        for now_s in (0.0, 1.0, LIMIT_S, 3 * LIMIT_S):
            generation.push(Delta(0, (7,), "a", None))
            assert not generation.stalls(now_s=now_s, limit_s=LIMIT_S)
            await asyncio.sleep(0)
        generation.push(LAST)
        assert await waiting == LAST

    asyncio.run(story())
