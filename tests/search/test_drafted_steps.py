"""Every state of a scheduler whose decodes take drafts: outputs are right, and what is shared or lent holds no wrong draft."""

from __future__ import annotations

import pytest

from tests.search.drafted_steps import DraftConfig, DraftedSteps
from tests.search.explorer import explore, stranded
from tests.sim import draft_mutants as rules
from tests.sim.mutants import Mutant

MAX_STATES = 200_000
SMALL = DraftConfig(max_tokens=4, lent=(5,), blocks=5)
MUTANTS = (
    rules.a_block_with_wrong_drafts_is_shared,
    rules.wrong_drafts_count_against_max_tokens,
    rules.drafts_go_on_behind_the_longest_length,
    rules.blocks_of_drafts_are_kept,
    rules.the_token_behind_a_wrong_draft_is_accepted,
    rules.an_abort_in_a_step_with_drafts_is_overlooked,
)
CONFIGS = {
    "small": SMALL,
    "a prompt begins with a wrong draft": DraftConfig(max_tokens=4, lent=(-5,), blocks=5),
    "two lenders": DraftConfig(max_tokens=4, lent=(5, -5), blocks=6),
    "a stop token": DraftConfig(max_tokens=7, lent=(6,), blocks=6),
    "a tight pool": DraftConfig(max_tokens=5, lent=(5,), blocks=4),
}


@pytest.mark.quick("small")
@pytest.mark.timeout(900)  # two lenders have fifteen thousand states
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_of_every_kind_change_no_output_and_leave_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = DraftedSteps(CONFIGS[name])
    result = explore(model, max_states=MAX_STATES, keep_labels=True)
    with capsys.disabled():
        print(f"\n{name}: {result.num_states:,} states, {result.num_transitions:,} transitions")
    assert result.counterexample is None, str(result.counterexample)
    left = stranded(result, model)
    assert left is None, str(left)
    drafts = {len(label[1]) for label in result.graph.edge_labels if label[0] == "plan"}
    assert drafts == {0, 1, 2}


@pytest.mark.quick("a_block*")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_without_its_rule_the_search_finds_a_wrong_draft(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    model = DraftedSteps(SMALL)
    result = explore(model, max_states=MAX_STATES)
    assert result.counterexample is not None or stranded(result, model) is not None
