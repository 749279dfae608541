"""Decode steps recorded once and replayed: a step of many small kernels costs one launch.

A decode step of a 32-layer model is about 330 launches, some 10 us of Python and driver each where Triton makes them,
beside 3.3 ms that an H200 needs to read 8B weights in bfloat16. A CUDA graph replays fixed launches on fixed addresses,
so each recording has its own inputs, which a step is copied into, and a fixed batch size; smaller batches fill up with
rows that are nobody's: no position to look at, nowhere to write. Batches with prompts in them and larger ones run as
they are.

Recordings share one memory pool, as only one runs at a time; the last bytes of one replay may be gone when the next
starts, so a result must be used before (in stream order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.attention.triton import TritonAttention, TritonStep
from pdserve.engine.kv.cache import NOBODY, KvCache
from pdserve.engine.models.batch import Batch
from pdserve.engine.models.llama import Llama

WARM_UPS: Final = 2  # the first run compiles kernels and makes cuBLAS allocate, neither of which may be recorded

Step = Callable[[], Tensor]
Record = Callable[[Step], tuple[Callable[[], None], Tensor]]
"""Takes a step; returns what repeats it and the tensor its result is in after each repetition."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What a replay reads (`batch`, `attention`) and where its result is."""

    batch: Batch
    attention: TritonStep
    replay: Callable[[], None]
    hidden: Tensor


class DecodeGraphs:
    def __init__(
        self,
        model: Llama,
        attention: TritonAttention,
        record: Record,
        *,
        kv: KvCache,
        max_positions: int,
        max_batch: int,
    ) -> None:
        """Records all batch sizes of `buckets(max_batch)`, the largest first, as it needs the most memory."""
        self._model = model
        self._attention = attention
        self._kv = kv
        self._max_positions = max_positions
        self._record = record
        self._recordings = {size: self._recorded(size) for size in reversed(buckets(max_batch))}
        self._sizes = sorted(self._recordings)

    def hidden(self, batch: Batch) -> Tensor:
        """As `Llama.hidden`: replayed where the batch is all single tokens and fits a recording."""
        if batch.tokens > self._sizes[-1] or any(span.count != 1 for span in batch.spans):
            return self._model.hidden(batch)
        recording = self._recordings[next(size for size in self._sizes if size >= batch.tokens)]
        self._fill(recording, batch)
        recording.replay()
        return recording.hidden

    def _fill(self, recording: Recording, batch: Batch) -> None:
        assert [span.row for span in batch.spans] == list(range(batch.tokens))
        fixed = recording.batch
        fixed.token_ids[: batch.tokens].copy_(batch.token_ids[: batch.tokens])
        fixed.positions[: batch.tokens].copy_(batch.positions[: batch.tokens])
        fixed.slots[: batch.tokens].copy_(batch.slots)
        fixed.slots[batch.tokens :] = NOBODY
        self._attention.refill(recording.attention, batch.spans)

    def _recorded(self, size: int) -> Recording:
        """Of `size` rows that are all nobody's: recording touches no block."""
        attention = self._attention.fixed(size, self._max_positions)
        device = attention.ends.device
        ids, positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        batch = Batch(size, ids, positions, self._kv.nobodys_slots(size), spans=())
        replay, hidden = self._record(lambda: self._model.forward(batch, attention))
        return Recording(batch, attention, replay, hidden)


def buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes to record: powers of two, from 8 on also those half-way between, up to the first that holds all."""
    sizes = [1]
    while sizes[-1] < max_batch:
        last = sizes[-1]
        power = 1 << (last.bit_length() - 1)
        sizes.append(2 * power if last > power or last < 8 else last + power // 2)
    return tuple(sizes)


def cuda_recorder() -> Record:
    """Records CUDA graphs that share one memory pool."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> tuple[Callable[[], None], Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may call CUDA
            hidden = step()
        return graph.replay, hidden

    return record
