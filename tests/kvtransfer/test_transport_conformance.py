"""What every transport must do: the same tests over the fake, CMA, NIXL within a host (CMA) and NIXL over TCP."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transfer_testing import BLOCK_BYTES, NUM_BLOCKS, FakePeer, NixlPeer, Peer, Pool, new_incarnation, wait_for

from kvtransfer.api import Region, TransferDevice, Transport
from kvtransfer.backends import nixl
from kvtransfer.backends.cma import CmaTransport
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.backends.nixl import NixlTransport, prepare_environment
from kvtransfer.backends.registry import prepare
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.ids import WorkerId

KINDS = ("fake", "cma", "nixl", "nixl-tcp")


@dataclass
class Pair:
    """`transport` reads from `peer` into `pool`, not yet connected."""

    transport: Transport
    pool: Pool
    peer: Peer

    def connect(self) -> None:
        self.transport.connect(self.peer.incarnation, self.peer.metadata)

    def read(self, remote: list[int], local: list[int], into: Region | None = None) -> None:
        handle = self.transport.post_read(self.peer.incarnation, self.peer.region, remote, local, into or self.pool.region)
        wait_for(self.transport, handle)


def make_pair(kind: str, pool: Pool | None = None) -> Iterator[Pair]:
    pool = pool or Pool()
    incarnation = new_incarnation()
    peer: Peer
    transport: Transport
    with pytest.MonkeyPatch.context() as patch:
        if kind == "nixl-tcp":
            patch.setenv("UCX_TLS", "tcp")
        if kind == "fake":
            fabric = FakeFabric()
            peer, transport = FakePeer(fabric), FakeTransport(fabric, incarnation, [pool.region])
        elif kind == "cma":
            peer, transport = NixlPeer(name=kind), CmaTransport(WorkerId("reader"), incarnation, [pool.region])
        else:
            pytest.importorskip("nixl", reason="NIXL is not installed")
            peer, transport = NixlPeer(), NixlTransport(WorkerId("reader"), incarnation, [pool.region])
        try:
            yield Pair(transport, pool, peer)
        finally:
            transport.close()
            peer.kill()


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """For tests that leave both sides alive."""
    yield from make_pair(request.param)


@pytest.fixture(params=KINDS)
def mortal_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from make_pair(request.param)


def test_unknown_peer_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="not connected"):
        pair.transport.post_read(new_incarnation(), pair.peer.region, [0], [0], pair.pool.region)


def test_every_byte_of_scattered_blocks_arrives(pair: Pair) -> None:
    pair.connect()
    remote = random.Random(7).sample(range(NUM_BLOCKS), 20)
    local = random.Random(8).sample(range(NUM_BLOCKS), 20)
    pair.read(remote, local)
    assert pair.pool.digest(local) == pair.peer.digest(remote)


def test_other_blocks_stay_untouched(pair: Pair) -> None:
    pair.connect()
    pair.pool.array[:] = 7
    pair.read([3], [5])
    untouched = [block for block in range(NUM_BLOCKS) if block != 5]
    assert (pair.pool.array[untouched] == 7).all()
    assert pair.pool.digest([5]) == pair.peer.digest([3])


def test_pieces_of_blocks_arrive_in_their_places_and_nothing_else_changes(pair: Pair) -> None:
    pair.connect()
    theirs, ours = ((0, 100), (5000, 4096), (BLOCK_BYTES - 8, 8)), ((8, 100), (BLOCK_BYTES - 4096, 4096), (200, 8))
    remote, local = list(range(1, NUM_BLOCKS, 2)), list(range(0, NUM_BLOCKS - 1, 2))
    expected, source = Pool().array, Pool(seed=1).array
    pair.pool.array[:] = expected[:] = 7
    for (at, nbytes), (to, _) in zip(theirs, ours, strict=True):
        expected[local, to : to + nbytes] = source[remote, at : at + nbytes]
    region, into = (
        dataclasses.replace(whole, pieces=pieces) for whole, pieces in ((pair.peer.region, theirs), (pair.pool.region, ours))
    )
    for _ in range(2):
        handle = pair.transport.post_read(pair.peer.incarnation, region, remote, local, into)
        wait_for(pair.transport, handle)
        assert (pair.pool.array == expected).all()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (((0, 100),), ((0, 200),)),
        (((0, 100),), ()),
        (((0, 100), (100, 100)), ((0, 200),)),
        (((BLOCK_BYTES - 8, 16),), ((0, 16),)),
        (((0, 16),), ((-8, 16),)),
    ],
)
def test_pieces_that_do_not_pair_or_leave_their_block_are_refused(
    pair: Pair, theirs: tuple[tuple[int, int], ...], ours: tuple[tuple[int, int], ...]
) -> None:
    pair.connect()
    region, into = dataclasses.replace(pair.peer.region, pieces=theirs), dataclasses.replace(pair.pool.region, pieces=ours)
    with pytest.raises(TransferFailed, match="piece"):
        pair.transport.post_read(pair.peer.incarnation, region, [0], [0], into)


def test_several_reads_at_once(pair: Pair) -> None:
    pair.connect()
    peer, region = pair.peer.incarnation, pair.peer.region
    handles = [pair.transport.post_read(peer, region, [i, i + 8], [i + 16, i + 24], pair.pool.region) for i in range(8)]
    for handle in handles:
        wait_for(pair.transport, handle)
    assert pair.pool.digest(list(range(16, 32))) == pair.peer.digest(list(range(16)))


def test_connecting_twice_is_connecting_once(pair: Pair) -> None:
    pair.connect()
    pair.connect()
    pair.read([1], [2])
    assert pair.pool.digest([2]) == pair.peer.digest([1])


def test_a_peer_can_be_forgotten_and_learnt_again(pair: Pair) -> None:
    """(1) Disconnect, twice; (2) a read is refused; (3) connect; (4) a read arrives."""
    pair.connect()
    pair.transport.disconnect(pair.peer.incarnation)
    pair.transport.disconnect(pair.peer.incarnation)
    with pytest.raises(TransferFailed, match="not connected"):
        pair.read([0], [0])
    pair.connect()
    pair.read([4], [9])
    assert pair.pool.digest([9]) == pair.peer.digest([4])


def test_metadata_of_another_incarnation_is_refused(pair: Pair) -> None:
    stranger = new_incarnation()
    with pytest.raises(TransferFailed):
        pair.transport.connect(stranger, pair.peer.metadata)
    pair.connect()
    pair.read([2], [3])
    assert pair.pool.digest([3]) == pair.peer.digest([2])


@pytest.mark.parametrize("metadata", [b"", b"\x00" * 400, b"x" * (1 << 20)])
def test_garbage_metadata_is_refused(pair: Pair, metadata: bytes) -> None:
    with pytest.raises(TransferFailed):
        pair.transport.connect(new_incarnation(), metadata)


@pytest.mark.parametrize(
    ("remote", "local"),
    [([NUM_BLOCKS], [0]), ([-1], [0]), ([0], [NUM_BLOCKS]), ([0], [-1]), ([0, 1], [0]), ([], [])],
)
def test_blocks_that_do_not_exist_or_pair_up_are_refused(pair: Pair, remote: list[int], local: list[int]) -> None:
    pair.connect()
    with pytest.raises(TransferFailed):
        pair.read(remote, local)


def test_blocks_of_another_size_are_refused(pair: Pair) -> None:
    pair.connect()
    region = dataclasses.replace(pair.peer.region, block_bytes=BLOCK_BYTES // 2)
    with pytest.raises(TransferFailed, match="bytes"):
        pair.transport.post_read(pair.peer.incarnation, region, [0], [0], pair.pool.region)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_with_other_blocks_is_read_into_staging_blocks(kind: str) -> None:
    """(1) Into the pool its blocks do not fit; (2) into two regions of its size they do, in turns; (3) only there."""
    with contextlib.contextmanager(make_pair)(kind, Pool(block_bytes=BLOCK_BYTES // 2)) as pair:
        metadata = pair.transport.metadata()
        pair.connect()
        with pytest.raises(TransferFailed, match="bytes"):
            pair.read([0], [0])
        one, other = Pool(num_blocks=4), Pool(num_blocks=6)
        for staging in (one, other, one):
            staging.array[:] = 7
            pair.read([9, 30, 2], [3, 0, 1], staging.region)
            assert staging.digest([3, 0, 1]) == pair.peer.digest([9, 30, 2])
            assert (staging.array[2] == 7).all()
        with pytest.raises(TransferFailed, match="outside"):
            pair.read([0], [4], one.region)
        assert not pair.pool.array.any()
        assert pair.transport.metadata() == metadata, "peers know the pool only"
        pair.transport.close()


def test_a_region_that_is_not_the_peers_is_refused(mortal_pair: Pair) -> None:
    mortal_pair.connect()
    region = dataclasses.replace(mortal_pair.peer.region, address=mortal_pair.peer.region.address + (1 << 40))
    with pytest.raises(TransferFailed):
        mortal_pair.transport.post_read(mortal_pair.peer.incarnation, region, [0], [0], mortal_pair.pool.region)


def test_death_of_the_peer_fails_its_reads(mortal_pair: Pair) -> None:
    """(1) A read works; (2) the peer is killed; (3) a read fails; (4) reconnecting fails; (5) closing works."""
    mortal_pair.connect()
    mortal_pair.read([0], [0])
    mortal_pair.peer.kill()
    with pytest.raises(TransferFailed):
        mortal_pair.read([1], [1])
    with pytest.raises(TransferFailed):
        mortal_pair.connect()
    mortal_pair.transport.close()
    mortal_pair.transport.close()


def test_a_stalled_peer_over_tcp_writes_late() -> None:
    """Why blocks of a read past its deadline stay out of use.

    (1) The peer's process is stopped; (2) a read makes no progress and reports nothing; (3) it continues: bytes arrive.
    """
    with contextlib.contextmanager(make_pair)("nixl-tcp") as pair:
        assert isinstance(pair.peer, NixlPeer)
        pair.connect()
        pair.read([0], [0])
        pair.peer.process.send_signal(signal.SIGSTOP)
        os.waitpid(pair.peer.process.pid, os.WUNTRACED)  # until every thread of it stands still
        handle = pair.transport.post_read(pair.peer.incarnation, pair.peer.region, [1, 2], [3, 4], pair.pool.region)
        for _ in range(100):
            assert not pair.transport.poll(handle)
        assert not pair.pool.array[[3, 4]].any()
        pair.peer.process.send_signal(signal.SIGCONT)
        wait_for(pair.transport, handle)
        assert pair.pool.digest([3, 4]) == pair.peer.digest([1, 2])


def read_anew(pair: Pair) -> None:
    pair.connect()
    pair.read([1], [1])


def test_a_broken_connection_is_kept_until_its_other_reads_are_over() -> None:
    """(1) Two reads in flight, the peer is killed; (2) one has failed: no new connection; (3) the other fails as cleanly."""
    with contextlib.contextmanager(make_pair)("nixl-tcp") as pair:
        assert isinstance(pair.peer, NixlPeer)
        pair.connect()
        pair.read([0], [0])
        pair.peer.process.send_signal(signal.SIGSTOP)
        os.waitpid(pair.peer.process.pid, os.WUNTRACED)
        peer, region = pair.peer.incarnation, pair.peer.region
        one, other = (pair.transport.post_read(peer, region, [i], [i], pair.pool.region) for i in (1, 2))
        assert not pair.transport.poll(one)
        assert not pair.transport.poll(other)
        pair.peer.process.kill()
        with pytest.raises(TransferFailed, match="disconnected"):
            wait_for(pair.transport, one)
        with pytest.raises(TransferFailed, match="unresolved"):
            pair.connect()
        with pytest.raises(TransferFailed, match="disconnected"):
            wait_for(pair.transport, other)
        with pytest.raises(TransferFailed):  # NIXL may notice only when it is asked to read
            read_anew(pair)


def test_nixl_leaves_a_users_environment_alone() -> None:
    environment = {"UCX_TCP_USER_TIMEOUT": "1m", "UCX_MODULES": "cma"}
    prepare_environment(environment)
    assert environment["UCX_TCP_USER_TIMEOUT"] == "1m"
    assert environment["UCX_MODULES"] == "cma"
    assert environment["UCX_KEEPALIVE_INTERVAL"] == "1s"


@pytest.mark.parametrize(("gpu", "get"), [(False, None), (True, "on")])
def test_ucx_reads_from_gpu_to_gpu_also_where_it_sees_no_nvlink(gpu: bool, get: str | None) -> None:
    environment: dict[str, str] = {}
    prepare_environment(environment, gpu=gpu)
    assert environment.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY") == get


@pytest.mark.parametrize(
    ("devices", "gpu", "hooks"), [(False, False, "n"), (True, False, None), (False, True, None)], ids=["plain", "rdma", "gpu"]
)
def test_ucx_hooks_memory_calls_only_where_it_caches_registrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: bool, gpu: bool, hooks: str | None
) -> None:
    if devices:
        (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl, "_RDMA_DEVICES", tmp_path)
    environment: dict[str, str] = {}
    prepare_environment(environment, gpu=gpu)
    assert environment.get("UCX_MEM_EVENTS") == hooks


def test_metadata_is_small_and_constant(pair: Pair) -> None:
    assert 0 < len(pair.transport.metadata()) < 4096
    assert pair.transport.metadata() == pair.transport.metadata()


def test_the_fake_transport_joins_the_workers_of_one_process() -> None:
    pools = [Pool(seed=seed) for seed in (1, None)]
    incarnations = [new_incarnation() for _ in pools]
    make = prepare("fake", "127.0.0.1", allow_public=False)
    lender, reader = (make(WorkerId("w"), i, [pool.region]) for i, pool in zip(incarnations, pools, strict=True))
    reader.connect(incarnations[0], lender.metadata())
    wait_for(reader, reader.post_read(incarnations[0], pools[0].region, [3], [5], pools[1].region))
    assert pools[1].digest([5]) == pools[0].digest([3])
    lender.close()
    with pytest.raises(TransferFailed, match="fake reaches only pools of its own process"):
        reader.connect(incarnations[0], lender.metadata())
    reader.close()


def test_the_fake_transport_refuses_a_pool_on_a_gpu() -> None:
    region = Region(4096, 1, 64, TransferDevice("cuda", 0))
    with pytest.raises(ConfigError, match="fake copies host memory only"):
        prepare("fake", "127.0.0.1", allow_public=False)(WorkerId("w"), new_incarnation(), [region])
