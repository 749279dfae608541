"""Snapshots of the core: the state of the cluster, or of one worker, at this moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

from pdserve.core.ids import Incarnation
from pdserve.core.worker import Role
from pdserve.observe.snapshot import (
    MAX_PAIRS,
    ClassSnapshot,
    ClusterSnapshot,
    EjectionSnapshot,
    LimitSnapshot,
    PairSnapshot,
    PickSnapshot,
    PrefixSnapshot,
    WorkerSnapshot,
)
from router.core.health import AsidePair
from router.core.registry import Worker
from router.core.router_core import RouterCore


def cluster_snapshot(
    core: RouterCore,
    incarnation: Incarnation,
    classes: tuple[tuple[ClassSnapshot, ...], float],
    bound: Mapping[str, int],
    *,
    now_s: float,
    uptime_s: float,
) -> ClusterSnapshot:
    """Return the state of the cluster. `classes` are the counts of classes, and the seconds that they are of; `bound` is
    how often each limit has bound."""
    queued = len(core.waiting)
    aside = list(core.pairs.set_aside(now_s=now_s))
    return ClusterSnapshot(
        router_incarnation=incarnation,
        queued_requests=queued,
        running_requests=core.num_requests - queued,
        workers=tuple([worker_snapshot(core, worker, now_s=now_s) for worker in sorted(core.registry, key=_pool_order)]),
        set_aside=tuple([_pair_snapshot(pair, now_s) for pair in islice(aside, MAX_PAIRS)]),
        num_set_aside=len(aside),
        set_aside_counts=_by_worker(aside),
        exact=core.registry.exact,
        foreign=core.registry.foreign,
        prefixes=_prefix_snapshot(core),
        picks=tuple(PickSnapshot(role, policy, why.value, count) for (role, policy, why), count in core.placer.picks.items()),
        ejections=tuple([EjectionSnapshot(role, cause.value, count) for (role, cause), count in core.health.ejections.items()]),
        classes=classes[0],
        classes_window_s=classes[1],
        limits=_limits(core, bound),
        demand=core.demand(now_s=now_s, uptime_s=uptime_s),
        poisoned=tuple([(death.worker_id, death.pid) for death in core.suspects.poisoned]),
    )


def worker_snapshot(core: RouterCore, worker: Worker, *, now_s: float) -> WorkerSnapshot:
    """Return the state of one worker."""
    return WorkerSnapshot(
        hello=worker.hello,
        load=worker.load,
        heartbeat_age_s=now_s - worker.last_seen_s,
        requests_placed=worker.requests_placed,
        draining=worker.draining,
        not_ready_reason=core.placer.not_ready_reason(worker, now_s=now_s),
        ejected=core.health.is_out(worker),
        before=worker.before,
    )


def _limits(core: RouterCore, bound: Mapping[str, int]) -> tuple[LimitSnapshot, ...]:
    limits = core.limits
    return (
        LimitSnapshot("connections", limits.streams, bound.get("connections", 0)),
        LimitSnapshot("queue", limits.queued_requests, bound.get("queue", 0)),
        LimitSnapshot("prefix_index", limits.index_bytes, bound.get("prefix_index", 0)),
    )


def _by_worker(aside: list[AsidePair]) -> tuple[tuple[Role, str, int], ...]:
    """Return the number of pairs of each worker, most first."""
    sides = (pair.prefill for pair in aside), (pair.decode for pair in aside)
    counts = [
        (role, str(worker_id), count)
        for role, hellos in zip((Role.PREFILL, Role.DECODE), sides, strict=True)
        for worker_id, count in Counter(hello.worker_id for hello in hellos).items()
    ]
    return tuple(sorted(counts, key=lambda one: -one[2]))


def _prefix_snapshot(core: RouterCore) -> PrefixSnapshot:
    index, predicted = core.prefix_index, core.placer.predicted_tokens
    return PrefixSnapshot(index.keys, index.bytes, index.evicted, index.resyncs, tuple(predicted.items()))


def _pair_snapshot(pair: AsidePair, now_s: float) -> PairSnapshot:
    return PairSnapshot(
        prefill_worker=pair.prefill.worker_id,
        decode_worker=pair.decode.worker_id,
        reason=pair.reason,
        remaining_s=pair.until_s - now_s,
        failures=pair.failures,
    )


def _pool_order(worker: Worker) -> tuple[bool, str]:
    """Sort prefill workers first, and each pool by worker id. The order of joining means nothing to a reader."""
    return worker.hello.role is Role.DECODE, worker.hello.worker_id
