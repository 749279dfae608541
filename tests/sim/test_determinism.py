"""One seed is one run: in this process, again, and in another process whose hashes differ."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sim.faults.run import run_seed

SEEDS = (3, 17)


@pytest.mark.quick("3")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_the_same_run_twice(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed)
    assert first.messages > 100
    assert (first.digest, first.outcomes, first.callbacks) == (second.digest, second.outcomes, second.callbacks)


def test_seeds_differ() -> None:
    assert run_seed(SEEDS[0]).digest != run_seed(SEEDS[1]).digest


def test_a_seed_gives_the_same_run_in_other_processes() -> None:
    """What iterates a set of strings or objects would differ between these two."""
    script = f"from sim.faults.run import run_seed; print(run_seed({SEEDS[0]}).digest)"
    answers = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert answers[0] == answers[1] == f"{run_seed(SEEDS[0]).digest}\n"
