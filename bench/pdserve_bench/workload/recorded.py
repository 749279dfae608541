"""Requests of traces that give lengths, and Mooncake's blocks: equal blocks at the start of two prompts are equal tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from itertools import count as endless
from statistics import fmean
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import BenchRequest, Ids
from pdserve_bench.workload.source import Classes, Means
from pdserve_bench.workload.spec import AzureSource, FileSource, MooncakeSource
from pdserve_bench.workload.tokens import TokenMaker
from pdserve_bench.workload.traces import BLOCK_TOKENS, Trace, TraceRow

KEPT_BLOCKS: Final = 1 << 12
"""The blocks whose tokens are kept: 2 Mi tokens, 16 MiB of references."""


class TraceRequests:
    """The requests of one trace, scaled and cut as the source says."""

    def __init__(
        self, source: MooncakeSource | AzureSource, trace: Trace, classes: Classes, max_model_len: int | None, head_tokens: int
    ) -> None:
        """Scale all lengths. Raises `ConfigError` if a request is over `max_model_len`, or if none is left.

        `head_tokens` are the first tokens by which blocks differ: no block may be shorter.
        """
        self._source, self._classes, self.digest = source, classes, trace.digest
        self._block_tokens = max(1, round(BLOCK_TOKENS * source.length_scale))
        if self._block_tokens < head_tokens and trace.rows[0].blocks:
            raise ConfigError(
                f"workload.source.length_scale must be at least {head_tokens / BLOCK_TOKENS:.4f}: blocks of "
                f"{self._block_tokens} tokens cannot be told apart, {head_tokens} are needed"
            )
        rows = [self._scaled(row) for row in trace.rows]
        self.notes = tuple(_notes(source, rows, trace.empty))
        most = math.inf if source.too_long == "cut" else source.max_prompt_tokens or math.inf
        self._rows = [self._cut(row) for row in rows if row.prompt_tokens <= most]
        if not self._rows:
            raise ConfigError(f"{source.file}: every prompt is over max_prompt_tokens {source.max_prompt_tokens}; raise it")
        self._check(max_model_len)
        span_s, steps = self._rows[-1].arrived_s - self._rows[0].arrived_s, len(self._rows) - 1
        self.means = Means(
            fmean(row.prompt_tokens for row in self._rows),
            fmean(row.output_tokens for row in self._rows),
            recorded_rate_per_s=steps / span_s if span_s > 0 else None,
        )
        self._most_block = max((max(row.blocks) for row in self._rows if row.blocks), default=0) + 1

    def requests(self, tokens: TokenMaker, seed: int) -> Iterator[BenchRequest]:
        """Yield the requests, once or without end. `send_at_s` is the recorded time."""
        block = lru_cache(KEPT_BLOCKS)(lambda number: tokens.ids(number, self._block_tokens, "block"))
        classes, first_s = self._classes.draws(seed), self._rows[0].arrived_s
        period_s = len(self._rows) / (self.means.recorded_rate_per_s or float("inf"))
        for turn in endless() if self._source.repeat else (0,):
            for place, row in enumerate(self._rows):
                number = turn * len(self._rows) + place
                yield BenchRequest(
                    number,
                    (self._prompt(row, number, turn * self._most_block, tokens, block),),
                    row.output_tokens,
                    send_at_s=row.arrived_s - first_s + turn * period_s,
                    slo_class=next(classes)[0],
                    prompt_tokens=row.prompt_tokens,
                )

    def _prompt(self, row: TraceRow, number: int, first_block: int, tokens: TokenMaker, block: Callable[[int], Ids]) -> Ids:
        if not row.blocks:
            return tokens.ids(number, row.prompt_tokens)
        return tuple(chain.from_iterable([block(first_block + one) for one in row.blocks]))[: row.prompt_tokens]

    def _scaled(self, row: TraceRow) -> TraceRow:
        """Scale a request. All blocks are scaled alike, so that prompts still share as many of them."""
        scale, output = self._source.length_scale, max(1, round(row.output_tokens * self._source.length_scale))
        prompt = max(1, round(row.prompt_tokens * scale))
        if row.blocks:
            rest = row.prompt_tokens - BLOCK_TOKENS * (len(row.blocks) - 1)
            last = min(self._block_tokens, max(1, round(rest * scale)))
            prompt = self._block_tokens * (len(row.blocks) - 1) + last
        return replace(row, prompt_tokens=prompt, output_tokens=output)

    def _cut(self, row: TraceRow) -> TraceRow:
        prompt = min(row.prompt_tokens, self._source.max_prompt_tokens or row.prompt_tokens)
        output = min(row.output_tokens, self._source.max_output_tokens or row.output_tokens)
        blocks = row.blocks[: -(-prompt // self._block_tokens)]
        return replace(row, prompt_tokens=prompt, output_tokens=output, blocks=blocks)

    def _check(self, max_model_len: int | None) -> None:
        for row in self._rows:
            if max_model_len is not None and row.prompt_tokens + row.output_tokens > max_model_len:
                raise ConfigError(
                    f"{self._source.file}, line {row.line}: {row.prompt_tokens} prompt and {row.output_tokens} answer tokens "
                    f"are over max_model_len {max_model_len}: set length_scale, max_prompt_tokens and max_output_tokens"
                )


def limit_notes(source: FileSource, cut: int, left_out: int, cut_outputs: int, total: int) -> Iterator[str]:
    """Yield what a report says about prompts and answers over the limits of the source."""
    if source.length_scale != 1:
        yield f"All lengths of {source.file} are multiplied by {source.length_scale:g}."
    for count, what in ((cut, "cut to that"), (left_out, "left out")):
        if count:
            yield f"{count} of {total} prompts are over {source.max_prompt_tokens} tokens and are {what}."
    if cut_outputs:
        yield f"{cut_outputs} of {total} answers are cut to {source.max_output_tokens} tokens."


def _notes(source: MooncakeSource | AzureSource, rows: Sequence[TraceRow], empty: int) -> Iterator[str]:
    if empty:
        yield f"{empty} lines of {source.file} have no prompt or no answer tokens and are left out."
    prompts, outputs = source.max_prompt_tokens, source.max_output_tokens
    kept = [row for row in rows if source.too_long == "cut" or prompts is None or row.prompt_tokens <= prompts]
    long_prompts = sum(prompts is not None and row.prompt_tokens > prompts for row in rows)
    long_outputs = sum(outputs is not None and row.output_tokens > outputs for row in kept)
    cut = source.too_long == "cut"
    yield from limit_notes(source, long_prompts * cut, long_prompts * (not cut), long_outputs, len(rows))
