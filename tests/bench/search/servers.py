"""Servers on virtual time, whose goodput is known: queues in numpy, without a clock or a process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdserve_bench.layout import Layout
from pdserve_bench.search.goodput import GoodputSearch, RunAction, StopAction
from pdserve_bench.search.result import Figures, Point
from pdserve_bench.search.settings import SearchSettings
from pdserve_bench.search.trial import Decision, Trial

NO_FIGURES = Figures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
Waits = Callable[[np.ndarray], np.ndarray]
"""The waits before service of requests that arrive at these times."""


def wait_of(arrivals_s: np.ndarray, service_s: float, servers: int = 1) -> np.ndarray:
    """Return the waits of a first-come queue with equal services. Each server takes every nth request, in turns."""
    waits = np.empty_like(arrivals_s)
    for first in range(servers):  # equal services end in the order of their beginnings, so M/D/c serves in turns
        mine = arrivals_s[first::servers]
        free = np.arange(len(mine)) * service_s
        begins = np.maximum.accumulate(mine - free) + free
        waits[first::servers] = begins - mine
    return waits


@dataclass(frozen=True, slots=True)
class Station:
    """One pool: equal services on some servers."""

    service_s: float
    servers: int

    def ends(self, arrivals_s: np.ndarray) -> np.ndarray:
        """Return when each request leaves the station."""
        return arrivals_s + wait_of(arrivals_s, self.service_s, self.servers) + self.service_s


@dataclass(frozen=True, slots=True)
class Server:
    """Prompts pass the first station, and outputs the second one. A request is good when neither wait passes its limit."""

    prefill: Station
    prefill_wait_s: float
    decode: Station | None = None
    decode_wait_s: float = math.inf

    def run(self, arrivals_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when each request ends, and which are good."""
        firsts = self.prefill.ends(arrivals_s)
        good = firsts - arrivals_s - self.prefill.service_s <= self.prefill_wait_s
        if self.decode is None:
            return firsts, good
        ends = self.decode.ends(firsts)
        return ends, good & (ends - firsts - self.decode.service_s <= self.decode_wait_s)

    def attainment(self, rate_per_s: float, seed: int = 0, count: int = 400_000) -> float:
        """Return the share of good requests in a long run."""
        arrivals_s = np.random.default_rng(seed).exponential(1.0 / rate_per_s, count).cumsum()
        return float(self.run(arrivals_s)[1][count // 20 :].mean())

    def goodput(self, target: float, low: float, high: float) -> float:
        """Return the highest rate that keeps the target, by bisection."""
        while high / low > 1.002:
            rate = math.sqrt(low * high)
            low, high = (rate, high) if self.attainment(rate) >= target else (low, rate)
        return math.sqrt(low * high)


def run_trial(server: Server, trial: Trial, seed: int) -> float:
    """Run a trial to its end on a server, and return the time that it took."""
    settings = trial.settings
    count = int(settings.rate_per_s * settings.max_s * 1.2) + 50
    rng = np.random.default_rng(seed)
    arrivals_s = rng.exponential(1.0 / settings.rate_per_s, count).cumsum()
    arrivals_s = arrivals_s[arrivals_s < settings.max_s]
    ends_s, good = server.run(arrivals_s)
    patience_s = server.prefill_wait_s + server.prefill.service_s
    if server.decode is not None:
        patience_s += server.decode_wait_s + server.decode.service_s
    for arrived_s in arrivals_s.tolist():
        trial.plan(arrived_s, arrived_s + patience_s + 1e-9)
    order = np.argsort(ends_s, kind="stable")
    for number, end_s, met in zip(order.tolist(), ends_s[order].tolist(), good[order].tolist(), strict=True):
        if end_s > settings.max_s:
            break
        if trial.end(number, end_s, met) is not None:
            return end_s
    trial.close(settings.max_s)
    return settings.max_s


@dataclass(slots=True)
class Bench:
    """A search over simulated layouts, on virtual time."""

    settings: SearchSettings
    servers: Callable[[Layout], Server]
    seed: int = 0
    reshape_s: float = 0.0
    spent_s: float = 0.0
    offered_per_s: float = math.inf
    """The highest rate that the generator can send."""

    def measure(self, run: RunAction, points: list[Point]) -> Point:
        """Return the point of a run."""
        trial = Trial(self.settings.trial(run.rate_per_s, run.min_yes_s, run.max_s))
        took_s = run_trial(self.servers(run.layout), trial, hash((self.seed, len(points))) % 2**32)
        self.spent_s += took_s + (self.reshape_s if not points or points[-1].layout != run.layout else 0.0)
        seen = trial.estimate
        late = "late" if run.rate_per_s > self.offered_per_s else ""
        return Point(
            run.layout, run.rate_per_s, seen.requests, seen.attained, seen.low, seen.high, took_s, NO_FIGURES, late,
            trial.decision is Decision.OVERLOADED,
        )  # fmt: skip

    def search(self, budget_s: float = math.inf, points: list[Point] | None = None) -> tuple[list[Point], StopAction]:
        """Run a search to its end, and return its points and why it ended."""
        search = GoodputSearch(self.settings)
        points = [] if points is None else points
        while len(points) < 400:
            shaped = points[-1].layout if points else None
            action = search.next(points, budget_s - self.spent_s, self.reshape_s, shaped)
            if isinstance(action, StopAction):
                return points, action
            points.append(self.measure(action, points))
        raise AssertionError(f"the search does not end: {points[-8:]}")
