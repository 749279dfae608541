"""A worker that fails its requests, or takes long for prompts, is ejected by the whole system, and its requests are served
elsewhere.

The judge of these runs finds each rule that is switched off. All is by default settings.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pdserve.core.worker import Role
from router.core import outliers
from router.core.health import Cause, Health
from router.core.outliers import Account
from sim.faults.run import RunReport, run_with_sick_workers
from sim.perf.cluster import ClusterSpec, PerfCluster, calm_router, run_cluster
from sim.perf.costs import LLAMA2_70B_A100
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape
from tests.sim.mutants import Mutant

SEEDS = range(1, 4)


def problems(seed: int, report: RunReport) -> list[str]:
    """Judge a run. One sick worker costs no request, as long as there is another one."""
    found = list(report.problems)
    if report.ejections == 0:
        found.append("nobody was ejected")
    if seed % 3 != 2 and report.outcomes.total() != report.outcomes["ok"]:
        found.append(f"a request failed: {report.outcomes}")
    if report.attempts > 40:
        found.append(f"{report.attempts} attempts were lost to one worker")
    return found


def test_a_sick_worker_costs_no_request() -> None:
    assert [found for seed in SEEDS if (found := problems(seed, run_with_sick_workers(seed)))] == []


def nobody_is_ejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "_eject", lambda *args: False)


def more_than_half_is_ejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "_may_lose", lambda self, role: True)
    patch.setattr(Health, "_readmit", lambda self, role, now_s: None)


def the_second_try_goes_anywhere(patch: pytest.MonkeyPatch) -> None:
    real = Health.failed

    def failed(self: Health, work: Any, *args: Any) -> None:
        real(self, work, *args)
        work.request.avoid = ()

    patch.setattr(Health, "failed", failed)


def nothing_counts_against_a_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "failed", lambda self, weight=1.0: None)


@pytest.mark.quick("nobody_is_ejected", "nothing_counts_against_a_worker")
@pytest.mark.parametrize(
    "mutant",
    [nobody_is_ejected, more_than_half_is_ejected, the_second_try_goes_anywhere, nothing_counts_against_a_worker],
    ids=lambda mutant: mutant.__name__,
)
def test_a_broken_rule_of_ejection_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(problems(seed, run_with_sick_workers(seed)) for seed in SEEDS)


def lengths(seed: int, count: int) -> list[TraceRequest]:
    """Requests with prompts of very different lengths, as many as three workers serve."""
    rng, at_s, requests = random.Random(seed), 0.0, []
    for n in range(count):
        at_s += rng.expovariate(4.0)
        tokens = rng.choice((40, 700, 3000, 12_000))
        requests.append(TraceRequest(at_s, tokens, rng.randint(1, 20), tuple(range(1000 * n, 1000 * n - (-tokens // 512)))))
    return requests


def with_slow_prefill(seed: int, times: float, policy: str, count: int) -> tuple[int, float]:
    """Run four pairs, of which one prefill worker takes so many times as long for each step. Return how often it is ejected,
    and its share of the prompts' tokens."""
    one = PerfWorkerShape(LLAMA2_70B_A100, max_model_len=32_768, max_num_seqs=32)
    slow = PerfWorkerShape(LLAMA2_70B_A100.scaled(times), max_model_len=32_768, max_num_seqs=32)
    requests = lengths(seed, count)
    cluster = PerfCluster(ClusterSpec([one, one, one, slow], [one] * 4, calm_router(prefill_policy=policy)), requests)
    report = run_cluster(cluster)
    assert len(report.finished) == count
    health = cluster.core.health
    assert all(worker.hello.worker_id == "prefill-3" for worker in cluster.core.registry if health.is_out(worker))
    assert set(health.ejections) <= {(Role.PREFILL, Cause.SLOW)}
    computed = sum(used.prefix_queried_tokens for used in report.workers if used.worker_id == "prefill-3")
    return health.ejections.total(), computed / sum(request.prompt_tokens for request in requests)


def test_a_slow_prefill_worker_is_ejected_and_prompts_of_all_lengths_eject_nobody() -> None:
    ejections, _ = with_slow_prefill(1, 6.0, "round_robin", 140)
    assert ejections >= 1
    assert with_slow_prefill(1, 1.0, "round_robin", 140)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded", "power_of_two", "round_robin", "random"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_slow_prefill_worker_is_ejected_or_passed_over_under_every_policy(seed: int, policy: str) -> None:
    """Policies that predict times leave it a few short prompts, by which nobody can tell that it is slow."""
    ejections, share = with_slow_prefill(seed, 10.0, policy, 400)
    assert ejections >= 1 or share < 0.05
    assert with_slow_prefill(seed, 1.0, policy, 400)[0] == 0
    assert with_slow_prefill(seed, 2.0, policy, 400)[0] == 0, "which is a handicap at most"


def only_decode_workers_are_compared(patch: pytest.MonkeyPatch) -> None:
    real = Health._look_at_speed
    patch.setattr(Health, "_look_at_speed", lambda self, role, now_s: real(self, role, now_s) if role is Role.DECODE else None)


def any_worker_is_too_slow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outliers, "TOO_SLOW", 1.0)


@pytest.mark.parametrize("mutant", [only_decode_workers_are_compared, any_worker_is_too_slow], ids=lambda one: one.__name__)
def test_a_broken_rule_of_slowness_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_slow_prefill_worker_is_ejected_and_prompts_of_all_lengths_eject_nobody()
