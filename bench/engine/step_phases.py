"""Where one thread's CPU time goes between two calls of the model, whole or by phase.

A look at the thread's clock takes 0.3 us, or 5 when a step of the model has swept the caches, so the whole is measured
without a look in between, and the phases apart from it: their sum is more than the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

Probe = tuple[Any, str, str]
"""(owner, name, phase): the time of `owner.name` that is not of another probe's function belongs to the phase."""


@dataclass(slots=True)
class Watch:
    """While entered, costs of one thread's steps: lists of microseconds, one entry a step."""

    model: list[tuple[Any, str]]
    probes: Iterable[Probe] = ()
    outside_us: list[float] = field(default_factory=list)
    """CPU time between the end of the model's last call and the beginning of this one."""
    step_us: list[float] = field(default_factory=list)
    """From one beginning to the next."""
    phases_us: list[dict[str, float]] = field(default_factory=list)
    _patches: ExitStack = field(default_factory=ExitStack)
    _spent_ns: dict[str, int] = field(default_factory=dict)
    _inner_ns: list[int] = field(default_factory=list)
    _began_ns: int = 0
    _left_ns: int = 0

    def __enter__(self) -> Watch:
        for owner, name, phase in self.probes:
            self._patches.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), phase)))
        for owner, name in self.model:
            self._patches.enter_context(mock.patch.object(owner, name, self._outside(getattr(owner, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _outside(self, model: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            entered_ns, now_ns = time.thread_time_ns(), time.perf_counter_ns()
            if self._left_ns:
                self.outside_us.append((entered_ns - self._left_ns) / 1e3)
                self.step_us.append((now_ns - self._began_ns) / 1e3)
                self.phases_us.append({phase: spent / 1e3 for phase, spent in self._spent_ns.items()})
            self._spent_ns = {}
            self._began_ns = now_ns
            try:
                return model(*args, **kwargs)
            finally:
                self._left_ns = time.thread_time_ns()
                if self._inner_ns:
                    self._inner_ns[-1] += self._left_ns - entered_ns

        return watched

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_ns.append(0)
            began_ns = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took_ns = time.thread_time_ns() - began_ns
                self._spent_ns[phase] = self._spent_ns.get(phase, 0) + took_ns - self._inner_ns.pop()
                if self._inner_ns:
                    self._inner_ns[-1] += took_ns

        return timed
