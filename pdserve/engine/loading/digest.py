"""The digest of a checkpoint's tensors, over every byte that the model is made of, computed while they are copied.

It is taken from the mapped memory that the copy reads, so it names the numbers that were loaded, not a file that may have been
replaced since. It does not depend on how the tensors are cut into files, nor on the order in which they are read. The digest is
not stored: a digest stored by path, size and time would be wrong once a byte changes while these three stay the same.

SHA-256 takes a core 0.6 s for each GB, if it has instructions for it. Threads take large tensors in pieces, while the copy
and its cast run beside them.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Final

import torch
from torch import Tensor

from pdserve.core.block_hash import encode_parts

PIECE_BYTES: Final = 1 << 24
"""The number of bytes that a thread takes at a time, about 10 ms of work. The digest depends on this number."""
MAX_THREADS: Final = 8  # at 1.6 GB/s each they are faster than most disks


class TensorDigests:
    """The digests of tensors by name. `adding` brackets the reads, and one thread at a time uses it."""

    def __init__(self) -> None:
        self._tensors: dict[str, bytes] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def adding(self) -> Adding:
        """Return the context in which tensors are added. At its end all tensors are digested and no thread is left."""
        return Adding(self._tensors)

    def hexdigest(self) -> str:
        """Return the digest of all tensors that were added."""
        return sha256(encode_parts(*[self._tensors[name] for name in sorted(self._tensors)])).hexdigest()


class Adding:
    """Digests tensors on separate threads. A tensor that was digested before is not digested again."""

    def __init__(self, tensors: dict[str, bytes]) -> None:
        self._tensors = tensors
        self._pieces: dict[str, tuple[Tensor, list[Future[bytes]]]] = {}
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="digest")

    def __enter__(self) -> Adding:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for name, (tensor, pieces) in self._pieces.items():
                facts = name, str(tensor.dtype), ",".join(map(str, tensor.shape))
                parts = [*(fact.encode() for fact in facts), *(piece.result() for piece in pieces)]
                self._tensors[name] = sha256(encode_parts(*parts)).digest()

    def add(self, name: str, tensor: Tensor) -> None:
        """Begin to digest a tensor on the CPU, whose numbers must not change until the context ends."""
        if name in self._tensors or name in self._pieces:
            return
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        starts = range(0, len(content), PIECE_BYTES)
        self._pieces[name] = tensor, [self._pool.submit(_digest, content[at : at + PIECE_BYTES]) for at in starts]


def _digest(content: memoryview) -> bytes:
    return sha256(content).digest()
