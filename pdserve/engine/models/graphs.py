"""Decode steps that are recorded once and replayed, so a step of many small kernels costs one launch.

A decode step of a 32-layer model has about 330 launches. Each launch by Triton costs some 10 us of Python and driver, while
an H200 needs 3.3 ms to read 8B weights in bfloat16. A CUDA graph replays fixed launches on fixed addresses. So each
recording has its own inputs, into which a step is copied, and a fixed batch size. Smaller batches are filled up with empty
rows, which attend to no position and write nothing. Larger batches and batches with prompts run without a recording.

Recordings share one memory pool, because only one runs at a time. A replay may overwrite the result of the replay before, so a
result must be used (in stream order) before the next replay starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pdserve.engine.attention.triton import TritonAttention, TritonStep
from pdserve.engine.kv.cache import NOBODY, KvCache
from pdserve.engine.models.batch import Batch, RowTurn
from pdserve.engine.models.decoder import Decoder

WARM_UPS: Final = 2  # the first run compiles kernels and makes cuBLAS allocate; neither may be recorded

Step = Callable[[], Tensor]
Record = Callable[[Step], tuple[Callable[[], None], Tensor]]
"""Function that records a step. It returns a function that replays the step, and the tensor with the result of a replay."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded step: the inputs of a replay (`batch`, `attention` of each KV group), the replay, and its result."""

    batch: Batch
    attention: tuple[TritonStep, ...]
    replay: Callable[[], None]
    hidden: Tensor


class DecodeGraphs:
    """Recorded decode steps of one model, one for each batch size of `buckets`."""

    def __init__(
        self,
        model: Decoder,
        attention: tuple[TritonAttention, ...],
        record: Record,
        *,
        caches: tuple[KvCache, ...],
        max_positions: int,
        max_batch: int,
    ) -> None:
        """Record all batch sizes of `buckets(max_batch)`. The largest comes first, because it needs the most memory.

        attention, caches: one for each KV group.
        """
        self._model = model
        self._attention = attention
        self._caches = caches
        self._max_positions = max_positions
        self._record = record
        self._recordings = {size: self._recorded(size) for size in reversed(buckets(max_batch))}
        self._sizes = sorted(self._recordings)

    def hidden(self, batch: Batch) -> Tensor:
        """Return what `Decoder.hidden` returns. A batch of single tokens that fits a recording is replayed.

        A recording has one turn, so steps with drafts are replayed where KV is plain.
        """
        turn, *more = batch.turns
        if more or batch.tokens > self._sizes[-1] or any(span.count != 1 for span in turn.spans[0]):
            return self._model.hidden(batch)
        recording = self._recordings[next(size for size in self._sizes if size >= batch.tokens)]
        self._fill(recording, batch)
        recording.replay()
        return recording.hidden

    def _fill(self, recording: Recording, batch: Batch) -> None:
        (turn,), (own,) = batch.turns, recording.batch.turns
        assert [span.row for span in turn.spans[0]] == list(range(batch.tokens))
        fixed = recording.batch
        fixed.token_ids[: batch.tokens].copy_(batch.token_ids[: batch.tokens])
        fixed.positions[: batch.tokens].copy_(batch.positions[: batch.tokens])
        for slots, given in zip(own.slots, turn.slots, strict=True):
            slots[: batch.tokens].copy_(given)
            if batch.tokens < len(slots):
                slots[batch.tokens :] = NOBODY
        assert fixed.real is not None
        fixed.real.fill_(batch.tokens)
        for attention, step, spans in zip(self._attention, recording.attention, turn.spans, strict=True):
            attention.refill(step, spans)

    def _recorded(self, size: int) -> Recording:
        """Record a step of `size` empty rows, which touches no block."""
        attention = tuple(one.fixed(size, self._max_positions) for one in self._attention)
        device = attention[0].ends.device
        ids, positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        real = torch.zeros((), dtype=torch.int64, device=device)
        turn = RowTurn(None, tuple(kv.nobodys_slots(size) for kv in self._caches), ())
        batch = Batch(size, ids, positions, (turn,), real)
        replay, hidden = self._record(lambda: self._model.forward(batch, (attention,)))
        return Recording(batch, attention, replay, hidden)


def buckets(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes to record, up to the first that holds `max_batch` rows.

    They are the powers of two, and from 8 on also the sizes half-way between them.
    """
    sizes = [1]
    while sizes[-1] < max_batch:
        last = sizes[-1]
        power = 1 << (last.bit_length() - 1)
        sizes.append(2 * power if last > power or last < 8 else last + power // 2)
    return tuple(sizes)


def cuda_recorder() -> Record:
    """Return a function that records CUDA graphs. All its graphs share one memory pool."""
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
