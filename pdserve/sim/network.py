"""The fake network: who reaches whom, how late, and what happens to a message on the way.

Two kinds of traffic. A *stream* (link, watch) is ordered and breaks as a whole, as a connection does; yet single
messages of it may be lost, repeated or overtaken, because that is what the numbers on a link and the level state of a
lease must survive. A *call* is one message each way, each with its own fate. A path that is cut holds what is sent until
it is healed, or until the connection is given up.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from pdserve.sim.clock import Timeline
from pdserve.sim.process import Process, Waker
from pdserve.sim.server import FakeServer

GIVE_UP_S: Final = 4.0
"""A connection over a cut path is broken after so long; with real keep-alives 15 s, of which nothing here depends."""


class Fate(Enum):
    """Of one message."""

    PASS = "pass"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"


@dataclass(slots=True)
class Weather:
    """How bad it is. Rates are shares of messages."""

    delay_s: float = 0.001  # of most messages, times 0.5 to 1.5
    late: float = 0.0  # share that is `late_s` times 0 to 1 later
    late_s: float = 0.0
    link_loss: float = 0.0  # any of the three faults on a link: each loss or overtaking costs the link
    watch_loss: float = 0.0
    call_loss: float = 0.0


class Tap(Protocol):
    """Sees every step of the protocol, at both ends. May kill or stop a process on the spot."""

    def sending(self, step: str, src: Process, dst: Process) -> Fate: ...

    def arriving(self, step: str, src: Process, dst: Process) -> None: ...


class Network:
    def __init__(self, timeline: Timeline, rng: random.Random, weather: Weather, tap: Tap) -> None:
        self.timeline = timeline
        self.rng = rng
        self.weather = weather
        self.servers: dict[str, tuple[Process, FakeServer]] = {}
        """By address. A process that died is found until another takes its address."""
        self.digest = 0
        self.messages = 0
        self.breaking: dict[object, Callable[[], None]] = {}
        """Breaks one open connection, for faults that hit a connection alone."""
        self._tap = tap
        self._world = Waker(timeline)
        self._cut: dict[tuple[str, str], int] = {}
        self._cuts = 0
        self._held: list[tuple[Process, Process, Callable[[], None]]] = []

    # Paths -----------------------------------------------------------------------------------------------------------

    def cut(self, src: str, dst: str) -> None:
        """One way. What is on its way already arrives."""
        self._cuts += 1
        self._cut.setdefault((src, dst), self._cuts)

    def heal(self, src: str, dst: str) -> None:
        self._cut.pop((src, dst), None)
        held, self._held = self._held, []
        for src_process, dst_process, arrive in held:
            self._go(src_process, dst_process, 0.0, arrive)

    def heal_all(self) -> None:
        for src, dst in list(self._cut):
            self.heal(src, dst)

    def reaches(self, src: Process, dst: Process) -> bool:
        return (src.name, dst.name) not in self._cut

    def joined(self, a: Process, b: Process) -> bool:
        return self.reaches(a, b) and self.reaches(b, a)

    def note_death(self, dead: Process, other: Process, tell: Callable[[], None]) -> None:
        """The kernel of a killed process resets its connections; over a cut path the other end gives up by itself."""
        wait_s = self.delay_s() if self.joined(dead, other) else GIVE_UP_S
        other.loop.post(wait_s, tell)

    # Messages --------------------------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        weather, rng = self.weather, self.rng
        delay_s = weather.delay_s * (0.5 + rng.random())
        if weather.late and rng.random() < weather.late:
            delay_s += rng.random() * weather.late_s
        return delay_s

    def fate(self, step: str, src: Process, dst: Process, loss: float) -> Fate:
        """Decided by the tap for directed faults, else by the weather."""
        fate = self._tap.sending(step, src, dst)
        if fate is Fate.PASS and loss and self.rng.random() < loss:
            return self.rng.choice((Fate.DROP, Fate.DUPLICATE, Fate.REORDER))
        return fate

    def carry(
        self, step: str, src: Process, dst: Process, data: bytes, delay_s: float, receive: Callable[[bytes], None]
    ) -> None:
        """Bring `data` to `dst` after `delay_s`, or after the path is whole again, unless `dst` is dead then."""

        def arrive() -> None:
            self._tap.arriving(step, src, dst)
            if dst.alive:
                self._note(step, src, dst, data)
                receive(data)

        self._go(src, dst, delay_s, arrive)

    def note(self, step: str, process: Process, detail: int = 0) -> None:
        """A step that is not a message: part of the run's digest as well."""
        line = f"{self.timeline.now_s:.9f} {step} {process.name} {detail}"
        self.digest = zlib.crc32(line.encode(), self.digest)

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._world.post(delay_s, callback)

    def _go(self, src: Process, dst: Process, delay_s: float, arrive: Callable[[], None]) -> None:
        if self.reaches(src, dst):
            dst.loop.post(delay_s, arrive)
        else:
            self._held.append((src, dst, arrive))

    def _note(self, step: str, src: Process, dst: Process, data: bytes) -> None:
        self.messages += 1
        line = f"{self.timeline.now_s:.9f} {step} {src.name} {dst.name} "
        self.digest = zlib.crc32(data, zlib.crc32(line.encode(), self.digest))
