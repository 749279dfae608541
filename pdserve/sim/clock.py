"""Virtual time. One timeline; on it an event loop for each simulated thread, each with a clock of its own.

Nothing sleeps: when no callback is ready, time jumps to the next timer. A loop may be skewed (its seconds are longer or
shorter), frozen (what is due for it waits, as for a stopped process) or dead (nothing of it ever runs again, no clean-up
either, as after SIGKILL). Production asyncio code runs on these loops unchanged.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NoReturn

MAX_AT_ONCE: Final = 100_000
"""Callbacks at one moment: more is a loop that never waits."""


class Livelock(AssertionError):
    """Virtual time stands still although callbacks run."""


class Timeline:
    """The order of everything. Owner of `now_s`, which no simulated code sees but through its loop's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.callbacks = 0
        self.errors: list[str] = []
        """Exceptions that nobody caught: each is a bug."""
        self._timers: list[tuple[float, int, SimLoop, events.Handle]] = []
        self._count = 0
        self._ready: deque[tuple[SimLoop, events.Handle]] = deque()

    def soon(self, loop: SimLoop, handle: events.Handle) -> None:
        self._ready.append((loop, handle))

    def at(self, due_s: float, loop: SimLoop, handle: events.Handle) -> None:
        self._count += 1
        heapq.heappush(self._timers, (max(due_s, self.now_s), self._count, loop, handle))

    def run(self, done: Callable[[], bool], *, until_s: float) -> bool:
        """Until `done` (looked at whenever time is about to move), or until that moment. True: done.

        Without timers nothing can ever happen again, which is also an end.
        """
        at_once = 0
        while True:
            while self._ready:
                self._call(*self._ready.popleft())
                at_once += 1
                if at_once > MAX_AT_ONCE:
                    raise Livelock(f"{at_once} callbacks at {self.now_s:.6f} s")
            if done():
                return True
            if not self._timers or self._timers[0][0] > until_s:
                self.now_s = max(self.now_s, until_s)
                return False
            due_s, _, loop, handle = heapq.heappop(self._timers)
            if due_s > self.now_s:
                self.now_s, at_once = due_s, 0
            if not handle.cancelled():
                self._ready.append((loop, handle))

    def _call(self, loop: SimLoop, handle: events.Handle) -> None:
        if loop.dead or handle.cancelled():
            return
        if loop.frozen:
            loop.backlog.append(handle)
            return
        self.callbacks += 1
        events._set_running_loop(loop)
        try:
            handle._run()  # what BaseEventLoop calls; errors go to the loop's handler
        finally:
            events._set_running_loop(None)


if TYPE_CHECKING:  # a loop lacks on purpose what would touch the world: sockets, processes, signals
    _Base = asyncio.SelectorEventLoop
else:
    _Base = asyncio.AbstractEventLoop


class SimLoop(_Base):
    """One simulated thread's loop. Its clock shows `offset_s + rate * now_s`."""

    def __init__(self, timeline: Timeline, name: str, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        assert rate > 0
        self.name = name
        self.dead = False
        self.frozen = False
        self.backlog: list[events.Handle] = []
        self._timeline = timeline
        self._rate = rate
        self._offset_s = offset_s

    def thaw(self) -> None:
        """What was due meanwhile runs now, in the order in which it became due."""
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        for handle in backlog:
            self._timeline.soon(self, handle)

    def post(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> events.Handle:
        """From outside the thread, in seconds of the timeline: an arrival, not a timer of its own."""
        handle = events.Handle(callback, args, self)
        self._timeline.at(self._timeline.now_s + delay_s, self, handle)
        return handle

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._offset_s + self._rate * self._timeline.now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> events.Handle:  # type: ignore[override]
        handle = events.Handle(callback, args, self, context)
        if not self.dead:
            self._timeline.soon(self, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        handle = events.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            self._timeline.at((when - self._offset_s) / self._rate, self, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise AssertionError("a thread in the simulation")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass  # it is skipped when its time comes

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self.dead and error is not None:
            self._timeline.errors.append(f"{self.name} at {self._timeline.now_s:.3f} s: {context['message']}: {error!r}")


def bury(loop: SimLoop) -> None:
    """End the tasks of a loop that will never run again, without a word from asyncio."""
    loop.dead = True
    events._set_running_loop(loop)
    try:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())
    finally:
        events._set_running_loop(None)


def _close(coro: Any) -> None:
    for _ in range(16):  # each await in a clean-up is refused once
        try:
            coro.close()
        except RuntimeError:
            continue
        except BaseException:  # noqa: BLE001 - what a dead process would say, nobody hears
            pass
        return
