"""Simulated engines that draft: drafts are right and wrong, pay and do not pay, and broken rules of drafts are found."""

from __future__ import annotations

import pytest

from pdserve.core.speculation import NO_COUNTS
from sim.faults.run import run_seed, run_with_preemptions
from tests.sim.draft_mutants import DRAFT_MUTANTS
from tests.sim.mutants import Mutant

SEEDS = range(1, 41)
FOUND_BY = {"penalties_do_not_follow_a_draft": 2, "the_least_length_does_not_follow_a_draft": 14}
"""The first seed that found it when this was written, if it was not seed 1."""
FOUND_BY_PREEMPTIONS = {
    "a_preemption_forgets_the_counts": 1,
    "a_right_draft_without_numbers_fails_its_sequence": 9,
}
"""The same of those that small pools find, or grammars that fail."""


def test_drafts_are_verified_and_some_are_wrong() -> None:
    drafts = NO_COUNTS
    for seed in (1, 3):
        report = run_seed(seed)
        assert not report.problems
        drafts = drafts.plus(report.drafts)
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens > 10
    assert len(drafts.num_accepted_tokens_per_pos) > 2


@pytest.mark.quick(
    "a_block_with_wrong*", "drafts_go_on_behind_a_stop_token", "a_grammar*", "odds*", "lookups*", "wrong_drafts_count_against*"
)
@pytest.mark.parametrize("mutant", DRAFT_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_drafts_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    name, run = mutant.__name__, run_with_preemptions if mutant.__name__ in FOUND_BY_PREEMPTIONS else run_seed
    seeds = [{**FOUND_BY, **FOUND_BY_PREEMPTIONS}.get(name, SEEDS[0]), *SEEDS]
    assert any(run(seed).problems for seed in seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [24])
def test_drafts_change_no_output_of_small_pools(seeds: int) -> None:
    for seed in range(1, seeds + 1):
        assert not run_with_preemptions(seed).problems, seed
