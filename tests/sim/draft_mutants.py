"""Rules of drafts, broken on purpose. See `mutants`. The engines of most seeds draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.sampling import LogitEdits
from pdserve.core.speculation import DraftCounts
from pdserve.core.step_plan import NO_TOKEN, Drafts, Sampled
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.schedule import collect, scheduler
from pdserve.engine.schedule.collect import Collector
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import Ahead, SequenceState
from pdserve.engine.schedule.sequence import Sequence as Computed
from pdserve.structured.state import ConstraintState
from tests.sim.mutants import Mutant

MORE_ROWS = 4


def wrong_drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    """KV of them is read as if it was that of the tokens there."""
    real = Computed.last_slice, Computed.drafted_slice, Collector._append_run

    def append_run(self: Any, seq: Any, drafts: Any, run: Any, *rest: Any) -> Any:
        verified = real[2](self, seq, drafts, run, *rest)
        ahead[seq.seq_id, id(seq)] = seq.computed + len(drafts) - verified.accepted
        return verified

    def later(self: Any, piece: Any) -> Any:
        """The tokens that follow are left out, as far as the drafts filled their places."""
        first = ahead.pop((self.seq_id, id(self)), 0)
        return piece if first <= piece.start else piece._replace(start=first)

    ahead: dict[Any, int] = {}
    patch.setattr(Collector, "_append_run", append_run)
    patch.setattr(Computed, "last_slice", lambda self: later(self, real[0](self)))
    patch.setattr(Computed, "drafted_slice", lambda self, *of: later(self, real[1](self, *of)))


def a_block_with_wrong_drafts_is_shared(patch: pytest.MonkeyPatch) -> None:
    """It is published when the rows of the step have filled it."""
    real = Collector._append_run

    def append_run(self: Any, seq: Any, drafts: Any, *rest: Any) -> Any:
        known, computed, chain = len(seq.tokens), seq.computed, seq.chain
        if chain is not None and (computed + 1 + len(drafts)) // self._block_size > seq.published:
            seq.tokens += drafts
            seq.computed += 1 + len(drafts)
            self._prefix.publish(seq)
            del seq.tokens[known:]
            seq.computed = computed
        return real(self, seq, drafts, *rest)

    patch.setattr(Collector, "_append_run", append_run)


def wrong_drafts_count_against_max_tokens(patch: pytest.MonkeyPatch) -> None:
    real = Collector._append_run

    def append_run(self: Any, seq: Any, drafts: Any, run: Any, *rest: Any) -> Any:
        verified = real(self, seq, drafts, run, *rest)
        seq.longest -= len(drafts) - verified.accepted
        return verified

    patch.setattr(Collector, "_append_run", append_run)


def drafts_go_on_behind_a_stop_token(patch: pytest.MonkeyPatch) -> None:
    real = Ahead.take

    def take(self: Any, token_id: int) -> bool:
        seq = self._seq
        stops, seq._stops = seq._stops, frozenset()
        goes_on = real(self, token_id)
        seq._stops = stops
        return goes_on

    patch.setattr(Ahead, "take", take)


def drafts_go_on_behind_the_longest_length(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Computed, "most_drafts", property(lambda self: 8 if self.spec.draft_limit is None else self.spec.draft_limit))


def penalties_do_not_follow_a_draft(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogitEdits, "after", lambda self, token_id: self)


def a_grammar_does_not_follow_a_draft(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConstraintState, "after", lambda self, token_id: self)


def all_rows_of_a_draft_have_one_index(patch: pytest.MonkeyPatch) -> None:
    """So they are drawn with one random number."""
    real = Ahead.take

    def take(self: Any, token_id: int) -> bool:
        first, goes_on = self.spec, real(self, token_id)
        if first.params.temperature:
            self.spec = self.spec._replace(output_index=first.output_index)
        return goes_on

    patch.setattr(Ahead, "take", take)


def the_least_length_does_not_follow_a_draft(patch: pytest.MonkeyPatch) -> None:
    real = Ahead.take

    def take(self: Any, token_id: int) -> bool:
        first, goes_on = self.spec, real(self, token_id)
        self.spec = self.spec._replace(banned_ids=first.banned_ids) if first.banned_ids else self.spec
        return goes_on

    patch.setattr(Ahead, "take", take)


def drafts_take_more_rows_than_there_are(patch: pytest.MonkeyPatch) -> None:
    real, rows = scheduler.take_drafts, Scheduler.next_rows.fget
    assert rows is not None

    def take_drafts(drafts: Drafts, decoding: Any, room: int, fit: Any) -> Any:
        return real(drafts, decoding, room + MORE_ROWS, fit)

    def next_rows(self: Any) -> tuple[int, int, int]:
        decoding, prompt_tokens, room = rows(self)
        return decoding, prompt_tokens, room + MORE_ROWS

    patch.setattr(scheduler, "take_drafts", take_drafts)
    patch.setattr(Scheduler, "next_rows", property(next_rows))


def blocks_of_drafts_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The blocks that a sequence got for drafts are held by somebody else as well, who never gives them back."""
    real = Scheduler._room_for_drafts

    def room_for_drafts(self: Any, seq: Any, count: int) -> int:
        before = seq.num_blocks
        room = real(self, seq, count)
        kept = Holder(HolderKind.LEASE, seq.seq_id)
        if seq.num_blocks > before and not self._pool.blocks_of(kept)[0]:
            self._pool.share(seq.holder, kept, len(seq.tokens))
        return room

    patch.setattr(Scheduler, "_room_for_drafts", room_for_drafts)


def the_limit_of_a_request_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Computed, "most_drafts", property(lambda self: self.longest - len(self.tokens) - 1))


def nobody_hears_of_the_end_of_a_sequence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftChoice, "forget", lambda self, seq_id, tokens, group: None)


def odds_learn_from_a_sequence_that_has_ended(patch: pytest.MonkeyPatch) -> None:
    real = DraftChoice.forget

    def forget(self: Any, seq_id: Any, tokens: Any, group: bytes) -> None:
        real(self, seq_id, tokens, group)
        self._ended.clear()

    patch.setattr(DraftChoice, "forget", forget)


def lookups_find_the_texts_of_all_salts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Computed, "group", property(lambda self: b""))


def the_token_behind_a_wrong_draft_is_accepted(patch: pytest.MonkeyPatch) -> None:
    real = collect.accept

    def accept(drafts: tuple[int, ...], drawn: Sequence[Sampled]) -> Sequence[Sampled]:
        return drawn[: len(real(drafts, drawn)) + 1]

    patch.setattr(collect, "accept", accept)


def the_last_right_draft_is_not_accepted(patch: pytest.MonkeyPatch) -> None:
    """The output is right, and the counts are not."""
    real = collect.accept

    def accept(drafts: tuple[int, ...], drawn: Sequence[Sampled]) -> Sequence[Sampled]:
        return drawn[: max(1, len(real(drafts, drawn)) - 1)]

    patch.setattr(collect, "accept", accept)


def the_last_token_counts_as_a_right_draft(patch: pytest.MonkeyPatch) -> None:
    real = DraftCounts.add
    patch.setattr(DraftCounts, "add", lambda self, drafted, accepted: real(self, drafted, min(drafted, accepted + 1)))


def a_preemption_forgets_the_counts(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._preempt

    def preempt(self: Any, seq: Any) -> None:
        real(self, seq)
        seq.speculation = None

    patch.setattr(Scheduler, "_preempt", preempt)


def only_the_engine_s_own_end_tells_the_counts(patch: pytest.MonkeyPatch) -> None:
    """A stop string is another end."""
    real = Collector._append

    def append(self: Any, seq: Any, sampled: Any) -> Any:
        token = real(self, seq, sampled)
        return token if token.finish_reason is not None else token._replace(speculation=None)

    patch.setattr(Collector, "_append", append)


def an_abort_in_a_step_with_drafts_is_overlooked(patch: pytest.MonkeyPatch) -> None:
    """The sequence keeps its blocks."""
    real = Collector.collect

    def collect_step(self: Any, step: Any, *rest: Any, **aborting: bool) -> Any:
        drafted = step.sequences[step.decodes : step.decodes + len(step.drafts)]
        aborted = [seq for seq in drafted if seq.state is SequenceState.ABORTING]
        forget, self._forget = self._forget, lambda seq, event: None if seq in aborted else forget(seq, event)
        try:
            return real(self, step, *rest, **aborting)
        finally:
            self._forget = forget

    patch.setattr(Collector, "collect", collect_step)


def a_right_draft_without_numbers_fails_its_sequence(patch: pytest.MonkeyPatch) -> None:
    """The grammar of its row is a copy, so the reason is lost."""
    real = Collector._append_run

    def append_run(self: Any, seq: Any, drafts: Any, run: Any, tokens: Any) -> Any:
        verified = real(self, seq, drafts, run, tokens)
        if run[-1][0] == NO_TOKEN and verified.accepted:
            self._fail(seq, [])
        return verified

    patch.setattr(Collector, "_append_run", append_run)


def a_block_dies_before_the_drafts_are_verified(patch: pytest.MonkeyPatch) -> None:
    """Blocks behind the window of the last draft are freed, and the window of the first row still has them."""
    real = Collector._append_run

    def append_run(self: Any, seq: Any, drafts: Any, *rest: Any) -> Any:
        verified = real(self, seq, drafts, *rest)
        if self._windowed and seq.state is SequenceState.DECODING:
            computed = seq.computed
            seq.computed += len(drafts) - verified.accepted
            self._prefix.free_behind(seq)
            seq.computed = computed
        return verified

    patch.setattr(Collector, "_append_run", append_run)


DRAFT_MUTANTS: tuple[Mutant, ...] = (
    wrong_drafts_count_as_computed,
    a_block_with_wrong_drafts_is_shared,
    wrong_drafts_count_against_max_tokens,
    drafts_go_on_behind_a_stop_token,
    drafts_go_on_behind_the_longest_length,
    penalties_do_not_follow_a_draft,
    a_grammar_does_not_follow_a_draft,
    all_rows_of_a_draft_have_one_index,
    the_least_length_does_not_follow_a_draft,
    drafts_take_more_rows_than_there_are,
    blocks_of_drafts_are_kept,
    the_limit_of_a_request_is_ignored,
    nobody_hears_of_the_end_of_a_sequence,
    odds_learn_from_a_sequence_that_has_ended,
    lookups_find_the_texts_of_all_salts,
    the_token_behind_a_wrong_draft_is_accepted,
    the_last_right_draft_is_not_accepted,
    the_last_token_counts_as_a_right_draft,
    a_preemption_forgets_the_counts,
    only_the_engine_s_own_end_tells_the_counts,
    a_right_draft_without_numbers_fails_its_sequence,
    a_block_dies_before_the_drafts_are_verified,
)

HISTORY_MUTANTS: tuple[Mutant, ...] = (
    wrong_drafts_count_as_computed,
    wrong_drafts_count_against_max_tokens,
    drafts_go_on_behind_a_stop_token,
    drafts_go_on_behind_the_longest_length,
    penalties_do_not_follow_a_draft,
    all_rows_of_a_draft_have_one_index,
    drafts_take_more_rows_than_there_are,
    blocks_of_drafts_are_kept,
    the_limit_of_a_request_is_ignored,
    the_token_behind_a_wrong_draft_is_accepted,
    the_last_right_draft_is_not_accepted,
    the_last_token_counts_as_a_right_draft,
    only_the_engine_s_own_end_tells_the_counts,
    an_abort_in_a_step_with_drafts_is_overlooked,
    a_block_dies_before_the_drafts_are_verified,
)
"""Those that random histories of a scheduler alone find. Commands of an engine wait for the end of a step, so that nothing is
aborted in it."""
