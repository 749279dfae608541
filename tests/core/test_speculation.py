"""Counts of drafts add up, in whatever order and grouping they are told, and a difference gives back what was added."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.speculation import MAX_DRAFTS, NO_COUNTS, DraftCounts, total

SLICES = st.lists(st.integers(1, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))), max_size=20)
"""The drafts of each slice, and how many of them were right."""


def counted(slices: list[tuple[int, int]]) -> DraftCounts:
    counts = NO_COUNTS
    for drafted, accepted in slices:
        counts = counts.add(drafted, accepted)
    return counts


@given(SLICES)
def test_counts_say_what_the_slices_were(slices: list[tuple[int, int]]) -> None:
    counts = counted(slices)
    drafted, accepted = sum(one for one, _ in slices), sum(one for _, one in slices)
    longest = max([accepted for _, accepted in slices], default=0)
    by_place = tuple(sum(accepted > place for _, accepted in slices) for place in range(longest))
    assert counts == (len(slices), drafted, accepted, by_place)
    assert counts.acceptance_rate == (pytest.approx(accepted / drafted) if slices else 0.0)
    assert counts.acceptance_length == (pytest.approx((accepted + len(slices)) / len(slices)) if slices else 0.0)


@given(st.lists(SLICES | st.none(), max_size=5), st.randoms(use_true_random=False))
def test_the_total_of_parts_is_that_of_their_slices_in_any_order(parts: list[list[tuple[int, int]] | None], random) -> None:
    told = [None if part is None else counted(part) for part in parts]
    random.shuffle(told)
    known = [part for part in parts if part is not None]
    assert total(told) == (counted([one for part in known for one in part]) if known else None)


@given(SLICES, SLICES)
def test_a_difference_is_what_was_added_and_never_below_nothing(
    before: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    first, both = counted(before), counted([*before, *more])
    assert first.plus(both.since(first)) == both
    assert not any(counted(before[:1]).since(both)[:3]), "a worker that counts anew has added nothing to what it had"


def test_what_a_peer_tells_of_places_is_bounded() -> None:
    told = DraftCounts.told(DraftCounts(1, 100, 100, (1,) * (MAX_DRAFTS + 9)))
    assert told == DraftCounts(1, 100, 100, (1,) * MAX_DRAFTS)
