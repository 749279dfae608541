"""Random workloads, random faults: whatever happens, tokens are right or an error is typed, and nothing is left behind."""

from __future__ import annotations

import os

import pytest

from sim.faults.matrix import run_matrix
from sim.faults.swarm import run_swarm

FEW = 6
MANY = 600  # `make sim-swarm` runs more


def test_a_small_swarm_keeps_every_promise() -> None:
    swarm = run_swarm(1, FEW, jobs=2)
    assert swarm.runs == FEW
    assert not swarm.failed, "\n".join(swarm.lines())
    assert swarm.outcomes["ok"] > 0.6 * sum(swarm.outcomes.values()), "faults that leave nothing to check"
    assert swarm.retried > 0
    assert len(swarm.outcomes) >= 4, f"faults that do nothing: {swarm.outcomes}"


def test_a_sample_of_steps_survives_the_fault_of_each_actor() -> None:
    """The whole matrix runs with the long tests."""
    matrix = run_matrix(nths=(0,), every=41, jobs=2)
    assert not matrix.failed, "\n".join(matrix.lines())
    assert not matrix.missed
    assert {report.hits for report in matrix.cells} == {1}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_large_swarm_keeps_every_promise() -> None:
    swarm = run_swarm(10_001, MANY, jobs=os.cpu_count() or 1)
    print(*swarm.lines(), sep="\n")
    assert not swarm.failed, "\n".join(swarm.lines())


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_step_survives_the_fault_of_each_actor() -> None:
    """At its first occurrence, and a third of them at a later one, which a step may not have."""
    first = run_matrix(nths=(0,), jobs=os.cpu_count() or 1)
    later = run_matrix(nths=(1, 3), every=3, jobs=os.cpu_count() or 1)
    for matrix in (first, later):
        print(*matrix.lines(), sep="\n")
        assert not matrix.failed, "\n".join(matrix.lines())
    assert not first.missed
