"""One simulated process: three threads that live, stop and die together, and a clock that may run fast or slow."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.sim.clock import SimLoop, Timeline


class Process:
    """`name` stays over restarts, as an address does; the object is one incarnation of it."""

    def __init__(self, timeline: Timeline, name: str, role: str, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self.name = name
        self.role = role
        self.timeline = timeline
        self.loop = SimLoop(timeline, f"{name} loop", rate=rate, offset_s=offset_s)
        self.engine_loop = SimLoop(timeline, f"{name} engine", rate=rate, offset_s=offset_s)
        self.transfer_loop = SimLoop(timeline, f"{name} transfer", rate=rate, offset_s=offset_s)
        self.on_death: dict[object, Callable[[], None]] = {}
        """What the rest of the world does when this process dies, in order."""
        self.disturbed = False
        """Was killed or stopped."""
        self.hung = False
        """Its engine hangs, and its loop goes on."""
        self._stops = 0

    @property
    def alive(self) -> bool:
        return not self.loop.dead

    @property
    def threads(self) -> tuple[SimLoop, ...]:
        return (self.loop, self.engine_loop, self.transfer_loop)

    def kill(self) -> None:
        """SIGKILL: from here on nothing that its code still does has an effect. Idempotent."""
        if not self.alive:
            return
        self.disturbed = True
        for thread in self.threads:
            thread.dead = True
        watchers, self.on_death = list(self.on_death.values()), {}
        for watcher in watchers:
            watcher()

    def stop(self, stop_s: float) -> None:
        """SIGSTOP, and SIGCONT later. Overlapping ones add up to the longest."""
        self.disturbed = True
        self._stops += 1
        for thread in self.threads:
            thread.frozen = True
        Waker(self.timeline).post(stop_s, self._go_on)

    def stop_engine(self, stop_s: float) -> None:
        """A device that hangs for a while; the loop goes on."""
        self.engine_loop.frozen = True
        Waker(self.timeline).post(stop_s, self._thaw_engine)

    def hang_engine(self) -> None:
        """A device that never answers again."""
        self.engine_loop.frozen = self.hung = True

    def stop_loop(self, stop_s: float) -> None:
        """The loop thread does not get to run; reads and the engine go on without anybody who renews a lease."""
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
    """The world's own timers, of which no process is the owner."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline, "world")
