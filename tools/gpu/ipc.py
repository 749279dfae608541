"""NIXL between two processes on one GPU, which should use CUDA IPC, beside a copy on the device.

The blocks are scattered and have the size of Llama-3-8B's: 16 tokens in bfloat16, 2 MiB. The bytes that arrive are compared
with those that were lent.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from kvtransfer.api import Region, TransferDevice
from tools.gpu import ucx_log
from tools.gpu.other_process import other_process, say, wait
from tools.gpu.row import Row, Setup, replayed_s

READS = 4  # the first one also opens the peer's memory, and is not counted
WANTED = "cuda_ipc"


def make_pool(setup: Setup) -> tuple[torch.Tensor, Region]:
    """Return a pool [blocks, block_bytes] uint8, and its region: 1,024 blocks of 2 MiB, or 4 of 64 KiB in a rehearsal."""
    blocks, block_bytes = (4, 1 << 16) if setup.rehearsed else (1024, 2 << 20)
    pool = torch.zeros((blocks, block_bytes), dtype=torch.uint8, device=setup.device)
    return pool, Region(pool.data_ptr(), blocks, block_bytes, TransferDevice("cpu" if setup.rehearsed else "cuda"))


def contents(setup: Setup, blocks: int, block_bytes: int) -> torch.Tensor:
    """Return random bytes, which are the same in both processes."""
    generator = torch.Generator(device=setup.device).manual_seed(7)
    return torch.randint(0, 256, (blocks, block_bytes), dtype=torch.uint8, device=setup.device, generator=generator)


def lend(setup: Setup) -> None:
    """Run the other process, which lends its pool."""
    from tools.gpu import reader

    pool, region = make_pool(setup)
    pool.copy_(contents(setup, *pool.shape))
    if not setup.rehearsed:
        torch.cuda.synchronize()
    transport = reader.lend(region)
    say(**reader.described(transport, region))
    wait()
    transport.close()


def run(setup: Setup) -> None:
    """Read the pool and show the rate. Raises `SystemExit` when the blocks that arrive differ from those that were lent."""
    with tempfile.TemporaryDirectory() as folder:
        ucx_log.ask_for_log(Path(folder))  # before anything loads UCX
        from tools.gpu import reader

        pool, region = make_pool(setup)
        order = torch.randperm(region.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        with other_process(setup, "lend") as said:
            took_s = reader.read_all(region, next(said), order, range(len(order)), READS)
        way = ucx_log.read_way(Path(folder))
    rate = region.nbytes / min(took_s[1:])
    target = torch.empty_like(pool)
    copied = pool.nbytes / replayed_s([lambda: target.copy_(pool)], setup.device)
    Row(
        "nixl", f"{region.nbytes >> 20} MiB, {region.num_blocks} blocks", f"{rate / 1e9:.1f} GB/s",
        f"{copied / 1e9:.1f} device copy", f"{rate / copied:.0%}", note(setup, way),
    ).emit()  # fmt: skip
    if not torch.equal(pool, contents(setup, *pool.shape)[order]):
        raise SystemExit("blocks arrived that are not the ones that were lent")


def note(setup: Setup, way: str) -> str:
    """Return a note that says by which way UCX read, and whether it is another than CUDA IPC."""
    by = f"by {way}" if way else "UCX did not say by what"
    return by if setup.rehearsed or WANTED in way else f"{by}: NOT {WANTED}"
