"""The steps that need the most memory among all that a scheduler may plan. The module is pure.

The memory of a step beside weights and KV grows with its rows and with the rows that draw a token; `_wide` has the most of
both. Where KV is gathered out of the pool, it also grows with the positions that its tokens attend to; `_long` has the most
positions. Where a sliding window bounds what one sequence gathers, more sequences share a turn of attention; `_windowed` has
the most sequences in a turn. Where blocks are copied because drafts may be wrong, `_drafted` has the most copies. No step
needs more than all of these together, so their sum bounds every step. Each of them runs in a moment, while a single step with
every sequence at the longest context would take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan

LONG_TOKENS: Final = 128  # tokens at the end of a prompt: attention computes prompts in pieces of at most this size
STRADDLE: Final = 64  # positions of a tile of attention: the window of a token at window + STRADDLE - 2 touches the most tiles
_DRAW: Final = (SampleSpec(SamplingParams(temperature=1.0, top_p=0.999, max_tokens=1, seed=0), 0),)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of every step of an engine. windows: the sliding windows of its model, in tokens."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_groups: int = 1
    windows: tuple[int, ...] = ()
    drafts: int = 0
    """The rows of drafts for which a step has memory beside one row of each sequence."""

    @property
    def sequences(self) -> int:
        """The largest number of running sequences. The tokens of a step bound it, since each sequence needs a token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def largest_steps(limits: StepLimits, *, gathered: int, decode_batches: tuple[int, ...]) -> tuple[StepPlan, ...]:
    """Return the largest steps. Run them on an unused pool: block ids repeat, and the steps write meaningless KV.

    gathered: positions whose KV attention copies out of the pool at a time; 0 means that it reads KV in place.
    decode_batches: numbers of single tokens that the backend computes in a special way; each becomes a step at the longest
    context.
    """
    batches = [_long_decodes(limits, min(size, limits.sequences)) for size in decode_batches]
    if limits.drafts and limits.max_model_len > 2:
        batches.append(_drafted(limits))
    if not gathered:
        return (_wide(limits), *batches)
    windowed = [_windowed(limits, gathered, size) for size in limits.windows if size < limits.max_model_len]
    return (_wide(limits), _long(limits, gathered), *windowed, *batches)


def prompt_step(limits: StepLimits, most: int | None = None) -> StepPlan:
    """Return a step that computes as much of one prompt as a step may, or `most` tokens of it. Run it as the largest steps."""
    count = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    return StepPlan((_slice(limits, 0, 0, count if most is None else min(count, most)),))


def _wide(limits: StepLimits) -> StepPlan:
    """Return a step in which every sequence draws a token and prompts fill the token budget."""
    budget, longest = limits.max_num_batched_tokens, limits.max_model_len - 1
    rest = budget - limits.sequences
    counts = []
    for _ in range(limits.sequences):
        more = min(rest, longest - 1)
        counts.append(1 + more)
        rest -= more
    return StepPlan(tuple(_slice(limits, i, 0, count) for i, count in enumerate(counts)))


def _long(limits: StepLimits, gathered: int) -> StepPlan:
    """Return a step with the end of the longest prompt and with decodes of the longest sequences."""
    decodes = min(limits.sequences - 1, max(1, gathered // limits.max_model_len))
    end = limits.max_model_len - 1
    count = min(LONG_TOKENS, end, limits.max_num_batched_tokens - decodes)
    prompt = _slice(limits, decodes, end - count, count)
    return StepPlan((*_long_decodes(limits, decodes).slices, prompt))


def _windowed(limits: StepLimits, gathered: int, window: int) -> StepPlan:
    """Return a step of as many single tokens as one turn of attention takes when each of them sees `window` positions."""
    count = min(limits.sequences, max(1, gathered // window))
    start = min(window + STRADDLE - 2, limits.max_model_len - 2)
    return StepPlan(tuple(_slice(limits, i, start, 1) for i in range(count)))


def _drafted(limits: StepLimits) -> StepPlan:
    """Return a step with the most rows that draw a token. Where KV is quantised, it has the most copies of blocks as well."""
    rest, longest = min(limits.max_num_seqs + limits.drafts, limits.max_num_batched_tokens), limits.max_model_len - 1
    slices: list[SequenceSlice] = []
    while rest > 0 and len(slices) < limits.sequences:
        count = min(rest, longest)
        slices.append(_slice(limits, len(slices), 0, count)._replace(samples=_DRAW * count))
        rest -= count
    return StepPlan(tuple(slices))


def _long_decodes(limits: StepLimits, count: int) -> StepPlan:
    return StepPlan(tuple(_slice(limits, i, limits.max_model_len - 2, 1) for i in range(count)))


def _slice(limits: StepLimits, index: int, start: int, count: int) -> SequenceSlice:
    """Return a slice of tokens [start, start + count) whose blocks are taken in turn from the whole pool."""
    blocks = ceil_div(start + count, limits.block_size)
    table = tuple(BlockId((index + i) % limits.num_blocks) for i in range(blocks))
    return SequenceSlice(SeqId(index), start, (0,) * count, (table,) * limits.kv_groups, _DRAW)
