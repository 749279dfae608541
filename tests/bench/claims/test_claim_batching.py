"""What the claims measure with: policies of batching that change no token, and the room that blocks of each size waste."""

from __future__ import annotations

import pytest

from bench.claims.claim import Claim, Verdict
from bench.claims.measured import intensity, quantised, steps
from bench.claims.measured.paging import fill
from bench.claims.measured.steps import Job, Loop, Steps, continuous, prompt_of, static
from bench.claims.registry import CLAIMS
from bench.claims.setup import Rounds, Setup
from bench.engine.floors import Machine
from pdserve.core.step_plan import StepPlan

JOBS = [Job(prompt_of(5 + 3 * i, i), 1 + (7 * i) % 11) for i in range(9)]


def served(runner: object, admit) -> tuple[dict[int, list[int]], list[int]]:  # type: ignore[no-untyped-def]
    """Return the tokens by sequence, and the number of sequences of each step."""
    sizes: list[int] = []
    loop = Loop.over(runner, 4, watch=lambda plan: sizes.append(len(plan.slices)))  # type: ignore[arg-type]
    loop.serve(JOBS, admit)
    loop.scheduler.check_invariants()
    assert loop.scheduler.num_live == 0
    assert loop.pool.num_allocatable == loop.pool.num_blocks
    return dict(loop.outputs), sizes


def test_static_batching_outputs_the_tokens_of_continuous_batching_in_more_steps() -> None:
    runner = Setup("tiny").runner(1024)
    moving, moving_sizes = served(runner, continuous)
    fixed, fixed_sizes = served(runner, static)
    assert moving == fixed
    assert [len(tokens) for tokens in moving.values()] == [job.output_tokens for job in JOBS]
    assert max(moving_sizes) == max(fixed_sizes) == 4
    assert len(fixed_sizes) > len(moving_sizes)


def test_static_batching_admits_nobody_beside_a_live_sequence() -> None:
    assert [static(live, 4) for live in range(5)] == [4, 0, 0, 0, 0]
    assert [continuous(live, 4) for live in range(5)] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(("block_size", "least", "most"), [(16, 0.0, 0.05), (2048, 0.3, 0.9)])
def test_blocks_of_a_whole_sequence_waste_what_blocks_of_a_few_tokens_do_not(
    block_size: int, least: float, most: float
) -> None:
    occupancy = fill(block_size, repeats=1)
    assert all(0.0 < share <= 1.0 for share in occupancy.used)
    assert least < 1 - sum(occupancy.used) / len(occupancy.used) < most


def test_a_prompt_is_cut_into_the_steps_of_the_scheduler() -> None:
    plans: list[StepPlan] = Steps(Setup("tiny").runner(1024)).prompt_plans(prompt_of(600), cached=16)
    assert [(p.slices[0].start, len(p.slices[0].token_ids), len(p.slices[0].samples)) for p in plans] == [
        (16, 512, 0),
        (528, 88, 1),
    ]


CLUSTERS = {"interference", "link-speed"}


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.name not in CLUSTERS], ids=lambda claim: claim.name)
def test_a_measurement_gives_its_rule_and_its_table_all_figures(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model proves nothing, but each figure that a rule asks for is there."""
    monkeypatch.setattr(steps, "AT_LEAST_S", 0.0)
    monkeypatch.setattr(quantised, "KV_BYTES", 2**24)
    monkeypatch.setattr(intensity, "measure_machine", lambda threads, clock: Machine(threads, 1e10, 1e11, 1e10))
    found = claim.measure(Setup("tiny", quick=True), Rounds(0.0))
    assert claim.judgement(found).verdict is not Verdict.NOT_MEASURED
    assert len(claim.table(found).rows) > 1


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.name in CLUSTERS], ids=lambda claim: claim.name)
def test_a_measurement_on_clusters_gives_all_figures_and_leaves_nothing_behind(claim: Claim) -> None:
    """Each cluster checks at its end that no block is lost."""
    found = claim.measure(Setup("tiny", quick=True), Rounds(0.0))
    assert claim.judgement(found).verdict is not Verdict.NOT_MEASURED
    assert len(claim.table(found).rows) > 1
