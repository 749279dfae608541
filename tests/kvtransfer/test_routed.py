"""Reads between workers of several processes: bytes arrive where they belong, and a read is over when all its routes are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import msgpack
import numpy as np
import pytest
from transfer_testing import NixlPeer, Pool, new_incarnation, wait_for, wait_until

from kvtransfer.api import KvRegion, ReadAdrift, Region
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.remote import RankReads, RemoteTransport, TransportSettings
from kvtransfer.routed import RoutedTransport, rank_id
from pdserve.core.errors import InternalBug, ReplicaLost, TransferFailed
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.kv_layout import KvGroup, KvShare, gqa_group, whole_share
from pdserve.engine.gang.line import RankLine, RankLines, serve

GROUP = gqa_group(num_layers=3, num_kv_heads=4, head_dim=8, block_size=4, dtype="int8")
BLOCKS = 6
LAYOUTS = {
    "one": ((3, (0, 4)),),
    "heads": ((3, (0, 2)), (3, (2, 4))),
    "uneven heads": ((3, (0, 1)), (3, (1, 4))),
}


def shares_of(name: str) -> tuple[KvShare, ...]:
    if name == "stages":
        return KvShare(0, range(2), range(4)), KvShare(1, range(2, 3), range(4))
    if name == "both":
        return tuple(KvShare(2 * s + r, (range(1), range(1, 3))[s], range(2 * r, 2 * r + 2)) for s in (0, 1) for r in (0, 1))
    if name == "the second rank alone":
        return (KvShare(1, range(3), range(4)),)
    return tuple(KvShare(rank, range(count), range(*heads)) for rank, (count, heads) in enumerate(LAYOUTS[name]))


NAMES = (*LAYOUTS, "stages", "both", "the second rank alone")


class Worker:
    """A worker whose ranks are pools of this process, on a fabric that knows each rank by its own id."""

    def __init__(self, fabric: FakeFabric, name: str, group: KvGroup = GROUP) -> None:
        self.incarnation = new_incarnation()
        self.shares = shares_of(name)
        self.pools = [Pool(num_blocks=BLOCKS, block_bytes=share.of(group).block_bytes) for share in self.shares]
        pairs = zip(self.shares, self.pools, strict=True)
        self.region = KvRegion(group, tuple((share, pool.region) for share, pool in pairs))
        self.transport = RoutedTransport({
            share.rank: FakeTransport(fabric, rank_id(self.incarnation, share.rank), [pool.region])
            for share, pool in zip(self.shares, self.pools, strict=True)
        })  # fmt: skip

    def write(self, blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        """Store whole blocks [BLOCKS, block_bytes]."""
        whole = whole_share(GROUP)
        for share, pool in zip(self.shares, self.pools, strict=True):
            for ours, theirs in zip(share.units(GROUP, share), share.units(GROUP, whole), strict=True):
                pool.array[:, ours.offset :][:, : ours.nbytes] = blocks[:, theirs.offset :][:, : theirs.nbytes]

    def rank(self, rank: int) -> Incarnation:
        return rank_id(self.incarnation, rank)


def random_blocks() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.random.default_rng(3).integers(0, 256, (BLOCKS, GROUP.block_bytes), dtype=np.uint8)


@pytest.mark.parametrize(("theirs", "ours"), list(product(NAMES, NAMES)))
def test_blocks_arrive_in_all_ranks_as_if_they_had_been_written_there(theirs: str, ours: str) -> None:
    fabric = FakeFabric()
    lender, reader, expected = Worker(fabric, theirs), Worker(fabric, ours), Worker(fabric, ours)
    lender.write(random_blocks())
    arrived = np.zeros((BLOCKS, GROUP.block_bytes), np.uint8)
    arrived[[1, 3, 0]] = random_blocks()[[5, 0, 2]]
    expected.write(arrived)
    reader.transport.connect(lender.incarnation, lender.transport.metadata())
    handle = reader.transport.post_read(lender.incarnation, lender.region, [5, 0, 2], [1, 3, 0], reader.region)
    wait_for(reader.transport, handle)
    for pool, other in zip(reader.pools, expected.pools, strict=True):
        assert (pool.array == other.array).all()


@dataclass
class Going:
    """A read from a lender of two ranks into a reader of two, in which both routes wait."""

    fabric: FakeFabric
    lender: Worker
    reader: Worker

    @classmethod
    def of(cls, reader: str = "heads") -> Going:
        fabric = FakeFabric()
        going = cls(fabric, Worker(fabric, "heads"), Worker(fabric, reader))
        going.lender.write(random_blocks())
        going.reader.transport.connect(going.lender.incarnation, going.lender.transport.metadata())
        for rank in range(2):
            fabric.hold(going.lender.rank(rank))
        return going

    def post(self):
        return self.reader.transport.post_read(self.lender.incarnation, self.lender.region, [1], [2], self.reader.region)


@pytest.mark.parametrize("reader", ["one", "heads"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_read_has_not_arrived_before_its_last_route(reader: str, first: int) -> None:
    going = Going.of(reader)
    handle = going.post()
    going.fabric.resume(going.lender.rank(first))
    assert not any(going.reader.transport.poll(handle) for _ in range(5))
    going.fabric.resume(going.lender.rank(1 - first))
    assert going.reader.transport.poll(handle)


@pytest.mark.parametrize("reader", ["one", "heads"])
@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("posted", [True, False])
def test_a_route_that_fails_fails_the_read_once_the_others_have_stopped(reader: str, failed: int, posted: bool) -> None:
    """The blocks of a failed read are used again at once, and the other route still writes into them."""
    going = Going.of(reader)
    transport = going.reader.transport
    if not posted:
        going.fabric.kill(going.lender.rank(failed))
    handle = None
    try:
        handle = going.post()
    except TransferFailed:
        assert not posted  # the first route was refused, so nothing was posted
        return
    going.fabric.kill(going.lender.rank(failed))
    assert not transport.poll(handle)
    assert not transport.poll(handle)
    going.fabric.resume(going.lender.rank(1 - failed))
    with pytest.raises(TransferFailed) as caught:
        wait_until(lambda: transport.poll(handle))
    assert not isinstance(caught.value, ReadAdrift)


@pytest.mark.parametrize("adrift", [0, 1])
def test_a_route_that_is_adrift_makes_the_read_adrift(adrift: int) -> None:
    """Also when the other one fails first, and cleanly."""
    going = Going.of()
    fabric, transport = going.fabric, going.reader.transport
    fabric.set_adrift(going.lender.rank(adrift))

    def read() -> None:
        handle = going.post()
        fabric.kill(going.lender.rank(1 - adrift))
        wait_for(transport, handle)  # type: ignore[arg-type]

    with pytest.raises(ReadAdrift):
        read()


def test_a_peer_is_connected_when_all_its_ranks_are_and_forgotten_with_all() -> None:
    fabric = FakeFabric()
    lender, reader = Worker(fabric, "heads"), Worker(fabric, "heads")
    fabric.kill(lender.rank(1))
    with pytest.raises(TransferFailed):
        reader.transport.connect(lender.incarnation, lender.transport.metadata())
    with pytest.raises(TransferFailed, match="not connected"):
        reader.transport.post_read(lender.incarnation, lender.region, [1], [2], reader.region)
    reader.transport.disconnect(lender.incarnation)
    fabric.attach(lender.rank(1), [lender.pools[1].region])
    reader.transport.connect(lender.incarnation, lender.transport.metadata())
    handle = reader.transport.post_read(lender.incarnation, lender.region, [1], [2], reader.region)
    wait_for(reader.transport, handle)
    reader.transport.disconnect(lender.incarnation)
    with pytest.raises(TransferFailed, match="not connected"):
        reader.transport.post_read(lender.incarnation, lender.region, [1], [2], reader.region)


@pytest.mark.parametrize(
    "metadata",
    [
        b"", b"fake:1",
        *map(msgpack.packb, ([], [[0, b"x"], [0, b"y"]], [[64, b"x"]], [[-1, b"x"]])),
        *map(msgpack.packb, ([[0, "x"]], [[True, b"x"]], [[0]], {0: b"x"})),
        msgpack.packb([[rank, b"x"] for rank in range(65)]),
    ],
)  # fmt: skip
def test_metadata_of_anything_else_are_refused(metadata: bytes) -> None:
    reader = Worker(FakeFabric(), "one")
    with pytest.raises(TransferFailed, match="1 to 64 ranks"):
        reader.transport.connect(new_incarnation(), metadata)


def test_a_region_of_a_rank_that_told_no_metadata_is_refused() -> None:
    fabric = FakeFabric()
    lender, reader = Worker(fabric, "one"), Worker(fabric, "one")
    reader.transport.connect(lender.incarnation, lender.transport.metadata())
    strange = KvRegion(GROUP, tuple((share, Region(4096, BLOCKS, share.of(GROUP).block_bytes)) for share in shares_of("heads")))
    with pytest.raises(TransferFailed, match=r"ranks \[1\], which are not connected"):
        reader.transport.post_read(lender.incarnation, strange, [1], [2], reader.region)


def test_the_ranks_of_a_worker_have_ids_of_their_own() -> None:
    ids = {rank_id(Incarnation(incarnation), rank) for incarnation in range(50) for rank in range(8)}
    assert len(ids) == 400
    assert rank_id(Incarnation(7), 0) == 7


# --- a rank in a process of its own


class Rank(RankReads):
    """The reads of a rank, and the memory into which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()

    def region(self) -> Region:
        return self.pool.region

    def digest(self, blocks: list[int]) -> str:
        return self.pool.digest(blocks)

    def fail(self) -> None:
        raise ZeroDivisionError

    def write(self, path: Path) -> None:
        time.sleep(0.3)  # long enough for an asker that does not wait
        path.touch()

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def rank_main(connection: Connection) -> None:
    serve(connection, Rank())


@contextmanager
def rank_process() -> Iterator[tuple[RankLine, multiprocessing.process.BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=rank_main, args=(theirs,))
    process.start()
    theirs.close()
    line = RankLine(1, ours)
    try:
        yield line, process
    finally:
        line.close()
        process.kill()
        process.join()
        process.close()


@pytest.mark.parametrize("name", ["cma", "nixl"])
def test_a_rank_reads_into_its_own_memory_for_rank_0(name: str) -> None:
    if name == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed")
    peer = NixlPeer(name=name)
    try:
        with rank_process() as (line, _):
            region = line.call("region")
            settings = TransportSettings(name, "127.0.0.1", False, WorkerId("reader"), new_incarnation())
            transport = RemoteTransport(line, [region], settings)
            assert transport.metadata()
            transport.connect(peer.incarnation, peer.metadata)
            handles = [transport.post_read(peer.incarnation, peer.region, [i, 9], [i + 1, i + 20], region) for i in range(3)]
            for handle in handles:
                wait_for(transport, handle)  # type: ignore[arg-type]
            assert line.call("digest", [1, 20]) == peer.digest([0, 9])
            assert line.call("digest", [3, 22]) == peer.digest([2, 9])
            peer.kill()
            with pytest.raises(TransferFailed):
                wait_for(transport, transport.post_read(peer.incarnation, peer.region, [1], [1], region))  # type: ignore[arg-type]
            transport.disconnect(peer.incarnation)
            transport.close()
            with pytest.raises(TransferFailed, match="closed"):
                transport.connect(peer.incarnation, peer.metadata)
    finally:
        peer.kill()


def test_a_rank_that_raises_goes_on_and_one_that_dies_is_lost() -> None:
    with rank_process() as (line, process):
        with pytest.raises(InternalBug, match="ZeroDivisionError"):
            line.call("fail")
        lines = RankLines({1: line})
        with pytest.raises(InternalBug):
            lines.ask_each({1: ("fail",)}, lambda: 3)
        assert lines.ask_each({1: ("digest", [1])}, lambda: 3) == (3, [Pool().digest([1])])
        waits = line.ask("stop")
        process.kill()
        line.settle(waits)
        with pytest.raises(ReplicaLost, match="rank 1"):
            waits.value  # noqa: B018 - it raises
        with pytest.raises(ReplicaLost, match="rank 1"):
            line.call("region")


@pytest.mark.parametrize("fails", ["another rank", "rank 0"])
def test_an_error_is_raised_once_all_ranks_have_done_their_work(fails: str, tmp_path: Path) -> None:
    """Ranks write into blocks, and who hears of an error gives them to somebody else."""
    done = tmp_path / "done"
    with rank_process() as (other, _), rank_process() as (slow, _):
        lines = RankLines({1: other, 2: slow})

        def own() -> None:
            if fails == "rank 0":
                raise InternalBug("rank 0")

        with pytest.raises(InternalBug):
            lines.ask_each({1: ("fail" if fails == "another rank" else "region",), 2: ("write", done)}, own)
        assert done.exists()


def test_a_rank_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.gang.line.ANSWER_S", 0.3)
    with rank_process() as (line, _):
        with pytest.raises(ReplicaLost, match="no answer within"):
            line.call("stop")
        with pytest.raises(ReplicaLost):
            line.call("region")
