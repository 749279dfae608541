"""Prompts are charged to the pool that computes them, and a rate of few tokens buys no workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.demand import NO_TRAFFIC, output_demand, prompt_demand
from pdserve.planner.limits import Limits, PoolLimits, Targets
from pdserve.planner.need import NO_WORKERS, Need, decode_need, prefill_need
from pdserve.planner.observations import DemandObserved, Observations, PoolObserved
from pdserve.planner.planner import Plan, PlannerSettings, PlannerState, plan

SETTINGS = PlannerSettings()
AIMS = Targets(ttft_s=1.0, tpot_s=0.05)
RATE = 10_000.0
"""Prompt tokens a second of a busy prefill worker."""
INTERVAL_S = 10.0


def seen(number: int, demand: DemandObserved, prefill: PoolObserved, decode: PoolObserved | None = None) -> Observations:
    decode = decode or PoolObserved(4, utilisation=1.0, step_s=0.02, sequences=20.0, max_sequences=64.0, kv_used=0.3)
    return Observations((number + 1) * INTERVAL_S, INTERVAL_S, demand, prefill, decode, 1.0, 1.0)


def planned(intervals: int, prefill_share: float | None, prefill: PoolObserved) -> Plan:
    """The last of some plans under 100,000 prompt tokens a second, of which prefill workers get a share."""
    state = PlannerState()
    demand = DemandObserved(100.0, 1e5, 5e3, 0.0, 0.0, prefill_share=prefill_share)
    for number in range(intervals):
        ready = state.sizes.prefill if state.sizes is not None else prefill.ready
        busy = min(1.0, (prefill.utilisation or 0.0) * prefill.ready / ready)
        one = seen(number, demand, replace(prefill, ready=ready, utilisation=busy))
        made = plan(one, AIMS, Limits(PoolLimits(1, 50), PoolLimits(1, 50)), state)
        state = made.state
    return made


def needs(demand: DemandObserved, prefill: PoolObserved, decode: PoolObserved | None = None) -> tuple[Need, Need]:
    """The needs of both pools after ten minutes."""
    workers, traffic = NO_WORKERS, NO_TRAFFIC
    for number in range(60):
        one = seen(number, demand, prefill, decode)
        workers, traffic = workers.add(one, SETTINGS), traffic.add(one, SETTINGS)
    prompts, outputs = prompt_demand(traffic, one, SETTINGS), output_demand(traffic, one, SETTINGS)
    return prefill_need(workers, prompts, AIMS, SETTINGS), decode_need(workers, outputs, AIMS, SETTINGS)


ONE_BUSY = PoolObserved(2, tokens_per_s=1e4, busy_tokens_per_s=RATE, utilisation=0.5, queued_tokens=0.0, cached_share=0.0)


def test_prefill_workers_are_not_bought_for_prompts_that_decode_workers_compute():
    """Nine of ten prompt tokens are computed by decode workers, and one prefill worker is busy with the tenth."""
    made = planned(120, 0.1, ONE_BUSY)
    assert made.prefill == 2
    assert made.pools[0].demand_tokens_per_s == pytest.approx(1e4, rel=0.01)


def test_a_demand_that_no_worker_was_seen_to_compute_is_not_believed():
    """Nobody has told where prompts are computed: the need is at most twice what the workers were busy with."""
    made = planned(120, None, ONE_BUSY)
    assert made.prefill <= 3
    assert "at most twice those that are busy count" in made.reasons[0]


@pytest.mark.parametrize(("utilisation", "queued", "refused"), [(1.0, 0.0, 0.0), (0.1, 50.0, 0.0), (0.1, 0.0, 9.0)])
def test_a_demand_that_cannot_be_served_yet_is_believed(utilisation, queued, refused):
    """Prefill workers are always busy, or requests wait before them or are refused: how busy they are says too little."""
    demand = DemandObserved(100.0, 1e5, 5e3, queued, queued * 1e3, refused_per_s=refused, prefill_share=1.0)
    prompts, _ = needs(demand, replace(ONE_BUSY, utilisation=utilisation))
    assert prompts.workers is not None
    assert prompts.workers >= 10


def test_a_rate_of_a_probe_buys_no_workers():
    """A pool computed 17 tokens in a step of 20 ms, and decode workers compute the prompts of all clients."""
    probe = PoolObserved(1, tokens_per_s=1.7, busy_tokens_per_s=850.0, utilisation=0.002, queued_tokens=0.0, cached_share=0.0)
    demand, workers, traffic = DemandObserved(200.0, 2e5, 5e3, 0.0, 0.0, prefill_share=0.001), NO_WORKERS, NO_TRAFFIC
    for number in range(100):
        idle = replace(probe, tokens_per_s=0.0, busy_tokens_per_s=None, utilisation=0.0)
        one = seen(number, demand, idle if number else probe)
        workers, traffic = workers.add(one, SETTINGS), traffic.add(one, SETTINGS)
        need = prefill_need(workers, prompt_demand(traffic, one, SETTINGS), AIMS, SETTINGS)
        assert need.workers is not None
        assert 0 < need.workers < 1
    assert workers.tokens_per_s(SETTINGS) is None
    for number in range(100, 103):
        workers = workers.add(seen(number, demand, ONE_BUSY), SETTINGS)
    assert workers.tokens_per_s(SETTINGS) == pytest.approx(RATE, rel=0.01)


def test_a_prefill_worker_stays_while_clients_send_prompts_although_decode_computes_all():
    """Nobody could see without it that longer prompts come."""
    made = planned(120, 0.0, replace(ONE_BUSY, ready=5, tokens_per_s=0.0, busy_tokens_per_s=None, utilisation=0.0))
    assert made.prefill == 1
    assert "decode workers take 100,000 tokens/s of them" in made.reasons[0]
    within, idle = Limits(PoolLimits(0, 9), PoolLimits(0, 9)), PoolObserved(0)
    state = plan(
        seen(0, DemandObserved(9.0, 9e3, 900.0, 0.0, 0.0, prefill_share=0.0), idle), AIMS, within, PlannerState()
    ).state
    for number in range(1, 10):
        made = plan(seen(number, DemandObserved(9.0, 9e3, 900.0, 0.0, 0.0, prefill_share=0.0), idle), AIMS, within, state)
        state = made.state
    assert made.prefill == 1


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 20))
def test_the_time_of_prompts_on_decode_workers_is_need_of_decode(share, more, ready):
    """However their prompts are spread, the pool needs workers for their time beside those for its outputs."""
    demand = DemandObserved(10.0, 1e5, 1e3, 0.0, 0.0, prefill_share=0.0)
    decode = PoolObserved(ready, utilisation=1.0, step_s=0.02, sequences=20.0, max_sequences=640.0, kv_used=0.0)
    without, few, many = (
        needs(demand, ONE_BUSY, replace(decode, prompt_share=each))[1].workers for each in (0.0, share, min(1.0, share + more))
    )
    assert without is not None
    assert few is not None
    assert many is not None
    assert without <= few <= many
    assert few >= ready * share / SETTINGS.max_utilisation * (1 - 1e-9)


@pytest.mark.parametrize(("ready", "busy", "wants"), [(2, 1.0, 3), (6, 0.1, 1)])
def test_a_decode_pool_that_only_computes_prompts_is_sized_by_their_time(ready, busy, wants):
    """Each answer has one token, so no step is without a prompt, and no sequence runs when somebody looks."""
    demand, state = DemandObserved(100.0, 1e5, 100.0, 0.0, 0.0, prefill_share=0.0), PlannerState()
    decode = PoolObserved(ready, utilisation=busy, prompt_share=busy, sequences=0.0, max_sequences=64.0, kv_used=0.0)
    for number in range(4 if wants > ready else 80):
        made = plan(seen(number, demand, ONE_BUSY, decode), AIMS, Limits(PoolLimits(1, 9), PoolLimits(1, 9)), state)
        state = made.state
    assert made.decode == wants
