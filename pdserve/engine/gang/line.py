"""Lines from rank 0 to threads of the other ranks, which answer questions in their order.

Steps do not pass here: the ranks meet for them. A line is for what a rank does to its own memory when rank 0 says so: reads of
peers' blocks, checksums, conversions. Both ends are processes of one gang, so messages are pickled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from pdserve.core.errors import InternalBug, PdserveError, ReplicaLost

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S: Final = 60.0
"""A rank that has not answered after this time is lost. Checksums and conversions take milliseconds, and a copy of a whole
prompt within one machine takes less than a second."""


class RankAnswer:
    """The answer to one question, once it is there."""

    __slots__ = ("_error", "_value", "done", "due_s")

    def __init__(self) -> None:
        self.done = False
        self.due_s = time.monotonic() + ANSWER_S
        """The time until which the rank may answer."""
        self._value: Any = None
        self._error: PdserveError | None = None

    @property
    def value(self) -> Any:
        """The value that the rank returned. Raises what it raised. It must be `done`."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._value

    def set(self, value: Any, error: PdserveError | None = None) -> None:
        """Note the value that the rank returned, or the error that it raised."""
        self.done, self._value, self._error = True, value, error


class RankLine:
    """Rank 0's end of one line. One thread asks at a time, and any thread may close."""

    def __init__(self, rank: int, connection: Connection, on_lost: Callable[[str], None] = lambda _: None) -> None:
        """`on_lost` is called with the reason when the rank is lost, before its questions fail. It must end the rank: one that
        was only late would go on writing into its memory, which others use by then."""
        self.rank = rank
        self._connection = connection
        self._on_lost = on_lost
        self._asked: deque[RankAnswer] = deque()
        self._lost: ReplicaLost | None = None
        self._lock = threading.RLock()

    def ask(self, name: str, *args: Any) -> RankAnswer:
        """Ask for the method `name` of what serves the line. The answer comes later, or is `ReplicaLost`."""
        answer = RankAnswer()
        with self._lock:
            if self._lost is None:
                try:
                    self._connection.send((name, args))
                except OSError as exc:
                    self._lose(str(exc))
            if self._lost is None:
                self._asked.append(answer)
            else:
                answer.set(None, self._lost)
        return answer

    def take(self, wait_s: float = 0.0) -> None:
        """Take the answers that have come. Wait at most `wait_s` for the first of them."""
        with self._lock:
            try:
                while self._asked and self._connection.poll(wait_s):
                    value, error = self._connection.recv()
                    self._asked.popleft().set(value, error)
                    wait_s = 0.0
            except (OSError, EOFError) as exc:
                self._lose(str(exc) or "its process has ended")

    def settle(self, answer: RankAnswer) -> None:
        """Return when an answer is there, or the rank is lost because it does not answer."""
        while not answer.done:
            left_s = answer.due_s - time.monotonic()
            if left_s <= 0.0:
                self._lose(f"no answer within {ANSWER_S:.0f} s")
            self.take(max(left_s, 0.0))

    def call(self, name: str, *args: Any) -> Any:
        """Ask, wait for the answer, and return its value. Raises what the rank raised, and `ReplicaLost` when it is lost."""
        answer = self.ask(name, *args)
        self.settle(answer)
        return answer.value

    def close(self) -> None:
        """Close the line to a rank that has ended. Questions without an answer fail. Idempotent."""
        with self._lock:  # a thread that still waits for an answer has seen that the rank has ended
            self._fail("the gang has ended")
            self._connection.close()

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._on_lost(reason)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._lost = self._lost or ReplicaLost(f"rank {self.rank}: {reason}")
        while self._asked:
            self._asked.popleft().set(None, self._lost)


class RankLines:
    """Lines to several ranks, which are all asked at once. Any thread may ask."""

    def __init__(self, lines: Mapping[int, RankLine]) -> None:
        self._lines = lines
        self._lock = threading.Lock()

    def ask_each(self, questions: Mapping[int, tuple[Any, ...]], meanwhile: Callable[[], T]) -> tuple[T, list[Any]]:
        """Ask ranks by their numbers, each for a method with arguments, do rank 0's part meanwhile, and wait for the answers.

        Returns the result of `meanwhile`, and the answers in the order of the questions. Raises the first error, but not before
        all ranks have answered: a rank that still works writes into memory that the asker may use again.
        """
        with self._lock, ExitStack() as answered:
            answers = []
            for rank, question in questions.items():
                answers.append(self._lines[rank].ask(*question))
                answered.callback(self._lines[rank].settle, answers[-1])
            own = meanwhile()
        return own, [answer.value for answer in answers]


def serve(connection: Connection, handler: object) -> None:
    """Answer the questions of a line by the methods of `handler`, until the line closes."""
    while True:
        try:
            name, args = connection.recv()
        except (EOFError, OSError):
            return
        answer: tuple[Any, PdserveError | None]
        try:
            answer = getattr(handler, name)(*args), None
        except PdserveError as exc:
            answer = None, exc
        except Exception as exc:  # rank 0 hears of it, and decides
            log.exception("a rank cannot %s", name)
            answer = None, InternalBug(f"a rank cannot {name}: {exc!r}")
        try:
            connection.send(answer)
        except OSError:
            return
