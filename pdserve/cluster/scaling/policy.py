"""Scaling policies of the operator's own: each decides the size of one pool, in a process of its own.

The actuator never waits for one. It asks once an interval and reads the answer at a later poll. A policy that fails, in
whatever way, gives no size, so its pool keeps the one that it has. All times are seconds of one clock, passed in.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from pdserve.cluster.backoff import Backoff
from pdserve.cluster.errors import Interrupted
from pdserve.cluster.events import PolicyChanged, PolicyFault
from pdserve.cluster.member import HOUR_S
from pdserve.cluster.scaling.policy_child import Answer, Question
from pdserve.core.errors import ConfigError
from pdserve.killable_child import NO_ANSWER, ChildEnded, ChildProcess
from pdserve.observe.log_files import empty_if_large, open_log
from pdserve.planner.limits import MOST_WORKERS
from pdserve.planner.policy import PolicySize, ScalingContext

MODULE: Final = "pdserve.cluster.scaling.policy_child"
ANSWER_BYTES: Final = 16 << 10  # an answer has less than 3 KiB
START_LIMIT_S: Final = 30.0  # the import of a library for machine learning takes several seconds
LOOK_S: Final = 0.02
FIRST_S: Final = 1.0
LONGEST_S: Final = 300.0
TRIES: Final = 1_000  # so many starts never fit into an hour: a policy is not given up, since a mended module heals it


class PolicyState(Enum):
    """The state of a policy's process."""

    DOWN = "down"  # there is none
    STARTING = "starting"  # it imports the policy
    IDLE = "idle"
    ASKED = "asked"  # it owes an answer


Told = Callable[[PolicyChanged, float], None]


class ScalingPolicy:
    """The policy of one pool, with its process. `close` ends the process, and a later `follow` starts another."""

    def __init__(self, setting: str, name: str, timeout_s: float, log: Path, told: Told) -> None:
        """`told` hears of each new fault and of its end, with the time. `timeout_s`: the time for an answer."""
        self._setting, self._name, self._timeout_s, self._log, self._told = setting, name, timeout_s, log, told
        self._process: ChildProcess | None = None
        self._killed: list[ChildProcess] = []
        self._state = PolicyState.DOWN
        self._until_s = 0.0  # the limit of the state STARTING or ASKED, and the end of DOWN
        self._number = 0
        self._backoff = Backoff(TRIES, HOUR_S, FIRST_S, LONGEST_S)
        self.size = PolicySize(name)
        self.fault: PolicyFault | None = None
        self.faults = 0  # since the start

    @property
    def is_asked(self) -> bool:
        """True while the process owes an answer."""
        return self._state is PolicyState.ASKED

    def follow(self, now_s: float) -> None:
        """Take what the process says. End a process that is late. Start a process where there is none and the pause is over."""
        self._killed = [process for process in self._killed if not process.close(0.0)]
        if self._process is not None:
            self._hear(self._process, now_s)
        elif now_s >= self._until_s:
            self._start(now_s)

    def ask(self, context: ScalingContext, now_s: float) -> None:
        """Ask for a size. Where no process is ready, the last answer does not count any more, and none comes."""
        if self._state is not PolicyState.IDLE or self._process is None:
            self.size = PolicySize(self._name, fault=self.size.fault or "its process is not ready")
            return
        self._number += 1
        self._state, self._until_s = PolicyState.ASKED, now_s + self._timeout_s
        empty_if_large(self._log)
        try:
            self._process.send(msgspec.json.encode(Question(self._number, context)))
        except ChildEnded as exc:
            self._fail(PolicyFault.ENDED, _words(exc), now_s)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._killed.append(self._process)
            self._process = None
        self._state, self._until_s, self.size = PolicyState.DOWN, 0.0, PolicySize(self._name)
        for process in self._killed:
            process.close()
        self._killed.clear()

    def _start(self, now_s: float) -> None:
        self._state, self._until_s = PolicyState.STARTING, now_s + START_LIMIT_S
        try:
            self._process = _started(self._setting, self._name, self._log)
        except OSError as exc:
            self._fail(PolicyFault.NO_PROCESS, f"no process can be started for it: {exc.strerror}", now_s)

    def _hear(self, process: ChildProcess, now_s: float) -> None:
        try:
            answer = _answer(process)
        except ChildEnded as exc:
            self._fail(PolicyFault.ENDED, _words(exc), now_s)
            return
        if answer is not None:
            self._take(answer, now_s)
        elif now_s >= self._until_s and self._state is PolicyState.ASKED:
            self._fail(PolicyFault.LATE, f"it gave no answer within {self._timeout_s:g} s", now_s)
        elif now_s >= self._until_s and self._state is PolicyState.STARTING:
            self._fail(PolicyFault.CANNOT_START, f"it was not imported within {START_LIMIT_S:g} s", now_s)

    def _take(self, answer: Answer, now_s: float) -> None:
        expected = {PolicyState.STARTING: 0, PolicyState.ASKED: self._number}.get(self._state)
        if answer.number != expected:
            self._fail(PolicyFault.ENDED, "its process gave an answer that nobody asked for", now_s)
        elif answer.fault == PolicyFault.CANNOT_START.value:
            self._fail(PolicyFault.CANNOT_START, answer.detail, now_s)
        elif self._state is PolicyState.STARTING:
            self._state = PolicyState.IDLE
        elif answer.workers is None:
            self._state = PolicyState.IDLE
            raised = answer.fault == PolicyFault.RAISED.value
            self._note(PolicyFault.RAISED if raised else PolicyFault.NOT_A_SIZE, answer.detail, now_s)
        else:
            self._state = PolicyState.IDLE
            self.size = PolicySize(self._name, answer.workers)
            if self.fault is not None:
                self.fault = None
                self._told(PolicyChanged(f"{self._setting}: {self._name} gives sizes again", None), now_s)

    def _fail(self, fault: PolicyFault, detail: str, now_s: float) -> None:
        """End the process. Another one is started after a pause, which is longer each time."""
        pause_s = self._backoff.next_delay_s(now_s)
        self._state, self._until_s = PolicyState.DOWN, now_s + (LONGEST_S if pause_s is None else pause_s)
        if self._process is not None:
            self._process.close(0.0)
            self._killed.append(self._process)
            self._process = None
        self._note(fault, detail, now_s)

    def _note(self, fault: PolicyFault, detail: str, now_s: float) -> None:
        """Note that there is no size. A fault of the same kind as the last one is told only once."""
        self.size = PolicySize(self._name, fault=detail)
        self.faults += 1
        if fault is not self.fault:
            self.fault = fault
            text = f"{self._setting}: {self._name} gives no size, so the pool keeps the one that it has: {detail}"
            self._told(PolicyChanged(text, fault), now_s)


def check_policy(setting: str, name: str, log: Path, stop: threading.Event) -> None:
    """Check that a process can import the policy. It blocks for at most `START_LIMIT_S`, and leaves no process.

    Raises `ConfigError` that names the setting, and `Interrupted` if `stop` is set meanwhile.
    """
    try:
        process = _started(setting, name, log)
    except OSError as exc:
        raise ConfigError(f"{setting} is {name!r}, and no process can be started for it: {exc.strerror}") from exc
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while (answer := _answer(process)) is None:
            if stop.wait(LOOK_S):
                raise Interrupted
            if time.monotonic() > deadline:
                raise ConfigError(f"{setting} is {name!r}, and was not imported within {START_LIMIT_S:g} s; see {log}")
        if answer.fault:
            raise ConfigError(answer.detail)
    except ChildEnded as exc:
        raise ConfigError(f"{setting} is {name!r}, and cannot be imported: {_words(exc)}; see {log}") from exc
    finally:
        process.close()


def _started(setting: str, name: str, log: Path) -> ChildProcess:
    """Start a process that imports the policy. Raises `OSError` if no process can be made."""
    with open_log(log) as file:
        return ChildProcess([sys.executable, "-m", MODULE, setting, name], ANSWER_BYTES, stderr=file)


def _answer(process: ChildProcess) -> Answer | None:
    """Return the next answer. None: there is none yet. Raises `ChildEnded`, also if the policy itself has written it."""
    message = process.answer()
    if message is None:
        return None
    try:
        answer = msgspec.json.decode(message, type=Answer)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ChildEnded(NO_ANSWER) from exc
    if answer.workers is not None and not 0 <= answer.workers <= MOST_WORKERS:
        raise ChildEnded(NO_ANSWER)
    return answer


def _words(exc: ChildEnded) -> str:
    return f"its process ended: {exc.how}"
