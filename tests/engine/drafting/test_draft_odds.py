"""The odds of drafts are learned by kind, place and sequence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.ids import SeqId
from pdserve.engine.drafting.odds import KINDS, Odds

A, B = SeqId(1), SeqId(2)


def verified(odds: Odds, seq_id: SeqId, kind: str, share: float, count: int, turns: int = 400) -> Odds:
    """Drafts each of which is right with probability `share` if those before it are."""
    rng = random.Random(7)
    for _ in range(turns):
        accepted = next((i for i in range(count) if rng.random() >= share), count)
        odds.learn(seq_id, kind, count, accepted)
    return odds


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_shares_are_learned_for_each_kind_and_multiply_with_the_place(share):
    odds = verified(Odds(), A, "x", share, 4, turns=2000)
    found = odds.survival(B, "x", 4)
    assert found[0] == pytest.approx(share, abs=0.1)
    assert found[1] == pytest.approx(share**2, abs=0.15)
    assert odds.survival(B, "y", 1)[0] == pytest.approx(0.5)


def test_a_place_that_was_never_tried_is_like_the_one_before_it():
    odds = verified(Odds(), A, "x", 0.9, 2)
    two, four = odds.survival(B, "x", 2), odds.survival(B, "x", 4)
    assert four[:2] == two
    assert four[3] / four[2] == pytest.approx(four[1] / four[0], abs=0.02)


def test_a_sequence_that_is_easier_than_its_kind_has_better_odds():
    odds = verified(Odds(), A, "x", 0.5, 4)
    verified(odds, B, "x", 0.98, 4, turns=12)
    assert odds.survival(B, "y", 1) == odds.survival(A, "y", 1), "it says nothing of other drafters"
    assert odds.survival(B, "x", 1)[0] > odds.survival(SeqId(3), "x", 1)[0] > odds.survival(A, "x", 1)[0] - 0.2
    odds.forget(B)
    assert odds.survival(B, "x", 4) == odds.survival(SeqId(3), "x", 4)


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from("xyz"), st.integers(1, 6), st.integers(0, 6))))
def test_survival_is_a_probability_that_never_rises_with_the_place(slices):
    odds = Odds()
    for seq_id, kind, drafted, accepted in slices:
        odds.learn(seq_id, kind, drafted, min(drafted, accepted))
    for seq_id in (A, B):
        found = odds.survival(seq_id, "x", 8)
        assert all(0.0 <= one <= 1.0 for one in found)
        assert found == sorted(found, reverse=True)


def test_old_drafts_are_forgotten():
    odds = verified(verified(Odds(), A, "x", 0.9, 1, turns=1000), A, "x", 0.1, 1, turns=600)
    assert odds.survival(B, "x", 1)[0] < 0.2


def test_the_number_of_kinds_is_bounded():
    odds = Odds()
    for i in range(2 * KINDS):
        odds.learn(A, f"kind {i}", 1, 1)
    assert len(odds._kinds) == KINDS
