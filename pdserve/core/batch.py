"""What the scheduler asks of the model in one step, and what comes back. Immutable: crosses threads."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Draw one token after the last token of a slice."""

    params: SamplingParams
    output_index: int
    """Absolute index of the drawn token among the request's output tokens: keys the randomness."""
    banned_ids: tuple[int, ...] = ()
    """Ids that may not be drawn: the end-of-sequence and stop ids while min_tokens is not reached."""


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Tokens [start, start + len(token_ids)) of one sequence, to be computed in this step.

    The KV of tokens [0, start) is in the blocks of `block_table`; this step writes that of the slice.
    """

    seq_id: SeqId
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[BlockId, ...]
    sample: SampleSpec | None
    """None for a chunk that does not end its prompt."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)


@dataclass(frozen=True, slots=True)
class Sampled:
    seq_id: SeqId
    token_id: int
