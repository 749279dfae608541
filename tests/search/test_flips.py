"""Every reachable state of a handoff whose workers drain and change their role, and the rules that this needs.

What is checked is what `test_handoff_model` checks. Besides, a worker that drains gets through it by what is sure to happen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.search.explorer import explore, stranded
from tests.search.flip_mutants import BACK, BACK_TWICE, FLIP_LEAKS, FLIP_MUTANTS, LENDS
from tests.search.handoff_flip import FlippingHandoff
from tests.search.handoff_state import Config
from tests.search.mutants import Mutant

MAX_STATES = 700_000
ONE_FLIP = Config(decode_blocks=(2,), max_binds=1, max_grants=1, prefill_restarts=0, role_flips=1)
CACHED = replace(ONE_FLIP, prefill_blocks=3, prefill_cached=True)

SMALL = {
    "a worker begins a new life": ONE_FLIP,
    "prefill reads from now on": replace(ONE_FLIP, flip_ways=("reads",)),
    "one of two decode workers lends from now on": replace(LENDS, decode_blocks=(1, 1)),
}
LARGE = {
    "new lives with prefix hits on both sides": replace(CACHED, decode_blocks=(3,), decode_cached=True),
    "prefill reads from now on and has prefix hits": replace(CACHED, decode_blocks=(3,), flip_ways=("reads",)),
    "decode lends its prefix hits": replace(ONE_FLIP, decode_blocks=(2, 2), decode_cached=True, flip_ways=("lends",)),
    "a worker changes its role twice": replace(ONE_FLIP, role_flips=2, flip_ways=("lends", "reads")),
    "two attempts, two new lives": replace(BACK_TWICE, role_flips=2),
    "two attempts, one of two decode workers lends": replace(BACK_TWICE, decode_blocks=(1, 1), flip_ways=("lends",)),
    "two attempts, prefill reads from now on": replace(BACK_TWICE, flip_ways=("reads",)),
}


def search(name: str, config: Config, capsys: pytest.CaptureFixture[str]) -> set[str]:
    model = FlippingHandoff(config)
    result = explore(model, max_states=MAX_STATES, keep_labels=name in SMALL)
    with capsys.disabled():
        print(f"\n{name}: {result.num_states:,} states, {result.num_transitions:,} transitions")
    assert result.counterexample is None, str(result.counterexample)
    left = stranded(result, model)
    assert left is None, str(left)
    return {label[0] for label in result.graph.edge_labels}


@pytest.mark.quick("a worker*", "one of*")
@pytest.mark.parametrize("name", SMALL)
def test_a_flip_corrupts_leaks_and_hangs_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = search(name, SMALL[name], capsys)
    assert seen >= {"drain", "drain timeout", "empty", "flip back", "copy", "answer arrives", "stopped"}
    assert ("flip" in seen) == bool(SMALL[name].flip_ways)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LARGE)
def test_a_flip_corrupts_leaks_and_hangs_nothing_larger(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    search(name, LARGE[name], capsys)


@pytest.mark.parametrize("mutant", [*FLIP_MUTANTS, *FLIP_LEAKS], ids=lambda m: f"rule {m.rule}: {m.model.__name__}")
def test_without_this_rule_the_search_finds_what_happens(mutant: Mutant, capsys: pytest.CaptureFixture[str]) -> None:
    model = mutant.model(mutant.config)
    result = explore(model, max_states=MAX_STATES)
    found = result.counterexample if mutant in FLIP_MUTANTS else stranded(result, model)
    assert found is not None, f"{result.num_states} states and no counterexample: the rule is not needed, or the model is blind"
    assert mutant.found_as in found.reason, str(found)
    with capsys.disabled():
        print(f"\nrule {mutant.rule}, {mutant.model.__name__}: {len(found.events)} events, {result.num_states:,} states")


@pytest.mark.parametrize("config", [BACK, LENDS], ids=["back", "lends"])
def test_with_its_rule_the_same_configuration_is_clean(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    search("a mutant's", config, capsys)
