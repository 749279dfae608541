"""Slow workers are found beside their pools, and workers with other work or other devices are not taken for slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.core.roofline import START
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from router.core.outliers import COMPARED, SLOW, TOO_SLOW, WorkerPace, pace_of, slowness

from ...core_peers import Stage, hello
from .sick import compute, flops, out, peer_of, step_s

Work = list[tuple[int, int, int]]
works: st.SearchStrategy[Work] = st.lists(
    st.tuples(st.integers(1, 200), st.sampled_from((1, 16, 300, 2048, 8192)), st.sampled_from((1, 500, 8000, 128_000))),
    min_size=1,
    max_size=3,
)
pools_of_work = st.lists(works, min_size=COMPARED, max_size=9)
PREFILL = hello("prefill-0", Role.PREFILL)
DECODE = hello("decode-0", Role.DECODE)


def after(work: Work, times: float = 1.0, fixed_s: float = 0.0) -> WorkerLoad:
    """The load after steps of prompts, each of so many tokens in such a context."""
    steps, tokens = sum(n for n, _, _ in work), sum(n * tokens for n, tokens, _ in work)
    busy_s = times * sum(n * (fixed_s + step_s(tokens, context)) for n, tokens, context in work)
    return replace(
        START,
        prompt_steps=steps,
        prompt_busy_s=busy_s,
        computed_prompt_tokens=tokens,
        prompt_flops=sum(n * flops(tokens, context) for n, tokens, context in work),
        prompt_tokens_per_s=tokens / busy_s,
    )


def pace(work: Work, times: float = 1.0, **changes: object) -> WorkerPace:
    found = pace_of(replace(PREFILL, **changes), START, after(work, times))  # type: ignore[arg-type]
    assert found is not None
    return found


@given(pools_of_work, st.tuples(*[st.floats(1e-6, 1.0)] * 3))
def test_no_work_makes_a_worker_look_too_slow_whatever_steps_cost(pool: list[Work], costs: tuple[float, float, float]) -> None:
    """Neither long prompts nor single short ones, however unlike the others' work is. Three costs, so three times at most."""
    paces = []
    for work in pool:
        counts = [sum(part) for part in zip(*[(n, n * x, n * x * (1 + c / 32_000)) for n, x, c in work], strict=True)]
        busy_s = sum(cost * count for cost, count in zip(costs, counts, strict=True))
        paces.append(WorkerPace((*(busy_s / count for count in counts), busy_s / counts[1]), (0.0, 0.0)))
    assert max(slowness(paces)) <= 3.001 < TOO_SLOW


@given(pools_of_work)
def test_no_work_of_a_usual_device_makes_it_look_slow(pool: list[Work]) -> None:
    assert max(slowness([pace(work) for work in pool])) < SLOW


@given(works, st.integers(COMPARED, 9), st.floats(SLOW, 100.0))
def test_a_slow_worker_with_the_work_of_its_pool_is_found_and_measured(work: Work, count: int, times: float) -> None:
    found = slowness([pace(work, times * 1.001)] + [pace(work)] * (count - 1))
    assert found == [pytest.approx(times, rel=0.01)] + [1.0] * (count - 1)


@given(pools_of_work, st.lists(st.sampled_from((0.1, 0.5, 1.0)), min_size=9, max_size=9))
def test_a_slower_device_is_not_a_slow_worker(pool: list[Work], speeds: Sequence[float]) -> None:
    """The time of its steps is known from its peaks, or shorter."""
    paces = [
        pace(work, 1 / speed, peak_flops_per_s=1e15 * speed, peak_bytes_per_s=3e12)
        for work, speed in zip(pool, speeds, strict=False)
    ]
    assert max(slowness(paces)) <= 3.001


def test_a_slow_worker_is_found_among_devices_whose_peaks_were_measured() -> None:
    """Those of CPUs differ a little from one worker to the next."""
    peaks = (1.0e11, 1.1e11, 0.9e11, 1.2e11)
    found = slowness([pace([(9, 300, 500)], 9.0 if n == 2 else 1.0, peak_flops_per_s=peaks[n]) for n in range(4)])
    assert found == [1.0, 1.0, pytest.approx(9.0 * 0.9 / 1.05), 1.0]


def test_of_two_or_of_equal_halves_nobody_is_slow() -> None:
    usual, slow = pace([(9, 300, 500)]), pace([(9, 300, 500)], 10.0)
    assert slowness([usual, slow]) == [1.0, 1.0]
    assert max(slowness([usual, slow] * 3)) < SLOW
    assert slowness([usual, slow, usual]) == [1.0, pytest.approx(10.0), 1.0]


@pytest.mark.parametrize("missing", ["prompt_steps", "prompt_busy_s", "computed_prompt_tokens", "prompt_tokens_per_s"])
def test_a_worker_that_does_not_tell_enough_has_no_pace(missing: str) -> None:
    """One of an older release does not count its steps."""
    load = after([(9, 300, 500)])
    assert pace_of(PREFILL, START, load) is not None
    assert pace_of(PREFILL, START, replace(load, **{missing: 0})) is None  # type: ignore[arg-type]
    assert pace_of(PREFILL, load, load) is None


@pytest.mark.parametrize("one", [PREFILL, DECODE])
def test_only_steps_of_the_workers_role_count(one: WorkerHello) -> None:
    """A decode worker computes a prompt now and then, beside its decodes."""
    prompts, decodes = after([(9, 300, 500)]), replace(START, decode_busy_s=1.0, decode_step_s=0.1)
    assert (pace_of(one, START, prompts) is None) == (one is DECODE)
    assert (pace_of(one, START, decodes) is None) == (one is PREFILL)


# In the router ---------------------------------------------------------------------------------------------------


def stage_of(prefill: int, **changes: object) -> Stage:
    stage = Stage()
    for n in range(prefill):
        stage.join(f"prefill-{n}", Role.PREFILL, **changes)
    stage.join("decode-0", Role.DECODE)
    return stage


def test_a_prefill_worker_whose_steps_take_five_times_as_long_is_ejected_and_tried_again() -> None:
    stage = stage_of(4)
    usual = {f"prefill-{n}": (5, 300 * (n + 1), 500 * (n + 1)) for n in range(4)}
    compute(stage, 30, usual)
    compute(stage, 2, usual, {"prefill-2": 50.0})
    assert not out(stage), "two looks are too few, however slow it is"
    compute(stage, 20, usual, {"prefill-2": 6.0})
    assert out(stage) == ["prefill-2"]
    worker = stage.core.registry.get(peer_of(stage, "prefill-2").link)
    assert worker is not None
    assert "its prefill steps take" in stage.core.placer.not_ready_reason(worker, now_s=stage.now_s)
    compute(stage, 31, usual)
    assert not out(stage)
    compute(stage, 60, usual)
    assert not out(stage), "it is well again"
    stage.assert_empty()


def test_a_prefill_worker_with_the_longest_prompts_of_all_stays() -> None:
    stage = stage_of(4)
    usual = {f"prefill-{n}": (5, 300, 500) for n in range(4)}
    compute(stage, 60, usual | {"prefill-1": (5, 8192, 100_000), "prefill-3": (5, 1, 1)})
    assert not stage.core.health.ejections
    assert stage.now_s >= stage.core.health.handicaps_until_s


def test_one_disturbed_step_ejects_nobody() -> None:
    """A kernel is compiled for a minute. The worker computes nothing else meanwhile, and its next steps are as ever."""
    stage = stage_of(3)
    usual = {f"prefill-{n}": (5, 300, 500) for n in range(3)}
    compute(stage, 30, usual)
    compute(stage, 1, usual, {"prefill-0": 1000.0})
    compute(stage, 60, usual)
    assert not stage.core.health.ejections


def test_a_worker_that_was_slow_once_and_has_no_work_since_stays() -> None:
    stage = stage_of(3)
    usual = {f"prefill-{n}": (5, 300, 500) for n in range(3)}
    compute(stage, 30, usual)
    compute(stage, 2, usual, {"prefill-0": 100.0})
    del usual["prefill-0"]
    compute(stage, 30, usual)
    assert not stage.core.health.ejections


def test_slow_workers_are_found_where_every_device_tells_peaks_of_its_own() -> None:
    """As CPUs do: their peaks are measured."""
    stage = Stage()
    for n in range(4):
        stage.join(f"prefill-{n}", Role.PREFILL, peak_flops_per_s=1e11 + n * 1e9, peak_bytes_per_s=1e10 - n * 1e8)
    compute(stage, 20, {f"prefill-{n}": (5, 300, 500) for n in range(4)}, {"prefill-1": 6.0})
    assert out(stage) == ["prefill-1"]


def test_workers_with_a_prompt_now_and_then_are_compared() -> None:
    """Each computes one in a few seconds, and never two of them in the same second."""
    stage = stage_of(4)
    for n in range(120):
        compute(stage, 1, {f"prefill-{n % 4}": (1, 300, 500)}, {"prefill-3": 8.0})
    assert out(stage) == ["prefill-3"]


def test_at_least_half_of_the_prefill_workers_stay_however_many_become_slow() -> None:
    stage = stage_of(5)
    usual = {f"prefill-{n}": (5, 300, 500) for n in range(5)}
    seen: set[str] = set()
    for n in range(100):
        compute(stage, 1, usual, {f"prefill-{k}": 10.0 for k in range(min(5, n // 20 + 1))})
        assert len(out(stage)) <= 2
        seen.update(out(stage))
    assert seen == {"prefill-0", "prefill-1"}
