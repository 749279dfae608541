"""What the simulation once found, and that it sees what it is there to see."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import reduce
from operator import xor
from typing import Any

import pytest

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.text.output import OutputText
from router.api.answer import Delta
from router.core.prefix_index import PrefixIndex
from sim.faults.checkers import check_outcome
from sim.faults.client import CallOutcome, ClientAsk
from sim.faults.faults import WORKERS, WRONG_DELTAS, Fault, FaultKind, FaultPlan
from sim.faults.oracle import TOKENIZER, answer
from sim.faults.router import CONFIG
from sim.faults.run import calm_plan, draw_asks, simulate, with_prefix_caching
from sim.faults.tap import Census
from sim.faults.transfer import ReadFaults
from sim.faults.world import WorldShape
from sim.world.network import Weather


def test_a_worker_whose_read_never_stops_is_replaced() -> None:
    """Its role waited for the read, and the transport, which alone could end it, was to be closed after the role."""
    plan = replace(calm_plan(6.0), reads=ReadFaults(stuck=0.3))
    census = Census()
    report = simulate(1, WorldShape(), plan, draw_asks(random.Random(1), 12, until_s=6.0, unruly=False), census)
    assert not report.problems
    assert census.world is not None
    assert census.world.restarts > 0, "no read was stuck"
    assert census.sent["worker_lost", "decode"] > 0, "the router hears of it before the process ends"


def test_a_calm_cluster_answers_everything_at_the_first_try() -> None:
    census = Census()
    report = simulate(2, WorldShape(), calm_plan(6.0), draw_asks(random.Random(2), 24, until_s=6.0, unruly=False), census)
    assert not report.problems
    assert report.outcomes == {"ok": 24}
    assert report.attempts == 0


def test_a_second_process_with_a_live_worker_s_id_costs_no_request_a_try() -> None:
    """They evicted each other ten times a second, and each time all their requests started over."""
    faults = tuple(Fault(0.2, FaultKind.DUPLICATE, name, 5.5) for name in ("decode0", "prefill1"))
    report = simulate(
        4,
        WorldShape(),
        replace(calm_plan(6.0), faults=faults),
        draw_asks(random.Random(4), 24, until_s=6.0, unruly=False),
        Census(),
    )
    assert not report.problems
    assert report.outcomes == {"ok": 24}
    assert report.attempts == 0


def test_a_worker_that_dies_and_is_back_at_once_gets_its_id_back() -> None:
    """Before the router hears that the old connection has broken, and while another process waits for the id."""
    faults = (
        *(Fault(at_s, FaultKind.KILL, "decode0", 0.0005) for at_s in (1.0, 2.0, 3.0)),
        Fault(2.5, FaultKind.DUPLICATE, "decode0", 2.0),
        Fault(1.5, FaultKind.KILL, "prefill1", 0.0005),
    )
    census = Census()
    report = simulate(
        5,
        WorldShape(),
        replace(calm_plan(6.0), faults=faults),
        draw_asks(random.Random(5), 24, until_s=6.0, unruly=False),
        census,
    )
    assert not report.problems
    assert report.outcomes == {"ok": 24}
    assert census.world is not None
    assert census.world.restarts == 4


def test_a_worker_whose_engine_hangs_is_replaced_and_its_requests_end_elsewhere() -> None:
    """Its loop beats on, so it stayed ready and held its requests until their deadlines."""
    faults = tuple(Fault(at_s, FaultKind.HANG_ENGINE, name) for at_s, name in ((0.6, "decode0"), (1.2, "prefill1")))
    plan = replace(calm_plan(6.0), faults=faults)
    asks = [replace(ask, deadline_s=60.0) for ask in draw_asks(random.Random(6), 24, until_s=2.0, unruly=False)]
    census = Census()
    report = simulate(6, WorldShape(), plan, asks, census)
    assert not report.problems
    assert report.outcomes == {"ok": 24}
    assert report.attempts > 0, "nothing ran on the hung ones"
    assert census.world is not None
    assert census.world.restarts == 2
    assert census.sent["worker_lost", "decode"] == census.sent["worker_lost", "prefill"] == 1


def test_logits_that_are_no_numbers_cost_a_retry_and_no_wrong_token() -> None:
    faults = tuple(Fault(at_s, FaultKind.NO_NUMBERS, name, 0.1) for at_s, name in ((0.6, "decode0"), (1.4, "prefill1")))
    asks = draw_asks(random.Random(3), 24, until_s=2.0, unruly=False)
    report = simulate(3, WorldShape(), replace(calm_plan(6.0), faults=faults), asks, Census())
    assert not report.problems
    assert report.outcomes == {"ok": 24}
    assert report.attempts > 0, "no step was hit"


def _outcome(ids: list[int]) -> CallOutcome:
    """As a client would see these tokens, ended well."""
    params = SamplingParams(max_tokens=6, seed=4, ignore_eos=True)
    outcome = CallOutcome(ClientAsk("a", 0.0, (5, 6, 7), params, 10.0), ended_s=1.0)
    reason = answer((5, 6, 7), params).finish_reason
    text = OutputText(TOKENIZER)
    for index, token_id in enumerate(ids):
        is_last = index == len(ids) - 1
        piece = text.push(token_id).text + (text.flush() if is_last else "")
        outcome.deltas.append(Delta(index, (token_id,), piece, reason if is_last else None))
    return outcome


def test_the_checker_passes_the_right_answer_and_no_other() -> None:
    ids = list(answer((5, 6, 7), SamplingParams(max_tokens=6, seed=4, ignore_eos=True)).ids)
    assert check_outcome(_outcome(ids), bound_s=2.0) == []
    wrong = [*ids[:3], (ids[3] + 1) % 64, *ids[4:]]
    assert "wrong token 3" in check_outcome(_outcome(wrong), bound_s=2.0)[0]
    assert "5 of 6 tokens" in check_outcome(_outcome(ids[:5]), bound_s=2.0)[0]
    assert "later" in check_outcome(_outcome(ids), bound_s=0.5)[0]
    twice = _outcome(ids)
    twice.deltas.insert(2, twice.deltas[1])
    assert "came after" in check_outcome(twice, bound_s=2.0)[0]
    unended = _outcome(ids)
    unended.ended_s = None
    assert check_outcome(unended, bound_s=2.0) == ["a never ended"]


def test_a_pair_that_is_cut_is_found_out_by_requests_too_hurried_to_say_so() -> None:
    """KV of prefill0 does not reach decode0, and no request lives as long as a lender may be silent. A probe does: then the
    pair is set aside, and nobody's time runs out on it any more."""
    until_s = 24.0
    cut = Fault(0.2, FaultKind.CUT, "prefill0", until_s, "decode0")
    plan = FaultPlan((cut,), Weather(), ReadFaults(), {}, until_s)
    shape = WorldShape(router=replace(CONFIG, probe_workers=True, pair_aside_s=60.0, pair_aside_max_s=60.0))
    drawn = draw_asks(random.Random(3), 80, until_s=until_s, unruly=False)
    asks = [replace(ask, at_s=0.4 + 0.28 * n, deadline_s=2.0, placement=Placement.DISAGGREGATED) for n, ask in enumerate(drawn)]
    census = Census()
    simulate(3, shape, plan, asks, census)
    assert census.world is not None
    ended = {client.outcome.ask.at_s: client.outcome for client in census.world.clients if client.outcome.ask in asks}
    failed_s = [at_s for at_s, outcome in ended.items() if not outcome.ok]
    assert failed_s, "the pair was never asked for"
    assert max(failed_s) < 12.0
    assert sum(at_s > 12.0 for at_s in ended) > 20


def test_budgets_that_change_during_a_run_change_no_output() -> None:
    """Outputs are checked against the oracle. A budget that a worker cannot have is refused, and so is an unknown worker."""
    tokens = ("8", "16", "9", "12", "99", "1")
    budgets = [Fault(0.3 + 0.2 * i, FaultKind.BUDGET, WORKERS[i % 4], other=tokens[i % 6]) for i in range(25)]
    faults = (*budgets, Fault(2.0, FaultKind.KILL, "decode0", 1.0))
    asks = draw_asks(random.Random(7), 24, until_s=6.0, unruly=False)
    census = Census()
    report = simulate(7, WorldShape(), replace(calm_plan(6.0), faults=faults), asks, census)
    assert not report.problems
    assert report.outcomes == {"ok": 24}
    assert census.sent["set_budget", "router"] > 5


@pytest.mark.parametrize("wrong", WRONG_DELTAS)
def test_a_worker_that_tells_a_change_of_its_keys_wrong_is_asked_for_all_of_them(wrong: str) -> None:
    faults = tuple(Fault(1.0, FaultKind.WRONG_KEYS, name, other=wrong) for name in WORKERS)
    asks = draw_asks(random.Random(8), 32, until_s=6.0, unruly=False)
    census = Census()
    report = simulate(8, with_prefix_caching(WorldShape(), True), replace(calm_plan(6.0), faults=faults), asks, census)
    assert not report.problems
    assert report.outcomes == {"ok": 32}
    assert census.world is not None
    assert census.world.router.core.prefix_index.resyncs == census.sent["prefix_resync", "router"] > 0


def test_an_index_that_is_always_full_asks_nobody_for_keys_and_is_replayed() -> None:
    shape = with_prefix_caching(WorldShape(router=replace(CONFIG, prefix_index_bytes=3000)), True)
    plan = replace(calm_plan(6.0), faults=(Fault(2.0, FaultKind.KILL, "prefill0", 0.5),))
    census = Census()
    report = simulate(9, shape, plan, draw_asks(random.Random(9), 32, until_s=6.0, unruly=False), census)
    assert not report.problems
    assert census.world is not None
    index = census.world.router.core.prefix_index
    assert index.evicted > 0
    assert index.resyncs == 0


def test_the_checker_sees_a_router_that_does_not_compare_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PrefixIndex._change

    def change(self: Any, holder: Any, delta: PrefixDelta) -> None:
        real(self, holder, replace(delta, digest=reduce(xor, (*delta.added, *delta.removed), holder.digest)))

    monkeypatch.setattr(PrefixIndex, "_change", change)
    faults = (Fault(1.0, FaultKind.WRONG_KEYS, "prefill1", other="key"),)
    asks = draw_asks(random.Random(8), 32, until_s=6.0, unruly=False)
    report = simulate(8, with_prefix_caching(WorldShape(), True), replace(calm_plan(6.0), faults=faults), asks, Census())
    assert any("known ones" in problem for problem in report.problems), report.problems
