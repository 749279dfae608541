"""The steps that need the most memory, of all that a scheduler may plan. Pure.

What a step takes beside weights and KV grows with its rows and with the rows that are drawn from (`wide`), and, where
KV is gathered out of the pool, with the positions that its tokens look at (`long`). No step needs more than both
together, so their sum bounds all: each alone takes a moment, while every sequence at the longest context would take
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan

LONG_TOKENS: Final = 128  # of a prompt at its end: attention takes prompts in pieces of at most so many
_DRAW: Final = SampleSpec(SamplingParams(temperature=1.0, top_p=0.999, max_tokens=1, seed=0), 0)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds every step of an engine."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def sequences(self) -> int:
        """As many run at once: a step has a token for each."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def largest_steps(limits: StepLimits, *, gathered: int, decode_batches: tuple[int, ...]) -> tuple[StepPlan, ...]:
    """To be run on a pool that nobody uses: block ids repeat, and what is written is meaningless.

    gathered: positions whose KV attention copies out of the pool at a time; 0: it reads where KV lies. decode_batches: how
    many single tokens the backend may treat in a way of its own; each runs at the longest context.
    """
    batches = [_long_decodes(limits, min(size, limits.sequences)) for size in decode_batches]
    return (_wide(limits), *([_long(limits, gathered)] if gathered else []), *batches)


def _wide(limits: StepLimits) -> StepPlan:
    """Every sequence draws, and prompts fill the budget."""
    budget, longest = limits.max_num_batched_tokens, limits.max_model_len - 1
    rest = budget - limits.sequences
    counts = []
    for _ in range(limits.sequences):
        more = min(rest, longest - 1)
        counts.append(1 + more)
        rest -= more
    return StepPlan(tuple(_slice(limits, i, 0, count) for i, count in enumerate(counts)))


def _long(limits: StepLimits, gathered: int) -> StepPlan:
    """The end of the longest prompt, beside decodes of the longest sequences."""
    decodes = min(limits.sequences - 1, max(1, gathered // limits.max_model_len))
    end = limits.max_model_len - 1
    count = min(LONG_TOKENS, end, limits.max_num_batched_tokens - decodes)
    prompt = _slice(limits, decodes, end - count, count)
    return StepPlan((*_long_decodes(limits, decodes).slices, prompt))


def _long_decodes(limits: StepLimits, count: int) -> StepPlan:
    return StepPlan(tuple(_slice(limits, i, limits.max_model_len - 2, 1) for i in range(count)))


def _slice(limits: StepLimits, index: int, start: int, count: int) -> SequenceSlice:
    """Tokens [start, start + count) in blocks that are taken in turn from the whole pool."""
    blocks = ceil_div(start + count, limits.block_size)
    table = tuple(BlockId((index + i) % limits.num_blocks) for i in range(blocks))
    return SequenceSlice(SeqId(index), start, (0,) * count, table, _DRAW)
