"""The wanted sizes of the pools: who decides them, why they are so, and what changed them. Pure.

In the mode FIXED the sizes are as configured or as an operator ordered. A worker that an operator drains then makes its pool
smaller, so that nobody starts another one. In the mode AUTOMATIC the planner decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdserve.cluster.scaling.limits import obstacle_of, sizes_of
from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolSizes

EVENTS: Final = 64  # events that wait for the router; while it is away, the oldest are forgotten


class Mode(Enum):
    """The two ways by which sizes are decided."""

    FIXED = "fixed"
    AUTOMATIC = "automatic"


@dataclass(frozen=True, slots=True)
class Resized:
    """An event of the history, and the wanted sizes after it."""

    at_s: float
    text: str
    sizes: PoolSizes


@dataclass(frozen=True, slots=True)
class Order:
    """An order of an operator. None: the pool keeps its size. `automatic`: the planner decides from now on."""

    number: int
    prefill: int | None = None
    decode: int | None = None
    automatic: bool = False

    @property
    def roles(self) -> list[Role]:
        """The pools whose sizes the order gives."""
        return [role for role, size in ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode)) if size is not None]


class WantedSizes:
    """The wanted sizes of both pools. All times are seconds of one clock, passed in."""

    def __init__(self, sizes: PoolSizes, limits: Limits, *, automatic: bool, unlimited: str) -> None:
        """unlimited: the reason why the planner may not decide. Empty: it may."""
        self.sizes = sizes
        self.mode = Mode.AUTOMATIC if automatic else Mode.FIXED
        self.reasons: tuple[str, ...] = ("The sizes are as configured.",)
        self.taken = 0  # the number of the last order
        self.refused = ""  # the reason why it was not followed
        self.events: deque[Resized] = deque(maxlen=EVENTS)  # those that the router does not have yet
        self.news: list[Resized] = []  # those that the listener was not told yet
        self.ordered: PoolSizes | None = None  # as operators left them; None: as configured
        self._limits = limits
        self._unlimited = unlimited

    def take(self, order: Order, now_s: float) -> bool:
        """Follow an order, or keep the reason why not in `refused`. False: the order was taken already."""
        if order.number == self.taken:
            return False
        self.taken, self.refused = order.number, ""
        if order.automatic:
            self.refused = self._unlimited
            if not self.refused:
                self.mode, self.ordered = Mode.AUTOMATIC, None
                self._note(f"order {order.number}: the planner decides the sizes", now_s)
        else:
            sizes = sizes_of(order.prefill, order.decode, self.sizes)
            self.refused = obstacle_of(order.prefill, order.decode, self.sizes, self._limits)
            if not self.refused:
                self.mode, self.reasons = Mode.FIXED, (f"An operator ordered the sizes (order {order.number}).",)
                self._become(sizes, f"order {order.number} of an operator", now_s)
                self.ordered = self.sizes
        if self.refused:
            self._note(f"order {order.number} is refused: {self.refused}", now_s)
        return True

    def plan(self, sizes: PoolSizes, reasons: tuple[str, ...], now_s: float) -> None:
        """Follow the planner. It decides nothing in the mode FIXED."""
        if self.mode is Mode.AUTOMATIC:
            self.reasons = reasons
            if sizes != self.sizes:
                self._become(sizes, _relevant(reasons, self.sizes, sizes), now_s)

    def keep(self, ordered: PoolSizes) -> None:
        """Take over what operators ordered of an earlier actuator."""
        self.mode, self.sizes, self.ordered = Mode.FIXED, ordered, ordered
        self.reasons = ("An operator ordered the sizes before this `pdserve up` came.",)

    def drained(self, role: Role, why: str, now_s: float) -> None:
        """Let the pool become smaller, since an operator drained one of its workers. In the mode AUTOMATIC it is replaced."""
        if self.mode is Mode.FIXED:
            prefill = self.sizes.prefill - (role is Role.PREFILL)
            decode = self.sizes.decode - (role is Role.DECODE)
            self._become(PoolSizes(max(0, prefill), max(0, decode)), why, now_s)
            self.ordered = self.sizes
        else:
            self._note(why, now_s)

    def moved(self, role: Role, why: str, now_s: float, settled: frozenset[Role] = frozenset()) -> None:
        """Let a worker that changed its role by an operator's order count for its new pool, `role`. The pools of `settled` keep
        their sizes. In the mode AUTOMATIC the planner decides what follows."""
        if self.mode is Mode.FIXED:
            more = 1 if role is Role.PREFILL else -1
            prefill = self.sizes.prefill + (0 if Role.PREFILL in settled else more)
            decode = self.sizes.decode - (0 if Role.DECODE in settled else more)
            self._become(PoolSizes(max(0, prefill), max(0, decode)), why, now_s)
            self.ordered = self.sizes
        else:
            self._note(why, now_s)

    def new_router(self) -> None:
        """Forget the number of the last order, since another router counts from the beginning. The sizes stay."""
        self.taken, self.refused = 0, ""

    def note(self, text: str, now_s: float) -> None:
        """Add an event that changes no size."""
        self._note(text, now_s)

    def record(self, text: str, now_s: float) -> None:
        """Add an event for the router alone. The listener gets it in another form."""
        self.events.append(Resized(now_s, text, self.sizes))

    def _become(self, sizes: PoolSizes, why: str, now_s: float) -> None:
        changes = [
            f"{name} {before} -> {after}"
            for name, before, after in (
                ("prefill", self.sizes.prefill, sizes.prefill),
                ("decode", self.sizes.decode, sizes.decode),
            )
            if before != after
        ]
        self.sizes = sizes
        self._note(f"{', '.join(changes) or 'the sizes stay'}: {why}", now_s)

    def _note(self, text: str, now_s: float) -> None:
        self.news.append(Resized(now_s, text, self.sizes))
        self.events.append(self.news[-1])


def _relevant(reasons: tuple[str, ...], before: PoolSizes, after: PoolSizes) -> str:
    """Return the reasons that are about the pools that change, and all where none is."""
    changed = [name for name in ("prefill", "decode") if getattr(before, name) != getattr(after, name)]
    about = [reason for reason in reasons if any(name in reason for name in changed)]
    return " ".join(about or reasons) or "the planner decided so"
