"""The places of tokens and blocks in a pool of plain numbers, as rows that one copy takes: those of all heads, or of some.

A unit is as many numbers as divide the dim of every plane, and a strip is block_size units. A token of a head is dim / unit
units, one after the other, so a head of a block is as many strips. K and V of most models have one dim, which is the unit:
each head of a block is one strip.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.core.kv_layout import KvGroup


class Places:
    """The places in the blocks of one group."""

    def __init__(self, layout: KvGroup, device: torch.device, heads: range | None = None) -> None:
        """Find the places of these heads of each plane, which count from the first of them. None: all heads."""
        size, self._layers = layout.block_size, layout.num_layers
        self.unit = math.gcd(*(dim for _, dim in layout.planes))
        """Numbers of a unit."""
        first = 0 if heads is None else heads.start * (layout.head_dim // self.unit)
        self.skipped = first * self.unit * size
        """Numbers of a block before the first of the heads."""
        self._planes: list[Tensor] = []
        self.layer_strips = 0
        """Strips of one layer of a block."""
        tokens: list[int] = []
        steps: list[int] = []
        for count, dim in layout.planes:
            own = range(count) if heads is None else heads
            units, begin = dim // self.unit, self.layer_strips - first
            firsts = range(begin + own.start * units, begin + own.stop * units, units)
            self.layer_strips += count * units
            self._planes.append(torch.tensor([range(f, f + units) for f in firsts], device=device).view(1, len(own), 1, units))
            tokens += [strip * size + i for strip in firsts for i in range(units)]
            steps += [units] * (len(own) * units)
        self.strips = len(tokens)
        """Strips of the heads in one layer of a block, which are as many as the units of one token in a layer."""
        self._tokens = torch.tensor(tokens, device=device)
        self._steps = torch.tensor(steps, device=device)
        self._block_units = self._layers * self.layer_strips * size

    def of_tokens(self, positions: Tensor) -> Tensor:
        """Return the units of tokens in layer 0: [tokens, strips] int64, plane by plane and head by head.

        positions: [tokens, 2] int64, the block and the offset of each token in it.
        """
        return positions[:, :1] * self._block_units + self._tokens + positions[:, 1:] * self._steps

    def of_blocks(self, block_tables: Tensor) -> Tensor:
        """Return the strips of blocks in layer 0, plane by plane, each [sequences, heads, blocks, strips of a head] made flat.

        block_tables: [sequences, blocks] int64.
        """
        blocks = block_tables[:, None, :, None] * (self._layers * self.layer_strips)
        return torch.cat([(blocks + plane).view(-1) for plane in self._planes])

    def counts(self, strips: int) -> list[int]:
        """Return how many of `strips` strips, the result of `of_blocks`, belong to each plane."""
        return [strips // self.strips * plane.numel() for plane in self._planes]
