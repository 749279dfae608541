"""Random weights without any file, for the setting `load_format: dummy`. They are equal in each process and on each machine.

A tensor's numbers come from one table of random numbers, which it begins to read at a place that its name decides. So they
repeat after `PERIOD` numbers, and billions of them are made at the speed of memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.loading.source import Copy

PERIOD: Final = 1_048_573  # a prime number, so that no two rows of a matrix begin at the same place of the table
_SEED: Final = 20240229
_SPREAD: Final = 0.25  # of vectors; vectors of published models spread about as much


class DummyTensors:
    """Random numbers of a size that keeps activations and logits at a few units: matrices with a deviation of in_features^-0.5,
    norms around one (less the number that the model itself adds to them), and other vectors around zero."""

    def __init__(self, norms: Set[str], *, offset: float) -> None:
        """`norms` are the names of the norms. The model adds `offset` to each of their numbers."""
        bits = np.random.PCG64(_SEED).random_raw(PERIOD) >> np.uint64(40)  # 24 bits, so every step is exact
        self._table = torch.from_numpy(bits.astype(np.float32) * np.float32(2**-23) - np.float32(1))  # [PERIOD], in [-1, 1)
        self._norms = norms
        self._offset = offset

    @contextmanager
    def opened(self) -> Iterator[Copy]:
        """Return the function that writes a tensor's numbers."""
        yield self._copy

    def digest(self) -> str:
        """Return one name for all numbers. This code makes the numbers, and the fingerprint of the model shows that they are
        dummies."""
        return "dummy"

    def _copy(self, name: str, into: Tensor) -> None:
        vector = into.dim() == 1
        centre = 1.0 - self._offset if name in self._norms else 0.0
        scale = _SPREAD if vector else math.sqrt(3 / into.shape[-1])
        table = (self._table * scale + centre).to(into.device, into.dtype)
        at = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % PERIOD
        flat = into.view(-1)
        begin = 0
        while begin < len(flat):
            part = table[at : at + len(flat) - begin]
            flat[begin : begin + len(part)] = part
            begin, at = begin + len(part), 0
