"""One sequence's tokens, and when it is over. Pure; owned by the scheduler."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from pdserve.core.block_hash import PrefixChain
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.logit_edits import LogitEdits, edits_of
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.step_plan import GREEDY, SampleSpec, SequenceSlice


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


@lru_cache(maxsize=256)
def _set_of(ids: tuple[int, ...]) -> frozenset[int]:
    """One for all sequences that stop at the same ids, so that a step finds it in the caches."""
    return frozenset(ids)


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
    turn: int
    """When it should be served, by the scheduler's clock: when it came, earlier for a larger priority."""
    arrival: int
    rule: StopRule
    computed: int = 0
    preempted: bool = False
    block_table: tuple[BlockId, ...] = field(default=())
    chain: PrefixChain | None = None
    """None: its blocks are not shared with others."""
    published: int = 0
    """Leading blocks that others can find: its own prefix hits, and those it has published."""
    final: int = 0
    """How many leading blocks of a lent sequence nothing writes any more."""
    decoding: bool = False
    """It runs, and has nothing left to compute but its last output token."""
    served: int = 0
    """The step that computed its last chunk."""
    planned: int = 0
    """Tokens that the step under way computes."""
    edits: LogitEdits | None = field(init=False)
    holder: Holder = field(init=False)
    stop_ids: tuple[int, ...] = field(init=False)
    longest: int = field(init=False)
    """Tokens at which it ends, whatever they are."""
    packed: bytes = b""
    """`block_table` as int32, for compiled code: made when the table changes, not at each step."""
    _stops: frozenset[int] = field(init=False)
    _min_tokens: int = field(init=False)
    _plain: bool = field(init=False)
    """Each of its draws is `GREEDY`."""

    def __post_init__(self) -> None:
        self.edits = edits_of(self.params, self.prompt_len)
        self.holder = Holder(HolderKind.SEQUENCE, self.seq_id)
        eos = () if self.params.ignore_eos else self.rule.eos_token_ids
        self.stop_ids = (*eos, *self.params.stop_token_ids)
        self._stops = _set_of(self.stop_ids)
        self._min_tokens = self.params.min_tokens
        self._plain = self.params.plainly_greedy and not self._min_tokens
        self.longest = self.prompt_len + self.params.max_tokens
        if self.kind is not SequenceKind.LENT:  # its one token ends nothing here: the reader holds what follows
            self.longest = min(self.longest, self.rule.max_model_len)

    @property
    def remaining(self) -> int:
        """Tokens known and not computed; at least 1 while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def output_count(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decodes(self) -> bool:
        """Whether nothing but its last output token is left to compute. A lent sequence never does: its last is a prompt's."""
        return self.remaining == 1 and self.output_count > 0 and self.kind is not SequenceKind.LENT

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Who is served first, smallest first: preempted ones, then by turn, then by arrival."""
        return (not self.preempted, self.turn, self.arrival)

    def last_slice(self) -> SequenceSlice:
        """Plan the one token that is left of a decoding sequence: what `next_slice(1)` does, in half the time."""
        self.planned = 1
        sample = GREEDY if self._plain else self.sample_spec()
        return SequenceSlice(self.seq_id, self.computed, (self.tokens[-1],), self.block_table, sample, self.packed)

    def next_slice(self, count: int) -> SequenceSlice:
        """Plan the next `count` tokens; behind the last one known, another is to be drawn."""
        assert not self.planned, "a sequence twice in one step"
        self.planned = count
        end = self.computed + count
        sample = self.sample_spec() if end == len(self.tokens) else None
        ids = tuple(self.tokens[self.computed : end])
        return SequenceSlice(self.seq_id, self.computed, ids, self.block_table, sample, self.packed)

    def has_blocks(self, table: tuple[BlockId, ...]) -> None:
        self.block_table, self.packed = table, array("i", table).tobytes()

    def sample_spec(self) -> SampleSpec:
        """How to draw the token after the last one.

        Until min_tokens tokens are out nothing that would stop may be drawn, so a stop adds one more (as in vLLM).
        """
        if self._plain:
            return GREEDY
        if self.edits is not None:
            self.edits.catch_up(self.tokens)
        index = len(self.tokens) - self.prompt_len
        return SampleSpec(self.params, index, self.stop_ids if index < self._min_tokens else (), self.edits)

    def finish_reason(self) -> FinishReason | None:
        """Whether the last output token ended the sequence. It is part of the output either way."""
        if self.tokens[-1] in self._stops and self.output_count >= self._min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.longest else None
