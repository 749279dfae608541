"""Pools driven to exhaustion: memory runs out nowhere, everyone finishes in time, and with the tokens of a run alone."""

from __future__ import annotations

import pytest
from exhaustion import OPEN, STEPS_EACH, Result, Storm

from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB

POOLS = {"prefill_blocks": 14, "decode_blocks": 24}  # 13 blocks hold the longest request
GROWTH = 16 * MIB  # of two engines and the driver: Python's objects; a step's activations are many times that in minutes


def storm(model: str, seconds: float, seed: int) -> Result:
    result = Storm(resolve(model), seed, **POOLS).run(seconds)
    print(result)
    assert result.compared > 0
    assert result.longest_steps <= OPEN * STEPS_EACH, "someone starved"
    assert result.rss_growth < GROWTH
    return result


def test_pools_far_too_small_for_the_load_lose_nothing() -> None:
    storm("tiny", seconds=2.0, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seconds", "seed"), [("tiny", 60.0, 2), ("default", 150.0, 3)])
def test_pools_far_too_small_for_the_load_lose_nothing_for_minutes(model: str, seconds: float, seed: int) -> None:
    result = storm(model, seconds=seconds, seed=seed)
    assert result.seen["preempted"] > 20
