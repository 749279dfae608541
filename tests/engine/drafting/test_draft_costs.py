"""The table of step times: measured steps, lines between them, and corrections."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.step_plan import StepPlan
from pdserve.engine.drafting.costs import REFRESH_STEPS, StepCosts, StepSize, measure

TABLE = ((1, 1.0), (4, 1.0), (8, 2.0), (16, 6.0))


def test_between_two_entries_the_time_is_a_line_and_behind_the_last_it_goes_on():
    costs = StepCosts(TABLE)
    assert [costs.rows_s(rows) for rows in (1, 2, 4, 6, 8, 12, 16, 32)] == [1, 1, 1, 1.5, 2, 4, 6, 14]


def test_positions_cost_once_for_a_sequence_and_again_for_each_draft():
    costs = StepCosts(TABLE, read_s=0.01, reread_s=0.001)
    assert costs.step_s(StepSize(4, 100, 50)) == pytest.approx(1 + 1.0 + 0.05)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_more_rows_never_take_less_time(seconds):
    """A table that was measured in a disturbed moment may fall."""
    costs = StepCosts([(2**i, step_s) for i, step_s in enumerate(seconds)])
    times = [costs.rows_s(rows) for rows in range(1, 300)]
    assert times == sorted(times)


def learnt(costs: StepCosts, *steps: tuple[int, float], turns: int = 20) -> StepCosts:
    for _ in range(turns * REFRESH_STEPS // len(steps)):
        for rows, step_s in steps:
            costs.learn(StepSize(rows), step_s)
    return costs


def test_a_machine_that_slows_down_changes_no_ratio():
    costs = learnt(StepCosts(TABLE), (1, 3.0), (8, 6.0))
    assert costs.rows_s(8) / costs.rows_s(1) == pytest.approx(2.0, rel=0.05)


def test_steps_that_others_disturb_leave_the_table_as_it_is():
    """Two of five steps take longer, some many times as long. Entries in use once sank to a thirtieth of the others."""
    rng, costs = random.Random(1), StepCosts(TABLE)
    for _ in range(4000):
        rows = rng.choice((1, 1, 4))
        costs.learn(StepSize(rows), 1.0 if rng.random() < 0.6 else 2.0 + rng.expovariate(0.5))
    assert costs.rows_s(1) == pytest.approx(1.0, rel=0.1)
    assert costs.rows_s(8) == pytest.approx(2.0, rel=0.1)


def test_a_ratio_that_was_measured_wrongly_is_learnt():
    """Eight rows take as long as one, and the table said twice as long."""
    costs = learnt(StepCosts(TABLE), (1, 1.0), (8, 1.0), turns=60)
    assert costs.rows_s(8) / costs.rows_s(1) < 1.25


def test_what_is_learnt_counts_after_some_steps_and_shows_in_the_version():
    costs = StepCosts(TABLE)
    before = costs.version
    for _ in range(REFRESH_STEPS - 1):
        costs.learn(StepSize(16), 20.0)
    assert (costs.version, costs.rows_s(16)) == (before, 6.0)
    costs.learn(StepSize(16), 20.0)
    assert costs.version == before + 1


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none_teaches_nothing(step_s):
    costs = learnt(StepCosts(TABLE), (8, step_s))
    assert costs.rows_s(8) == 2.0


class Engine:
    """Steps of a known time: 4 rows are free, each further row takes 1 s; a position takes 10 ms, and again for each row."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sizes: set[tuple[int, int]] = set()
        self._rng = random.Random(1)

    def execute(self, plan: StepPlan) -> None:
        (piece,) = plan.slices
        rows = len(piece.token_ids)
        self.sizes.add((rows, piece.start))
        assert len(piece.samples) == rows
        assert len(piece.block_tables) == 2
        assert piece.start + rows <= 4 * len(piece.block_tables[0])
        late_s = 5.0 if self._rng.random() < 0.3 else 0.0  # a busy neighbour disturbs three of ten steps
        self.now_s += 10 + max(0, rows - 4) + piece.start * 0.01 * (1 + 0.1 * (rows - 1)) + late_s


def test_steps_of_all_sizes_are_measured_and_disturbances_left_out():
    engine = Engine()
    costs = measure(
        engine.execute, groups=2, block_size=4, num_blocks=512, most_rows=40, max_model_len=2000, clock=lambda: engine.now_s
    )
    alone = costs.rows_s(1)
    assert costs.rows_s(4) == pytest.approx(alone, rel=0.06)
    assert costs.rows_s(32) - costs.rows_s(16) == pytest.approx(16, rel=0.1)
    assert costs.read_s == pytest.approx(0.01, rel=0.05)
    assert costs.reread_s == pytest.approx(0.001, rel=0.2)
    assert max(rows for rows, _ in engine.sizes) == 32, "no step has more rows than draws"


@pytest.mark.parametrize(("blocks", "rows", "longest"), [(1, 1, 2), (2, 64, 8), (4, 3, 16), (16, 64, 64), (300, 1, 512)])
def test_the_smallest_pools_are_measured_within_their_bounds(blocks, rows, longest):
    engine = Engine()
    costs = measure(
        engine.execute, groups=2, block_size=4, num_blocks=blocks, most_rows=rows, max_model_len=longest,
        clock=lambda: engine.now_s,
    )  # fmt: skip
    assert all(start + count <= min(longest, 4 * blocks) and count <= rows for count, start in engine.sizes)
    assert costs.rows_s(1) > 0
