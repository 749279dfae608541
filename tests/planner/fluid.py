"""A fluid model of both pools: requests are an amount, not things. It closes the loop around the planner in milliseconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.planner.limits import Limits, PoolLimits, Targets
from pdserve.planner.observations import DemandObserved, Missed, Observations, PoolObserved
from pdserve.planner.planner import Plan, PlannerSettings, PlannerState, plan

PROMPT_TOKENS, OUTPUT_TOKENS = 1000.0, 200.0
PROMPT_RATE = 10_000.0
"""Prompt tokens a second of one prefill worker."""
FIXED_S, SEQUENCE_S = 0.02, 0.0002
"""A decode step with n sequences takes `FIXED_S + SEQUENCE_S * n`."""
MAX_SEQUENCES, KV_SEQUENCES = 256.0, 300.0
LIMITS = Limits(PoolLimits(1, 40), PoolLimits(1, 40))
TARGETS = Targets(ttft_s=1.0, tpot_s=0.05)


@dataclass
class FluidPool:
    """Workers of one role, as counts: those on their way have a time at which they are ready or gone."""

    ready: int
    coming: list[float] = field(default_factory=list)
    leaving: list[float] = field(default_factory=list)

    def advance(self, now_s: float) -> None:
        self.ready += sum(at <= now_s for at in self.coming)
        self.coming = [at for at in self.coming if at > now_s]
        self.leaving = [at for at in self.leaving if at > now_s]

    def resize(self, size: int, now_s: float, start_s: float, drain_s: float) -> None:
        while self.ready + len(self.coming) < size:
            self.coming.append(now_s + start_s)
        while self.ready + len(self.coming) > size:
            if self.coming:
                self.coming.pop()
            else:
                self.ready -= 1
                self.leaving.append(now_s + drain_s)

    @property
    def all(self) -> int:
        return self.ready + len(self.coming) + len(self.leaving)


@dataclass
class Fluid:
    """Both pools under a load, with the planner around them. Each call of `run` continues."""

    load: Callable[[float], float]
    """Requests a second at a time."""
    seed: int = 0
    noise: bool = True
    tells_misses: bool = False
    """The planner is told which requests missed. A fluid misses with all requests of an interval or with none, so its planner
    learns faster than one of real requests."""
    prefill: FluidPool = field(default_factory=lambda: FluidPool(1))
    decode: FluidPool = field(default_factory=lambda: FluidPool(1))
    limits: Limits = LIMITS
    targets: Targets = TARGETS
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    interval_s: float = 1.0
    start_s: float = 60.0
    drain_s: float = 10.0
    now_s: float = 0.0
    prompts: float = 0.0
    """Prompt tokens that wait on prefill workers."""
    waiting: float = 0.0
    """Requests that wait in the router for decode, and those that decode."""
    running: float = 0.0
    state: PlannerState = field(default_factory=PlannerState)
    plans: list[Plan] = field(default_factory=list)
    planner: Callable[..., Plan] = plan

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def run(self, intervals: int) -> list[Plan]:
        """Advance the pools and plan after each interval. Returns the plans of these intervals."""
        for _ in range(intervals):
            observed = self.step()
            made = self.planner(observed, self.targets, self.limits, self.state, self.settings)
            self.state = made.state
            self._apply(made)
            self.plans.append(made)
        return self.plans[-intervals:]

    def step(self) -> Observations:
        """Advance by one interval and observe it."""
        dt = self.interval_s
        self.now_s += dt
        self.prefill.advance(self.now_s)
        self.decode.advance(self.now_s)
        mean = max(self.load(self.now_s), 0.0) * dt
        arrived = max(0.0, self.chance.gauss(mean, math.sqrt(mean))) if self.noise else mean
        tokens = arrived * PROMPT_TOKENS * (max(0.2, self.chance.gauss(1, 0.3)) if self.noise and arrived else 1.0)
        room = self.decode.ready * min(MAX_SEQUENCES, KV_SEQUENCES) - self.running
        begun = max(0.0, min(self.waiting + arrived, room))
        self.waiting += arrived - begun
        self.prompts += tokens if arrived <= begun else begun * PROMPT_TOKENS
        computed = min(self.prompts, self.prefill.ready * PROMPT_RATE * dt)
        self.prompts -= computed
        wait_s = self.prompts / (self.prefill.ready * PROMPT_RATE) if self.prefill.ready else math.inf
        self.running += begun
        sequences = self.running / self.decode.ready if self.decode.ready else 0.0
        step_s = FIXED_S + SEQUENCE_S * sequences
        sent = min(self.decode.ready * sequences / step_s * dt, self.running * OUTPUT_TOKENS)
        self.running -= sent / OUTPUT_TOKENS
        return self._observed(arrived / dt, tokens / dt, sent / dt, computed / dt, sequences, step_s, wait_s)

    def _observed(
        self, requests: float, tokens: float, sent: float, computed: float, sequences: float, step_s: float, wait_s: float
    ) -> Observations:
        capacity, ended = self.prefill.ready * PROMPT_RATE, requests * self.interval_s
        is_late = wait_s + PROMPT_TOKENS / PROMPT_RATE > (self.targets.ttft_s or math.inf)
        is_slow = sequences > 0.0 and step_s > (self.targets.tpot_s or math.inf)
        ready, decode = self.prefill.ready, self.decode.ready
        return Observations(
            self.now_s,
            self.interval_s,
            DemandObserved(requests, tokens, sent, self.waiting, self.waiting * PROMPT_TOKENS),
            PoolObserved(
                ready,
                len(self.prefill.coming),
                len(self.prefill.leaving),
                busy_tokens_per_s=PROMPT_RATE if computed else None,
                utilisation=computed / capacity if capacity else None,
                queued_tokens=self.prompts if ready else None,
                cached_share=0.0 if tokens else None,
            ),
            PoolObserved(
                decode,
                len(self.decode.coming),
                len(self.decode.leaving),
                step_s=step_s if sequences else None,
                sequences=sequences if decode else None,
                max_sequences=MAX_SEQUENCES if decode else None,
                kv_used=min(sequences / KV_SEQUENCES, 1.0) if decode else None,
            ),
            None if not requests else float(not is_late),
            None if not sequences else float(not is_slow),
            ended=ended if self.tells_misses else None,
            missed=Missed(prefill_queue=ended * is_late, steps=ended * is_slow) if self.tells_misses else Missed(),
        )

    def _apply(self, made: Plan) -> None:
        """Flip workers where one pool lacks what the other one gives, and start and drain the rest."""
        if self.limits.can_flip:
            for one, other, more, less in (
                (self.prefill, self.decode, made.prefill, made.decode),
                (self.decode, self.prefill, made.decode, made.prefill),
            ):
                while one.ready + len(one.coming) < more and other.ready + len(other.coming) > less and other.ready:
                    other.ready -= 1
                    one.coming.append(self.now_s + self.drain_s)
        self.prefill.resize(made.prefill, self.now_s, self.start_s, self.drain_s)
        self.decode.resize(made.decode, self.now_s, self.start_s, self.drain_s)


def changes(plans: list[Plan]) -> int:
    """Return the number of intervals in which a size changed."""
    return sum((one.prefill, one.decode) != (other.prefill, other.decode) for one, other in pairwise(plans))
