"""The fake network: which processes reach each other, and the delay and the fate of each message.

There are two kinds of traffic. A *stream* (link, watch) is ordered and breaks as a whole, as a connection does. Yet single
messages of it may be lost, repeated or overtaken, because the numbers on a link and the level state of a lease must
survive that. A *call* is one message each way, each with its own fate. A path that is cut holds messages until it is
healed, or until the connection is given up.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from sim.world.clock import Timeline
from sim.world.process import Process, Waker
from sim.world.server import FakeServer

GIVE_UP_S: Final = 4.0
"""A connection over a cut path breaks after this time. With real keep-alives it is 15 s; the difference does not matter
here."""


class Fate(Enum):
    """The fate of one message."""

    PASS = "pass"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"


@dataclass(slots=True)
class Weather:
    """The delays and losses of the network. Rates are shares of all messages, from 0 to 1."""

    delay_s: float = 0.001  # a message is delayed by this, times 0.5 to 1.5
    late: float = 0.0  # this share of messages comes later by `late_s` times 0 to 1
    late_s: float = 0.0
    link_loss: float = 0.0  # share that is dropped, repeated or overtaken on a link; a drop or an overtaking ends the link
    watch_loss: float = 0.0  # the same on a watch
    call_loss: float = 0.0  # the same for requests and answers of calls


class Tap(Protocol):
    """An observer of every step of the protocol, at both ends. It may kill or stop a process at that moment."""

    def sending(self, step: str, src: Process, dst: Process) -> Fate:
        """See a message before it is sent, and decide its fate."""

    def arriving(self, step: str, src: Process, dst: Process) -> None:
        """See a message before the receiver handles it."""


class Network:
    """The network between all simulated processes."""

    def __init__(self, timeline: Timeline, rng: random.Random, weather: Weather, tap: Tap) -> None:
        self.timeline = timeline
        self.rng = rng
        self.weather = weather
        self.servers: dict[str, tuple[Process, FakeServer]] = {}
        """The process and the server at each address. A process that died stays until another takes its address."""
        self.digest = 0
        self.messages = 0
        self.breaking: dict[object, Callable[[], None]] = {}
        """The functions that break the open connections, one each. Faults that hit only connections call them."""
        self._tap = tap
        self._world = Waker(timeline)
        self._cut: dict[tuple[str, str], int] = {}
        self._cuts = 0
        self._held: list[tuple[Process, Process, Callable[[], None]]] = []

    # Paths -----------------------------------------------------------------------------------------------------------

    def cut(self, src: str, dst: str) -> None:
        """Cut the path from `src` to `dst`, in this direction only. Messages that are on their way still arrive."""
        self._cuts += 1
        self._cut.setdefault((src, dst), self._cuts)

    def heal(self, src: str, dst: str) -> None:
        """Make the path from `src` to `dst` whole again. The messages that it held arrive now."""
        self._cut.pop((src, dst), None)
        held, self._held = self._held, []
        for src_process, dst_process, arrive in held:
            self._go(src_process, dst_process, 0.0, arrive)

    def heal_all(self) -> None:
        """Make every path whole again."""
        for src, dst in list(self._cut):
            self.heal(src, dst)

    def reaches(self, src: Process, dst: Process) -> bool:
        """Tell whether the path from `src` to `dst` is whole."""
        return (src.name, dst.name) not in self._cut

    def joined(self, a: Process, b: Process) -> bool:
        """Tell whether the paths between two processes are whole in both directions."""
        return self.reaches(a, b) and self.reaches(b, a)

    def note_death(self, dead: Process, other: Process, tell: Callable[[], None]) -> None:
        """Tell `other` that a process died. The kernel of the dead process resets its connections.

        Over a cut path the other end learns it only when it gives the connection up.
        """
        wait_s = self.delay_s() if self.joined(dead, other) else GIVE_UP_S
        other.loop.post(wait_s, tell)

    # Messages --------------------------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        """Draw the delay of one message, in seconds."""
        weather, rng = self.weather, self.rng
        delay_s = weather.delay_s * (0.5 + rng.random())
        if weather.late and rng.random() < weather.late:
            delay_s += rng.random() * weather.late_s
        return delay_s

    def fate(self, steps: tuple[str, ...], src: Process, dst: Process, loss: float) -> Fate:
        """Decide the fate of one message. The tap decides first, for directed faults; then the share `loss` decides. A bundle
        has several steps, and shares the first fate that the tap decides for one of them."""
        fates = [self._tap.sending(step, src, dst) for step in steps]
        fate = next((one for one in fates if one is not Fate.PASS), Fate.PASS)
        if fate is Fate.PASS and loss and self.rng.random() < loss:
            return self.rng.choice((Fate.DROP, Fate.DUPLICATE, Fate.REORDER))
        return fate

    def carry(
        self, steps: tuple[str, ...], src: Process, dst: Process, data: bytes, delay_s: float, receive: Callable[[bytes], None]
    ) -> None:
        """Bring `data` to `dst` after `delay_s`, or after the path is whole again, unless `dst` is dead then."""

        def arrive() -> None:
            for step in steps:
                self._tap.arriving(step, src, dst)
            if dst.alive:
                self._note("+".join(steps), src, dst, data)
                receive(data)

        self._go(src, dst, delay_s, arrive)

    def note(self, step: str, process: Process, detail: int = 0) -> None:
        """Add a step that is not a message to the run's digest."""
        line = f"{self.timeline.now_s:.9f} {step} {process.name} {detail}"
        self.digest = zlib.crc32(line.encode(), self.digest)

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back after `delay_s` seconds of the timeline, whichever process lives then."""
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
