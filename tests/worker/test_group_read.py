"""Reads of several KV groups as one: every order of posts that fail, results, failures and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.api import AnyRegion, Region
from kvtransfer.pull import read_groups
from kvtransfer.thread import BlockRead
from pdserve.config import LeaseConfig
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import BlockSum, Incarnation

PEER = Incarnation(5)
BLOCKS = 3


@dataclass
class Source:
    """The source of one group: the test plays its transport."""

    group: int
    refuses: bool = False
    reads: list[BlockRead] = field(default_factory=list)
    asked: list[tuple[AnyRegion, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def read(
        self, peer: Incarnation, region: AnyRegion, remote_blocks: Sequence[int], local_blocks: Sequence[int],
        *, deadline_s: float,
    ) -> BlockRead:  # fmt: skip
        if self.refuses:
            raise TransferFailed(f"group {self.group} is not posted")
        self.asked.append((region, tuple(remote_blocks), tuple(local_blocks)))
        self.reads.append(BlockRead(peer, region.block_bytes * len(local_blocks), asyncio.get_running_loop()))
        return self.reads[-1]

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        return 1.0

    def arrive(self) -> None:
        self.reads[0].succeed(1.0 + self.group, (self.sums,))
        self.reads[0].mark_stopped()

    def fail(self) -> None:
        self.reads[0].fail(TransferFailed(f"group {self.group} failed"))

    @property
    def sums(self) -> tuple[BlockSum, ...]:
        return tuple(BlockSum(10 * self.group + i) for i in range(BLOCKS))


def region(group: int) -> Region:
    return Region(1 << (20 + group), 16, 64 * (group + 1))


def post(sources: Sequence[Source]) -> BlockRead:
    return read_groups(
        sources,
        PEER,
        [region(source.group) for source in sources],
        [[source.group, 5, 6] for source in sources],
        [[7, 8, source.group] for source in sources],
        deadline_s=30.0,
    )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_every_group_is_read_from_its_region_into_its_blocks() -> None:
    async def test() -> None:
        sources = [Source(group) for group in range(3)]
        read = post(sources)
        assert [source.asked for source in sources] == [[(region(g), (g, 5, 6), (7, 8, g))] for g in range(3)]
        assert read.nbytes == BLOCKS * (64 + 128 + 192)
        for source in sources[::-1]:
            assert not read.result.done()
            source.arrive()
            await settle()
        result = read.result.result()
        assert result.sums == tuple(source.sums for source in sources), "group by group, in the order of the groups"
        assert result.duration_s == 3.0
        assert read.is_stopped

    run(test)


def test_one_group_is_read_without_a_wrapper() -> None:
    async def test() -> None:
        source = Source(0)
        assert post([source]) is source.reads[0]

    run(test)


def test_a_post_that_fails_after_others_fails_the_read_but_waits_for_them() -> None:
    """(1) The third group is refused; (2) the error is there; (3) the two before it must stop first."""

    async def test() -> None:
        sources = [Source(0), Source(1), Source(2, refuses=True), Source(3)]
        read = post(sources)
        with pytest.raises(TransferFailed, match="group 2 is not posted"):
            await read.result
        assert not sources[3].asked
        await settle()
        assert all(source.reads[0].result.cancelled() for source in sources[:2]), "nobody waits for them"
        for source in sources[:2]:
            assert not read.is_stopped
            source.reads[0].mark_stopped()
            await settle()
        assert read.is_stopped

    run(test)


def test_a_first_post_that_fails_posts_nothing() -> None:
    async def test() -> None:
        sources = [Source(0, refuses=True), Source(1)]
        with pytest.raises(TransferFailed, match="group 0"):
            post(sources)
        assert not sources[1].asked

    run(test)


def test_a_read_that_is_given_up_gives_up_every_group() -> None:
    async def test() -> None:
        sources = [Source(0), Source(1)]
        read = post(sources)
        read.give_up()
        await settle()
        assert all(source.reads[0].result.cancelled() for source in sources)
        sources[0].reads[0].mark_stopped()
        await settle()
        assert not read.is_stopped
        sources[1].reads[0].mark_stopped()
        await settle()
        assert read.is_stopped

    run(test)


ENDS = st.sampled_from(["arrive", "fail", "stop", "give up"])


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 4), st.lists(st.tuples(ENDS, st.integers(0, 3)), max_size=16))
def test_the_read_succeeds_only_with_every_group_and_stops_only_with_every_group(
    groups: int, ends: list[tuple[str, int]]
) -> None:
    async def test() -> None:
        sources = [Source(group) for group in range(groups)]
        read = post(sources)
        failed: list[int] = []
        given_up = False
        for end, group in [*ends, *[("arrive", group) for group in range(groups)]]:
            source = sources[group % groups]
            part = source.reads[0]
            if end == "give up":
                given_up |= not read.result.done()
                read.give_up()
            elif end == "stop" and (part.result.done() or part.is_stopped):
                part.mark_stopped()
            elif end == "arrive" and not part.is_stopped:
                source.arrive()
            elif end == "fail" and not part.result.done():
                source.fail()
                failed.append(source.group)
            await settle()
            assert read.is_stopped == all(one.reads[0].is_stopped for one in sources)
            if failed and not given_up:
                assert f"group {failed[0]} failed" in str(read.result.exception()), "the first error wins"
        assert read.is_stopped
        assert read.result.cancelled() == given_up
        if not failed and not given_up:
            assert read.result.result().sums == tuple(source.sums for source in sources)

    run(test)
