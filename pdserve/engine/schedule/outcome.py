"""The scheduler's reports about its steps. They are immutable because they cross threads."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import FinishReason


class OutputToken(NamedTuple):
    """Output token `output_index` of a sequence. It is the last one when it has a finish reason."""

    seq_id: SeqId
    output_index: int
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With output token 0: those of all prompt tokens but the first, if the sequence asks for them."""


class Advance(NamedTuple):
    """Prompt tokens [0, computed) of a lent sequence are final."""

    seq_id: SeqId
    computed: int


class Admitted(NamedTuple):
    """A lent sequence got its blocks. The lease already holds its references to those that its reader needs."""

    seq_id: SeqId
    block_tables: tuple[tuple[BlockId, ...], ...]
    """The lease's blocks in each KV group. Blocks that are dead at the end of the prompt are null."""
    hits: int = 0
    """Number of its first blocks whose KV was here already."""


class Final(NamedTuple):
    """Blocks of a lent sequence, from position `first` on, are final: nothing writes them any more.

    Each is full, or it is the last block of the prompt. Some may be behind a sliding window by now, and cached or free.
    """

    seq_id: SeqId
    first: int
    block_tables: tuple[tuple[BlockId, ...], ...]
    """These blocks in each KV group."""


class StepOutcome(NamedTuple):
    """Everything that one collected step changed."""

    tokens: tuple[OutputToken, ...]
    advanced: tuple[Advance, ...]
    preempted: tuple[SeqId, ...]
    """Sequences that lost their blocks since the last collected step. They will be recomputed."""
    failed: tuple[SeqId, ...] = ()
    """Sequences that ended because no token could be drawn: their logits were not finite numbers."""
    grammars_failed: tuple[tuple[SeqId, str], ...] = ()
    """Sequences that ended because their grammar could not go on, each with the reason in words."""
    final: tuple[Final, ...] = ()
