"""One simulated process: three threads that live, stop and die together, and a clock that may run fast or slow."""

from __future__ import annotations

from collections.abc import Callable

from sim.world.clock import SimLoop, Timeline


class Process:
    """One incarnation of a process. Its `name` stays the same over restarts, as an address does."""

    def __init__(self, timeline: Timeline, name: str, role: str, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self.name = name
        self.role = role
        self.timeline = timeline
        self.loop = SimLoop(timeline, f"{name} loop", rate=rate, offset_s=offset_s)
        self.engine_loop = SimLoop(timeline, f"{name} engine", rate=rate, offset_s=offset_s)
        self.transfer_loop = SimLoop(timeline, f"{name} transfer", rate=rate, offset_s=offset_s)
        self.on_death: dict[object, Callable[[], None]] = {}
        """The functions that are called, in order, when this process dies."""
        self.disturbed = False
        """True once the process was killed, or it or its loop was stopped."""
        self.hung = False
        """True while the engine hangs; the loop goes on."""
        self._stops = 0

    @property
    def alive(self) -> bool:
        """True until the process is killed."""
        return not self.loop.dead

    @property
    def threads(self) -> tuple[SimLoop, ...]:
        """The loops of the three threads."""
        return (self.loop, self.engine_loop, self.transfer_loop)

    def kill(self) -> None:
        """Kill the process, as SIGKILL does: its code has no effect any more. Idempotent."""
        if not self.alive:
            return
        self.disturbed = True
        for thread in self.threads:
            thread.dead = True
        watchers, self.on_death = list(self.on_death.values()), {}
        for watcher in watchers:
            watcher()

    def stop(self, stop_s: float) -> None:
        """Stop all threads, as SIGSTOP does, and continue after `stop_s`. Of stops that overlap, the last end counts."""
        self.disturbed = True
        self._stops += 1
        for thread in self.threads:
            thread.frozen = True
        Waker(self.timeline).post(stop_s, self._go_on)

    def stop_engine(self, stop_s: float) -> None:
        """Stop only the engine for `stop_s`, as a device that hangs does. The loop goes on."""
        self.engine_loop.frozen = True
        Waker(self.timeline).post(stop_s, self._thaw_engine)

    def hang_engine(self) -> None:
        """Stop the engine for good, as a device that never answers again does."""
        self.engine_loop.frozen = self.hung = True

    def stop_loop(self, stop_s: float) -> None:
        """Stop only the loop thread for `stop_s`. Reads and the engine go on, but no lease is renewed."""
        self.disturbed = True
        self.loop.frozen = True
        Waker(self.timeline).post(stop_s, self._thaw_loop)

    def _go_on(self) -> None:
        self._stops -= 1
        if self._stops == 0:
            for thread in self.threads:
                if thread is not self.engine_loop or not self.hung:
                    thread.thaw()

    def _thaw_loop(self) -> None:
        if self._stops == 0:
            self.loop.thaw()

    def _thaw_engine(self) -> None:
        if self._stops == 0 and not self.hung:
            self.engine_loop.thaw()


class Waker(SimLoop):
    """A loop for timers that belong to no process."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline, "world")
