"""Attention on CUDA. One kernel computes the single tokens of a step, another its prompts; both read KV from the pool.

The spans of a step become one tensor of 32-bit numbers: block tables, rows and ends of the single tokens, tiles of the
prompts. It is copied to the device once, and all layers share it. The shape of a recorded step (`graphs.py`) never
changes: `fixed` makes such a step and `refill` puts the spans of a step into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.ids import BlockId
from pdserve.core.kv_layout import ceil_div
from pdserve.engine.kernels.decode import choose_splits, decode
from pdserve.engine.kernels.prefill import cut, prefill, tile_tokens, tiles_tensor
from pdserve.engine.kernels.shape import KernelShape
from pdserve.engine.kernels.support import multiprocessors
from pdserve.engine.kernels.tiling import Tiling, decode_tiling, prefill_tiling, programs_at_a_time
from pdserve.engine.kv.paged import PagedKv
from pdserve.engine.kv.span import Span

WIDTH_STEP: Final = 16
ALIGNED: Final = 4  # in 32-bit numbers


@dataclass(slots=True)
class HostTables:
    """Block tables on the CPU. A row is written again only when its table has changed.

    A sequence keeps the same tuple until it grows, once in block_size steps. Turning 256 tables of 128 blocks into a tensor
    takes 2 ms. The entries after the end of a table are leftovers of an earlier table; nothing reads them.
    """

    rows: Tensor  # [sequences, width] int32
    held: list[tuple[BlockId, ...]]

    def put(self, row: int, table: tuple[BlockId, ...]) -> None:
        """Write `table` into a row unless the row holds this same tuple. Blocks beyond the width are left out."""
        if self.held[row] is not table:
            known = table[: self.rows.shape[1]]
            self.rows[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
            self.held[row] = table


@dataclass(frozen=True, slots=True)
class TritonStep:
    """One step as the kernels read it.

    tables: [decodes + prompts, width] int32, the tables of the decodes first. rows, ends: [decodes] int32. tiles: [tiles, 4]
    int32. splits: the number of parts that the decode kernel cuts a sequence into. host: the memory from which the tables of a
    fixed step are copied; None for other steps.
    """

    tables: Tensor
    rows: Tensor
    ends: Tensor
    tiles: Tensor
    splits: int
    host: HostTables | None = None


class TritonAttention:
    """Attention of one shape over `kv` of any format."""

    def __init__(self, kv: PagedKv, shape: KernelShape, dtype: torch.dtype) -> None:
        self._layers = [kv.layer(i) for i in range(kv.num_layers)]
        self._shape = shape
        self._block_size = kv.block_size
        self._device = kv.data.device
        self._decode: Tiling = decode_tiling(shape, dtype)
        self._prefill: Tiling = prefill_tiling(shape, dtype)
        self._tokens = tile_tokens(self._prefill, shape.group)

    def prepare(self, spans: tuple[Span, ...]) -> TritonStep:
        """Describe a step to the kernels and copy the description to the device."""
        singles = [span for span in spans if span.count == 1]
        prompts = [span for span in spans if span.count > 1]
        width = ceil_div(max(ceil_div(span.end, self._block_size) for span in spans), WIDTH_STEP) * WIDTH_STEP
        tiles = [
            tile
            for i, span in enumerate(prompts, len(singles))
            for tile in cut(span.row, span.start, span.count, i, self._tokens)
        ]
        parts = (
            _tables([*singles, *prompts], width),
            torch.tensor([span.row for span in singles], dtype=torch.int32),
            torch.tensor([span.end for span in singles], dtype=torch.int32),
            tiles_tensor(tiles),
        )
        tables, rows, ends, tiles_there = self._copied(parts)
        longest = max((span.end for span in singles), default=0)
        return TritonStep(tables, rows, ends, tiles_there, self._splits(len(singles), longest))

    def fixed(self, sequences: int, max_positions: int) -> TritonStep:
        """Return a step of `sequences` single tokens; row i is the i-th. All rows are empty until `refill` fills them."""
        width = ceil_div(max_positions, self._block_size)
        host = HostTables(torch.zeros((sequences, width), dtype=torch.int32), [()] * sequences)
        rows = torch.arange(sequences, dtype=torch.int32, device=self._device)
        ends = torch.zeros(sequences, dtype=torch.int32, device=self._device)
        tiles = tiles_tensor([]).to(self._device)
        return TritonStep(
            torch.zeros_like(host.rows, device=self._device), rows, ends, tiles, self._splits(sequences, max_positions), host
        )

    def refill(self, step: TritonStep, spans: tuple[Span, ...]) -> None:
        """Put `spans` into a step that `fixed` made, and make its other rows empty.

        spans: single tokens in the order of their rows, at most as many as `step` has.
        """
        assert step.host is not None
        sequences = len(step.ends)
        for row, span in enumerate(spans):
            step.host.put(row, span.block_table)
        used = max(ceil_div(span.end, self._block_size) for span in spans)
        tables = step.host.rows[: len(spans), :used]
        ends = torch.tensor([span.end for span in spans] + [0] * (sequences - len(spans)), dtype=torch.int32)
        there, ends_there = self._copied((tables, ends))
        step.tables[: len(spans), :used] = there
        step.ends.copy_(ends_there)

    def run(self, prepared: TritonStep, layer: int, query: Tensor) -> Tensor:
        """Return the attention of `query` in one layer, [tokens, heads, v_dim]. query: [tokens, heads, qk_dim], contiguous
        heads.
        """
        shape = self._shape
        out = torch.empty((*query.shape[:2], shape.v_dim), dtype=query.dtype, device=query.device)
        of_layer = self._layers[layer]
        if len(prepared.rows):
            decode(query, out, shape, of_layer, prepared.tables, prepared.rows, prepared.ends, prepared.splits, self._decode)
        if len(prepared.tiles):
            prefill(query, out, shape, of_layer, prepared.tables, prepared.tiles, self._prefill)
        return out

    def _splits(self, sequences: int, longest: int) -> int:
        seen = min(longest, self._shape.window) if self._shape.window else longest
        at_a_time = programs_at_a_time(self._shape, self._decode) * multiprocessors(self._device)
        return choose_splits(sequences, self._shape.programs(self._decode.rows), seen, at_a_time)

    def _copied(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        """Copy all `parts` to the device at once and return them there in the same shapes.

        The source is pinned, so the copy does not wait for the device. Each part starts at a multiple of 16 bytes, because
        Triton compiles a kernel again for pointers that do not.
        """
        padded = [F.pad(part.reshape(-1), (0, -part.numel() % ALIGNED)) for part in parts]
        flat = torch.cat(padded)
        if self._device.type == "cuda":
            flat = flat.pin_memory()
        there = torch.split(flat.to(self._device, non_blocking=True), [part.numel() for part in padded])
        return [piece[: part.numel()].view(part.shape) for piece, part in zip(there, parts, strict=True)]


def _tables(spans: list[Span], width: int) -> Tensor:
    """Return the block tables as [spans, width] int32. Shorter tables are filled up with zeros, longer ones are cut."""
    rows = [span.block_table[:width] for span in spans]
    return torch.tensor([(*row, *(0,) * (width - len(row))) for row in rows], dtype=torch.int32).view(len(spans), width)
