"""Turns for a thread: everybody comes, small pieces pass large ones, and nobody is passed for ever."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from router.service.loop_time import LEVELS, PASSING, FairTurns, Piece

NAMES = st.sampled_from("abc")
PATHS = st.lists(NAMES, max_size=LEVELS).map(tuple)
PIECES = st.builds(Piece, PATHS, st.integers(1, 1000))
MANY = 64


@given(st.lists(st.one_of(PIECES, st.none(), st.integers(0, 100)), max_size=60), st.integers(1, 8))
def test_each_piece_ends_once_and_a_full_room_refuses_the_newest_of_who_has_most(
    steps: list[Piece | int | None], most: int
) -> None:
    """A step is a piece that comes, one that leaves, or the next turn."""
    turns, waiting = FairTurns(most), list[Piece]()
    for step in steps:
        if isinstance(step, Piece):
            refused = turns.add(step)
            waiting.append(step)
            assert (refused is None) == (len(waiting) <= most)
            if refused is not None:
                _check_refused(refused, waiting)
                waiting.remove(refused)
        elif step is None:
            served = turns.next()
            assert (served is None) == (not waiting)
            if served is not None:
                waiting.remove(served)
        elif waiting:
            turns.remove(waiting.pop(step % len(waiting)))
        assert len(turns) == len(waiting)
        turns._flows.check_invariants()
    while (piece := turns.next()) is not None:
        waiting.remove(piece)
    assert not waiting


def _check_refused(refused: Piece, waiting: list[Piece]) -> None:
    beside = waiting
    for level in range(LEVELS):
        costs = Counter[str]()
        for piece in beside:
            costs[piece.flows[level]] += piece.cost
        assert costs[refused.flows[level]] == max(costs.values())
        beside = [piece for piece in beside if piece.flows[level] == refused.flows[level]]
    assert refused is beside[-1]


@given(st.integers(0, MANY - 1), st.integers(1, 300), st.booleans())
def test_a_small_piece_passes_all_large_ones_whenever_it_comes(served: int, cost: int, is_same_client: bool) -> None:
    turns = FairTurns(MANY + 1)
    for i in range(MANY):
        turns.add(Piece(("a", str(i)), 1000))
    for _ in range(served):
        turns.next()
    small = Piece(("a" if is_same_client else "b", "small"), cost)
    turns.add(small)
    assert turns.next() is small


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 500))
def test_what_passes_a_large_piece_is_bounded(flood: list[int], cost: int) -> None:
    """Some clients always have a small piece waiting. Each of them gets `PASSING` times the cost of the large one, and its own
    last piece, before the large one comes."""
    turns, large, passed = FairTurns(MANY), Piece(("large",), cost), Counter[str]()
    turns.add(large)
    for i, small in enumerate(flood):
        turns.add(Piece((str(i),), small))
    while (piece := turns.next()) is not large:
        assert piece is not None
        passed[piece.path[0]] += piece.cost
        turns.add(Piece(piece.path, piece.cost))
    for i, small in enumerate(flood):
        assert passed[str(i)] <= PASSING * cost + small


@given(st.integers(1, 100), st.integers(2, 5))
def test_clients_that_always_wait_get_equally_much_whatever_their_connections(cost: int, connections: int) -> None:
    turns, served = FairTurns(MANY), Counter[str]()
    for client, count in (("one", 1), ("many", connections)):
        for i in range(count):
            turns.add(Piece((client, str(i)), cost))
    for _ in range(40):
        piece = turns.next()
        assert piece is not None
        served[piece.path[0]] += piece.cost
        turns.add(Piece(piece.path, piece.cost))
    assert abs(served["one"] - served["many"]) <= 2 * cost
