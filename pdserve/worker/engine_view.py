"""The engine as the loop sees it: its last snapshot, the keys of its pool, and the watch over its steps. Loop thread only.

The engine outlives the lives of its worker, and so does this view: a role flip ends the member, and the next one looks at the
same view. Nothing in it belongs to a role, a link or an incarnation.

The watch tells whether the engine still makes steps. The engine owes a sign of life while it has not taken all commands, or
when its last snapshot said that it had work. An engine that waits for a command, or whose waiting sequences do not fit, owes
nothing: its snapshots say so. Time counts only while the loop itself runs, so a process that was stopped does not look stuck
when it goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from pdserve.worker.messages import Command, EngineSnapshot, StepEvents
from pdserve.worker.prefix_log import PrefixLog

LOOK_S: Final = 0.5
"""The seconds between two looks. The router knows at most one heartbeat later."""
MAX_STEPS_LATE: Final = 30
"""A step may take so many times the time of the slowest of the largest steps at the worker's start. Measured: a worker at a
lower priority, which shared its cores with two busy processes, took 28 times as long as alone."""


def step_timeout_s(configured_s: float, slowest_s: float) -> float:
    """Return the seconds after which a worker whose step does not end is lost. `slowest_s` is the time of the slowest of the
    largest steps at the start, with the compilation of kernels."""
    return max(configured_s, MAX_STEPS_LATE * slowest_s)


class EngineWatch:
    """The watch over one engine. `timeout_s` is the longest time that it may owe a step."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.stalled_s = 0.0
        """The time for which the engine has owed a step without a sign of life, in seconds."""
        self._submitted = 0
        self._taken = 0
        self._has_work = False
        self._owed = False  # True: it owed a step at the last look and has published no event since then

    def submitted(self) -> None:
        """Count one more command that waits for the engine."""
        self._submitted += 1

    def heard(self, events: StepEvents) -> None:
        """Take the engine's events, which are its sign of life."""
        self.stalled_s, self._owed = 0.0, False
        if events.snapshot is not None:
            self._taken, self._has_work = events.snapshot.commands_taken, events.snapshot.has_work

    @property
    def owes(self) -> bool:
        """True while the engine has not taken all commands, or has work."""
        return self._has_work or self._submitted > self._taken

    def look(self, elapsed_s: float) -> bool:
        """Return whether the engine is stuck. Call it every `LOOK_S`, with the seconds since the last call."""
        owes = self.owes
        # Work that came after the last look counts from this look on. A look that comes late counts at most two intervals,
        # because the loop could not hear the engine meanwhile.
        self.stalled_s = self.stalled_s + min(elapsed_s, 2 * LOOK_S) if owes and self._owed else 0.0
        self._owed = owes
        return self.stalled_s > self.timeout_s

    @property
    def reason(self) -> str:
        """The reason why the engine is stuck, in words."""
        return f"the engine has made no step for {self.stalled_s:.1f} s, of at most {self.timeout_s:.1f} s, while work waits"


class EngineView:
    """The loop's knowledge of one engine, from the start of the process to its end."""

    def __init__(
        self,
        snapshot: EngineSnapshot,
        submit: Callable[[Command], None],
        *,
        step_timeout_s: float,
        prefix_caching: bool = False,
        peak_flops_per_s: float = 0.0,
        peak_bytes_per_s: float = 0.0,
    ) -> None:
        """`peak_flops_per_s` and `peak_bytes_per_s` are those of the engine's device. 0: unknown."""
        self.peak_flops_per_s = peak_flops_per_s
        self.peak_bytes_per_s = peak_bytes_per_s
        self.snapshot = snapshot
        self.largest_step = snapshot.load.max_num_batched_tokens
        """The largest number of tokens in a step for which the engine has memory."""
        self.watch = EngineWatch(step_timeout_s)
        self.prefixes = PrefixLog() if prefix_caching else None
        """All keys that the pool holds. None: it shares no prefixes."""
        self.seq_ids = itertools.count(1)
        """The ids of new sequences. An engine never uses one twice, so all lives of its worker take theirs from here."""
        self._submit = submit

    def submit(self, command: Command) -> None:
        """Give a command to the engine. Raises `Overloaded` when its queue is full."""
        self._submit(command)
        self.watch.submitted()

    def on_step(self, events: StepEvents) -> None:
        """Take the events of an engine step."""
        self.watch.heard(events)
        if events.snapshot is not None:
            self.snapshot = events.snapshot
            if events.snapshot.keys is not None and self.prefixes is not None:
                self.prefixes.note(events.snapshot.keys)

    @property
    def empty(self) -> bool:
        """True when the engine has taken every command and has no sequence, and no block is held or quarantined."""
        load = self.snapshot.load
        blocks = load.blocks
        left = (load.running_sequences, load.queued_requests, blocks.held, blocks.quarantined)
        return not any(left) and not self.watch.owes
