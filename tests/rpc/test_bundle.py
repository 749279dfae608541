"""Bundles: the messages that wait for a link travel together, in order, within bounds, and only to a peer that takes them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ReplicaLost
from pdserve.rpc import bundle
from pdserve.rpc.bundle import Outbound, unbundled
from pdserve.rpc.v1 import link_pb2

SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 400)), max_size=30)


def worker_lost(text: str) -> link_pb2.WorkerMessage:
    return link_pb2.WorkerMessage(worker_lost=link_pb2.WorkerLost(message=text))


async def written(outbound: Outbound[link_pb2.WorkerMessage], groups: list[list[str]]) -> list[link_pb2.WorkerMessage]:
    """Put each group at once, and read until it has gone, as it crosses the wire."""
    got, left = [], 0
    for group in groups:
        for text in group:
            outbound.put(worker_lost(text))
        left += len(group)
        while left:
            message = link_pb2.WorkerMessage.FromString((await outbound.next()).SerializeToString())
            left -= len(unbundled(message))
            got.append(message)
    return got


@given(st.lists(SIZES, max_size=4), st.booleans())
def test_all_messages_come_once_in_order_within_the_bounds(sizes: list[list[int]], bundles: bool) -> None:
    groups = [[f"{i}.{j}" + "x" * size for j, size in enumerate(group)] for i, group in enumerate(sizes)]

    async def story() -> list[link_pb2.WorkerMessage]:
        outbound: Outbound[link_pb2.WorkerMessage] = Outbound(64)
        outbound.bundles = bundles
        return await written(outbound, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "MAX_BUNDLE_BYTES", 300)
        patch.setattr(bundle, "MAX_BUNDLE_MESSAGES", 7)
        got = asyncio.run(story())
    assert [one.worker_lost.message for message in got for one in unbundled(message)] == [t for group in groups for t in group]
    assert [message.number for message in got] == list(range(1, len(got) + 1))
    for message in got:
        assert len(message.bundle) != 1, "one message needs no bundle"
        assert len(message.bundle) <= (7 if bundles else 0)
        assert not message.bundle or sum(map(len, message.bundle)) <= 300


def test_a_bundle_is_as_full_as_its_bounds_allow() -> None:
    async def story() -> None:
        outbound: Outbound[link_pb2.WorkerMessage] = Outbound(1000)
        outbound.bundles = True
        got = await written(outbound, [["x"] * (bundle.MAX_BUNDLE_MESSAGES + 2)])
        assert [len(message.bundle) for message in got] == [bundle.MAX_BUNDLE_MESSAGES, 2]

    asyncio.run(story())


def test_what_waits_is_bounded_and_goes_on_after_a_refusal() -> None:
    async def story() -> None:
        outbound: Outbound[link_pb2.WorkerMessage] = Outbound(2)
        outbound.put(worker_lost("a"))
        outbound.put(worker_lost("b"))
        with pytest.raises(asyncio.QueueFull):
            outbound.put(worker_lost("c"))
        assert (await outbound.next()).worker_lost.message == "a"
        outbound.put(worker_lost("d"))
        assert [(await outbound.next()).worker_lost.message for _ in range(2)] == ["b", "d"]

    asyncio.run(story())


def test_a_writer_that_waits_is_woken() -> None:
    async def story() -> None:
        outbound: Outbound[link_pb2.WorkerMessage] = Outbound(2)
        reading = asyncio.create_task(outbound.next())
        await asyncio.sleep(0)
        outbound.put(worker_lost("late"))
        async with asyncio.timeout(10.0):
            assert (await reading).worker_lost.message == "late"

    asyncio.run(story())


def test_a_bundle_with_a_part_that_is_no_message_is_lost() -> None:
    with pytest.raises(ReplicaLost, match="bundle 7 of the link cannot be read"):
        unbundled(link_pb2.RouterMessage(number=7, bundle=[b"\xff\xff"]))


def test_a_bundle_of_more_messages_than_are_ever_sent_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(ReplicaLost, match="bundle 7 of the link has 257 messages; at most 256 are allowed"):
        unbundled(link_pb2.WorkerMessage(number=7, bundle=[b""] * (bundle.MAX_BUNDLE_MESSAGES + 1)))
