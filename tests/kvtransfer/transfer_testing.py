"""Pools, peers and waiting, shared by the tests of kvtransfer."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kvtransfer.api import Region, Transport, TransportRead
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from pdserve.core.ids import BlockSum, Incarnation

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 48
BLOCK_BYTES = 96 * 1024

_incarnations = itertools.count(random.SystemRandom().getrandbits(48) << 8)


def new_incarnation() -> Incarnation:
    return Incarnation(next(_incarnations))


class Pool:
    """A registered-to-be region: [num_blocks, block_bytes] uint8, random when `seed` is given, else zero."""

    def __init__(self, *, seed: int | None = None, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> None:
        self.array = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        if seed is not None:
            self.array[:] = np.random.default_rng(seed).integers(0, 256, self.array.shape, dtype=np.uint8)

    @property
    def region(self) -> Region:
        return Region(self.array.ctypes.data, *self.array.shape)

    def sums(self, blocks: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Import torch here: a peer's process that needs no checksums starts without it."""
        import torch

        from pdserve.engine.block_sums import BlockSums

        return BlockSums(torch.from_numpy(self.array))(blocks)

    def flip(self, block: int) -> None:
        """One bit."""
        self.array[block, 1234] ^= 4

    def digest(self, blocks: Sequence[int]) -> str:
        sha = hashlib.sha256()
        for block in blocks:
            sha.update(self.array[block].tobytes())
        return sha.hexdigest()


class Peer(Protocol):
    """The passive side of a pair."""

    incarnation: Incarnation
    metadata: bytes
    region: Region

    def digest(self, blocks: Sequence[int]) -> str: ...

    def kill(self) -> None: ...


class FakePeer:
    def __init__(self, fabric: FakeFabric, *, seed: int = 1, incarnation: Incarnation | None = None) -> None:
        self.fabric = fabric
        self.incarnation = incarnation or new_incarnation()
        self.pool = Pool(seed=seed)
        self.region = self.pool.region
        self.metadata = FakeTransport(fabric, self.incarnation, [self.region]).metadata()

    def digest(self, blocks: Sequence[int]) -> str:
        return self.pool.digest(blocks)

    def kill(self) -> None:
        self.fabric.kill(self.incarnation)


class NixlPeer:
    """The passive side in a process of its own, so that bytes cross a real boundary."""

    def __init__(self, *, name: str = "nixl", seed: int = 1, num_blocks: int = NUM_BLOCKS) -> None:
        self.incarnation = new_incarnation()
        command = [sys.executable, str(Path(__file__).with_name("nixl_peer.py"))]
        command += [name, str(self.incarnation), str(seed), str(num_blocks)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        hello = json.loads(self._read_line())
        self.metadata = bytes.fromhex(hello["metadata"])
        self.region = Region(hello["address"], hello["num_blocks"], hello["block_bytes"])

    def digest(self, blocks: Sequence[int]) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(list(blocks)) + "\n")
        self.process.stdin.flush()
        return str(json.loads(self._read_line()))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def wait_for(transport: Transport, handle: TransportRead, *, within_s: float = 30.0) -> None:
    """Poll until the read is over; what `poll` raises goes to the caller."""
    wait_until(lambda: transport.poll(handle), within_s=within_s)


def wait_until(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.001)
