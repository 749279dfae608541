"""Choices of one prompt on a simulated cluster: each is right, the prompt is handed over once, and broken rules are found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from decode_worker.role import BoundRequest, DecodeRole
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.worker.messages import ReserveResult
from router.core.live_request import LiveRequest
from router.core.requests import Requests
from router.core.waiting import WaitingRequests
from router.service.admission import Admission
from sim.faults.checkers import leftovers
from sim.faults.client import ClientAsk, with_siblings
from sim.faults.oracle import BLOCK_SIZE, VOCAB_SIZE
from sim.faults.run import RunReport, calm_plan, run_seed, simulate, with_prefix_caching
from sim.faults.tap import Census
from sim.faults.world import WorldShape

PROMPT_LEN = 50
N = 4


def run_groups(placement: Placement | None, *, caching: bool, groups: int = 3) -> tuple[RunReport, Census]:
    """Groups of four choices that follow each other, on a cluster without faults."""
    rng = random.Random(57)
    asks = []
    for i in range(groups):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN))
        params = SamplingParams(max_tokens=12, seed=(1 << 32) - 2, ignore_eos=True)  # the next seeds begin again at 0
        leader = ClientAsk(f"r{i}", 0.5 + 2.0 * i, prompt, params, deadline_s=20.0, placement=placement)
        group = with_siblings([leader], random.Random(i), 1.0, unruly=False)
        while len(group) < N:
            group = with_siblings([leader], rng, 1.0, unruly=False)
        asks += group
    census = Census()
    report = simulate(1, with_prefix_caching(WorldShape(), caching), calm_plan(8.0), asks, census)
    assert not report.problems
    assert report.outcomes == {"ok": groups * N}
    return report, census


def reports_of(census: Census) -> dict[str, Any]:
    assert census.world is not None
    return {c.outcome.ask.name: c.outcome.report for c in census.world.clients if not c.outcome.ask.name.startswith("fresh")}


@pytest.mark.parametrize("placement", [None, Placement.DISAGGREGATED, Placement.COLOCATED], ids=str)
def test_each_sibling_shares_all_full_blocks_of_the_prompt_with_its_leader(
    placement: Placement | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is handed over once, and each sibling computes only what follows its last full block."""
    hits: dict[str, int] = {}
    reserved = DecodeRole._reserved

    def note(self: DecodeRole, request: BoundRequest, result: ReserveResult) -> None:
        hits[request.request_id] = result.hits
        reserved(self, request, result)

    monkeypatch.setattr(DecodeRole, "_reserved", note)
    _, census = run_groups(placement, caching=True)
    reports = reports_of(census)
    siblings = {name: report for name, report in reports.items() if "-" in name}
    assert {(report.placement, report.placement_reason) for report in siblings.values()} == {(Placement.COLOCATED, "sibling")}
    assert {name: r.decode_worker for name, r in siblings.items()} == {
        name: reports[name.partition("-")[0]].decode_worker for name in siblings
    }
    assert census.world is not None
    assert {hits[name] for name in siblings} == {(PROMPT_LEN - 1) // BLOCK_SIZE}
    assert not leftovers(census.world)


def test_without_prefix_caching_siblings_are_placed_as_any_other_request() -> None:
    _, census = run_groups(Placement.DISAGGREGATED, caching=False)
    assert {report.placement_reason for report in reports_of(census).values()} == {"requested"}


Mutant = Callable[[pytest.MonkeyPatch], None]


def the_end_of_a_leader_frees_nobody(patch: pytest.MonkeyPatch) -> None:
    real = Requests.free_siblings

    def free_siblings(self: Any, leader: LiveRequest, now_s: float) -> None:
        if not leader.machine.terminal:
            real(self, leader, now_s)

    patch.setattr(Requests, "free_siblings", free_siblings)


def nobody_is_freed_before_the_end_of_the_leader(patch: pytest.MonkeyPatch) -> None:
    real = Requests.free_siblings

    def free_siblings(self: Any, leader: LiveRequest, now_s: float) -> None:
        if leader.machine.terminal:
            real(self, leader, now_s)

    patch.setattr(Requests, "free_siblings", free_siblings)


def a_sibling_that_goes_is_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = WaitingRequests.remove

    def remove(self: Any, request: LiveRequest) -> None:
        if request.request_id in self._behind.get(request.leader, {}):
            del self._places[request.request_id]
        else:
            real(self, request)

    patch.setattr(WaitingRequests, "remove", remove)


def siblings_have_the_seed_of_their_leader(patch: pytest.MonkeyPatch) -> None:
    real = Admission.admit

    async def admit(self: Any, request: Any, *, arrived_s: float, leader: Any = None) -> Any:
        submit = await real(self, request, arrived_s=arrived_s, leader=leader)
        if leader is not None:
            object.__setattr__(submit, "spec", leader.spec)
        return submit

    patch.setattr(Admission, "admit", admit)


MUTANTS: dict[Mutant, int] = {
    the_end_of_a_leader_frees_nobody: 16,
    nobody_is_freed_before_the_end_of_the_leader: 13,
    a_sibling_that_goes_is_not_forgotten: 25,
    siblings_have_the_seed_of_their_leader: 3,
}
"""Each with the first seed that found it when this was written, which saves the seeds before it."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_siblings_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(run_seed(seed).problems for seed in (MUTANTS[mutant], *range(1, 41)))


def test_a_sibling_that_is_placed_before_the_kv_is_there_shares_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is wrong then, so only the hits tell."""
    monkeypatch.setattr(LiveRequest, "kv_link", property(lambda self: self.decode and self.decode.link))
    with pytest.raises(AssertionError, match="assert"):
        test_each_sibling_shares_all_full_blocks_of_the_prompt_with_its_leader(Placement.DISAGGREGATED, monkeypatch)
