"""Virtual time: one timeline, and on it one event loop for each simulated thread, with a clock of its own.

Nothing sleeps: when no callback is ready, time jumps to the next timer. A loop may be skewed (its seconds are longer or
shorter), frozen (its due callbacks wait, as in a stopped process) or dead (its callbacks never run again, not even for
clean-up, as after SIGKILL). Production asyncio code runs on these loops unchanged.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

MAX_AT_ONCE: Final = 100_000
"""The most callbacks at one moment. More callbacks mean a loop that never waits."""


class Livelock(AssertionError):
    """Virtual time stands still although callbacks run."""


class Timeline:
    """The order of all callbacks. It owns `now_s`, which simulated code sees only through the clock of its loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.callbacks = 0
        self.errors: list[str] = []
        """Exceptions that were not caught. Each is a bug."""
        self._timers: list[tuple[float, int, SimLoop, events.Handle]] = []
        self._count = 0
        self._ready: deque[tuple[SimLoop, events.Handle]] = deque()

    def soon(self, loop: SimLoop, handle: events.Handle) -> None:
        """Run the callback of `loop` at the present moment, after those that are ready already."""
        self._ready.append((loop, handle))

    def at(self, due_s: float, loop: SimLoop, handle: events.Handle) -> None:
        """Run the callback of `loop` at the moment `due_s` of the timeline, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._timers, (max(due_s, self.now_s), self._count, loop, handle))

    def run(self, done: Callable[[], bool], *, until_s: float) -> bool:
        """Run callbacks until `done` returns True, or until the moment `until_s`. Tell whether `done` did.

        `done` is asked whenever time is about to move. The run also ends when no timer is left, since no event can happen any
        more. Raises `Livelock` when more than `MAX_AT_ONCE` callbacks run at one moment.
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
            handle._run()  # BaseEventLoop calls it too; errors go to the loop's handler
        finally:
            events._set_running_loop(None)


if TYPE_CHECKING:  # a loop here lacks sockets, processes and signals on purpose, since they would touch the real world
    _Base = asyncio.SelectorEventLoop
else:
    _Base = asyncio.AbstractEventLoop


class SimLoop(_Base):
    """The event loop of one simulated thread. Its clock shows `offset_s + rate * now_s`."""

    def __init__(self, timeline: Timeline, name: str, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        assert rate > 0
        self.name = name
        self.dead = False
        self.frozen = False
        self.backlog: list[events.Handle] = []
        self.in_thread: Callable[[Callable[[], Any], asyncio.Future[Any]], None] | None = None
        """Does work as a thread of an executor would, and sets the future on this loop. None: there is no such thread."""
        self._timeline = timeline
        self._rate = rate
        self._offset_s = offset_s

    def thaw(self) -> None:
        """End the freeze. The callbacks that became due in it run now, in the order in which they became due."""
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        for handle in backlog:
            self._timeline.soon(self, handle)

    def post(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> events.Handle:
        """Let a callback arrive from outside the thread after `delay_s` seconds of the timeline, not of the loop's clock."""
        handle = events.Handle(callback, args, self)
        self._timeline.at(self._timeline.now_s + delay_s, self, handle)
        return handle

    # The methods that asyncio calls on a loop.

    def time(self) -> float:
        """Return the time of this loop's clock, in seconds."""
        return self._offset_s + self._rate * self._timeline.now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> events.Handle:  # type: ignore[override]
        """Run the callback at the present moment. A dead loop drops it."""
        handle = events.Handle(callback, args, self, context)
        if not self.dead:
            self._timeline.soon(self, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        """Run the callback after `delay` seconds of this loop's clock."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        """Run the callback when this loop's clock shows `when`. A dead loop drops it."""
        handle = events.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            self._timeline.at((when - self._offset_s) / self._rate, self, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """Make a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Make a task of this loop."""
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Give the call to `in_thread`. Asserts that it is set, since a real thread would break the simulation."""
        assert self.in_thread is not None, "a thread in the simulation"
        done = self.create_future()
        self.in_thread(partial(func, *args), done)
        return done

    def get_debug(self) -> bool:
        """Return False: asyncio's debug mode is off."""
        return False

    def is_running(self) -> bool:
        """Tell whether the loop is alive."""
        return not self.dead

    def is_closed(self) -> bool:
        """Return False: loops are never closed here."""
        return False

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass  # the timeline skips a cancelled timer when its time comes

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note an uncaught exception in `Timeline.errors`. Exceptions of a dead loop are dropped."""
        error = context.get("exception")
        if not self.dead and error is not None:
            self._timeline.errors.append(f"{self.name} at {self._timeline.now_s:.3f} s: {context['message']}: {error!r}")


def bury(loop: SimLoop) -> None:
    """End the tasks of a loop that will never run again, without warnings from asyncio."""
    loop.dead = True
    events._set_running_loop(loop)
    try:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())
    finally:
        events._set_running_loop(None)


def _close(coro: Any) -> None:
    for _ in range(16):  # each await in a clean-up raises RuntimeError once
        try:
            coro.close()
        except RuntimeError:
            continue
        except BaseException:  # noqa: BLE001 - nobody would see the errors of a dead process
            pass
        return
