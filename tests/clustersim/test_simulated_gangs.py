"""Gangs on the cluster simulator: their steps take the times of the formulas, and runs agree with what these expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.capacity.devices import device
from pdserve.capacity.model_source import find_model
from pdserve.capacity.question import CapacityQuestion
from pdserve.capacity.worker_speed import WorkerSpeed
from pdserve.core.errors import ConfigError
from pdserve.core.shards import Degrees
from sim.perf.costs import GangCosts, StepWork
from sim.perf.gangs import SHARES, GangPools, expected, row, simulated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "multi-node.md"


def worker(model: str, degrees: Degrees, gpus: int = 16) -> WorkerSpeed:
    return WorkerSpeed(CapacityQuestion(find_model(model), device("h100-sxm"), gpus=gpus), degrees)


@pytest.mark.parametrize(
    ("model", "degrees"),
    [("llama-3-70b", Degrees(4)), ("deepseek-v3", Degrees(16)), ("deepseek-v3", Degrees(16, experts=True))],
    ids=str,
)
def test_a_step_takes_the_time_of_the_formulas(model: str, degrees: Degrees) -> None:
    speed = worker(model, degrees)
    costs = GangCosts.of(speed, 50e9)
    assert costs.prompt_s(2048) == pytest.approx(speed.prefill_s(2048))
    assert costs.prompt_s(2004, cached=2000) < speed.prefill_s(2004)
    assert costs.step_s(StepWork(decodes=64, context_tokens=64 * 2000)) == pytest.approx(speed.decode_s(64, 2001))
    both = StepWork(2048, 2048 * 2049 // 2, 64, 64 * 2000)
    assert costs.step_s(both) == pytest.approx(speed.mixed_s(64, 2001, 2048, 2048))
    assert costs.step_s(StepWork()) == 0.0
    assert costs.transfer_s(1000) == pytest.approx(1000 * speed.kv_bytes(1) / (50e9 * 0.8))
    assert costs.kv_tokens // 2304 == speed.users_at(2304)


def test_a_stride_takes_the_time_of_its_steps() -> None:
    costs = GangCosts.of(worker("deepseek-v3", Degrees(16)), 50e9)
    first = StepWork(decodes=8, context_tokens=8 * 1000)
    single = [costs.step_s(StepWork(decodes=8, context_tokens=8 * (1000 + step))) for step in range(64)]
    assert costs.steps_s(first, 64) == pytest.approx(sum(single), rel=1e-4)
    assert costs.steps_s(first, 1) == single[0]
    assert all(costs.steps_s(first, steps) < costs.steps_s(first, steps + 1) for steps in range(1, 64))


def test_stages_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2: the cluster simulator has no stages; use 1"):
        GangCosts.of(worker("deepseek-v3", Degrees(8, 2)), 50e9)


@pytest.mark.quick("0.8")
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_two_pools_of_gangs_serve_what_the_formulas_expect(share: float) -> None:
    """A 70B model on 2 prefill and 2 decode workers of 4 GPUs. TTFT is within a factor of 1.25, TPOT of 1.05."""
    question = CapacityQuestion(
        find_model("llama-3-70b"), device("h100-sxm"), gpus=16, tp=4, isl=1024, osl=512, ttft_s=0.4, tpot_s=0.025
    )
    gangs = GangPools(question, 2, 2)
    formula, found = expected(gangs, share * gangs.goodput_per_s), simulated(gangs, share * gangs.goodput_per_s)
    assert formula.ttft_s / 1.25 < found.ttft_s < formula.ttft_s * 1.25
    assert formula.tpot_s / 1.05 < found.tpot_s < formula.tpot_s * 1.05
    assert found.attainment is not None
    assert found.attainment >= 0.9 - 0.03, "the formulas promise 0.9"
    assert row(gangs, share) in PAGE.read_text().splitlines()
