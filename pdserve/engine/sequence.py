"""One sequence's tokens, and when it is over. Pure; owned by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.batch import SampleSpec
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.prefix import PrefixChain
from pdserve.core.sampling import FinishReason, SamplingParams


class SequenceKind(Enum):
    """What becomes of a sequence's KV."""

    LOCAL = "local"  # prefill and decode here
    LENT = "lent"  # prefill only: a remote reader takes the blocks under a lease
    INBOUND = "inbound"  # pulled from a peer; decode only, once activated


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a sequence besides its own parameters."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt and then the output. KV exists for [0, computed); the rest is still to be computed.

    ```
     0            prompt_len           len(tokens)
     |   prompt       |   output so far   |
     |   computed  >  |                      a preempted sequence starts again from 0 and keeps its output,
                                             a resumed one brings the output that another worker drew
    ```
    A step that computes the last token also samples, so prefill, recompute and decode are one case: a decode is a
    sequence with exactly one token left.
    """

    seq_id: SeqId
    kind: SequenceKind
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    priority: int
    arrival: int
    rule: StopRule
    computed: int = 0
    preempted: bool = False
    block_table: tuple[BlockId, ...] = field(default=())
    chain: PrefixChain | None = None
    """None: its blocks are not shared with others."""
    published: int = 0
    """Leading blocks that others can find: its own prefix hits, and those it has published."""

    @property
    def holder(self) -> Holder:
        return Holder(HolderKind.SEQUENCE, self.seq_id)

    @property
    def remaining(self) -> int:
        """Tokens known and not computed; at least 1 while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def output_count(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        return self.output_count > 0 and self.remaining == 1

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Who is served first, smallest first: preempted ones, then larger priority, then arrival."""
        return (not self.preempted, -self.priority, self.arrival)

    def sample_spec(self) -> SampleSpec:
        """How to draw the token after the last one."""
        return SampleSpec(self.params, self.output_count, self._banned_ids())

    def finish_reason(self) -> FinishReason | None:
        """Whether the last output token ended the sequence. It is part of the output either way."""
        if self.output_count >= self.params.min_tokens and self.tokens[-1] in self._stop_ids():
            return FinishReason.STOP
        if self.output_count >= self.params.max_tokens or len(self.tokens) >= self.rule.max_model_len:
            return FinishReason.LENGTH
        return None

    def _banned_ids(self) -> tuple[int, ...]:
        """Until min_tokens tokens are out nothing that would stop may be drawn, so a stop adds one more (as in vLLM)."""
        return self._stop_ids() if self.output_count < self.params.min_tokens else ()

    def _stop_ids(self) -> tuple[int, ...]:
        eos = () if self.params.ignore_eos else self.rule.eos_token_ids
        return (*eos, *self.params.stop_token_ids)
