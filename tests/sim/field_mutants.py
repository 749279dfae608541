"""Rules of grammars and of scored prompts, broken on purpose. See `mutants`, and docs/design/0056 and 0059.

Requests of half of the seeds have constraints, and requests of half of the seeds have scored prompts. Preemptions are rare
there, and have runs of their own.
"""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.role import DecodeRole
from pdserve.engine.schedule.room import PrefixCache
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import Sequence
from pdserve.structured.compilations import Compilations
from pdserve.structured.compiler import Compiler
from pdserve.structured.state import ConstraintState
from prefill_worker.role import PrefillRole


def a_replay_starts_its_grammar_anew(patch: pytest.MonkeyPatch) -> None:
    """The grammar of a replay does not take the output of the attempts before."""
    real = Sequence.constrain

    def constrain(self: Any, grammar: Any) -> None:
        grammar._accepted = self.output_count
        real(self, grammar)

    patch.setattr(Sequence, "constrain", constrain)


def a_handoff_forgets_the_first_token(patch: pytest.MonkeyPatch) -> None:
    """The grammar of the decode worker does not take the token that the prefill worker drew."""
    real = Scheduler.activate

    def activate(self: Any, seq_id: Any, first_token: int) -> None:
        if (grammar := self._sequences[seq_id].grammar) is not None:
            grammar._accepted += 1
        real(self, seq_id, first_token)

    patch.setattr(Scheduler, "activate", activate)


def a_preempted_grammar_takes_its_tokens_twice(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._preempt

    def preempt(self: Any, seq: Any) -> None:
        real(self, seq)
        if seq.grammar is not None:
            seq.grammar._accepted = 0

    patch.setattr(Scheduler, "_preempt", preempt)


def requests_of_one_constraint_share_a_state(patch: pytest.MonkeyPatch) -> None:
    real = Compiler.start

    def start(self: Any, constraint: Any) -> Any:
        states = self.__dict__.setdefault("states", {})
        return states.setdefault(constraint, real(self, constraint))

    patch.setattr(Compiler, "start", start)


def a_mask_outlives_its_token(patch: pytest.MonkeyPatch) -> None:
    real = ConstraintState.accept

    def accept(self: Any, token_id: int) -> bool:
        mask = self._mask
        taken = real(self, token_id)
        self._mask = mask if taken else None
        return taken

    patch.setattr(ConstraintState, "accept", accept)


def the_prefill_worker_has_no_grammar(patch: pytest.MonkeyPatch) -> None:
    """Token 0 may be any."""
    real = PrefillRole._begin
    patch.setattr(PrefillRole, "_begin", lambda self, command, spec, resumed, grammar: real(self, command, spec, resumed, None))


def an_output_goes_on_behind_its_grammar(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConstraintState, "ended", property(lambda self: False))


def a_cancelled_request_begins_once_it_is_compiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compilations, "cancel", lambda self, handle: False)


def requests_of_a_lost_link_begin_once_they_are_compiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compilations, "cancel_all", lambda self, which=None: None)


def a_drain_begins_what_was_compiled_meanwhile(patch: pytest.MonkeyPatch) -> None:
    for role in (PrefillRole, DecodeRole):
        patch.setattr(role, "_begin", _undrained(role._begin))


def _undrained(begin: Any) -> Any:
    def begin_all(self: Any, command: Any, spec: Any, resumed: Any, grammar: Any) -> None:
        drains = self._host.draining
        self._host.draining = drains and grammar is None
        begin(self, command, spec, resumed, grammar)
        self._host.draining = drains

    return begin_all


GRAMMAR_MUTANTS = (
    a_replay_starts_its_grammar_anew,
    a_handoff_forgets_the_first_token,
    requests_of_one_constraint_share_a_state,
    a_mask_outlives_its_token,
    the_prefill_worker_has_no_grammar,
    an_output_goes_on_behind_its_grammar,
    a_cancelled_request_begins_once_it_is_compiled,
    requests_of_a_lost_link_begin_once_they_are_compiled,
    a_drain_begins_what_was_compiled_meanwhile,
)


def a_scored_prompt_takes_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a prefix hit have no scores."""
    patch.setattr(PrefixCache, "chain_to_compute", lambda self, spec, resumed: self.chain(spec.cache_salt))


def a_preempted_prompt_keeps_its_scores(patch: pytest.MonkeyPatch) -> None:
    """A second set follows those of the chunks before."""
    real = Sequence._scored

    def scored(self: Any, end: int) -> Any:
        kept = list(self.scores)
        samples = real(self, end)
        self.scores[:] = kept
        return samples

    patch.setattr(Sequence, "_scored", scored)


def scores_go_out_with_each_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "take_scores", lambda self: tuple(self.scores or ()))


def a_replay_scores_its_prompt_again(patch: pytest.MonkeyPatch) -> None:
    """A second set after token 0, which the client has."""
    real = Sequence.__post_init__

    def post_init(self: Any) -> None:
        real(self)
        if self.params.prompt_logprobs is not None:
            self.scores = []

    patch.setattr(Sequence, "__post_init__", post_init)


SCORE_MUTANTS = (
    a_scored_prompt_takes_shared_blocks,
    scores_go_out_with_each_token,
    a_replay_scores_its_prompt_again,
)

PREEMPTION_MUTANTS = (a_preempted_grammar_takes_its_tokens_twice, a_preempted_prompt_keeps_its_scores)
"""Found by `run_with_preemptions`."""
