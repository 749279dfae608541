"""Corrections: a pool grows until the asked share of requests is in time, whatever the formulas say, and no further."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.worker import Role
from pdserve.planner.correction import NO_CORRECTIONS, Corrections, PoolSeen, corrected
from pdserve.planner.hysteresis import begun, workers_for
from pdserve.planner.limits import Limits, PoolLimits, Targets
from pdserve.planner.observations import DemandObserved, Missed, Observations, PoolObserved
from pdserve.planner.planner import PlannerState, plan
from pdserve.planner.reasons import CAUSES, missed_sentences, room_sentence
from pdserve.planner.settings import PlannerSettings

SETTINGS = PlannerSettings()
AIMS = Targets(1.0, 0.05, attainment=0.97)
MAY = 1.0 - AIMS.attainment
NOBODY = PoolSeen(1, 0.0, 0.0, False)
INTERVAL_S = 5.0
START_S = 60.0


@dataclass
class World:
    """A decode pool whose requests miss with a share that depends on its size, and whose workers take a minute to start."""

    need: float
    """The workers that the formulas ask for."""
    misses: Callable[[int], float]
    ended: float = 20.0
    """Requests that end in an interval."""
    most: int = 1_000
    """The limit of the pool."""
    state: Corrections = NO_CORRECTIONS
    ready: int = 0
    coming: list[float] = field(default_factory=list)
    now_s: float = 0.0
    missed: list[float] = field(default_factory=list)
    """The share that missed in each interval."""
    sizes: list[int] = field(default_factory=list)

    def run(self, minutes: float, **blame: float) -> None:
        self.ready = self.ready or workers_for(self.need)
        for _ in range(int(60 * minutes / INTERVAL_S)):
            self.now_s += INTERVAL_S
            self.ready += sum(at_s <= self.now_s for at_s in self.coming)
            self.coming = [at_s for at_s in self.coming if at_s > self.now_s]
            share = self.misses(self.ready)
            seen = seen_at(self.now_s, self.ended, **(blame or {"steps": self.ended * share}))
            is_growing = bool(self.coming)
            pool = PoolSeen(
                self.ready, self.need, 0.0 if is_growing or self.ready >= self.most else 1.1 * self.ready, is_growing
            )
            self.state = corrected(self.state, seen, AIMS, (NOBODY, pool), 5.0, SETTINGS)
            wanted = min(self.most, workers_for(self.state.decode.of(self.need)))
            self.coming += [self.now_s + START_S] * max(0, wanted - self.ready - len(self.coming))
            if wanted < self.ready:
                self.ready = wanted
            self.missed.append(share)
            self.sizes.append(self.ready)


def seen_at(now_s: float, ended: float, **missed: float) -> Observations:
    idle = PoolObserved(1, utilisation=0.1)
    return Observations(now_s, INTERVAL_S, DemandObserved(), idle, PoolObserved(1), ended=ended, missed=Missed(**missed))


def below(enough: float) -> Callable[[int], float]:
    """Half of the requests miss where workers are missing, and none where they are not."""
    return lambda ready: 0.0 if ready >= enough else 0.5


@pytest.mark.parametrize(("need", "enough"), [(0.4, 3), (1.0, 2), (4.0, 6), (4.0, 12), (40.0, 60), (40.0, 120)])
def test_a_pool_reaches_the_size_that_attains_within_minutes_however_wrong_the_formulas_are(need, enough):
    world = World(need, below(enough))
    world.run(25)
    assert max(world.sizes) >= enough
    assert world.sizes.index(max(world.sizes)) * INTERVAL_S <= 20 * 60
    assert max(world.sizes) <= math.ceil(1.6 * enough), "it grows no further than it must"


@settings(max_examples=40, deadline=None)
@given(st.floats(0.3, 30.0), st.floats(1.0, 3.0), st.floats(0.2, 1.0), st.floats(1.0, 200.0))
def test_in_the_long_run_no_more_requests_miss_than_may(need, wrong, steep, ended):
    """The share that misses falls with the size in any way, and some size that may be taken attains."""
    enough = workers_for(need * wrong) + 1

    def misses(ready: int) -> float:
        return MAY / 4 if ready >= enough else min(1.0, steep * (enough - ready) / enough + MAY / 2)

    world = World(need, misses, ended)
    world.run(240)
    late = world.missed[len(world.missed) // 2 :]
    assert sum(late) / len(late) <= 2.0 * MAY


def test_where_no_size_attains_the_pool_grows_to_a_multiple_of_its_need_and_the_plan_says_what_misses():
    world = World(2.0, lambda _: 0.3)
    world.run(120)
    assert max(world.sizes) == SETTINGS.max_correction * 2
    (said,) = missed_sentences(world.state, AIMS, ((), ()), Limits())
    assert said.startswith("30.0% of the requests of late missed a target, where 3.0% may. Of these, 100% had decode steps")
    world.misses = lambda _: 0.0
    world.run(30)
    assert missed_sentences(world.state, AIMS, ((), ()), Limits()) == []


@pytest.mark.parametrize("cause", [*CAUSES])
def test_each_cause_grows_the_pool_that_it_concerns_and_no_other(cause):
    state = NO_CORRECTIONS
    pool = PoolSeen(2, 2.0, 100.0, False)
    for number in range(60):
        seen = seen_at(INTERVAL_S * (number + 1), 10.0, **{cause: 5.0})
        state = corrected(state, seen, AIMS, (pool, pool), 5.0, SETTINGS)
    blamed = {"prefill_queue": "prefill", "prefill": "prefill", "transfer": "", "failure": ""}.get(cause, "decode")
    assert state.prefill.margin > 0.5 if blamed == "prefill" else state.prefill.margin <= 0.0
    assert state.decode.margin > 0.5 if blamed == "decode" else state.decode.margin <= 0.0
    assert CAUSES[cause] in missed_sentences(state, AIMS, ((), ()), Limits())[0]


def test_refused_requests_are_misses_of_the_pool_for_which_others_wait():
    for queued, busy, on_decode in ((0.0, 0.9, False), (5.0, 0.1, True), (5.0, 0.9, False)):
        state, pool = NO_CORRECTIONS, PoolSeen(2, 2.0, 100.0, False)
        seen = replace(
            seen_at(1.0, 5.0), demand=DemandObserved(queued_requests=queued), refused=5.0,
            prefill=PoolObserved(2, utilisation=busy),
        )  # fmt: skip
        for _ in range(60):
            state = corrected(state, seen, AIMS, (pool, pool), 5.0, SETTINGS)
        assert (state.prefill.margin > 0.5, state.decode.margin > 0.5) == (not on_decode, on_decode)
        assert state.missed_share == pytest.approx(0.5)
        assert "100% were refused" in missed_sentences(state, AIMS, ((), ()), Limits())[0]


def test_a_pool_at_its_limit_does_not_wind_up_and_the_plan_says_that_no_size_attains():
    world = World(4.0, below(10), most=4)
    world.run(60)
    assert world.state.decode.of(4.0) <= 5.1
    said = missed_sentences(world.state, AIMS, ((), ("decode.max_workers",)), Limits(decode=PoolLimits(1, 4)))
    assert said[-1] == "No size of the decode pool within its limits attains the targets: decode.max_replicas is 4."


def test_misses_while_workers_start_teach_to_keep_room_and_not_that_the_formulas_are_wrong():
    state, aims = NO_CORRECTIONS, AIMS
    growing, calm = PoolSeen(2, 4.0, 0.0, True), PoolSeen(4, 4.0, 4.4, False)
    for number in range(200):
        seen = seen_at(INTERVAL_S * (number + 1), 20.0, steps=10.0 if number < 12 else 0.0)
        state = corrected(state, seen, aims, (NOBODY, growing if number < 12 else calm), 5.0, SETTINGS)
        assert state.decode.margin <= 0.0
    assert state.decode.worst_growth == pytest.approx(120.0, rel=0.02)
    assert state.keeps_room(state.decode, aims.attainment, SETTINGS)
    assert not state.keeps_room(state.prefill, aims.attainment, SETTINGS)
    for number in range(200, 500):
        state = corrected(state, seen_at(INTERVAL_S * (number + 1), 20.0), aims, (NOBODY, calm), 5.0, SETTINGS)
    assert not state.keeps_room(state.decode, aims.attainment, SETTINGS), "10,000 requests may well miss 2 x 120 times"


def test_a_pool_that_attains_more_than_asked_needs_less_and_the_first_misses_end_that():
    world = World(10.0, lambda _: 0.0)
    world.run(300)
    assert world.state.decode.of(10.0) == pytest.approx(10.0 * SETTINGS.min_correction)
    world.misses = lambda _: 0.2
    world.run(5)
    assert world.state.decode.of(10.0) > 9.9


def test_the_room_is_that_of_the_largest_rise_within_a_start_and_no_more_than_the_peak():
    memory, settings_ = begun(1, 0.0), replace(SETTINGS, start_s=60.0)
    for second in range(0, 600, 5):  # a slow rise: by one worker a minute
        memory = memory.seen(1.0 + second / 60.0, float(second), settings_)
    assert memory.rises[0][1] == pytest.approx(1.0, abs=0.1)
    for second in range(600, 1200, 5):
        memory = memory.seen(2.0, float(second), settings_)
    assert memory.room() == pytest.approx(3.0, abs=0.1)
    for second in range(1200, 1210, 5):
        memory = memory.seen(10.0, float(second), settings_)
    assert memory.room() == pytest.approx(10.9, abs=0.1), "at a peak it keeps no room for a second one"
    for second in range(1210, 1400, 5):
        memory = memory.seen(2.0, float(second), settings_)
    assert memory.room() == pytest.approx(10.0)
    assert len(memory.peaks) <= 64
    assert room_sentence(Role.DECODE, memory.room()).startswith("The decode pool keeps room for 10.0 workers: another rise")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(0.0, 1e6) for _ in range(10)], st.booleans(), st.integers(0, 50), st.floats(0.0, 1e4)),
        min_size=1,
        max_size=30,
    ),
    st.floats(0.01, 0.99),
)
def test_corrections_stay_finite_and_bounded_for_any_counts(rows, attainment):
    state = NO_CORRECTIONS
    for number, (ended, refused, *missed, is_growing, ready, need) in enumerate(rows):
        seen = replace(seen_at(INTERVAL_S * (number + 1), ended), missed=Missed(*missed), refused=refused)
        pool = PoolSeen(ready, need, 0.0 if is_growing else float(ready), is_growing)
        state = corrected(state, seen, replace(AIMS, attainment=attainment), (pool, pool), 5.0, SETTINGS)
        for one in state.pools:
            assert all(math.isfinite(value) for value in astuple(one) if isinstance(value, float))
            assert one.of(need) <= max(SETTINGS.max_correction * max(need, 1.0), need) * 1.001 or one.of(need) >= 0.0
            assert one.of(need) >= SETTINGS.min_correction * need * 0.999
        assert 0.0 <= state.missed_share <= 1.0


def test_a_young_planner_makes_no_pool_smaller():
    """It has seen no request from its begin to its end, so it does not know how long outputs are."""
    limits = Limits(PoolLimits(1, 9), PoolLimits(1, 9))
    decode = PoolObserved(6, step_s=0.02, sequences=1.0, max_sequences=64.0, kv_used=0.01)
    prefill = PoolObserved(1, busy_tokens_per_s=1e4, utilisation=0.1, queued_tokens=0.0)
    sizes, state = [], PlannerState()
    for number in range(200):
        seen = Observations(INTERVAL_S * (number + 1), INTERVAL_S, DemandObserved(1.0, 1e3, 200.0, 0.0, 0.0), prefill, decode)
        made = plan(seen, AIMS, limits, state)
        state = made.state
        sizes.append(made.decode)
    assert set(sizes[: int(SETTINGS.memory_s / INTERVAL_S)]) == {6}
    assert sizes[-1] < 6


def test_a_class_without_requests_for_days_stops_nothing():
    """The means of nearly nothing become numbers that a product rounds to 0."""
    state, pool = NO_CORRECTIONS, PoolSeen(2, 2.0, 2.2, False)
    state = corrected(state, seen_at(60.0, 20.0, steps=1.0), AIMS, (pool, pool), 5.0, SETTINGS)
    for number in range(2, 6_000):
        seen = replace(seen_at(60.0 * number, 0.0), interval_s=60.0)
        state = corrected(state, seen, AIMS, (pool, pool), 5.0, SETTINGS)
    assert state.decode.tried_missed < 1e-200


def test_a_margin_that_a_small_need_has_taught_is_bounded_when_the_need_rises():
    night, noon = World(0.05, lambda _: 0.5), 4.0
    night.run(120)
    assert night.state.decode.of(0.05) <= SETTINGS.max_correction
    assert night.state.decode.of(noon) <= SETTINGS.max_correction * noon
    night.need, night.misses = noon, lambda _: 0.0
    night.run(900)
    assert night.state.decode.of(noon) <= 2 * noon


def test_a_burst_a_day_that_overdraws_the_budget_keeps_room_on_every_day():
    state, settings_ = NO_CORRECTIONS, replace(SETTINGS, budget_s=8_640.0)
    growing, calm = PoolSeen(2, 4.0, 0.0, True), PoolSeen(4, 4.0, 4.4, False)
    for number in range(25 * 1_728):
        burst = number % 1_728 < 200
        seen = seen_at(INTERVAL_S * (number + 1), 20.0, steps=20.0 if burst else 0.0)
        state = corrected(state, seen, AIMS, (NOBODY, growing if burst else calm), 5.0, settings_)
        if number > 1_728:
            assert state.keeps_room(state.decode, AIMS.attainment, settings_), number


def test_misses_that_no_size_mends_do_not_turn_a_few_others_into_a_ratchet():
    world = World(4.0, lambda _: 0.0)
    world.run(1)
    world.run(5, steps=2.0)
    world.run(300, transfer=1.0, steps=0.02)
    assert max(world.sizes) <= 12
    assert world.sizes[-1] <= 5


def test_a_class_without_targets_misses_none():
    seen = replace(seen_at(5.0, 0.0), refused=5.0)
    assert corrected(NO_CORRECTIONS, seen, Targets(), (NOBODY, NOBODY), 5.0, SETTINGS) is NO_CORRECTIONS


def test_a_decode_pool_that_is_nearly_idle_is_not_grown_by_misses_that_have_another_reason():
    """A client's deadlines of a millisecond end in the queue, whatever the size of the pool."""
    limits, state = Limits(PoolLimits(1, 9), PoolLimits(1, 40)), PlannerState()
    ready = 4
    for number in range(2_000):
        sequences = 60.0 / ready
        decode = PoolObserved(ready, step_s=0.02 + 2e-4 * sequences, sequences=sequences, max_sequences=256.0, kv_used=0.01)
        seen = Observations(
            INTERVAL_S * (number + 1), INTERVAL_S, DemandObserved(10.0, 1e4, 2e3, 0.0, 0.0),
            PoolObserved(1, busy_tokens_per_s=1e5, utilisation=0.1, queued_tokens=0.0), decode,
            ended=50.0, missed=Missed(queue=3.0),
        )  # fmt: skip
        made = plan(seen, AIMS, limits, state)
        state, ready = made.state, made.decode
    assert ready <= 12


@given(st.integers(70, 400))
def test_a_list_of_the_largest_values_forgets_what_is_old(length):
    memory, settings_ = begun(1, 0.0), replace(SETTINGS, start_s=length * 1.0)
    for second in range(3 * length):
        memory = memory.seen(1.0 + second / 1000.0, float(second), settings_)
    assert memory.rises[0][1] == pytest.approx(length / 1000.0, rel=0.1)
