"""The static splits of a number of workers into two pools, and the search for the cheapest split that attains enough.

A split of n workers costs n times the length of the run, so if a split attains enough, a split with more workers costs more and
cannot be the best. The search therefore goes by the number of workers, and ends after the first number at which a split attains
enough; all splits of that number are run. It may go on for a larger share. A run ends early once it has missed too many targets
to attain enough. The search takes no other short cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sim.perf.cluster import ClusterSpec, PerfCluster, run_cluster
from sim.perf.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Split:
    """The result of one static split."""

    prefill: int
    decode: int
    attainment: float
    """The share of all requests that met their targets. After an early end, it is the largest share that was still possible."""
    whole: bool
    """The run was not ended early."""
    worker_s: float
    """The cost of a whole run: its workers, from the start until the last request ended."""
    ttft_p99_s: float = 0.0
    tpot_p99_s: float = 0.0

    @property
    def workers(self) -> int:
        """The number of workers of both pools."""
        return self.prefill + self.decode


class _Hopeless(Exception):
    """More requests have missed their targets than may."""


def run_split(
    spec: ClusterSpec, prefill: int, decode: int, requests: Sequence[TraceRequest], enough: float,
    on_end: Callable[[], object] = lambda: None,
) -> Split:  # fmt: skip
    """Run a split. `spec` has at least one worker of each role, whose shapes all workers of the role have."""
    spec = replace(spec, prefill=[spec.prefill[0]] * prefill, decode=[spec.decode[0]] * decode)
    missed = 0

    def judge() -> None:
        nonlocal missed
        missed += not cluster.report.served[-1].attained
        if missed > (1.0 - enough) * len(requests):
            raise _Hopeless
        on_end()

    cluster = PerfCluster(spec, requests, judge)
    try:
        report = run_cluster(cluster)
    except _Hopeless:
        return Split(prefill, decode, 1.0 - missed / len(requests), False, 0.0)
    end_s = max(one.ended_s for one in report.served)
    attainment = 1.0 - missed / len(requests)
    return Split(prefill, decode, attainment, True, (prefill + decode) * end_s, report.ttft_s(0.99), report.tpot_s(0.99))


def splits_of(workers: int, max_prefill: int, max_decode: int) -> Iterator[tuple[int, int]]:
    """Return all splits of this many workers within the limits of both pools."""
    for prefill in range(1, workers):
        if prefill <= max_prefill and workers - prefill <= max_decode:
            yield prefill, workers - prefill


def search(
    run: Callable[[Sequence[tuple[int, int]], float], Sequence[Split]],
    max_prefill: int,
    max_decode: int,
    shares: Sequence[float],
) -> list[Split]:
    """Return the results of all splits that could be the cheapest split for one of the shares.

    `run` gets splits of one number of workers, and the share below which a run may end. It may run several at the same time. A
    split that has ended below a share attains no larger one, so no split is run twice.
    """
    found: list[Split] = []
    left = sorted(set(shares))
    for workers in range(2, max_prefill + max_decode + 1):
        found += run(list(splits_of(workers, max_prefill, max_decode)), left[0])
        while left and best_of(found, left[0]) is not None:
            left.pop(0)
        if not left:
            break
    return found


def best_of(splits: Sequence[Split], enough: float) -> Split | None:
    """Return the cheapest split that attains enough. Among equally cheap splits, return the split that attains most. None: no
    split attains enough."""
    good = [one for one in splits if one.whole and one.attainment >= enough]
    return min(good, key=lambda one: (one.workers, -one.attainment), default=None)
