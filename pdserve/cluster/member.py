"""One worker of a pool over all its processes: the state of the present process, and the time of the next start.

PLACING -> LOADING -> RUNNING -> BACKING_OFF -> PLACING ... A worker that dies too often, or has drained, is GONE; the
actuator decides whether another one takes its name. Of Ray, this module calls only the actor that it is handed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from pdserve.cluster.actor import WorkerActor
from pdserve.cluster.backoff import Backoff
from pdserve.cluster.keeping.order import NodePlace, WorkerReport
from pdserve.cluster.plan import WorkerPlan
from pdserve.core.errors import PdserveError
from pdserve.observe.title import PREFIX

HOUR_S: Final = 3600.0
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0
SETTING: Final = "max_restarts_per_hour"


class MemberState(Enum):
    """The state of a worker's present process."""

    NEW = "new"  # Ray was not asked yet
    PLACING = "placing"  # Ray was asked for a process
    LOADING = "loading"  # the process starts the worker
    RUNNING = "running"
    BACKING_OFF = "backing off"  # the process died; another is asked for at `again_s`
    GONE = "gone"  # no other process follows


_NEXT: Final = {
    MemberState.NEW: {MemberState.PLACING},
    MemberState.PLACING: {MemberState.LOADING, MemberState.BACKING_OFF, MemberState.GONE},
    MemberState.LOADING: {MemberState.RUNNING, MemberState.BACKING_OFF, MemberState.GONE},
    MemberState.RUNNING: {
        MemberState.RUNNING,
        MemberState.BACKING_OFF,
        MemberState.GONE,
    },  # `load` is asked again after a lost connection
    MemberState.BACKING_OFF: {MemberState.PLACING},
    MemberState.GONE: set[MemberState](),
}


@dataclass(slots=True)
class Member:
    """One worker of a pool. All times are seconds of a monotonic clock that the caller passes in."""

    plan: WorkerPlan
    failure: PdserveError | None = None  # the reason why its first start failed; None: it has not, or a later one succeeded
    state: MemberState = MemberState.NEW
    actor: Any = None
    pending: Any = None  # reference of the one open call; None while there is no process
    progress: Any = None  # reference of an open call that asks how far the loading is; None: none is open
    asked_progress_s: float = 0.0  # the time of the last such call
    node_id: str | None = None
    host: str = ""  # the address of the node on which its process runs or may run; empty: nobody knows, or it has died
    report: WorkerReport | None = None  # the report of the process that runs
    first_start: bool = True  # False once it has loaded
    drained: bool = False  # True once it has drained, and so is GONE because somebody wanted that
    asked_s: float = 0.0  # the time at which its first process was asked for
    since_s: float = 0.0  # the time at which the state was entered
    again_s: float = 0.0  # the time of the next start, in BACKING_OFF
    waits_for: str | None = None  # the reason why it had no place at the last look; None: no reason was found
    said: str | None = None  # the reason that was told last
    forgiven: frozenset[int] = frozenset()  # the ids of processes whose deaths will not count, since a request has ended them
    _counted: dict[int, float] = field(default_factory=dict)  # the times of deaths that did, by the ids of the processes
    _backoff: Backoff = field(init=False)

    def __post_init__(self) -> None:
        self.host = self.host or self.plan.host
        tries = self.plan.max_restarts_per_hour
        self._backoff = Backoff(tries=tries, window_s=HOUR_S, first_s=FIRST_WAIT_S, longest_s=LONGEST_WAIT_S)

    @property
    def worker_id(self) -> str:
        """The worker's id, the same for all its processes."""
        return self.plan.worker_id

    @property
    def restarts_used(self) -> str:
        """A phrase for the operator: the restarts used within the hour, counted at the last death."""
        return (
            f"{self._backoff.used} of {self.plan.max_restarts_per_hour} restarts within the hour ({self.plan.role}.{SETTING})"
        )

    def shown(self) -> Member:
        """Return a copy for another process, without what only the process that joined Ray can use."""
        shown = copy.copy(self)
        shown.actor = shown.pending = shown.progress = None
        return shown

    def asked(self, actor: Any, node_id: str | None, now_s: float) -> None:
        """Enter PLACING: Ray was asked for `actor`. `node_id` None lets Ray choose the node."""
        self.asked_s = now_s if self.state is MemberState.NEW else self.asked_s
        self._to(MemberState.PLACING, now_s)
        self.actor, self.node_id, self.waits_for, self.said = actor, node_id, None, None
        self.pending = actor.place.remote()

    def replan(self, plan: WorkerPlan) -> None:
        """Let the next process start by another plan, whose limit of restarts holds from now on."""
        self.plan = plan
        self._backoff.tries = plan.max_restarts_per_hour

    def waits_for_now(self, why: str | None) -> bool:
        """Note why the worker has no place (None: no reason), and tell whether the operator should hear it now.

        A reason is told once, and only when two looks in a row gave it, since a look may show an old state.
        """
        news = why is not None and why == self.waits_for and why != self.said
        self.waits_for = why
        self.said = why if news else self.said
        return news

    def placed(self, place: NodePlace, now_s: float) -> None:
        """Enter LOADING: the process runs at `place`. Its actor is asked to start the worker."""
        self._to(MemberState.LOADING, now_s)
        self.node_id, self.host, self.asked_progress_s = place.node_id, place.host, now_s
        self.pending = self._named(self.actor.load)

    def loaded(self, report: WorkerReport, now_s: float) -> None:
        """Enter RUNNING: the worker has started. Its actor is asked to watch it."""
        self._to(MemberState.RUNNING, now_s)
        self.report, self.first_start, self.progress, self.failure = report, False, None, None
        self.pending = self._named(self.actor.watch)

    def ask_progress(self, now_s: float) -> None:
        """Ask how far the loading is."""
        self.progress, self.asked_progress_s = self.actor.progress.remote(), now_s

    def ask_again(self) -> None:
        """Repeat the open call after a lost connection, since the process may still live.

        `place` and `load` give the same answer twice. In RUNNING `load` is asked, and `watch` follows its answer.
        """
        self.pending = self.actor.place.remote() if self.state is MemberState.PLACING else self._named(self.actor.load)

    def died(self, now_s: float, *, counts: bool) -> float | None:
        """Enter BACKING_OFF and return the seconds until the next start, or enter GONE and return None.

        counts: True counts this death as one of the restarts that an hour allows, unless it was forgiven.
        """
        pid = self.report.pid if self.report is not None else 0
        counts = counts and pid not in self.forgiven
        self.forgiven -= {pid}
        self._counted = {other: at_s for other, at_s in self._counted.items() if now_s - at_s < HOUR_S}
        if counts:
            self._counted[pid] = now_s
        delay_s = self._backoff.next_delay_s(now_s) if counts else FIRST_WAIT_S
        self._without_process(MemberState.GONE if delay_s is None else MemberState.BACKING_OFF, now_s)
        self.again_s = now_s + (delay_s or 0.0)
        return delay_s

    def forgive(self, pid: int) -> None:
        """Take back the restart that the death of a process has used up. One whose death is not known yet will use none."""
        if pid in self._counted:
            self._backoff.take_back(self._counted.pop(pid))
        else:
            self.forgiven |= {pid}

    def gone(self, now_s: float) -> None:
        """Enter GONE: the worker has drained."""
        self.drained = True
        self._without_process(MemberState.GONE, now_s)

    def _named(self, method: Any) -> Any:
        """Call the actor. While the call runs, the title of its process is `ray::WorkerActor pdserve: decode-0`.

        Ray sets the title to `ray::` and the name of the call, and takes it back when the call ends. `watch` runs as long
        as the worker does. `ray::WorkerActor` stays in front, since `ray stop` finds processes by it.
        """
        return method.options(name=f"{WorkerActor.__name__} {PREFIX}{self.worker_id}").remote()

    def _without_process(self, state: MemberState, now_s: float) -> None:
        self._to(state, now_s)
        self.actor = self.pending = self.progress = self.report = self.node_id = None

    def _to(self, state: MemberState, now_s: float) -> None:
        assert state in _NEXT[self.state], f"{self.worker_id}: {self.state.value} -> {state.value}"
        self.state, self.since_s = state, now_s
