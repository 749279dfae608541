"""The arguments and results of compiled sampling, for each row that is not plainly greedy."""

from __future__ import annotations

import ctypes
from array import array
from itertools import repeat

import numpy as np

from pdserve.core.sampling import TokenLogprobs
from pdserve.core.step_plan import NO_TOKEN, Sampled, SampleSpec
from pdserve.engine.native.library import ROW_BYTES, ROW_DRAW, ROW_MORE

_Part = tuple[int, ...]
_NO_BIAS: _Part = (0, 0, 0)
_NO_SEEN: _Part = (0, 0, 0)
_NO_BANS: _Part = (0, 0)
_NO_LOGPROBS: _Part = (0, 0, 0)


class PackedRows:
    """The `PdRow` structures of one call. This object keeps all memory alive that they point to."""

    def __init__(self, rows: list[int], specs: list[SampleSpec], vocab_size: int) -> None:
        """Pack one structure for each row. specs[i] says how to draw a token from row rows[i] of the logits, which has
        `vocab_size` numbers."""
        self._mask_bytes = 2 * -(-vocab_size // 16)  # compiled code reads 16 bits at once
        self._rows = bytearray(ROW_BYTES * len(rows))
        self._ids = array("i", bytes(4 * len(rows)))
        self._kept: list[object] = []
        self._wanted: list[tuple[int, array[float], array[int]]] = []
        for i, (row, spec) in enumerate(zip(rows, specs, strict=True)):
            params = spec.params
            ROW_DRAW.pack_into(
                self._rows, i * ROW_BYTES, row, params.top_k, params.temperature, params.top_p, params.min_p, params.seed,
                spec.output_index,
            )  # fmt: skip
            if spec.edits is not None or spec.banned_ids or params.logprobs is not None or spec.grammar is not None:
                self._pack_more(i, spec)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._rows))
        self.ids_address = self._ids.buffer_info()[0]

    def taken(self) -> list[Sampled]:
        """Return the token of each row, in order. Call it after the compiled call has returned."""
        taken: list[Sampled] = list(zip(self._ids, repeat(None)))
        for i, logprobs, top_ids in self._wanted:
            if self._ids[i] == NO_TOKEN:
                continue
            taken[i] = (self._ids[i], TokenLogprobs(logprobs[0], tuple(zip(top_ids, logprobs[1:], strict=True))))
        return taken

    def _pack_more(self, i: int, spec: SampleSpec) -> None:
        params, edits = spec.params, spec.edits
        bias, seen = _NO_BIAS, _NO_SEEN
        if edits is not None:
            bias = (edits.bias_ids.buffer_info()[0], *edits.bias.buffer_info())
            seen = (edits.seen_ids.buffer_info()[0], *edits.output_counts.buffer_info())
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        banned, logprobs = self._banned(spec), self._logprobs(i, params.logprobs)
        ROW_MORE.pack_into(
            self._rows, i * ROW_BYTES + ROW_DRAW.size, *bias, *seen, *penalties, *banned, *logprobs, self._mask(spec)
        )

    def _banned(self, spec: SampleSpec) -> _Part:
        if not spec.banned_ids:
            return _NO_BANS
        banned = array("i", spec.banned_ids)
        self._kept.append(banned)
        return banned.buffer_info()

    def _mask(self, spec: SampleSpec) -> int:
        """Return the address of the mask of the spec's grammar, or 0. A grammar that has failed allows no token."""
        if spec.grammar is None:
            return 0
        mask = spec.grammar.mask()
        bits = np.frombuffer(bytes(self._mask_bytes) if mask is None else mask, np.uint8)
        assert len(bits) >= self._mask_bytes
        self._kept.append(bits)
        return int(bits.__array_interface__["data"][0])  # a fifth of the time of `bits.ctypes.data`

    def _logprobs(self, i: int, tops: int | None) -> _Part:
        if tops is None:
            return _NO_LOGPROBS
        logprobs, top_ids = array("f", bytes(4 * (1 + tops))), array("i", bytes(4 * tops))
        self._wanted.append((i, logprobs, top_ids))
        return (logprobs.buffer_info()[0], *top_ids.buffer_info())
