"""Measure how fast KV blocks cross between two processes, beside what the machine can do.

    python -m bench.transfer.reads [--blocks 256] [--block-kib 360] [--piece-kib 2] [--runs 15] [--transport nixl]

Several ways move the same scattered blocks, one after the other in every round, so that a busy machine slows all of
them: a plain copy within this process (the floor), the transport as the workers use it, the same by pieces that lie in
another order here, as ranks of other degrees read, NIXL held to TCP, and a raw TCP loopback socket to compare the latter
with. Every read is compared bit for bit. --transport takes what the setting transfer.transport takes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtransfer.api import Region, Transport
from kvtransfer.backends.registry import prepare
from pdserve.core.ids import Incarnation, WorkerId

SEED = 1
POLL_S = 100e-6
TIMEOUT_S = 30.0
PEER_INCARNATION = Incarnation(1)
READER_INCARNATION = Incarnation(2)


class Pool:
    """A pool of blocks: `array` is [num_blocks, block_bytes] uint8. `fill` gives every process the same random bytes."""

    def __init__(self, num_blocks: int, block_bytes: int, *, fill: bool) -> None:
        self.array = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        if fill:
            self.array[:] = np.random.default_rng(SEED).integers(0, 256, self.array.shape, dtype=np.uint8)
        self.region = Region(self.array.ctypes.data, num_blocks, block_bytes)


@dataclass(frozen=True)
class Peer:
    """The passive process as a reader sees it: its metadata, its pool, the port of its socket, and its process id."""

    metadata: bytes
    region: Region
    port: int
    pid: int


def make_transport(name: str, worker_id: str, incarnation: Incarnation, region: Region) -> Transport:
    """Make the transport of one process on loopback."""
    return prepare(name, "127.0.0.1", allow_public=False)(WorkerId(worker_id), incarnation, [region])


def serve(name: str, num_blocks: int, block_bytes: int) -> None:
    """Run the passive process until stdin ends. It prints where its pool is, and sends the pool to the client of its socket."""
    pool = Pool(num_blocks, block_bytes, fill=True)
    transport = make_transport(name, "peer", PEER_INCARNATION, pool.region)
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, args=(server, pool), daemon=True).start()
    hello = {"metadata": transport.metadata().hex(), "address": pool.region.address, "port": server.getsockname()[1]}
    print(json.dumps(hello), flush=True)
    sys.stdin.read()
    transport.close()


def answer(server: socket.socket, pool: Pool) -> None:
    """Serve one client. Each request is a count of bytes, as 8 bytes little-endian; the answer is that many bytes of
    the pool.
    """
    connection, _ = server.accept()
    with connection:
        while len(request := connection.recv(8)) == 8:
            connection.sendall(pool.array.data.cast("B")[: struct.unpack("<Q", request)[0]])


@contextmanager
def started_peer(name: str, num_blocks: int, block_bytes: int) -> Iterator[Peer]:
    """Run a passive process until the block ends."""
    command = [sys.executable, "-m", "bench.transfer.reads", "--serve", "--blocks", str(num_blocks)]
    command += ["--block-bytes", str(block_bytes), "--transport", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        hello = json.loads(process.stdout.readline())
        region = Region(hello["address"], num_blocks, block_bytes)
        yield Peer(bytes.fromhex(hello["metadata"]), region, hello["port"], process.pid)
        process.communicate(timeout=TIMEOUT_S)  # its stdin ends
    finally:
        process.kill()
        process.communicate()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for processes and agents that are made inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class TransportWay:
    """A reader with its passive process. `run` reads the whole pool in scattered order."""

    def __init__(self, stack: ExitStack, name: str, source: Pool, order: list[int]) -> None:
        num_blocks, block_bytes = source.array.shape
        self.peer = stack.enter_context(started_peer(name, num_blocks, block_bytes))
        self.pool = Pool(num_blocks, block_bytes, fill=False)
        self.source = source
        self.order = order
        self.transport = make_transport(name, "reader", READER_INCARNATION, self.pool.region)
        stack.callback(self.transport.close)
        self.transport.connect(PEER_INCARNATION, self.peer.metadata)

    def run(self, piece_bytes: int | None = None) -> float:
        """Read the pool, and return the seconds. piece_bytes: read blocks by pieces of this size, into the opposite order.

        Raises `TimeoutError` after 30 s, and `AssertionError` when a byte differs.
        """
        theirs, ours = self.peer.region, self.pool.region
        expected = self.source.array[self.order]
        if piece_bytes is not None:
            pieces = tuple((offset, piece_bytes) for offset in range(0, ours.block_bytes, piece_bytes))
            theirs, ours = replace(theirs, pieces=pieces), replace(ours, pieces=pieces[::-1])
            expected = expected.reshape(len(expected), -1, piece_bytes)[:, ::-1].reshape(expected.shape)
        self.pool.array[:] = 0
        started_s = time.perf_counter()
        handle = self.transport.post_read(PEER_INCARNATION, theirs, self.order, range(len(self.order)), ours)
        while not self.transport.poll(handle):
            if time.perf_counter() - started_s > TIMEOUT_S:
                raise TimeoutError("a read did not finish")
            time.sleep(POLL_S)
        duration_s = time.perf_counter() - started_s
        assert np.array_equal(self.pool.array, expected), "bytes differ"
        return duration_s


def copy(source: Pool, target: Pool, order: list[int]) -> float:
    """Copy the blocks `order` of `source` into `target`, and return the seconds."""
    started_s = time.perf_counter()
    for local, remote in enumerate(order):
        ctypes.memmove(target.region.address_of(local), source.region.address_of(remote), source.region.block_bytes)
    return time.perf_counter() - started_s


def receive(connection: socket.socket, target: Pool) -> float:
    """Fill `target` from the socket, and return the seconds."""
    view = target.array.data.cast("B")
    started_s = time.perf_counter()
    connection.sendall(struct.pack("<Q", len(view)))
    while view:
        view = view[connection.recv_into(view) :]
    return time.perf_counter() - started_s


def measure(name: str, num_blocks: int, block_bytes: int, piece_bytes: int, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run, by way. The first round warms up and is not counted."""
    order = [int(block) for block in np.random.default_rng(SEED).permutation(num_blocks)]
    source, target = Pool(num_blocks, block_bytes, fill=True), Pool(num_blocks, block_bytes, fill=False)
    with ExitStack() as stack:
        read = TransportWay(stack, name, source, order)
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", read.peer.port), timeout=TIMEOUT_S))
        ways: dict[str, Callable[[], float]] = {
            "memcpy in one process (floor)": lambda: copy(source, target, order),
            f"{name} read": read.run,
            f"{name} read, pieces of {piece_bytes / 1024:g} KiB": lambda: read.run(piece_bytes),
            "TCP loopback socket": lambda: receive(connection, target),
        }
        if name == "nixl":
            with environment(UCX_TLS="tcp"):
                ways["nixl read, UCX_TLS=tcp"] = TransportWay(stack, name, source, order).run
        rounds = [{label: way() for label, way in ways.items()} for _ in range(runs + 1)]
    return {label: [one[label] for one in rounds[1:]] for label in ways}


def report(times_s: dict[str, list[float]], num_blocks: int, block_bytes: int) -> Table:
    """Return the table."""
    total_bytes = num_blocks * block_bytes
    runs = len(next(iter(times_s.values())))
    title = f"{num_blocks} blocks of {block_bytes // 1024} KiB ({total_bytes / 1e6:.0f} MB), median of {runs} interleaved runs"
    table = Table("way", title=title)
    for column in ("ms", "GB/s", "slowest", "fastest", "of floor"):
        table.add_column(column, justify="right")
    floor_s = statistics.median(next(iter(times_s.values())))
    for name, values in times_s.items():
        median_s = statistics.median(values)
        rates = [f"{total_bytes / seconds / 1e9:.2f}" for seconds in (median_s, max(values), min(values))]
        table.add_row(name, f"{median_s * 1e3:.2f}", *rates, f"{floor_s / median_s:.0%}")
    return table


def main() -> None:
    """Run the benchmark, or with --serve the passive process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument(
        "--block-kib", type=int, default=360, help="size of a block; 360 is that of SmolLM2-135M with 16 tokens in bf16"
    )
    parser.add_argument(
        "--piece-kib", type=int, default=2, help="size of a piece, which divides a block; 2 is a head of SmolLM2-135M"
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--transport", default="nixl", metavar="NAME")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--block-bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    block_bytes = options.block_bytes or options.block_kib * 1024
    if options.serve:
        serve(options.transport, options.blocks, block_bytes)
    else:
        times_s = measure(options.transport, options.blocks, block_bytes, options.piece_kib * 1024, options.runs)
        Console().print(report(times_s, options.blocks, block_bytes))


if __name__ == "__main__":
    main()
