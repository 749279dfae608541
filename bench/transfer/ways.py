"""The ways by which the sweep moves blocks, and the CPU time that each of them takes in both processes."""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.transfer.reads import (
    PEER_INCARNATION,
    READER_INCARNATION,
    SEED,
    TIMEOUT_S,
    Peer,
    Pool,
    environment,
    make_transport,
    started_peer,
)
from kvtransfer.thread import POLL_MAX_S, POLL_MIN_S
from pdserve.engine.block_sums import BlockSums

FLOOR = "memcpy"
SOCKET = "TCP socket"
CHECKED = "nixl, checksums"
WAYS = (FLOOR, SOCKET, "nixl", CHECKED, "nixl, TCP", "cma")
"""All ways in the order of tables."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured read: seconds of one read, as a mean where several small reads follow each other."""

    wall_s: float
    reader_cpu_s: float
    lender_cpu_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """One way to bring the first `count` blocks of a scattered order into a pool of this process."""

    name: str
    read: Callable[[int], None]
    """It returns when all blocks are there."""
    target: Pool
    lender_pid: int | None
    """The passive process. None: there is none."""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, from the kernel's counts of nanoseconds."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


class Bench:
    """All ways over pools of `num_blocks` blocks of `block_bytes` bytes. `stack` closes what they need."""

    def __init__(self, stack: ExitStack, num_blocks: int, block_bytes: int) -> None:
        self.source = Pool(num_blocks, block_bytes, fill=True)
        self.order = [int(block) for block in np.random.default_rng(SEED).permutation(num_blocks)]
        self._stack = stack
        nixl, peer = self._transport("nixl", "nixl")
        with environment(UCX_TLS="tcp"):
            over_tcp, _ = self._transport("nixl, TCP", "nixl")
        cma, _ = self._transport("cma", "cma")
        self.ways = (self._floor(), self._socket(peer), nixl, self._checked(nixl), over_tcp, cma)

    def sample(self, way: Way, count: int, repeats: int, own_pid: int) -> Sample:
        """Read `count` blocks `repeats` times. Raises `AssertionError` when a byte differs."""
        way.target.array[:count] = 0
        lender_s, own_s = cpu_s(way.lender_pid) if way.lender_pid else 0.0, cpu_s(own_pid)
        began_s = time.perf_counter()
        for _ in range(repeats):
            way.read(count)
        wall_s = time.perf_counter() - began_s
        own_s = cpu_s(own_pid) - own_s
        lender_s = cpu_s(way.lender_pid) - lender_s if way.lender_pid else 0.0
        assert np.array_equal(way.target.array[:count], self.source.array[self.expected(way, count)]), (
            f"{way.name}: bytes differ"
        )
        return Sample(wall_s / repeats, own_s / repeats, lender_s / repeats)

    def expected(self, way: Way, count: int) -> list[int]:
        """Return the blocks that the way reads: the socket sends them in the order of the pool."""
        return list(range(count)) if way.name == SOCKET else self.order[:count]

    def _pool(self) -> Pool:
        region = self.source.region
        return Pool(region.num_blocks, region.block_bytes, fill=False)

    def _floor(self) -> Way:
        target, source = self._pool(), self.source.region

        def read(count: int) -> None:
            for local, remote in enumerate(self.order[:count]):
                ctypes.memmove(target.region.address_of(local), source.address_of(remote), source.block_bytes)

        return Way(FLOOR, read, target, None)

    def _socket(self, peer: Peer) -> Way:
        connection = self._stack.enter_context(socket.create_connection(("127.0.0.1", peer.port), timeout=TIMEOUT_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target = self._pool()

        def read(count: int) -> None:
            view = target.array[:count].data.cast("B")
            connection.sendall(struct.pack("<Q", len(view)))
            while view:
                view = view[connection.recv_into(view) :]

        return Way(SOCKET, read, target, peer.pid)

    def _transport(self, name: str, transport_name: str) -> tuple[Way, Peer]:
        """Start a passive process and a transport. Polls wait as in the production reactor."""
        region = self.source.region
        peer = self._stack.enter_context(started_peer(transport_name, region.num_blocks, region.block_bytes))
        target = self._pool()
        transport = make_transport(transport_name, "reader", READER_INCARNATION, target.region)
        self._stack.callback(transport.close)
        transport.connect(PEER_INCARNATION, peer.metadata)

        def read(count: int) -> None:
            ends_s, delay_s = time.perf_counter() + TIMEOUT_S, POLL_MIN_S
            handle = transport.post_read(PEER_INCARNATION, peer.region, self.order[:count], range(count), target.region)
            while not transport.poll(handle):
                if time.perf_counter() > ends_s:
                    raise TimeoutError(f"a read over {name} took more than {TIMEOUT_S:.0f} s")
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, POLL_MAX_S)

        return Way(name, read, target, peer.pid), peer

    def _checked(self, way: Way) -> Way:
        """Return a way that also sums all blocks that it read, as a decode worker does."""
        sums = BlockSums(torch.from_numpy(way.target.array))

        def read(count: int) -> None:
            way.read(count)
            sums(range(count))

        return Way(CHECKED, read, way.target, way.lender_pid)
