"""NIXL between two processes on one GPU, which is CUDA IPC, beside a copy on the device.

The blocks are Llama-3-8B's, 16 tokens in bfloat16: 2 MiB, scattered. What arrives is compared with what was sent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch

from kvtransfer.api import Device, Region, Transport
from pdserve.core.ids import Incarnation, WorkerId
from tools.gpu.row import Row, Setup, mean_s

LENDER, READER = Incarnation(1), Incarnation(2)
READ_TIMEOUT_S = 60.0


def make_pool(setup: Setup) -> tuple[torch.Tensor, Region]:
    """[blocks, block_bytes] uint8: 1,024 blocks of 2 MiB, or 4 of 64 KiB."""
    blocks, block_bytes = (4, 1 << 16) if setup.rehearsed else (1024, 2 << 20)
    pool = torch.zeros((blocks, block_bytes), dtype=torch.uint8, device=setup.device)
    return pool, Region(pool.data_ptr(), blocks, block_bytes, Device("cpu" if setup.rehearsed else "cuda"))


def lend(setup: Setup) -> None:
    """The other process: fills a pool with its block numbers, says where it is and waits until stdin ends."""
    from kvtransfer.backends.nixl import NixlTransport

    pool, region = make_pool(setup)
    pool += torch.arange(1, len(pool) + 1, device=setup.device).to(torch.uint8).view(-1, 1)
    if not setup.rehearsed:
        torch.cuda.synchronize()
    transport = NixlTransport(WorkerId("lender"), LENDER, region)
    print(json.dumps({"metadata": transport.metadata().hex(), "address": region.address}), flush=True)
    sys.stdin.read()
    transport.close()


def run(setup: Setup) -> None:
    from kvtransfer.backends.nixl import NixlTransport

    pool, region = make_pool(setup)
    command = [sys.executable, "-m", "tools.gpu_check", "--part", "lend", *(["--rehearse"] if setup.rehearsed else [])]
    lender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert lender.stdout is not None
        hello = json.loads(lender.stdout.readline() or "null")
        if hello is None:
            raise SystemExit("the lending process ended before it lent anything")
        transport = NixlTransport(WorkerId("reader"), READER, region)
        transport.connect(LENDER, bytes.fromhex(hello["metadata"]))
        remote = Region(hello["address"], region.num_blocks, region.block_bytes, region.device)
        order = torch.randperm(region.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        read(transport, remote, order)
        rate = region.nbytes / min(read(transport, remote, order) for _ in range(3))
        expected = torch.tensor(order, device=setup.device).add(1).to(torch.uint8)
        if not torch.equal(pool[:, 0], expected) or not torch.equal(pool[:, -1], expected):
            raise SystemExit("blocks arrived that are not the ones that were lent")
        transport.close()
    finally:
        lender.communicate(timeout=30)
    target = torch.empty_like(pool)
    copied = pool.nbytes / mean_s(lambda: target.copy_(pool), setup.device)
    Row(
        "nixl", f"{region.nbytes >> 20} MiB in {region.num_blocks} blocks, two processes", f"{rate / 1e9:.1f} GB/s",
        f"{copied / 1e9:.1f} device copy", f"{rate / copied:.0%}",
    ).emit()  # fmt: skip


def read(transport: Transport, remote: Region, blocks: list[int]) -> float:
    """Seconds until remote block blocks[i] is local block i, for all i."""
    began_s = time.perf_counter()
    handle = transport.post_read(LENDER, remote, blocks, range(len(blocks)))
    while not transport.poll(handle):
        if time.perf_counter() - began_s > READ_TIMEOUT_S:
            raise SystemExit(f"a read was not over after {READ_TIMEOUT_S:.0f} s")
    return time.perf_counter() - began_s
