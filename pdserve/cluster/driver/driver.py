"""The parent's side of the process that speaks with Ray. It looks like a pool of workers, and outlives any number of children.

While no child is there, the workers that run go on, and nothing can be started. The next child gets the plans of all workers
that are wanted; its keepers find the processes that run, and start those that do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.cluster.backoff import Backoff
from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.cluster.events import Event, Listener, RayBack, RayLost
from pdserve.cluster.keeping.order import WorkerReport
from pdserve.cluster.member import Member, MemberState
from pdserve.cluster.nodes import Node
from pdserve.cluster.plan import WorkerPlan
from pdserve.config import ClusterConfig
from pdserve.killable_child import ChildEnded, ChildProcess
from pdserve.observe.log_files import open_log

# The messages between `pdserve up` and its Ray driver. Each request has one answer, in order.


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to the driver: join Ray, or start one below the private folder."""

    config: ClusterConfig
    private: str
    name: str  # the cluster's


@dataclass(frozen=True, slots=True)
class Joined:
    """The driver's answer to `Begin`. It sends an error instead when it could not join Ray."""

    node_host: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a method of the pool."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """The events since the last answer, and all workers as they are now, without the handles of Ray."""

    events: tuple[Event, ...]
    members: tuple[Member, ...]


COMMAND: Final = (sys.executable, "-m", "pdserve.cluster.driver.process")
JOIN_TIMEOUT_S: Final = 120.0
"""The longest time until a child has joined Ray or started one: seconds on an idle machine."""
ANSWER_TIMEOUT_S: Final = 60.0
"""A child that does not answer for so long is ended. Ray itself gives its control service up after 60 seconds."""
PROMPT_S: Final = 1.0
"""An answer that takes longer is not waited for: the supervision of the router goes on meanwhile."""
CLOSE_TIMEOUT_S: Final = 20.0
MOST_BYTES: Final = 256 << 20  # of an answer: a worker takes a few kB in it, and a pool has at most some thousands
LOOK_S: Final = 0.1


class RayDriver:
    """The connection to Ray, and the workers. One thread calls it, which must outlive it; any thread may call `kill`."""

    def __init__(self, config: ClusterConfig, private: Path, name: str, log: Path, listener: Listener) -> None:
        """Prepare; `begin` starts the child. `private` is the folder for a private Ray, `log` the file for what Ray says."""
        self._begin = Begin(config, str(private), name)
        self._log = log
        self._listener = listener
        self._child: ChildProcess | None = None
        self._asked_s: float | None = None  # the time of the request that has no answer yet
        self._joined: Joined | None = None
        self._members: tuple[Member, ...] = ()
        self._launched = False  # the child keeps the pool
        self._backoff = Backoff(tries=sys.maxsize, window_s=600.0, first_s=1.0, longest_s=60.0)
        self._again_s = 0.0
        self._lost = False

    def begin(self) -> None:
        """Start a child without waiting for it. Raises `ClusterError` when no process can be started."""
        try:
            with open_log(self._log) as log:
                self._child = ChildProcess([*COMMAND, str(self._log)], MOST_BYTES, stderr=log)
        except OSError as exc:
            raise ClusterError(f"cannot run the process that speaks with Ray: {exc.strerror}") from exc
        self._joined, self._launched = None, False
        with contextlib.suppress(ChildEnded):  # it has ended already, as the next look finds
            self._send(self._begin)

    def wait_joined(self, stop: threading.Event) -> None:
        """Wait until Ray was joined. Raises `Interrupted`, and `ClusterError` or `ConfigError` when it was not."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while self._joined is None:
            if stop.is_set():
                raise Interrupted
            if time.monotonic() > deadline:
                raise ClusterError(f"Ray was not there after {JOIN_TIMEOUT_S:.0f} s; see {self._log}")
            try:
                said = self._receive(LOOK_S)
            except ChildEnded as exc:
                if stop.is_set():  # the signal may have ended it as well
                    raise Interrupted from exc
                raise ClusterError(f"the process that speaks with Ray has ended; see {self._log}") from exc
            if isinstance(said, Exception):
                raise said
            self._joined = said

    @property
    def node_host(self) -> str:
        """The address at which other nodes of the Ray cluster reach this machine; loopback for a private Ray."""
        assert self._joined is not None
        return self._joined.node_host

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes of the joined cluster at the time of joining; none for a private Ray."""
        assert self._joined is not None
        return self._joined.nodes

    @property
    def answers(self) -> bool:
        """Tell whether requests are answered now, so that workers can be started and ended."""
        return self._launched and self._asked_s is None

    @property
    def lost(self) -> bool:
        """Tell whether Ray was lost and is not back yet."""
        return self._lost

    @property
    def members(self) -> tuple[Member, ...]:
        """All workers as the last answer showed them."""
        return self._members

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """The reports of the workers that run, in the order of their plans."""
        return tuple(member.report for member in self._members if member.report is not None)

    def serves(self, role: str) -> bool:
        """Tell whether the role has a worker that is not gone for good."""
        return any(member.plan.role == role and member.state is not MemberState.GONE for member in self._members)

    def launch(self, plans: Sequence[WorkerPlan]) -> None:
        """Ask Ray for every worker, without waiting for it."""
        self._members = tuple(Member(plan) for plan in plans)
        try:
            self._launch()
        except ChildEnded as exc:
            self._lose_ended(exc)

    def check(self, wait_s: float = 0.0) -> None:
        """Look once at what has happened to workers, and tell the listener. A lost child is replaced meanwhile.

        The look waits for news for at most `wait_s`, and about a second more.
        """
        now_s = time.monotonic()
        try:
            if self._child is None:
                time.sleep(wait_s)
                if now_s >= self._again_s:
                    self.begin()
            elif not self._launched:
                self._follow_joining(wait_s)
            else:
                if self._asked_s is None:
                    self._send(Request("check", (wait_s,)))
                self._take(wait_s + PROMPT_S)
        except ChildEnded as exc:
            self._lose_ended(exc)
        except ClusterError as exc:
            self._lose(str(exc))
        limit_s = ANSWER_TIMEOUT_S if self._launched else JOIN_TIMEOUT_S
        if self._asked_s is not None and time.monotonic() - self._asked_s > limit_s:
            self._lose(f"no answer for {limit_s:.0f} s")

    def add(self, plan: WorkerPlan) -> None:
        """Ask Ray for one more worker, without waiting for it."""
        self._call("add", plan)

    def cancel(self, worker_id: str) -> None:
        """End and forget a worker that serves nobody."""
        self._call("cancel", worker_id)

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is gone."""
        self._call("forget", worker_id)

    def move(self, worker_id: str, plan: WorkerPlan) -> None:
        """Let the next process of a worker start by another plan."""
        self._call("move", worker_id, plan)

    def forgive(self, worker_id: str, pid: int) -> None:
        """Do not count the death of a worker's process, since a request has ended it."""
        self._call("forgive", worker_id, pid)

    def stop(self) -> bool:
        """Stop all workers at the same time, and end their processes for good.

        False: they were not reached, since there is no child now.
        """
        self._call("stop")
        return self._launched or not self._members

    def close(self) -> None:
        """Leave Ray, and end a private Ray. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.finish(CLOSE_TIMEOUT_S)

    def kill(self) -> None:
        """End the child at once, without waiting. A private Ray ends with it."""
        if (child := self._child) is not None:
            child.kill()

    def _launch(self) -> None:
        left = [member for member in self._members if member.state is not MemberState.GONE]
        wanted = [dataclasses.replace(member.plan, host=member.host) for member in left]
        self._send(Request("launch", (wanted,)))
        self._launched = True

    def _follow_joining(self, wait_s: float) -> None:
        """Look whether a new child has joined Ray, and launch the pool then: its keepers adopt what runs."""
        said = self._receive(max(wait_s, LOOK_S))
        if isinstance(said, Exception):
            raise ClusterError(str(said))
        if said is None:
            return
        self._joined = said
        self._launch()
        if self._lost:
            self._lost = False
            self._listener(RayBack())

    def _call(self, method: str, *arguments: object) -> None:
        """Make one request and wait for its answer; a request that has none yet comes first."""
        if self._child is None or not self._launched:
            return
        try:
            if self._asked_s is not None:
                self._take(ANSWER_TIMEOUT_S)
            self._send(Request(method, arguments))
            self._take(ANSWER_TIMEOUT_S)
        except ChildEnded as exc:
            self._lose_ended(exc)
        if self._asked_s is not None:
            self._lose(f"no answer for {ANSWER_TIMEOUT_S:.0f} s")

    def _take(self, wait_s: float) -> None:
        answer = self._receive(wait_s)
        if isinstance(answer, DriverAnswer):
            self._members = answer.members
            for event in answer.events:
                self._listener(event)

    def _send(self, message: Begin | Request) -> None:
        assert self._child is not None
        self._asked_s = time.monotonic()
        self._child.send(pickle.dumps(message))

    def _receive(self, wait_s: float) -> Any:
        """Return the next message; None: none came within `wait_s`. Raises `ChildEnded` for a lost child."""
        assert self._child is not None
        end_s = time.monotonic() + wait_s
        try:
            while not (said := self._child.wait(max(0.0, end_s - time.monotonic()))):
                pass  # the empty greeting
        except TimeoutError:
            return None
        self._asked_s = None
        return pickle.loads(said)  # noqa: S301 - our own child wrote it

    def _lose_ended(self, ended: ChildEnded) -> None:
        self._lose(f"its process ended ({ended.how}), see {self._log}")

    def _lose(self, why: str) -> None:
        """Give the child up, and plan the next one."""
        child, self._child = self._child, None
        self._asked_s, self._launched = None, False
        if child is not None:
            child.close()
        delay_s = self._backoff.next_delay_s(time.monotonic()) or self._backoff.longest_s
        self._again_s = time.monotonic() + delay_s
        if not self._lost:
            self._lost = True
            self._listener(RayLost(why))
