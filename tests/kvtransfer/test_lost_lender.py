"""What a reader does when its lender dies, stops or is replaced: real processes, NIXL, and the bound of each wait."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from lender import LAYOUT, PROMPT_HASH, TOKEN, Lender, lender
from transfer_testing import ROOT, FakePeer, NixlPeer, Pool, new_incarnation

from decode_worker.role import InboundBlocks
from kvtransfer.api import KvRegion
from kvtransfer.backends.fake import FakeFabric
from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.lease_client import LeaseClient
from kvtransfer.routed import RoutedTransport, pack_metadata
from kvtransfer.thread import TransferThread
from pdserve.config import EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.errors import LeaseGone, ReplicaLost, TransferFailed
from pdserve.core.ids import BlockId, LeaseId, ReaderId, WorkerId
from pdserve.core.kv_layout import KvSpec

pytest.importorskip("nixl", reason="NIXL is not installed")

SEED = 5
WAIT_S = 600.0  # of the request: nothing below may take that long
BOUND_S = 40.0  # lost after 5 s, Release 2 s, the rest for a busy machine
BLOCKS = tuple(range(10, 18))
CHUNK = 4 * LAYOUT.block_size


@dataclass
class Reader:
    """A decode worker, as far as a pull sees it."""

    kv_spec: KvSpec
    regions: tuple[KvRegion, ...]
    config: WorkerConfig
    transfer: TransferThread
    pool: Pool
    client: LeaseClient
    staging: None = None

    def inbound(self) -> InboundBlocks:
        blocks = tuple(BlockId(block) for block in range(len(BLOCKS)))
        reader_id = ReaderId(new_incarnation(), 1)
        return InboundBlocks(self, self.client, reader_id, (blocks,), prompt_hash=PROMPT_HASH, wait_s=WAIT_S)


@asynccontextmanager
async def reader(**lease: float) -> AsyncIterator[Reader]:
    """Nothing may be followed, in flight or quarantined when the block ends."""
    pool, own = Pool(), new_incarnation()
    thread = TransferThread(lambda: RoutedTransport({0: NixlTransport(WorkerId("reader"), own, [pool.region])}))
    config = WorkerConfig("decode-0", "127.0.0.1:1", EngineConfig(model="tiny"), cluster_token=TOKEN)
    config = replace(config, lease=LeaseConfig(kv_checksum=False, **lease))  # type: ignore[arg-type]
    try:
        await thread.start()
        client = LeaseClient(thread, config.lease, cluster_token=TOKEN)
        yield Reader(KvSpec((LAYOUT,)), (KvRegion.of(LAYOUT, pool.region),), config, thread, pool, client)
        assert thread.num_unstopped == 0
        assert client.num_followed == 0
        await client.close()
    finally:
        await thread.close()


class LenderProcess:
    def __init__(self) -> None:
        self.incarnation = new_incarnation()
        command = [sys.executable, str(Path(__file__).with_name("lender_process.py")), str(self.incarnation), str(SEED)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.address = str(self._answer()["address"])

    def __enter__(self) -> LenderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def grant(self) -> tuple[LeaseId, bytes]:
        answer = self.ask("grant", *BLOCKS)
        return LeaseId(self.incarnation, int(str(answer["counter"]))), bytes.fromhex(str(answer["ticket"]))

    def ask(self, *words: object) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        stop(self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        answer: dict[str, object] = json.loads(self.process.stdout.readline())
        return answer


def stop(process: subprocess.Popen[str]) -> None:
    """Until every thread of it stands still; over TCP its kernel goes on accepting."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - bytes that arrive, and reads that another thread posts, have no event
        await asyncio.sleep(0.002)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * BOUND_S))


@asynccontextmanager
async def half_pulled(one: Reader, peer: LenderProcess) -> AsyncIterator[tuple[InboundBlocks, asyncio.Task[object]]]:
    """A pull that has read the first of two chunks and waits for the second. Given up when the block ends."""
    inbound = one.inbound()
    lease_id, ticket = peer.grant()
    pulling = asyncio.create_task(inbound.pull(lease_id, ticket))
    peer.ask("advance", lease_id.counter, CHUNK)
    expected = Pool(seed=SEED).digest(BLOCKS[:4])
    await until(lambda: pulling.done() or one.pool.digest(range(4)) == expected)
    await until(lambda: one.transfer.num_unstopped == 0)
    assert not pulling.done()
    yield inbound, pulling  # type: ignore[misc]
    await asyncio.wait_for(inbound.abandon(release=True), BOUND_S)
    assert not inbound.read_in_flight


def test_a_lender_that_is_killed_between_chunks() -> None:
    async def test() -> None:
        async with reader() as one:
            with LenderProcess() as peer:
                async with half_pulled(one, peer) as (_, pulling):
                    peer.kill()
                    with pytest.raises(ReplicaLost):
                        await asyncio.wait_for(pulling, BOUND_S)

    run(test)


def test_a_lender_that_is_stopped_between_chunks() -> None:
    """Its sockets stay open and its leases would live for 30 s more; silence ends the wait."""

    async def test() -> None:
        async with reader() as one:
            with LenderProcess() as peer:
                async with half_pulled(one, peer) as (_, pulling):
                    peer.stop()
                    with pytest.raises(ReplicaLost, match="no answer"):
                        await asyncio.wait_for(pulling, BOUND_S)

    run(test)


def test_a_lender_that_is_replaced_at_its_address_between_chunks() -> None:
    """The successor knows nothing of the lease: GONE."""

    async def test() -> None:
        async with reader() as one:
            with LenderProcess() as peer:
                async with half_pulled(one, peer) as (_, pulling):
                    peer.kill()
                    successor = Lender(FakePeer(FakeFabric()), ttl_s=30.0)
                    await successor.serve(int(peer.address.rpartition(":")[2]))
                    try:
                        with pytest.raises(LeaseGone):
                            await asyncio.wait_for(pulling, BOUND_S)
                    finally:
                        await successor.stop()

    run(test)


def test_a_lender_that_is_stopped_before_it_is_ever_spoken_to() -> None:
    """The handshake has a bound of its own."""

    async def test() -> None:
        async with reader() as one:
            with LenderProcess() as peer:
                lease_id, ticket = peer.grant()
                peer.stop()
                inbound = one.inbound()
                with pytest.raises((TransferFailed, ReplicaLost)):
                    await asyncio.wait_for(inbound.pull(lease_id, ticket), BOUND_S)
                await asyncio.wait_for(inbound.abandon(release=True), BOUND_S)

    run(test)


@asynccontextmanager
async def two_reads_stalled(one: Reader) -> AsyncIterator[tuple[NixlPeer, InboundBlocks, asyncio.Task[object]]]:
    """Over TCP, the process that holds the bytes is stopped, then two chunks become final; its lease service goes on."""
    remote = NixlPeer(seed=SEED)
    try:
        async with lender(FakeFabric(), incarnation=remote.incarnation) as control:
            control.peer.region, control.peer.metadata = remote.region, remote.metadata
            await control.stop()
            await control.serve()
            await one.transfer.connect(remote.incarnation, pack_metadata({0: remote.metadata}))
            await one.transfer.read(
                remote.incarnation, KvRegion.of(LAYOUT, remote.region), [0], [40], deadline_s=30, into=one.regions[0]
            ).result  # a warm endpoint
            stop(remote.process)
            inbound = one.inbound()
            lease_id, ticket = control.grant(BLOCKS, len(BLOCKS) * LAYOUT.block_size)
            pulling = asyncio.create_task(inbound.pull(lease_id, ticket.encode()))
            for number in (1, 2):
                control.advance(lease_id, number * LAYOUT.block_size)
                await until(lambda number=number: pulling.done() or one.transfer.num_unstopped == number)  # type: ignore[misc]
            assert not pulling.done()
            yield remote, inbound, pulling  # type: ignore[misc]
            assert not inbound.read_in_flight
            assert "Commit" not in control.calls.count
            await control.stop()
    finally:
        remote.kill()


def test_reads_of_a_stopped_process_end_at_their_deadline_and_its_blocks_are_kept_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(1) Deadline: a typed error; (2) the blocks stay out of use; (3) the process goes on, late bytes land; (4) free."""
    monkeypatch.setenv("UCX_TLS", "tcp")

    async def test() -> None:
        async with reader(transfer_deadline_floor_s=4.0) as one, two_reads_stalled(one) as (remote, inbound, pulling):
            with pytest.raises(TransferFailed, match="took more than"):
                await asyncio.wait_for(pulling, BOUND_S)
            assert inbound.read_in_flight
            abandoning = asyncio.create_task(inbound.abandon(release=True))
            done, _ = await asyncio.wait([abandoning], timeout=0.3)
            assert not done
            remote.process.send_signal(signal.SIGCONT)
            await asyncio.wait_for(abandoning, BOUND_S)
            assert one.pool.digest(range(2)) == remote.digest(BLOCKS[:2])

    run(test)


def test_reads_of_a_killed_process_fail_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")

    async def test() -> None:
        async with reader() as one, two_reads_stalled(one) as (remote, inbound, pulling):
            remote.process.kill()
            with pytest.raises(TransferFailed):
                await asyncio.wait_for(pulling, BOUND_S)
            await asyncio.wait_for(inbound.abandon(release=True), BOUND_S)

    run(test)


def test_a_cancelled_pull_keeps_its_blocks_until_its_reads_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")

    async def test() -> None:
        async with reader() as one, two_reads_stalled(one) as (remote, inbound, pulling):
            assert inbound.read_in_flight
            pulling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pulling
            assert inbound.read_in_flight
            remote.process.send_signal(signal.SIGCONT)
            await asyncio.wait_for(inbound.abandon(release=True), BOUND_S)

    run(test)
