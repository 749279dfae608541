"""The end of a step: drawn tokens are appended to their sequences, blocks that became full are published, and blocks behind a
sliding window are freed. Pure.

The reports about a step are immutable because they cross threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.core.step_plan import NO_TOKEN, Sampled, accept
from pdserve.engine.schedule.room import PrefixCache
from pdserve.engine.schedule.sequence import Sequence, SequenceEvent, SequenceKind, SequenceState


class OutputToken(NamedTuple):
    """Output token `output_index` of a sequence. It is the last one when it has a finish reason."""

    seq_id: SeqId
    output_index: int
    token_id: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With output token 0: those of all prompt tokens but the first, if the sequence asks for them."""
    speculation: DraftCounts | None = None
    """The drafts of the sequence on this worker so far. A stop string may make any token the last one, and the engine does not
    know of it. None: the sequence had none."""


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


class Verified(NamedTuple):
    """The drafts of one sequence in a collected step: how many there were, and how many of the first ones were right."""

    seq_id: SeqId
    drafted: int
    accepted: int


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
    verified: tuple[Verified, ...] = ()


_S, _E = SequenceState, SequenceEvent
Change = Callable[[Sequence, SequenceEvent], None]


class PlannedStep(NamedTuple):
    """The sequences of a step: first those that decode without drafts, then those with drafts, then those with a chunk."""

    sequences: list[Sequence]
    decodes: int
    """The number of sequences that decode without drafts."""
    drafts: tuple[tuple[int, ...], ...]
    """The drafts of each sequence that has some."""


class Collector:
    """Finishes the steps of one scheduler."""

    def __init__(self, prefix: PrefixCache, block_size: int, move: Change, forget: Change) -> None:
        """`move` changes the state of a sequence. `forget` ends a sequence and drops its references."""
        self._prefix = prefix
        self._block_size = block_size
        self._move = move
        self._forget = forget
        self._windowed = prefix.windowed

    def collect(
        self, step: PlannedStep, sampled: list[Sampled], preempted: tuple[SeqId, ...], *, aborting: bool
    ) -> StepOutcome:
        """Finish a step: its tokens count as computed, and every accepted token is appended to its sequence.

        sampled: one token for each sample of the plan, in the order of the slices. preempted: sequences to report. aborting:
        True if sequences were aborted during the step.
        """
        sequences, decodes, drafts = step
        assert len(sampled) >= decodes, "there are fewer sampled tokens than decodes"
        tokens: list[OutputToken] = []
        failed: list[Sequence] = []
        drawn = iter(sampled)
        # zip asks for a sequence first, so it takes no token too many.
        for seq, token in zip(sequences[:decodes], drawn, strict=False):
            seq.computed = computed = seq.computed + 1
            seq.planned = 0
            if aborting and seq.state is _S.ABORTING:
                self._forget(seq, _E.COLLECTED)
                continue
            if token[0] == NO_TOKEN:
                self._fail(seq, failed)
                continue
            if not computed % self._block_size:
                self._prefix.publish(seq)
            if self._windowed and seq.computed >= seq.next_death:
                self._prefix.free_behind(seq)
            tokens.append(self._append(seq, token))
        verified: list[Verified] = []
        for seq, guessed in zip(sequences[decodes:], drafts, strict=False):
            seq.planned = 0
            run = accept(guessed, [next(drawn) for _ in range(len(guessed) + 1)])
            if seq.state is _S.ABORTING:
                self._forget(seq, _E.COLLECTED)
            else:
                verified.append(self._append_run(seq, guessed, run, tokens))
        chunks = sequences[decodes + len(drafts) :]
        advanced, final = self._chunks(chunks, drawn, tokens, failed) if chunks else ((), ())
        assert next(drawn, None) is None, "there are more sampled tokens than slices that draw one"
        reasons = _reasons(failed) if failed else ((), ())
        return StepOutcome(tuple(tokens), advanced, preempted, *reasons, final, tuple(verified))

    def _chunks(
        self, sequences: list[Sequence], drawn: Iterator[Sampled], tokens: list[OutputToken], failed: list[Sequence]
    ) -> tuple[tuple[Advance, ...], tuple[Final, ...]]:
        """Finish the chunks of the step. A token was drawn after each chunk that reached the last known token."""
        advanced: list[Advance] = []
        final: list[Final] = []
        for seq in sequences:
            seq.computed = computed = seq.computed + seq.planned
            scored = _scored(seq, drawn) if seq.scores is not None else True
            seq.planned = 0
            last = next(drawn) if computed == len(seq.tokens) else None
            if seq.state is _S.ABORTING:
                self._forget(seq, _E.COLLECTED)
                continue
            if not scored or (last is not None and last[0] == NO_TOKEN):
                self._fail(seq, failed)
                continue
            if seq.kind is SequenceKind.LENT:
                final.append(self._final(seq))
            if seq.state is _S.DECODING:  # it was admitted with all but its last token computed
                self._prefix.publish(seq)
            else:
                self._prefilled(seq, advanced, drawn=last is not None)
            if self._windowed and seq.computed >= seq.next_death:
                self._prefix.free_behind(seq)
            if last is not None:
                tokens.append(self._append(seq, last))
        return tuple(advanced), tuple(final)

    def _prefilled(self, seq: Sequence, advanced: list[Advance], *, drawn: bool) -> None:
        """Finish a chunk of a prefilling sequence: publish its blocks and report the advance of a lent one.

        Any other sequence decodes from now on if a token was drawn after the chunk, or if only its last output token is left.
        """
        self._prefix.publish(seq)
        if seq.kind is SequenceKind.LENT:
            advanced.append(Advance(seq.seq_id, seq.computed))
        elif drawn or seq.decodes:
            self._move(seq, _E.PREFILLED)

    def _final(self, seq: Sequence) -> Final:
        """Return the blocks of a lent sequence that became final with its last chunk."""
        ended = seq.computed == len(seq.tokens)
        blocks = ceil_div(seq.computed, self._block_size) if ended else seq.computed // self._block_size
        first, seq.final = seq.final, blocks
        return Final(seq.seq_id, first, tuple([table[first:blocks] for table in seq.block_tables]))

    def _append(self, seq: Sequence, sampled: Sampled) -> OutputToken:
        token_id, logprobs = sampled
        index = len(seq.tokens) - seq.prompt_len
        seq.tokens.append(token_id)
        reason = seq.finish_reason()
        scores = () if seq.scores is None else seq.take_scores()
        if reason is not None or seq.kind is SequenceKind.LENT:
            self._forget(seq, _E.FINISHED)
        return OutputToken(seq.seq_id, index, token_id, reason, logprobs, scores, seq.speculation)

    def _append_run(
        self,
        seq: Sequence,
        drafts: tuple[int, ...],
        run: Many[Sampled],
        tokens: list[OutputToken],
    ) -> Verified:
        """Append the accepted tokens of a sequence, as if each was drawn by a step of its own. Only the last may end it, since
        no draft follows such a token. No row fails the sequence: where one has no numbers, the next step tells, without drafts.

        The KV of the other drafts is behind `computed`, where the next slice overwrites it before anything reads it.
        """
        right = len(run) - 1
        if run[-1][0] == NO_TOKEN:  # perhaps for a draft behind it, whose numbers share a tile: it is computed again alone
            run, seq.refuses_drafts = run[:-1], True
        seq.speculation = (seq.speculation or NO_COUNTS).add(len(drafts), right)
        for token in run:
            seq.computed += 1
            if not seq.computed % self._block_size:
                self._prefix.publish(seq)
            if self._windowed and seq.computed >= seq.next_death:
                self._prefix.free_behind(seq)
            tokens.append(self._append(seq, token))
        return Verified(seq.seq_id, len(drafts), right)

    def _fail(self, seq: Sequence, failed: list[Sequence]) -> None:
        """End a sequence for which no token could be drawn. If its logits are not finite numbers, its KV may be the reason, so
        no other sequence may find it."""
        if seq.grammar is None or seq.grammar.failure is None:
            self._prefix.withdraw(seq)
        self._forget(seq, _E.FAILED)
        failed.append(seq)


def _scored(seq: Sequence, drawn: Iterator[Sampled]) -> bool:
    """Take the scores of the tokens that follow those of a chunk. False: one has none, as its logits are not finite."""
    assert seq.scores is not None
    count = min(seq.computed, seq.prompt_len - 1) - (seq.computed - seq.planned)
    scores = [logprobs for _, logprobs in [next(drawn) for _ in range(count)] if logprobs is not None]
    seq.scores += scores
    return len(scores) == count


def _reasons(failed: Many[Sequence]) -> tuple[tuple[SeqId, ...], tuple[tuple[SeqId, str], ...]]:
    """Return the sequences without finite logits, and those whose grammar has failed, with the reason."""
    grammars = [(seq.seq_id, seq.grammar.failure) for seq in failed if seq.grammar is not None and seq.grammar.failure]
    ids = {seq_id for seq_id, _ in grammars}
    return tuple([seq.seq_id for seq in failed if seq.seq_id not in ids]), tuple(grammars)
