"""What the scheduler asks of the model in one step, and what comes back. Immutable: crosses threads.

Named tuples, since a step makes some for each of its sequences: one costs a quarter of a frozen dataclass.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.logit_edits import LogitEdits
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import SamplingParams


class SampleSpec(NamedTuple):
    """Draw one token after the last token of a slice."""

    params: SamplingParams
    output_index: int
    """Absolute index of the drawn token among the request's output tokens: keys the randomness."""
    banned_ids: tuple[int, ...] = ()
    """Ids that may not be drawn: the end-of-sequence and stop ids while min_tokens is not reached."""
    edits: LogitEdits | None = None
    """Set exactly where `params.edits_logits`; the sequence's own, which grows once this step is collected."""


GREEDY: Final = SampleSpec(SamplingParams(temperature=0.0), 0)
"""The spec of every row that is plainly greedy and bans nothing: its draw depends on neither parameters nor index, and one
object is in the caches where those of 256 sequences are not."""


class SequenceSlice(NamedTuple):
    """Tokens [start, start + len(token_ids)) of one sequence, to be computed in this step.

    The KV of tokens [0, start) is in the blocks of `block_table`; this step writes that of the slice.
    """

    seq_id: SeqId
    start: int
    token_ids: tuple[int, ...]
    block_table: tuple[BlockId, ...]
    sample: SampleSpec | None
    """None for a chunk that does not end its prompt."""
    packed: bytes = b""
    """`block_table` as int32 where it is kept in that form too; else empty."""


class StepPlan(NamedTuple):
    slices: tuple[SequenceSlice, ...]
    decodes: int = 0
    """So many slices, the first ones, are known to be one token each, after which another is drawn."""

    @property
    def sampled_rows(self) -> list[int]:
        """Ascending: which of all the slices' tokens are followed by a draw."""
        rows, end = list(range(self.decodes)), self.decodes
        for piece in self.slices[self.decodes :]:
            end += len(piece.token_ids)
            if piece.sample is not None:
                rows.append(end - 1)
        return rows

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)


NO_TOKEN: Final = -1
"""Stands for a token where none could be drawn: the row's logits, or what was made of them, have no largest finite number."""

Sampled = tuple[int, TokenLogprobs | None]
"""A drawn token, with log-probabilities exactly where the parameters ask for them; or `NO_TOKEN` and None.
A step's are in the order of its slices."""
