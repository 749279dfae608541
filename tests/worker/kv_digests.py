"""A prefill worker as a child process that answers each line on standard input with its KV blocks' digests."""

import hashlib
import json
import sys

import torch

from pdserve.config import WorkerConfig, load
from prefill_worker.main import start


def digests(blocks: torch.Tensor) -> list[str]:
    """SHA-256 of the bytes of each block of [num_blocks, ...]."""
    return [hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for block in blocks]


if __name__ == "__main__":
    worker = start(load(WorkerConfig, sys.argv[1]))
    for _ in sys.stdin:
        print(json.dumps(digests(worker.engine.kv.caches[0].tensor)), flush=True)
    worker.stop()
