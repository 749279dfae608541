"""The plan of one step, which the scheduler gives to the model, and the drawn tokens that come back. Immutable.

The types are named tuples, since a step makes some for each of its sequences: a named tuple costs a quarter of a frozen
dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.sampling import LogitEdits, SamplingParams, TokenLogprobs
from pdserve.core.structured.grammar_state import GrammarState


class SampleSpec(NamedTuple):
    """A request to draw one token after one row of a slice."""

    params: SamplingParams
    output_index: int
    """The absolute index of the drawn token among the request's output tokens. The draw depends on it and on the seed."""
    banned_ids: tuple[int, ...] = ()
    """Ids that may not be drawn: the end-of-sequence and stop ids while min_tokens is not reached."""
    edits: LogitEdits | None = None
    """The sequence's own edits, which grow once this step is collected. None unless `params.edits_logits`."""
    grammar: GrammarState | None = None
    """The sequence's place in its grammar, which says which ids may be drawn. It advances once this step is collected. None:
    any id may be drawn."""
    scored: int | None = None
    """The id of the prompt token that follows the row. It is taken, with its log-probabilities, and nothing is drawn. None: a
    token is drawn."""


GREEDY: Final = SampleSpec(SamplingParams(temperature=0.0), 0)
"""The spec of every row that is plainly greedy and bans nothing. Such a draw depends on neither parameters nor index, and one
shared object stays in the CPU's caches, where the objects of 256 sequences do not."""
ONE_GREEDY: Final = (GREEDY,)
"""The samples of every slice that draws one plainly greedy token. All these slices share one tuple for the same reason."""


class SequenceSlice(NamedTuple):
    """Tokens [start, start + len(token_ids)) of one sequence, which this step computes.

    The blocks of `block_tables` hold the KV of tokens [0, start); this step writes the KV of the slice into them. The first
    entries of a group with a sliding window are `NULL_BLOCK`, as many as `KvGroup.first_live(start)`. While blocks of later
    tokens are not taken yet, the tables end with the slice.
    """

    seq_id: SeqId
    start: int
    token_ids: tuple[int, ...]
    block_tables: tuple[tuple[BlockId, ...], ...]
    """A block table for each KV group of the model."""
    samples: tuple[SampleSpec, ...]
    """The draws after the last `len(samples)` tokens of the slice, in their order. Empty: the slice is a chunk that does not
    end its prompt. One: the slice ends with the last known token. More: drafts follow the last known token. A slice of a prompt
    whose tokens are scored has one draw for each token."""
    packed: tuple[bytes, ...] = ()
    """The block tables as int32, if the sequence keeps them in that form too; else empty."""

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafts at the end of the slice; empty unless a token is drawn after each of several rows."""
        count = len(self.samples)
        return self.token_ids[1 - count :] if count > 1 and self.samples[0].scored is None else ()


_SAMPLES: Final = attrgetter("samples")


class StepPlan(NamedTuple):
    """The slices of all sequences that one step computes."""

    slices: tuple[SequenceSlice, ...]
    decodes: int = 0
    """The first `decodes` slices have one token each, and one token is drawn after each of them."""

    @property
    def sampled_rows(self) -> list[int]:
        """The rows after which a token is drawn, ascending. A row is the index of a token among the tokens of all slices."""
        rows, end = list(range(self.decodes)), self.decodes
        for piece in self.slices[self.decodes :]:
            end += len(piece.token_ids)
            rows += range(end - len(piece.samples), end)
        return rows

    @property
    def specs(self) -> list[SampleSpec]:
        """The draws of all slices, in the order of `sampled_rows`."""
        return list(chain.from_iterable(map(_SAMPLES, self.slices)))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all slices."""
        return sum(len(s.token_ids) for s in self.slices)


NO_TOKEN: Final = -1
"""This number stands for a token that could not be drawn: the row's logits, edited or not, have no largest finite number."""

Sampled = tuple[int, TokenLogprobs | None]
"""A drawn token with its log-probabilities, which are None unless the parameters ask for them; or `NO_TOKEN` and None.
The tokens of a step are in the order of its slices, and of the samples of each."""

Drafts = Mapping[SeqId, tuple[int, ...]]
"""Guesses of the next tokens of sequences, as ids of the vocabulary. A wrong guess costs time and changes no output."""
NO_DRAFTS: Final[Drafts] = MappingProxyType({})


def accept(drafts: tuple[int, ...], drawn: Sequence[Sampled]) -> Sequence[Sampled]:
    """Return the drawn tokens that count: all up to the first token that differs from its draft, this token included.

    drafts: the guesses that a slice computed after its last known token. drawn: len(drafts) + 1 tokens, one for the last known
    token and one for each draft. drawn[i] is the true token after the known tokens only if all drafts before it were right.
    Each row is drawn with its own index, so steps of one token would draw the same tokens.
    """
    for count, (draft, (token_id, _)) in enumerate(zip(drafts, drawn, strict=False), start=1):
        if token_id != draft:
            return drawn[:count]
    return drawn
