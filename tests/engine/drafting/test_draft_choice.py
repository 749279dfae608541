"""The choice takes the drafts that give the most accepted tokens a second, and none where none do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import SeqId
from pdserve.engine.drafting.api import NO_DRAFT, Draft, DraftView
from pdserve.engine.drafting.choice import (
    LEAST_GAIN,
    LEAST_SHARE,
    RARE_STEPS,
    SAMPLED_STEPS,
    Base,
    DraftChoice,
    choose,
    look_share,
)
from pdserve.engine.drafting.costs import StepCosts, StepSize
from pdserve.engine.schedule.collect import OutputToken, StepOutcome, Verified

FREE = StepCosts(((1, 1.0), (64, 1.0)))
"""Rows cost nothing."""
DEAR = StepCosts(((1, 1.0), (64, 64.0)))
"""Each row costs as much as the first."""
shares = st.lists(st.floats(0.0, 1.0), max_size=3).map(lambda some: list(itertools.accumulate(some, lambda a, b: a * b)))
tables = st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12).map(
    lambda more: StepCosts([(i, 1.0 + sum(more[:i])) for i in range(1, 13)], reread_s=0.001)
)


@given(st.lists(shares, min_size=1, max_size=3), tables, st.integers(1, 9), st.integers(0, 300))
@settings(max_examples=200)
def test_the_best_number_of_drafts_is_found(survivals, costs, room, context):
    """Against all choices, where every draft reads the same context."""
    contexts = [context] * len(survivals)
    base = Base(len(survivals), StepSize(len(survivals), 50), room)

    def rate(counts: Sequence[int]) -> float:
        tokens = sum(sum(own[:count]) for own, count in zip(survivals, counts, strict=True))
        return base.rate(costs, tokens, sum(counts), context * sum(counts))

    counts = choose(base, costs, survivals, contexts)
    assert sum(counts) <= room
    assert all(count <= len(own) for count, own in zip(counts, survivals, strict=True))
    usable = [[share for share in own if share > LEAST_SHARE] for own in survivals]
    every = itertools.product(*(range(len(own) + 1) for own in usable))
    best = max(rate(some) for some in every if sum(some) <= room)
    nothing = rate([0] * len(survivals))
    least = (LEAST_GAIN + look_share(base, costs)) * nothing
    assert rate(counts) == pytest.approx(best if best > least else nothing)


class Source:
    """Sequences that decode. `most` drafts fit one that needs blocks."""

    def __init__(self, count: int, *, prompt_tokens: int = 0, room: int = 64, fit: int = 64, context: int = 100) -> None:
        self.tokens = {SeqId(i): list(range(context)) for i in range(count)}
        self.next_rows = (count, prompt_tokens, room)
        self.fit = fit

    def draft_views(self, most: int) -> list[DraftView]:
        return [DraftView(seq_id, tokens, 3, b"", most) for seq_id, tokens in self.tokens.items()]

    def with_blocks(self, view: DraftView) -> DraftView | None:
        most = min(view.most, self.fit)
        return view._replace(most=most, block_tables=((),)) if most else None


class Guesser:
    """A drafter that guesses the true continuation of each sequence, whose tokens count up, or something else."""

    def __init__(self, kind: str, share: float, place_s: float | None = None) -> None:
        self.kind, self.most, self.needs_blocks, self.spent_s = kind, 8, True, 0.5
        self._share = share
        self._place_s = place_s
        self._rng = random.Random(3)
        self.asked: list[int] = []
        self.forgotten: list[SeqId] = []

    def place_s(self, sequences: int, read: int) -> float:
        assert self._place_s is not None
        return self._place_s

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        self.asked.append(sum(view.most for view in views))
        drafts = []
        for view in views:
            right = list(range(len(view.tokens), len(view.tokens) + view.most))
            guess = tuple(one if self._rng.random() < self._share else -1 for one in right)
            drafts.append(Draft(guess, self.kind) if self._share >= 0 else NO_DRAFT)
        return drafts

    def forget(self, seq_id: SeqId, tokens: Any, group: bytes) -> None:
        self.forgotten.append(seq_id)


def play(choice: DraftChoice, source: Source, steps: int = 60) -> list[dict[SeqId, tuple[int, ...]]]:
    """Run steps: a draft is accepted while it counts up."""
    chosen = []
    for _ in range(steps):
        drafts = dict(choice.drafts(source))
        chosen.append(drafts)
        verified, drawn = [], []
        for seq_id, tokens in source.tokens.items():
            guess = drafts.get(seq_id, ())
            accepted = next((i for i, one in enumerate(guess) if one != len(tokens) + i), len(guess))
            if guess:
                verified.append(Verified(seq_id, len(guess), accepted))
            for _ in range(accepted + 1):
                drawn.append(OutputToken(seq_id, len(tokens) - 3, len(tokens), None))
                tokens.append(len(tokens))
        choice.learn(StepOutcome(tuple(drawn), (), (), verified=tuple(verified)))
        rows = len(source.tokens) + sum(map(len, drafts.values()))
        choice.took(rows, choice.costs.rows_s(rows) + choice._spent_s)
    return chosen


def test_drafts_that_are_right_are_taken_to_the_limit_where_rows_cost_nothing():
    choice = DraftChoice([Guesser("good", 1.0)], FREE, most=5)
    assert all(len(guess) == 5 for step in play(choice, Source(2))[20:] for guess in step.values())


def test_nobody_is_asked_where_each_row_costs_as_much_as_a_token():
    good = Guesser("good", 1.0)
    assert not any(play(DraftChoice([good], DEAR, most=5), Source(2)))
    assert not good.asked


def test_drafts_fade_out_with_the_number_of_sequences():
    """Four rows are free, and then each row costs a sixth of a step, as on a CPU."""
    costs = StepCosts(((1, 6.0), (4, 6.0), (64, 66.0)))
    taken = []
    for count in (1, 2, 4, 16):
        last = play(DraftChoice([Guesser("fair", 0.6)], costs, most=8), Source(count))[-20:]
        taken.append(sum(sum(map(len, step.values())) for step in last) / 20 / count)
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > 2
    assert taken[-1] == 0


def test_drafts_that_are_wrong_are_given_up_and_those_that_become_right_are_found():
    costs = StepCosts(((1, 1.0), (64, 7.3)))
    bad = Guesser("bad", 0.0)
    choice, source = DraftChoice([bad], costs, most=4), Source(1)
    assert not any(play(choice, source, 300)[-60:])
    bad._share = 1.0
    assert any(play(choice, source, 800)[-60:]), "what is not verified still teaches"


def test_the_better_of_two_drafts_counts():
    choice = DraftChoice([Guesser("bad", 0.1), Guesser("good", 0.9), Guesser("none", -1)], FREE, most=3)
    play(choice, Source(1))
    assert set(choice._kinds.values()) == {"good"}


def test_a_model_drafts_where_its_time_pays():
    """A draft takes a third of a step. One of ten that is right does not pay, nine of ten do."""
    for share, pays in ((0.1, False), (0.9, True)):
        model = Guesser("model", share, place_s=0.3)
        choice = DraftChoice([], FREE, most=8, model=model)
        last = play(choice, Source(1), 400)[-100:]
        assert (sum(map(bool, last)) > 50) == pays
        assert (len(model.asked) > 200) == pays
        assert len(model.asked) > 1, "it is tried now and then"


def test_the_time_of_a_models_drafts_is_not_that_of_rows():
    """Steps with drafts and steps without take turns. The model takes half of a step."""
    choice = DraftChoice([], StepCosts(((1, 1.0), (64, 1.0))), most=8, model=Guesser("model", 1.0, place_s=0.01))
    for _ in range(4000):
        choice._steps = 0
        for source in (Source(1), Source(1, fit=0)):
            rows = 1 + sum(map(len, choice.drafts(source).values()))
            choice._steps = SAMPLED_STEPS
            choice.took(rows, 1.0 + (0.5 if rows > 1 else 0.0))
    assert choice.costs.rows_s(9) == pytest.approx(choice.costs.rows_s(1), rel=0.05)


def test_a_model_does_not_draft_where_a_lookup_is_as_good():
    model = Guesser("model", 1.0, place_s=0.3)
    choice = DraftChoice([Guesser("lookup", 1.0)], FREE, most=8, model=model)
    play(choice, Source(2), 200)
    assert sum(model.asked) < 40


def test_a_model_gets_blocks_or_does_not_draft():
    for fit, most in ((0, 0), (2, 2)):
        model = Guesser("model", 1.0, place_s=0.01)
        last = play(DraftChoice([], FREE, most=8, model=model), Source(2, fit=fit))[-1]
        assert max(map(len, last.values()), default=0) == most


def test_steps_of_sequences_that_may_have_no_drafts_do_not_seem_dear():
    """Nobody has summed the positions that such a step reads. Here they take as long as the rest of it."""
    true, costs = [StepCosts(((1, 1.0), (64, 2.0)), read_s=0.01) for _ in range(2)]
    source, choice = Source(1), DraftChoice([Guesser("good", 1.0)], costs, most=8)
    views = source.draft_views
    for step in range(2000):
        source.draft_views = views if step % 3 else lambda most: []
        drafts = choice.drafts(source)
        count = sum(map(len, drafts.values()))
        choice.learn(StepOutcome((), (), (), verified=tuple([Verified(seq_id, count, count) for seq_id in drafts])))
        choice.took(1 + count, true.step_s(StepSize(1 + count, 100)))
    assert [costs.rows_s(rows) for rows in (1, 9, 64)] == pytest.approx([true.rows_s(rows) for rows in (1, 9, 64)], rel=0.01)


def test_the_room_of_a_step_is_kept():
    choice = DraftChoice([Guesser("good", 1.0)], FREE, most=8)
    assert all(sum(map(len, step.values())) <= 5 for step in play(choice, Source(3, room=5)))
    assert not choice.drafts(Source(3, room=0))
    assert not choice.drafts(Source(0))


def test_sequences_that_may_have_no_drafts_get_none_from_a_model_either():
    model = Guesser("model", 1.0, place_s=0.01)
    source = Source(2)
    source.draft_views = lambda most: []  # type: ignore[method-assign]
    assert not any(play(DraftChoice([], FREE, most=8, model=model), source, 200))
    assert not model.asked


def test_all_drafters_forget_a_sequence():
    drafters = [Guesser("a", 1.0), Guesser("b", 1.0)]
    model = Guesser("model", 1.0, place_s=0.1)
    choice = DraftChoice(drafters, FREE, most=2, model=model)
    play(choice, Source(2))
    choice.forget(SeqId(1), [1, 2], b"")
    assert [one.forgotten for one in (*drafters, model)] == [[SeqId(1)]] * 3
    assert set(choice._odds._own) == {SeqId(0)}


def test_drafts_that_do_not_pay_are_looked_for_seldom():
    bad = Guesser("bad", 0.0)
    play(DraftChoice([bad], StepCosts(((1, 1.0), (64, 7.3))), most=4), Source(1), 800)
    assert 800 // RARE_STEPS <= len(bad.asked) < 200


def test_drafts_pay_beside_a_long_context_that_is_read_once():
    """A row costs as much as the first one, and so nobody drafts behind few tokens."""
    costs = StepCosts(((1, 1.0), (64, 64.0)), read_s=0.001)
    short, long = (DraftChoice([Guesser("good", 1.0)], costs, most=4) for _ in range(2))
    assert not any(play(short, Source(16, context=4), 40))
    assert any(play(long, Source(16, context=4000), 40))
