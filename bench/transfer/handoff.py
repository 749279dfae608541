"""Measure what a handoff costs the stream when KV is read chunk by chunk: the time from token 0 to usable KV.

    python -m bench.transfer.handoff [--chunks 8] [--chunk-blocks 32] [--block-kib 360] [--chunk-ms 100] [--runs 15]

Lender and reader are two processes with the production lease service, transfer thread and pull over NIXL; prefill is a timer
that makes a chunk final every `--chunk-ms`. Three prompts take turns in every round, each with checksums and without: the first
is read while it is computed, the second becomes final at once, and the third has a single chunk. The floor is a plain copy of
the same blocks within this process. Every pull is compared bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.transfer.reads import PEER_INCARNATION, READER_INCARNATION, TIMEOUT_S, Pool, copy
from kvtransfer.api import KvRegion, Region
from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.lease_client import LeaseClient
from kvtransfer.lease_service import LeaseService, PeerService
from kvtransfer.pull import Pull, PullResult
from kvtransfer.routed import RoutedTransport
from kvtransfer.thread import PoolSource, TransferThread
from kvtransfer.ticket import Ticket
from pdserve.config import LeaseConfig
from pdserve.core.block_hash import prompt_hash
from pdserve.core.ids import BlockId, LeaseId, ReaderId, SeqId, WorkerId
from pdserve.core.kv_layout import KvGroup, KvSpec, gqa_group
from pdserve.core.lease import FirstToken, LeaseTable
from pdserve.engine.block_sums import BlockSums
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import peer_pb2_grpc

TOKEN = "bench"
BLOCK_SIZE = 16  # tokens


@dataclass(frozen=True)
class Shape:
    """The size of the prompt: `chunks` of `chunk_blocks` blocks, each block of `block_kib` KiB."""

    chunks: int
    chunk_blocks: int
    block_kib: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt."""
        return self.chunks * self.chunk_blocks

    @property
    def layout(self) -> KvGroup:
        """Layout of a block of the asked size: one head, and as many layers as fit."""
        bytes_per_layer = 2 * BLOCK_SIZE * 64 * 2
        return gqa_group(self.block_kib * 1024 // bytes_per_layer, 1, 64, BLOCK_SIZE, "bfloat16")

    def pool(self, *, fill: bool) -> Pool:
        """Make a pool for the whole prompt. `fill` gives it the bytes that all processes share."""
        return Pool(self.num_blocks, self.layout.block_bytes, fill=fill)


async def serve(shape: Shape) -> None:
    """Run the lender. Each line on stdin is `BLOCKS CHUNK_BLOCKS INTERVAL_S CHECKSUMS`; for each, grant a lease, print its
    ticket and advance it.
    """
    pool = shape.pool(fill=True)
    transport = RoutedTransport({0: NixlTransport(WorkerId("lender"), PEER_INCARNATION, [pool.region])})
    loop = asyncio.get_running_loop()
    table = LeaseTable(PEER_INCARNATION, ttl_s=30.0)
    service = LeaseService(table, loop.time, lambda: None, cluster_token=TOKEN)
    server = grpc.aio.server(options=server_options())
    peer_pb2_grpc.add_LeaseServicer_to_server(service, server)
    peer_pb2_grpc.add_PeerServicer_to_server(PeerService(PEER_INCARNATION, transport.metadata(), cluster_token=TOKEN), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    sum_blocks = BlockSums(torch.from_numpy(pool.array))
    order = np.random.default_rng(1).permutation(shape.num_blocks)
    while line := await asyncio.to_thread(sys.stdin.readline):
        blocks, step, interval, checksums = line.split()
        ids = tuple(BlockId(int(block)) for block in order[: int(blocks)])
        prompt_len = len(ids) * BLOCK_SIZE
        summed = checksums == "True"
        lease_id = table.grant(SeqId(1), (ids,), prompt_len, sums=((),) if summed else None, now_s=loop.time())
        ticket = ticket_of(lease_id, shape, pool.region, address, ids, checksums=summed)
        table.expect(lease_id, ticket.proof)
        print(json.dumps({"counter": lease_id.counter, "ticket": ticket.encode().hex()}), flush=True)
        for done in range(int(step), len(ids) + 1, int(step)):
            await asyncio.sleep(float(interval))
            first = FirstToken(1, None) if done == len(ids) else None
            service.publish(table.advance(lease_id, done * BLOCK_SIZE, first, now_s=loop.time()))
            if summed:  # on another thread than the loop's, as in a worker
                final = ids[done - int(step) : done]
                service.seal(lease_id, done - int(step), [await asyncio.to_thread(sum_blocks, final)])
    await server.stop(None)
    transport.close()


def ticket_of(
    lease_id: LeaseId, shape: Shape, region: Region, address: str, ids: tuple[BlockId, ...], *, checksums: bool
) -> Ticket:
    """Return the sealed ticket of a lease over the blocks `ids`."""
    ticket = Ticket(
        incarnation=lease_id.incarnation,
        lease_counter=lease_id.counter,
        peer_address=address,
        kv_spec=KvSpec((shape.layout,)),
        regions=(KvRegion.of(shape.layout, region),),
        block_tables=(ids,),
        prompt_len=len(ids) * BLOCK_SIZE,
        prompt_hash=prompt_hash(b"", ""),
        checksums=checksums,
    )
    return ticket.with_mac(b"bench")


class Reader:
    """The decode worker's half of the handoff, which also drives the lender's process."""

    def __init__(self, shape: Shape, lender: asyncio.subprocess.Process) -> None:
        self.shape = shape
        self.lender = lender
        self.pool = shape.pool(fill=False)
        self.source = shape.pool(fill=True)
        own = self.pool.region
        self.thread = TransferThread(lambda: RoutedTransport({0: NixlTransport(WorkerId("reader"), READER_INCARNATION, [own])}))
        self.sums = BlockSums(torch.from_numpy(self.pool.array))
        self.config = LeaseConfig()
        self.binds = 0

    async def start(self) -> None:
        """Start the transfer thread and make the lease client."""
        await self.thread.start()
        self.client = LeaseClient(self.thread, self.config, cluster_token=TOKEN)

    async def pull(self, blocks: int, step: int, interval_s: float, *, checksums: bool) -> PullResult:
        """Let the lender make `blocks` blocks final, `step` at a time every `interval_s`, and pull them. Raises
        `AssertionError` when a byte differs.
        """
        assert self.lender.stdin is not None
        assert self.lender.stdout is not None
        self.lender.stdin.write(f"{blocks} {step} {interval_s} {checksums}\n".encode())
        answer = json.loads(await self.lender.stdout.readline())
        lease_id = LeaseId(PEER_INCARNATION, answer["counter"])
        ticket = Ticket.decode(bytes.fromhex(answer["ticket"]))
        self.pool.array[:] = 0
        self.binds += 1
        lease = await self.client.attach(lease_id, ticket, deadline_s=TIMEOUT_S)
        reader_id = ReaderId(READER_INCARNATION, self.binds)
        region = KvRegion.of(self.shape.layout, self.pool.region)
        self.thread.sum_blocks = {region: self.sums} if checksums else {}
        pull = Pull(lease, ticket, [range(blocks)], reader_id, [PoolSource(self.thread, region)], self.config)
        pulled = await pull.run(wait_s=TIMEOUT_S)
        lease.close()
        assert np.array_equal(self.pool.array[:blocks], self.source.array[list(ticket.block_tables[0])]), "bytes differ"
        return pulled

    def sum(self, blocks: int) -> float:
        """Return the seconds that the checksums of `blocks` blocks take."""
        began_s = time.perf_counter()
        BlockSums(torch.from_numpy(self.source.array))(range(blocks))
        return time.perf_counter() - began_s

    def copy(self, blocks: int) -> float:
        """Return the seconds that a copy of `blocks` blocks within this process takes."""
        return copy(self.source, self.pool, list(range(blocks)))

    async def close(self) -> None:
        """Close the lease client and end the transfer thread."""
        await self.client.close()
        await self.thread.close()


@asynccontextmanager
async def started(shape: Shape) -> AsyncIterator[Reader]:
    """Run a lender and a reader until the block ends."""
    sizes = [str(size) for size in (shape.chunks, shape.chunk_blocks, shape.block_kib)]
    command = ["-m", "bench.transfer.handoff", "--serve"]
    command += ["--chunks", sizes[0], "--chunk-blocks", sizes[1], "--block-kib", sizes[2]]
    pipe = asyncio.subprocess.PIPE
    lender = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe, limit=1 << 22)
    reader = Reader(shape, lender)
    try:
        await reader.start()
        yield reader
        await reader.close()
    finally:
        lender.kill()
        await lender.wait()


async def measure(shape: Shape, chunk_s: float, runs: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each run, by row, and the share of bytes that were still to be read at token 0 when streamed. The
    first round is not counted.
    """
    rounds: list[dict[str, float]] = []
    shares: list[float] = []
    async with started(shape) as reader:
        for _ in range(runs + 1):
            row: dict[str, float] = {}
            for checksums in (False, True):
                kind = ", checksums" if checksums else ""
                streamed = await reader.pull(shape.num_blocks, shape.chunk_blocks, chunk_s, checksums=checksums)
                whole = await reader.pull(shape.num_blocks, shape.num_blocks, chunk_s, checksums=checksums)
                chunk = await reader.pull(shape.chunk_blocks, shape.chunk_blocks, chunk_s, checksums=checksums)
                row |= {
                    f"exposed: streamed{kind}": streamed.exposed_s,
                    f"exposed: a single chunk{kind}": chunk.exposed_s,
                    f"exposed: whole prompt at the end{kind}": whole.exposed_s,
                    f"read of one chunk{kind}": chunk.transfer_s,
                    f"read of the whole prompt{kind}": whole.transfer_s,
                    f"Commit{kind}": streamed.commit_s,
                }
            shares.append(streamed.exposed_bytes / streamed.kv_bytes)
            row["sum of one chunk"] = reader.sum(shape.chunk_blocks)
            row["memcpy of one chunk (floor)"] = reader.copy(shape.chunk_blocks)
            row["memcpy of the whole prompt (floor)"] = reader.copy(shape.num_blocks)
            rounds.append(row)
    return {name: [one[name] for one in rounds[1:]] for name in rounds[0]}, statistics.median(shares[1:])


def report(times_s: dict[str, list[float]], share: float, shape: Shape) -> Table:
    """Return the table."""
    chunk_bytes = shape.chunk_blocks * shape.layout.block_bytes
    runs = len(next(iter(times_s.values())))
    size = f"{shape.chunks} chunks of {shape.chunk_blocks} blocks ({chunk_bytes / 1e6:.1f} MB each)"
    table = Table(
        "what",
        title=f"{size}, median of {runs} interleaved rounds",
        caption=f"{share:.0%} of the bytes were still to be read when token 0 was known",
    )
    for column in ("ms", "fastest", "slowest"):
        table.add_column(column, justify="right")
    for name, values in times_s.items():
        table.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in (statistics.median(values), min(values), max(values))))
    return table


def main() -> None:
    """Run the benchmark, or with --serve the lender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-blocks", type=int, default=32, help="blocks of a chunk; 32 hold 512 tokens")
    parser.add_argument(
        "--block-kib", type=int, default=360, help="size of a block; 360 is that of SmolLM2-135M with 16 tokens in bf16"
    )
    parser.add_argument("--chunk-ms", type=float, default=100.0, help="time that prefill takes for a chunk")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(options.chunks, options.chunk_blocks, options.block_kib)
    if options.serve:
        asyncio.run(serve(shape))
        return
    times_s, share = asyncio.run(measure(shape, options.chunk_ms / 1e3, options.runs))
    Console().print(report(times_s, share, shape))


if __name__ == "__main__":
    main()
