"""Reading behind a prefill that is under way: a scripted lender, a scripted transport, and a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from lender import FIRST, LAYOUT, ticket_of
from transfer_testing import new_incarnation

from kvtransfer.api import KvRegion, Region
from kvtransfer.lease_client import Committed, FollowedLease
from kvtransfer.pull import PrefillStalled, Pull, PullResult
from kvtransfer.thread import BlockRead, Pace
from pdserve.config import LeaseConfig
from pdserve.core.errors import DeadlineExceeded, LeaseGone, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import BlockId, Incarnation, LeaseId, ReaderId
from pdserve.core.lease import CommitAnswer, LeaseView
from pdserve.core.reader import SendCommit

CONFIG = LeaseConfig(stalled_s=60.0)
REMOTE = tuple(BlockId(block) for block in (40, 41, 42, 43, 10, 11, 12, 13))
LOCAL = (7, 6, 5, 4, 3, 2, 1, 0)
CHUNK = 2 * LAYOUT.block_size  # four chunks of two blocks
PROMPT_LEN = len(REMOTE) * LAYOUT.block_size - 5


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Nothing takes time; when all wait, the clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@dataclass
class Posted:
    read: BlockRead
    remote: tuple[int, ...]
    local: tuple[int, ...]
    deadline_s: float

    def done(self) -> None:
        self.read.succeed(0.0)
        self.read.mark_stopped()

    def fail(self) -> None:
        self.read.fail(TransferFailed("the script says so"))

    def stop(self) -> None:
        self.read.mark_stopped()


@dataclass
class Script:
    """The peer of one pull: both a lender's link and a transfer thread."""

    posted: list[Posted] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    commit_ok: bool = True
    commit_s: float = 0.0
    refuse_reads_from: int = 99

    def __post_init__(self) -> None:
        self.lease_id = LeaseId(Incarnation(5), 1)
        ticket = ticket_of(self.lease_id, Region(4096, 64, LAYOUT.block_bytes), REMOTE, PROMPT_LEN, layout=LAYOUT)
        self.lease = FollowedLease(self.lease_id, PROMPT_LEN, ticket.proof, self)
        self.pull = Pull(self.lease, ticket, [LOCAL], ReaderId(new_incarnation(), 1), [self], CONFIG)
        self.running: asyncio.Task[PullResult] | None = None

    async def commit(self, lease_id: LeaseId, proof: bytes, reader_id: ReaderId, commit: SendCommit) -> Committed:
        self.committed.append(commit.blocks)
        await asyncio.sleep(self.commit_s)
        return Committed(CommitAnswer.OK if self.commit_ok else CommitAnswer.GONE)

    async def release(self, lease_id: LeaseId, proof: bytes) -> None: ...

    def unfollow(self, lease: FollowedLease) -> None: ...

    def read(
        self,
        peer: Incarnation,
        region: KvRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> BlockRead:
        if len(self.posted) + 1 >= self.refuse_reads_from:
            raise TransferFailed("no more are posted")
        read = BlockRead(peer, len(local_blocks) * region.block_bytes, asyncio.get_running_loop())
        self.posted.append(Posted(read, tuple(remote_blocks), tuple(local_blocks), deadline_s))
        return read

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        return Pace().deadline_s(nbytes, config)

    async def start(self, *, wait_s: float = 1000.0) -> None:
        self.running = asyncio.create_task(self.pull.run(wait_s=wait_s))
        await settle()

    async def chunk(self, number: int) -> None:
        """Chunks [0, number] are final; the fourth brings token 0."""
        watermark = min((number + 1) * CHUNK, PROMPT_LEN)
        self.lease.apply(LeaseView(self.lease_id, True, watermark, FIRST if watermark == PROMPT_LEN else None))
        await settle()

    async def result(self) -> PullResult:
        assert self.running is not None
        return await self.running


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(asyncio.wait_for(test(), 1e6))


def test_each_chunk_is_read_before_the_next_is_final_and_commit_comes_last() -> None:
    """(1) A chunk, its read, four times; (2) no Commit before the last; (3) of the last only is anything exposed."""

    async def test() -> None:
        script = Script(commit_s=2.0)
        await script.start()
        assert script.posted == []
        for number in range(4):
            await asyncio.sleep(10)
            await script.chunk(number)
            assert len(script.posted) == number + 1
            assert script.pull.read_in_flight
            await asyncio.sleep(1)
            assert script.committed == []
            script.posted[number].done()
        pulled = await script.result()
        assert script.committed == [8]
        assert [posted.remote for posted in script.posted] == [(40, 41), (42, 43), (10, 11), (12, 13)]
        assert [posted.local for posted in script.posted] == [(7, 6), (5, 4), (3, 2), (1, 0)]
        assert pulled.exposed_bytes == 2 * LAYOUT.block_bytes
        assert (pulled.reads, pulled.blocks, pulled.kv_bytes) == (4, 8, 8 * LAYOUT.block_bytes)
        assert (pulled.transfer_s, pulled.commit_s, pulled.exposed_s) == (34.0, 2.0, 3.0)
        assert script.pull.stopped is None
        assert not script.pull.read_in_flight

    run(test)


def test_a_slow_transport_gets_later_chunks_as_one_read() -> None:
    async def test() -> None:
        script = Script()
        await script.start()
        for number in range(4):
            await script.chunk(number)
        assert len(script.posted) == 2
        script.posted[1].done()
        await settle()
        assert script.posted[2].local == (3, 2, 1, 0)
        assert script.posted[2].deadline_s > script.posted[1].deadline_s
        for number in (0, 2):
            script.posted[number].done()
        pulled = await script.result()
        assert pulled.exposed_bytes == pulled.kv_bytes

    run(test)


def test_a_chunk_that_ends_inside_a_block_leaves_that_block_for_later() -> None:
    async def test() -> None:
        script = Script()
        await script.start()
        script.lease.apply(LeaseView(script.lease_id, True, CHUNK - 1))
        await settle()
        assert script.posted[0].local == (7,)
        script.running.cancel()  # type: ignore[union-attr]
        await settle()

    run(test)


async def with_two_reads_in_flight() -> Script:
    script = Script()
    await script.start()
    await script.chunk(0)
    await script.chunk(1)
    assert len(script.posted) == 2
    return script


async def check_both_must_stop(script: Script) -> None:
    """After the pull has ended: its blocks are free to use once both reads have stopped, and never before."""
    assert script.committed == []
    stopped = script.pull.stopped
    assert stopped is not None
    script.posted[0].fail()
    script.posted[0].stop()
    await settle()
    assert not stopped.done()
    assert script.pull.read_in_flight
    script.posted[1].done()  # late data, that nobody wants any more
    await stopped
    assert script.pull.stopped is None
    assert not script.pull.read_in_flight
    assert script.committed == []
    assert len(script.posted) == 2


def test_one_of_two_reads_fails() -> None:
    async def test() -> None:
        script = await with_two_reads_in_flight()
        script.posted[0].fail()
        with pytest.raises(TransferFailed, match="script"):
            await script.result()
        await check_both_must_stop(script)

    run(test)


@pytest.mark.parametrize("error", [LeaseGone("gone"), ReplicaLost("silent")])
def test_the_lease_ends_with_reads_in_flight(error: PdserveError) -> None:
    async def test() -> None:
        script = await with_two_reads_in_flight()
        script.lease.fail(error)
        with pytest.raises(type(error)):
            await script.result()
        await check_both_must_stop(script)

    run(test)


def test_cancelled_with_reads_in_flight() -> None:
    async def test() -> None:
        script = await with_two_reads_in_flight()
        assert script.running is not None
        script.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await script.result()
        await check_both_must_stop(script)

    run(test)


def test_a_cancelled_pull_posts_no_read_any_more() -> None:
    """Whoever cancels looks at `read_in_flight` in the same turn: a chunk that arrives in that turn comes too late."""

    async def test() -> None:
        script = Script()
        await script.start()
        assert script.running is not None
        script.lease.apply(LeaseView(script.lease_id, True, CHUNK))
        script.running.cancel()
        assert not script.pull.read_in_flight
        with pytest.raises(asyncio.CancelledError):
            await script.result()
        assert script.posted == []
        assert script.pull.stopped is None

    run(test)


def test_a_read_that_is_refused_waits_for_the_one_in_flight() -> None:
    async def test() -> None:
        script = Script(refuse_reads_from=2)
        await script.start()
        await script.chunk(0)
        await script.chunk(1)
        with pytest.raises(TransferFailed, match="no more are posted"):
            await script.result()
        stopped = script.pull.stopped
        assert stopped is not None
        script.posted[0].done()
        await stopped

    run(test)


def test_reads_that_have_stopped_by_the_time_the_pull_ends_hold_nothing() -> None:
    """(1) A read fails and stops, another ends well, in one turn; (2) the blocks are free at once."""

    async def test() -> None:
        script = await with_two_reads_in_flight()
        script.posted[0].fail()
        script.posted[0].stop()
        script.posted[1].done()
        with pytest.raises(TransferFailed):
            await script.result()
        assert script.pull.stopped is None
        assert not script.pull.read_in_flight

    run(test)


def test_gone_to_commit_discards() -> None:
    async def test() -> None:
        script = Script(commit_ok=False)
        await script.start()
        await script.chunk(3)
        script.posted[0].done()
        with pytest.raises(LeaseGone):
            await script.result()
        assert script.pull.stopped is None

    run(test)


def test_cancelled_while_commit_is_under_way() -> None:
    async def test() -> None:
        script = Script(commit_s=5.0)
        await script.start()
        await script.chunk(3)
        script.posted[0].done()
        await settle()
        assert script.committed == [8]
        assert script.running is not None
        script.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await script.result()
        assert script.pull.stopped is None

    run(test)


def test_a_watermark_that_stands_still_is_given_up_but_progress_is_waited_for() -> None:
    """(1) A chunk every 50 s, with 60 s allowed; (2) then nothing: 60 s after the last, the pull says how far it came."""

    async def test() -> None:
        script = Script()
        await script.start()
        for number in range(3):
            await asyncio.sleep(50)
            await script.chunk(number)
            script.posted[number].done()
        with pytest.raises(PrefillStalled, match=f"{3 * CHUNK} of {PROMPT_LEN} tokens, no progress for 60.0 s"):
            await script.result()
        assert asyncio.get_running_loop().time() == 210.0
        assert script.pull.stopped is None

    run(test)


def test_a_repeated_view_is_no_progress() -> None:
    async def test() -> None:
        script = Script()
        await script.start()
        for _ in range(10):
            await script.chunk(0)
            await asyncio.sleep(10)
        with pytest.raises(PrefillStalled, match="no progress"):
            await script.result()
        assert asyncio.get_running_loop().time() == 100.0, "it was given up at 60 s"
        script.posted[0].done()

    run(test)


def test_progress_does_not_outlast_the_requests_own_deadline() -> None:
    async def test() -> None:
        script = Script()
        await script.start(wait_s=120.0)
        for number in range(2):
            await asyncio.sleep(50)
            await script.chunk(number)
        with pytest.raises(DeadlineExceeded, match=r"after 120\.0 s"):
            await script.result()
        assert asyncio.get_running_loop().time() == 120.0
        await check_both_must_stop(script)

    run(test)


def test_the_view_of_another_lease_is_not_applied() -> None:
    async def test() -> None:
        script = Script()
        await script.start()
        script.lease.apply(LeaseView(LeaseId(script.lease_id.incarnation, 2), True, CHUNK))
        script.lease.apply(LeaseView(LeaseId(script.lease_id.incarnation, 2), held=False))
        await settle()
        assert script.posted == []
        assert script.lease.error is None
        script.running.cancel()  # type: ignore[union-attr]
        await settle()

    run(test)


@pytest.mark.parametrize(
    "view", [(PROMPT_LEN, None), (CHUNK, FIRST), (PROMPT_LEN + 1, FIRST)], ids=["no token 0", "token 0 too early", "too far"]
)
def test_a_view_that_contradicts_itself_ends_the_pull(view: tuple[int, Any]) -> None:
    async def test() -> None:
        script = await with_two_reads_in_flight()
        script.lease.apply(LeaseView(script.lease_id, True, *view))
        with pytest.raises(TransferFailed, match="watermark"):
            await script.result()
        await check_both_must_stop(script)

    run(test)
