"""The state of the cluster at one moment, as the router knows it. Metrics and `GetClusterState` show it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final

from pdserve.core.roofline import START, Utilisation, utilisation
from pdserve.core.slo import DemandCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The state of one worker."""

    hello: WorkerHello
    load: WorkerLoad
    heartbeat_age_s: float
    requests_placed: int
    """The requests that this router placed and that have not finished."""
    draining: bool = False
    """The router places nothing more on the worker."""
    not_ready_reason: str = ""
    ejected: bool = False
    """The worker failed much more than its pool, or was much slower, and gets nothing for a while."""
    before: WorkerLoad = START
    """The load of 10 to 20 s ago."""

    @property
    def recent(self) -> Utilisation:
        """The utilisation of the last 10 to 20 s."""
        return utilisation(self.hello, self.before, self.load)

    @property
    def since_start(self) -> Utilisation:
        """The utilisation since the start of the incarnation."""
        return utilisation(self.hello, START, self.load)

    @property
    def ready(self) -> bool:
        """The worker takes requests, so there is no reason why it would not."""
        return not self.not_ready_reason


MAX_PAIRS: Final = 100
"""A snapshot names so many pairs: more than a person reads, and some of each of a few causes."""


@dataclass(frozen=True, slots=True)
class PairSnapshot:
    """Two workers between which KV did not pass. `remaining_s` is infinite when they will never be paired again."""

    prefill_worker: str
    decode_worker: str
    reason: str
    remaining_s: float
    failures: int


@dataclass(slots=True)
class ClassSnapshot:
    """The counts of one class of requests over the last minutes. ClassState in inference.proto explains each field."""

    slo_class: str
    requests: int = 0
    good: int = 0
    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    refused: int = 0
    shed: int = 0

    def add(self, other: ClassSnapshot) -> None:
        """Add the counts of the same class from another time."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTS: Final = tuple(one.name for one in fields(ClassSnapshot) if one.name != "slo_class")


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """The index of held prefixes. The counts other than `keys` and `index_bytes` begin at the router's start."""

    keys: int = 0
    index_bytes: int = 0
    evicted: int = 0
    resyncs: int = 0
    predicted_tokens: tuple[tuple[Role, int], ...] = ()
    """The prompt tokens that the workers that were picked probably held, by role."""


@dataclass(frozen=True, slots=True)
class PickSnapshot:
    """The number of times, since the router's start, that a policy picked a worker of a role for this reason."""

    role: Role
    policy: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class EjectionSnapshot:
    """The number of ejections from a pool for one cause since the router's start."""

    role: Role
    cause: str
    count: int


@dataclass(frozen=True, slots=True)
class LimitSnapshot:
    """A limit that holds now, and how often it has bound since the router's start: what it refused, or forgot."""

    name: str
    value: int
    bound: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The state of the router, its workers, and the pairs of workers that are set aside."""

    router_incarnation: int
    queued_requests: int
    running_requests: int
    workers: tuple[WorkerSnapshot, ...]
    set_aside: tuple[PairSnapshot, ...] = ()
    """The first of the pairs that are set aside, at most `MAX_PAIRS`: a broken network between two pools of 200 sets 40,000
    aside."""
    num_set_aside: int = 0
    """All of them."""
    set_aside_counts: tuple[tuple[Role, str, int], ...] = ()
    """The number of pairs of each worker that are set aside, most first: role, worker id, pairs."""
    classes: tuple[ClassSnapshot, ...] = ()
    classes_window_s: float = 0.0
    exact: bool = True  # all workers give the same bits in any company
    foreign: bool = False  # some worker runs an engine that is not our own
    prefixes: PrefixSnapshot = PrefixSnapshot()
    picks: tuple[PickSnapshot, ...] = ()
    ejections: tuple[EjectionSnapshot, ...] = ()
    limits: tuple[LimitSnapshot, ...] = ()
    demand: DemandCounts = field(default_factory=DemandCounts)
    poisoned: tuple[tuple[str, int], ...] = ()
    """The last processes that ended under a request which had ended another one before: worker id, pid."""
