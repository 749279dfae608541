"""One sequence: the table of its states, its tokens, its place in the schedule, and the rule that ends it. It is pure; the
scheduler owns it.

The scheduler keeps a list of the sequences in each state. A sequence that is computed step after step has no event: only the
events of the table change its list.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Final

from pdserve.core.block_hash import PrefixChain
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.errors import IllegalTransition
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, LogitEdits, SamplingParams, TokenLogprobs, edits_of
from pdserve.core.speculation import DraftCounts
from pdserve.core.step_plan import GREEDY, ONE_GREEDY, SampleSpec, SequenceSlice
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.engine.drafting.api import DraftView


class SequenceState(Enum):
    """The state of one sequence. ENDED is final."""

    NEW = "new"
    """It is not in the schedule yet."""
    WAITING = "waiting"
    """It holds no blocks and waits for those of all its tokens."""
    INBOUND = "inbound"
    """A peer's KV is read into its blocks. It takes no part in steps."""
    PREFILLING = "prefilling"
    """It runs, and more than its last output token may be left to compute."""
    DECODING = "decoding"
    """It runs, and only its last output token is left to compute."""
    ABORTING = "aborting"
    """It was aborted during a step that computes it, so it keeps its blocks until the step is collected."""
    ENDED = "ended"


class SequenceEvent(Enum):
    """The events of one sequence."""

    QUEUED = "queued"
    RESERVED_LOCAL = "reserved_local"
    """It got its blocks at once, and its prompt is computed here."""
    RESERVED_INBOUND = "reserved_inbound"
    """It got its blocks at once, and its prompt's KV comes from a peer."""
    ADMITTED = "admitted"
    """It got its blocks after it had waited for them."""
    ACTIVATED = "activated"
    """The peer's KV is here, and its lease is committed."""
    PREFILLED = "prefilled"
    """Its tokens are computed, or all but its last output token are."""
    PREEMPTED = "preempted"
    """It lost its blocks to an older sequence, and is recomputed later."""
    FINISHED = "finished"
    """Its last output token was drawn."""
    FAILED = "failed"
    """No token could be drawn: its logits were not finite numbers."""
    ABORTED = "aborted"
    ABORTED_IN_STEP = "aborted_in_step"
    """It was aborted during a step that computes it."""
    COLLECTED = "collected"
    """The step during which it was aborted is collected."""


_S, _E = SequenceState, SequenceEvent

TRANSITIONS: Final[dict[tuple[SequenceState, SequenceEvent], SequenceState]] = {
    (_S.NEW, _E.QUEUED): _S.WAITING,
    (_S.NEW, _E.RESERVED_LOCAL): _S.PREFILLING,
    (_S.NEW, _E.RESERVED_INBOUND): _S.INBOUND,
    (_S.WAITING, _E.ADMITTED): _S.PREFILLING,
    (_S.WAITING, _E.ABORTED): _S.ENDED,
    (_S.INBOUND, _E.ACTIVATED): _S.DECODING,
    (_S.INBOUND, _E.ABORTED): _S.ENDED,
    (_S.PREFILLING, _E.PREFILLED): _S.DECODING,
    (_S.PREFILLING, _E.FINISHED): _S.ENDED,  # a lent sequence, which never decodes here
    (_S.DECODING, _E.FINISHED): _S.ENDED,
    **{(s, _E.PREEMPTED): _S.WAITING for s in (_S.PREFILLING, _S.DECODING)},
    **{(s, _E.FAILED): _S.ENDED for s in (_S.PREFILLING, _S.DECODING)},
    **{(s, _E.ABORTED): _S.ENDED for s in (_S.PREFILLING, _S.DECODING)},
    **{(s, _E.ABORTED_IN_STEP): _S.ABORTING for s in (_S.PREFILLING, _S.DECODING)},
    (_S.ABORTING, _E.ABORTED_IN_STEP): _S.ABORTING,  # it is aborted again
    (_S.ABORTING, _E.COLLECTED): _S.ENDED,
}

MAX_HISTORY: Final = 16
"""The most events that a sequence keeps for the message of an illegal transition. A sequence that is never preempted has at
most five."""


ID_BYTES: Final = array("i").itemsize
SCORED_TOKENS: Final = 64
"""A step computes at most so many tokens of a prompt that is scored, or a block if that is more. All their logits are computed:
64 rows of 150,000 ids have 38 MB."""

Turn = tuple[int, int]
"""A time by the scheduler's clock, and a number that only rises, for turns at one time."""


class SequenceKind(Enum):
    """Origin and use of a sequence's KV."""

    LOCAL = "local"  # prefill and decode here
    LENT = "lent"  # prefill only: a remote reader takes the blocks under a lease
    INBOUND = "inbound"  # pulled from a peer; decode only, once activated


@dataclass(frozen=True, slots=True)
class StopRule:
    """The limits of the model that end a sequence, besides its own parameters."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int


@lru_cache(maxsize=256)
def _set_of(ids: tuple[int, ...]) -> frozenset[int]:
    """Return one set for all sequences that stop at the same ids, so that a step finds it in the CPU's caches."""
    return frozenset(ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of the scheduler. `tokens` is its prompt and then its output.

    KV exists for tokens [0, computed); the other tokens are still to be computed.

    ```
     0            prompt_len           len(tokens)
     |   prompt       |   output so far   |
     |   computed  >  |                      a preempted sequence starts again from 0 and keeps its output,
                                             a resumed one brings the output that another worker drew
    ```
    A step that computes the last token also samples the next one. So prefill, recompute and decode are one case: a decode
    is a sequence with exactly one token left to compute.
    """

    seq_id: SeqId
    kind: SequenceKind
    tokens: list[int]
    spec: RequestSpec
    turn: Turn
    """When it should be served. See `Turns`."""
    arrival: int
    rule: StopRule
    tag: float = 0.0
    """Its place among the sequences of its priority, smallest first."""
    computed: int = 0
    state: SequenceState = SequenceState.NEW
    preemptions: int = 0
    """Number of times that it lost its blocks and was recomputed."""
    history: tuple[str, ...] = ()
    chain: PrefixChain | None = None
    """Hashes of its blocks; None when its blocks are not shared."""
    published: int = 0
    """Number of leading blocks that others can find: its own prefix hits and the blocks that it has published."""
    next_death: int = 0
    """Number of computed tokens at which a block of it dies behind a sliding window. Before, there is nothing to free."""
    final: int = 0
    """Number of leading blocks of a lent sequence that nothing writes any more."""
    scores: list[TokenLogprobs] | None = None
    """The log-probabilities of its prompt tokens so far. None: they are not asked for, or token 0 came with them."""
    served: int = 0
    """Number of the step that computed its last chunk."""
    speculation: DraftCounts | None = None
    """Its drafts so far. None: it had none."""
    refuses_drafts: bool = False
    """A row of a slice with drafts had no numbers."""
    planned: int = 0
    """Known tokens that the step under way computes; its drafts do not count."""
    prompt_len: int = field(init=False)
    grammar: GrammarState | None = field(init=False, default=None)
    """Its place in the grammar of its output; None: any token may follow. It knows the tokens of `tokens`, as edits do."""
    params: SamplingParams = field(init=False)
    edits: LogitEdits | None = field(init=False)
    holder: Holder = field(init=False)
    stop_ids: tuple[int, ...] = field(init=False)
    longest: int = field(init=False)
    """Length in tokens at which it ends, whatever the tokens are."""
    block_tables: tuple[tuple[BlockId, ...], ...] = ()
    """Its blocks in each KV group; empty while it waits."""
    num_blocks: int = 0
    """Number of its blocks in each KV group."""
    taken: int | None = None
    """Number of its first blocks that are taken, while its tables have a gap: see `WindowPool`. None: there is no gap."""
    packed: tuple[bytes, ...] = ()
    """`block_tables` as int32 for compiled code. They are made when a table changes, not at each step."""
    stops: frozenset[int] = field(init=False)
    min_tokens: int = field(init=False)
    plain: bool = field(init=False)
    """True when each of its draws is `GREEDY`."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.spec.prompt_ids)
        self.params = self.spec.sampling
        self.edits = edits_of(self.params, self.prompt_len)
        self.holder = Holder(HolderKind.SEQUENCE, self.seq_id)
        eos = () if self.params.ignore_eos else self.rule.eos_token_ids
        self.stop_ids = (*eos, *self.params.stop_token_ids)
        self.stops = _set_of(self.stop_ids)
        self.min_tokens = self.params.min_tokens
        self.plain = self.params.plainly_greedy and not self.min_tokens
        self.longest = self.prompt_len + self.params.max_tokens
        if self.params.prompt_logprobs is not None and not self.output_count and self.kind is not SequenceKind.INBOUND:
            self.scores = []
        if self.kind is not SequenceKind.LENT:  # a lent one draws one token here; its reader applies the model's limit
            self.longest = min(self.longest, self.rule.max_model_len)

    def constrain(self, grammar: GrammarState) -> None:
        """Let the output follow a grammar. Asserts that no least length is asked for, which could forbid the end that
        the grammar wants."""
        assert not self.min_tokens, "the caller refuses min_tokens beside a grammar"
        self.grammar = grammar
        self.plain = False
        grammar.catch_up(self.tokens, self.prompt_len)

    @property
    def remaining(self) -> int:
        """Tokens that are known and not yet computed; at least 1 while the sequence lives."""
        return len(self.tokens) - self.computed

    @property
    def output_count(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def most_drafts(self) -> int:
        """The most drafts that a step may verify: the request may have a limit, and none lies behind the last token that can be
        drawn."""
        if self.refuses_drafts:
            return 0
        left, limit = self.longest - len(self.tokens) - 1, self.spec.draft_limit
        return left if limit is None or left < limit else limit

    @property
    def decodes(self) -> bool:
        """True when only its last output token is left to compute. Never true for a lent sequence, which only prefills."""
        return self.remaining == 1 and self.output_count > 0 and self.kind is not SequenceKind.LENT

    @property
    def rank(self) -> tuple[bool, Turn]:
        """Order of service, smallest first: preempted sequences come first, then the order is by turn."""
        return (not self.preemptions, self.turn)

    def move(self, event: SequenceEvent) -> SequenceState:
        """Change the state as the table says, and return the new one. Raises `IllegalTransition`, with the history and nothing
        changed, when the state does not allow the event."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"sequence {self.seq_id}", self.state.name, event.name, self.history)
        if target is not self.state:
            self.history = (*self.history[-(MAX_HISTORY - 1) :], f"{event.name}:{target.name}")
        if event is SequenceEvent.PREEMPTED:
            self.preemptions += 1
        self.state = target
        return target

    def last_slice(self) -> SequenceSlice:
        """Plan the one token that is left of a decoding sequence. The result is that of `next_slice(1)` in half the time."""
        self.planned = 1
        samples = ONE_GREEDY if self.plain else (self.sample_spec(),)
        return SequenceSlice(self.seq_id, self.computed, (self.tokens[-1],), self.block_tables, samples, self.packed)

    def chunk(self, budget: int, block_size: int) -> int:
        """Return the number of tokens of the next chunk.

        A chunk that does not reach the last known token ends at the end of a block, if the budget reaches one. The numbers
        of a quantised block depend on how its tokens are cut into steps, so a block should be written in one step.
        """
        if self.scores is not None:
            budget = min(budget, max(SCORED_TOKENS, block_size))
        if self.remaining <= budget:
            return self.remaining
        beyond = (self.computed + budget) % block_size
        return budget - beyond if beyond < budget else budget

    def cuts(self, unit: int, count: int) -> bool:
        """Tell whether a chunk of `count` tokens ends within a unit and before the last known token."""
        return count < self.remaining and (self.computed + count) % unit > 0

    def next_slice(self, count: int) -> SequenceSlice:
        """Plan the next `count` tokens. A slice that ends with the last known token also draws the next one."""
        assert not self.planned, "a sequence is planned twice in one step"
        self.planned = count
        end = self.computed + count
        samples: tuple[SampleSpec, ...] = (self.sample_spec(),) if end == len(self.tokens) else ()
        if self.scores is not None:
            samples = self._scored(end) + samples
        ids = tuple(self.tokens[self.computed : end])
        tables, packed = self.block_tables, self.packed
        if self.taken is not None:  # nobody reads behind the slice, where the gap begins
            tables = tuple([table[: self.taken] for table in tables])
            packed = tuple([one[: self.taken * ID_BYTES] for one in packed])
        return SequenceSlice(self.seq_id, self.computed, ids, tables, samples, packed)

    def _scored(self, end: int) -> tuple[SampleSpec, ...]:
        """Plan the scores of the prompt tokens after those of the next slice, which ends at `end`. A prompt that starts again
        is scored anew."""
        assert self.scores is not None
        if not self.computed:
            self.scores.clear()
        return tuple([SampleSpec(self.params, 0, scored=one) for one in self.tokens[self.computed + 1 : end + 1]])

    def take_scores(self) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of the whole prompt, once: they go out with token 0."""
        scores, self.scores = self.scores, None
        return tuple(scores or ())

    @property
    def group(self) -> bytes:
        """The name of the group of sequences that may learn from each other's tokens: those with one cache salt."""
        return self.spec.cache_salt.encode(errors="surrogatepass")

    def draft_view(self, most: int) -> DraftView:
        """Return the sequence as drafters see it."""
        return DraftView(self.seq_id, self.tokens, self.prompt_len, self.group, most, self.grammar, partial(Ahead, self))

    def drafted_slice(self, drafts: tuple[int, ...], samples: tuple[SampleSpec, ...]) -> SequenceSlice:
        """Plan the one token that is left of a decoding sequence, and drafts of the tokens after it. samples: the draws after
        each of them, as `Ahead` gives them."""
        assert len(samples) == len(drafts) + 1
        self.planned = 1
        ids = (self.tokens[-1], *drafts)
        return SequenceSlice(self.seq_id, self.computed, ids, self.block_tables, samples, self.packed)

    def grow(self, more: tuple[tuple[BlockId, ...], ...]) -> None:
        """Append blocks of each group to the block tables."""
        tables = self.block_tables
        if len(tables) == 1:  # the usual case, in a third of the time
            self.has_blocks((tables[0] + more[0],))
        else:
            self.has_blocks(tuple([table + blocks for table, blocks in zip(tables, more, strict=True)]))

    def has_blocks(self, tables: tuple[tuple[BlockId, ...], ...]) -> None:
        """Set the block tables, in both of their forms."""
        self.block_tables, self.num_blocks = tables, len(tables[0]) if tables else 0
        if len(tables) == 1:
            self.packed = (array("i", tables[0]).tobytes(),)
        else:
            self.packed = tuple([array("i", table).tobytes() for table in tables])

    def sample_spec(self) -> SampleSpec:
        """Return the specification for drawing the next token.

        Stop ids are banned until the output has min_tokens tokens, so a stop token always comes on top of them (as in vLLM).
        """
        if self.plain:
            return GREEDY
        if self.edits is not None:
            self.edits.catch_up(self.tokens)
        index = len(self.tokens) - self.prompt_len
        return SampleSpec(self.params, index, self.stop_ids if index < self.min_tokens else (), self.edits, self.grammar)

    def finish_reason(self) -> FinishReason | None:
        """Return why the last output token ended the sequence; None when it goes on. The token is output in both cases."""
        if self.tokens[-1] in self.stops and self.output_count >= self.min_tokens:
            return FinishReason.STOP
        if self.grammar is not None:
            self.grammar.catch_up(self.tokens, self.prompt_len)
            if self.grammar.ended:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.longest else None


class Ahead:
    """The draws of a decoding sequence along a draft of its next tokens. Edits and grammar go on with each token of the draft,
    on copies, so that each draw is the one that would follow if the tokens before it were drawn."""

    __slots__ = ("_index", "_seq", "spec")

    def __init__(self, seq: Sequence) -> None:
        """Stand before the next token."""
        self._seq = seq
        self._index = len(seq.tokens) - seq.prompt_len
        self.spec = seq.sample_spec()
        """The specification for drawing the token that comes next here."""

    def take(self, token_id: int) -> bool:
        """Go on behind a token. False: nothing may follow it, because the sequence would end there, or the grammar forbids the
        token; then this object is of no use any more."""
        seq, spec = self._seq, self.spec
        self._index += 1
        if token_id in seq.stops and self._index >= seq.min_tokens:
            return False
        if spec is GREEDY:
            return True
        edits, grammar = spec.edits, spec.grammar
        if grammar is not None and ((grammar := grammar.after(token_id)) is None or grammar.ended):
            return False
        edits = None if edits is None else edits.after(token_id)
        banned = seq.stop_ids if self._index < seq.min_tokens else ()
        self.spec = SampleSpec(seq.params, self._index, banned, edits, grammar)
        return True


def drawable(seq: Sequence, drafts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[SampleSpec, ...]]:
    """Return the drafts of a sequence up to the first one that nothing may follow, and the draws of a slice of them."""
    ahead = Ahead(seq)
    samples = [ahead.spec]
    for draft in drafts:
        if not ahead.take(draft):
            break
        samples.append(ahead.spec)
    return drafts[: len(samples) - 1], tuple(samples)
