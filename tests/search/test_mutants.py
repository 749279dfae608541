"""Each rule of the lease protocol is needed: without it the same search finds a counterexample, a shortest one."""

import pytest

from tests.search import handoff_events as do
from tests.search.checksum_mutants import CHECKSUM_MUTANTS, AnyPromptsTicket
from tests.search.deadlock import Order, TwoPools
from tests.search.explorer import endless, explore, stranded
from tests.search.group_mutants import GROUP_MUTANTS
from tests.search.handoff import Handoff
from tests.search.mutants import BLOCK_MUTANT, MUTANTS, ONE, SLOW, STALLED, LeasesForEver, Mutant, NoCap, ReturnsGetLost
from tests.search.window_mutants import WINDOW_MUTANTS, FreedTooEarly, HitsOfTheWholeGroup, PromisedToTwo

MAX_STATES = 300_000
TAKE_LONG = (*SLOW, AnyPromptsTicket, FreedTooEarly, HitsOfTheWholeGroup)
TOO_LARGE = (PromisedToTwo,)
"""Their configurations have more than `MAX_STATES` states when nothing is broken, so no search ends."""
ALL = (*MUTANTS, *CHECKSUM_MUTANTS, *GROUP_MUTANTS, *WINDOW_MUTANTS)


def told(mutant: Mutant) -> object:
    marks = [pytest.mark.slow] if mutant.model in TAKE_LONG else []
    return pytest.param(mutant, id=f"rule {mutant.rule}: {mutant.model.__name__}", marks=marks)


@pytest.mark.quick(
    "rule 1: UseWhenRead",
    "rule 2: Freed*",
    "rule 4: CountedWhenLaunched",
    "rule 5: HitsOutsideTheLease",
    "rule 6:*",
    "rule 7: CommitOfSomeBlocks",
    "rule 8:*",
    "rule C1: SumOf*",
    "rule C2: SummedAsStored",
    "rule C3: Corrupt*",
    "rule C[45]:*",
    "rule G1: Decode*",
    "rule G2: Reads*",
    "rule G3: *0",
    "rule G4:*",
    "rule W*",
)
@pytest.mark.parametrize("mutant", [told(mutant) for mutant in ALL])
def test_without_this_rule_the_search_finds_wrong_kv(mutant, capsys):
    result = explore(mutant.model(mutant.config), max_states=MAX_STATES)
    found = result.counterexample
    assert found is not None, f"{result.num_states} states and no counterexample: the rule is not needed, or the model is blind"
    assert mutant.found_as in found.reason, str(found)
    with capsys.disabled():
        print(f"\nrule {mutant.rule}, {mutant.model.__name__}: {len(found.events)} events, {result.num_states:,} states")


CLEAN = dict.fromkeys(mutant.config for mutant in ALL if mutant.model not in (*TAKE_LONG, *TOO_LARGE))
"""What breaks a mutant is not its configuration. Those of slow mutants are among the larger configurations."""


LARGER = (4, 14, 15, 19, 21)
"""These configurations of `CLEAN` have more than 15,000 states. They run with the long tests."""
CLEAN_PARAMS = [
    pytest.param(config, id=f"configuration {i}", marks=[pytest.mark.slow] if i in LARGER else [])
    for i, config in enumerate(CLEAN)
]


@pytest.mark.quick(
    "configuration 0", "configuration 3", "configuration 7", "configuration 9", "configuration 10", "configuration 1[678]"
)
@pytest.mark.parametrize("config", CLEAN_PARAMS)
def test_with_its_rule_the_same_configuration_is_clean(config):
    result = explore(Handoff(config), max_states=MAX_STATES)
    assert result.counterexample is None, str(result.counterexample)


def test_rule_9_half_reserved_pools_deadlock_and_so_does_any_order_but_ours(capsys):
    lengths = {}
    for order in Order:
        model = TwoPools(order)
        found = stranded(explore(model, max_states=MAX_STATES), model)
        lengths[order] = None if found is None else len(found.events)
    with capsys.disabled():
        print("\n" + "\n".join(f"rule 9, {order.value}: {length or 'no deadlock'}" for order, length in lengths.items()))
    assert lengths == {Order.BLOCK_BY_BLOCK: 2, Order.WHOLE_FREE: 2, Order.WHOLE_DECODE_FIRST: 4, Order.OURS: None}


@pytest.mark.parametrize(("requests", "blocks"), [(3, 3), (3, 5), (4, 4)])
def test_rule_9_our_order_has_no_circle_of_waits_in_larger_pools_either(requests, blocks):
    model = TwoPools(Order.OURS, requests=requests, prefill_blocks=blocks, decode_blocks=blocks)
    assert stranded(explore(model, max_states=MAX_STATES), model) is None


def test_rule_10_without_a_cap_on_the_wait_renewing_holds_a_lease_for_ever(capsys):
    def held(model):
        return lambda state: bool(model.machines.ask(state.prefill.table, do.held_leases))

    def passes(label):
        return label == ("tick",)

    ours, mutant = Handoff(STALLED), NoCap(STALLED)
    assert endless(explore(ours, max_states=MAX_STATES, keep_labels=True), held(ours), passes) is None
    found = endless(explore(mutant, max_states=MAX_STATES, keep_labels=True), held(mutant), passes)
    assert found is not None
    with capsys.disabled():
        print(f"\nrule 10, NoCap: {len(found.events)} events, then for ever {found.cycle}")
    assert {label[0] for label in found.cycle} == {"tick", "renew"}


def test_blocks_freed_under_a_read_are_found():
    found = explore(BLOCK_MUTANT.model(BLOCK_MUTANT.config), max_states=MAX_STATES).counterexample
    assert found is not None
    assert BLOCK_MUTANT.found_as in found.reason


@pytest.mark.parametrize("model_type", [LeasesForEver, ReturnsGetLost])
def test_a_leak_is_found_as_a_state_that_nothing_leads_out_of(model_type):
    model = model_type(ONE)
    result = explore(model, max_states=MAX_STATES)
    assert result.counterexample is None, "it is safe, and it leaks"
    assert stranded(result, model) is not None
