"""Every reachable state of a handoff between gangs whose ranks have memory of their own, and the rules that this needs.

What is checked is what `test_handoff_model` checks. Content of a block is right when each of its heads is.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.search.explorer import explore, stranded
from tests.search.handoff_ranks import GangHandoff
from tests.search.handoff_state import Config
from tests.search.mutants import Mutant
from tests.search.rank_mutants import GANGS, MERGED, RANK_MUTANTS, SPLIT

MAX_STATES = 700_000
TWO_BLOCKS = replace(GANGS, prompts=((1, 2, 3),))

SMALL = {
    "two ranks to two: a rank dies, a read is lost sight of": replace(GANGS, prefill_restarts=1, adrifts=1),
    "two ranks to one: a rank dies, a read is lost sight of": replace(MERGED, prefill_restarts=1, adrifts=1),
    "one rank to two: the lender dies": replace(SPLIT, prefill_restarts=1),
    "two ranks to two: a head rots, and a copy goes wrong": replace(GANGS, checksums=True, rots=1, flips=1),
    "two ranks to one: two blocks": replace(TWO_BLOCKS, ranks=(2, 1)),
}
LARGE = {
    "two ranks to two: two blocks, a rank dies, a read is lost sight of, a retry": replace(
        TWO_BLOCKS, prefill_restarts=1, adrifts=1, retries=True
    ),
    "two ranks to one: prefix hits on both sides": replace(
        TWO_BLOCKS, ranks=(2, 1), prefill_blocks=3, decode_blocks=(3,), prefill_cached=True, decode_cached=True, adrifts=1
    ),
    "one rank to two: two blocks, checksums, another form on decode": replace(
        TWO_BLOCKS, ranks=(1, 2), checksums=True, rots=1, flips=1, converted=True
    ),
    "two ranks to two: two binds, decode restarts": replace(GANGS, max_binds=2, decode_restarts=1, retries=True),
    "two ranks to two: two binds of a lease, a rank dies": replace(GANGS, prompts=((1,),), max_binds=2, prefill_restarts=1),
}


def search(name: str, config: Config, capsys: pytest.CaptureFixture[str]) -> set[str]:
    model = GangHandoff(config)
    result = explore(model, max_states=MAX_STATES, keep_labels=name in SMALL)
    with capsys.disabled():
        print(f"\n{name}: {result.num_states:,} states, {result.num_transitions:,} transitions")
    assert result.counterexample is None, str(result.counterexample)
    left = stranded(result, model)
    assert left is None, str(left)
    return {label[0] for label in result.graph.edge_labels}


@pytest.mark.quick("two ranks to two: a rank*", "one rank*")
@pytest.mark.parametrize("name", SMALL)
def test_gangs_corrupt_leak_and_hang_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = SMALL[name]
    seen = search(name, config, capsys)
    assert seen >= {"rank writes", "copy", "route fails", "route arrives", "failed", "stopped", "done", "answer arrives"}
    assert ({"rank dies", "restart"} <= seen) == bool(config.prefill_restarts)
    assert ({"route adrift", "unhealthy"} <= seen) == bool(config.adrifts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LARGE)
def test_gangs_corrupt_leak_and_hang_nothing_larger(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    search(name, LARGE[name], capsys)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (2, 1), (1, 2)], ids=str)
def test_the_model_reads_each_head_once(ranks: tuple[int, int]) -> None:
    routes = GangHandoff(replace(GANGS, ranks=ranks)).routes
    assert len(routes) == max(ranks)
    assert sorted(pair for route in routes for pair in route.heads) == [(0, 0), (1, 1)]


@pytest.mark.quick("rule R1*", "rule R2: *0", "rule R4: ReadsFromOneRank", "rule R6: L*")
@pytest.mark.parametrize("mutant", RANK_MUTANTS, ids=lambda m: f"rule {m.rule}: {m.model.__name__}")
def test_without_this_rule_of_ranks_the_search_finds_wrong_kv(mutant: Mutant, capsys: pytest.CaptureFixture[str]) -> None:
    result = explore(mutant.model(mutant.config), max_states=MAX_STATES)
    found = result.counterexample
    assert found is not None, f"{result.num_states} states and no counterexample: the rule is not needed, or the model is blind"
    assert mutant.found_as in found.reason, str(found)
    with capsys.disabled():
        print(f"\nrule {mutant.rule}, {mutant.model.__name__}: {len(found.events)} events, {result.num_states:,} states")


@pytest.mark.parametrize("config", dict.fromkeys(mutant.config for mutant in RANK_MUTANTS), ids=str)
def test_with_its_rule_of_ranks_the_same_configuration_is_clean(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    search("a mutant's", config, capsys)
