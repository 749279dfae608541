"""Loads on which a planner is judged: three groups, drawn from one space by their names. Pure.

A planner is tuned on the group `tune` and watched on `check`. Results are reported for all three groups. No load is picked by
hand: each property of a group is a Latin hypercube, so each of the `LOADS_OF_A_GROUP` equal parts of its range has one load of
the group, in a random order. The loads of a group depend only on its name.

| property | range |
|---|---|
| mean prompt / mean output | 100 to 1/4, by powers; the product of both means stays the same |
| share of the prompt that earlier prompts began with | 0 to 0.9, in whole blocks of 512 tokens |
| rate over the day | steady, a season with two peaks, steps, bursts |
| hardware | equal workers, slow prefill workers, slow decode workers |
| classes | one, or a second one with longer requests and looser targets |
| start of a worker | 1 to 15 minutes, by powers |
| busy workers at the peak | 3 to 6 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from pdserve.core.slo import SloClass
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes, Targets
from pdserve_bench.workload.request import Lognormal
from pdserve_bench.workload.traces import BLOCK_TOKENS
from sim.perf.cluster import ClusterSpec, calm_router
from sim.perf.costs import LLAMA2_70B_A100, CostModel, StepWork
from sim.perf.days import Day
from sim.perf.days import share as season_share
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape

GROUPS: Final = ("tune", "check", "held-out")
LOADS_OF_A_GROUP: Final = 8
ATTAINMENT: Final = 0.97
"""The share that is asked for, as in the day of the public trace (docs/benchmarks.md)."""
MAX_WORKERS: Final = 10
"""The limit of each pool: a load's peak keeps at most six workers of both busy."""
SLOWNESS: Final = 6.0
"""The workers are slower than the preset by this factor, so a day has thousands of requests instead of tens of thousands."""
MEAN_TOKENS: Final = 512
"""The geometric mean of the mean prompt and the mean output."""
LENGTH_SIGMA: Final = 0.7
"""The sigma of both logarithms. The variance over the squared mean is then 0.63; Azure's conversations of 2023 have 0.92."""
MOST_CACHED: Final = 0.9
"""The largest share of a prompt that is common with earlier prompts."""
PREFIXES: Final = 8
"""The different beginnings that the prompts of a class share."""
TTFT_PROMPTS: Final = 8.0
"""The target for TTFT, in times of a mean prompt: more than twice the time of the 97th percentile of the lengths."""
CHANCE: Final = 3.0
"""A difference of this many standard deviations between rates is more than chance."""
TPOT_STEPS: Final = 1.4
"""The target for TPOT, in steps of one decode: the day of the public trace asks 60 ms of steps of 44 ms."""


class LoadRate(Enum):
    """The form of the rate over a day."""

    STEADY = "steady"
    SEASON = "season"
    STEPS = "steps"
    BURSTS = "bursts"


@dataclass(frozen=True, slots=True)
class LoadTraffic:
    """The requests of one class."""

    slo: SloClass
    share: float
    """The share of all requests that belongs to the class."""
    prompt_tokens: int
    output_tokens: int
    cached_share: float
    """The share of a prompt that begins like earlier prompts, before it is cut to whole blocks."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load and the workers that serve it. The pools are sized for the first class, which has the tightest targets."""

    name: str
    rate: LoadRate
    levels: tuple[tuple[float, float], ...]
    """The rate divided by the peak rate, from each share of the day on. A season has no such list."""
    classes: tuple[LoadTraffic, ...]
    peak_workers: float
    """The workers that the peak keeps busy, at the batches that the targets allow."""
    prefill: CostModel
    decode: CostModel
    start_s: float

    @property
    def group(self) -> str:
        """The group of the load, which is a part of its name."""
        return self.name.rpartition("-")[0]

    @property
    def words(self) -> str:
        """The properties of the load, for a table."""
        first = self.classes[0]
        slow = self.prefill.prompt_token_s - self.decode.prompt_token_s
        hardware = "" if not slow else ", slow prefill" if slow > 0 else ", slow decode"
        mixed = ", 2 classes" if len(self.classes) > 1 else ""
        lengths = f"{first.prompt_tokens} : {first.output_tokens} tokens, {first.cached_share:.0%} cached"
        return f"{lengths}, {self.rate.value}{hardware}{mixed}, starts {self.start_s / 60.0:.0f} min"

    @property
    def targets(self) -> Targets:
        """The targets for which the pools are sized."""
        slo = self.classes[0].slo
        return Targets(slo.ttft_s, slo.tpot_s, ATTAINMENT)

    @property
    def limits(self) -> Limits:
        """The limits of the pools. Workers that differ do not change their roles."""
        pool = PoolLimits(1, MAX_WORKERS)
        return Limits(pool, pool, can_flip=self.prefill == self.decode)

    @property
    def spec(self) -> ClusterSpec:
        """The cluster with one worker of each role."""
        prefill, decode = (PerfWorkerShape(costs, max_num_batched_tokens=2048) for costs in (self.prefill, self.decode))
        classes = {one.slo.name: one.slo for one in self.classes}
        cached = any(one.cached_share for one in self.classes)
        return ClusterSpec([prefill], [decode], calm_router(), prefix_caching=cached, classes=classes)

    def busy(self, rate_per_s: float) -> tuple[float, float]:
        """Return the busy prefill and decode workers of a rate, where batches are as large as the targets allow."""
        prefill = decode = 0.0
        for one in self.classes:
            prefill += one.share * self.prefill.prompt_s(one.prompt_tokens, _cached_tokens(one.prompt_tokens, one.cached_share))
            context = one.prompt_tokens + one.output_tokens // 2
            base_s = self.decode.step_s(StepWork(decodes=1, context_tokens=context))
            each_s = self.decode.decode_s + self.decode.context_token_s * context
            sequences = max(1.0, ((self.classes[0].slo.tpot_s or base_s) - base_s) / each_s)
            decode += one.share * one.output_tokens * (base_s + each_s * (sequences - 1.0)) / sequences
        return rate_per_s * prefill, rate_per_s * decode

    @property
    def peak_per_s(self) -> float:
        """The requests a second at the peak."""
        return self.peak_workers / sum(self.busy(1.0))

    def level(self, time_s: float, day: Day) -> float:
        """Return the rate divided by the peak rate."""
        if self.rate is LoadRate.SEASON:
            return season_share(day.hour_of(time_s))
        return [level for begins, level in self.levels if begins * day.length_s <= time_s][-1]

    def rises_s(self, day: Day) -> list[float]:
        """Return the moments from which on a jump of the rate differs from chance. A season has no jumps.

        A jump from a to b requests a second differs from chance after t seconds with `(b - a) t = 3 sqrt(a t)`. A jump that
        ends before does not.
        """
        times_s = [begins * day.length_s for begins, _ in self.levels] + [day.length_s]
        found = []
        for n in range(1, len(self.levels)):
            before, after = (self.peak_per_s * level for _, level in self.levels[n - 1 : n + 1])
            if after > before:
                visible_s = times_s[n] + CHANCE**2 * before / (after - before) ** 2
                found += [visible_s] if visible_s < times_s[n + 1] else []
        return found

    def sizes_at(self, time_s: float, day: Day) -> PoolSizes:
        """Return the sizes of which each worker would be busy for at most the whole time."""
        busy = self.busy(self.peak_per_s * self.level(time_s, day))
        return PoolSizes(*(min(MAX_WORKERS, max(1, math.ceil(pool))) for pool in busy))

    def requests(self, day: Day) -> list[TraceRequest]:
        """Return the requests of a day, at random times with the rate of each moment."""
        arrivals, lengths = Random(f"{self.name}:{day.seed}:arrivals"), Random(f"{self.name}:{day.seed}:lengths")
        blocks = _Blocks()
        requests: list[TraceRequest] = []
        peak_per_s = self.peak_per_s
        at_s = arrivals.expovariate(peak_per_s)
        while at_s < day.length_s:
            if arrivals.random() < self.level(at_s, day):
                requests.append(_request(at_s, self.classes, lengths, blocks))
            at_s += arrivals.expovariate(peak_per_s)
        return requests


@dataclass(slots=True)
class _Blocks:
    """The numbers of blocks: first the blocks of common beginnings, and then new blocks for ever."""

    used: int = 1 << 20

    def new(self, count: int) -> tuple[int, ...]:
        self.used += count
        return tuple(range(self.used - count, self.used))


def _request(at_s: float, classes: tuple[LoadTraffic, ...], rng: Random, blocks: _Blocks) -> TraceRequest:
    (number,) = rng.choices(range(len(classes)), [one.share for one in classes])
    one = classes[number]
    prompt = Lognormal(mean=one.prompt_tokens, sigma=LENGTH_SIGMA, most=8 * one.prompt_tokens).draw(rng)
    output = Lognormal(mean=one.output_tokens, sigma=LENGTH_SIGMA, most=8 * one.output_tokens).draw(rng)
    common = _cached_tokens(prompt, one.cached_share) // BLOCK_TOKENS
    first = (number * PREFIXES + rng.randrange(PREFIXES)) << 10
    numbers = (*range(first, first + common), *blocks.new(-(-prompt // BLOCK_TOKENS) - common))
    return TraceRequest(at_s, prompt, output, numbers, slo_class=one.slo.name)


def _cached_tokens(prompt_tokens: int, cached_share: float) -> int:
    """Return the tokens of the whole blocks that are common."""
    most = int(MOST_CACHED * prompt_tokens / BLOCK_TOKENS)
    return BLOCK_TOKENS * min(most, round(cached_share * prompt_tokens / BLOCK_TOKENS))


# The groups ----------------------------------------------------------------------------------------------------------


def loads_of(group: str) -> list[Load]:
    """Return the loads of a group."""
    assert group in GROUPS
    rng = Random(group)
    count = LOADS_OF_A_GROUP
    rates = rng.sample([*LoadRate] * (count // 4), count)
    slow = rng.sample([(1.0, 1.0)] * (count // 2) + [(2.0, 1.0), (1.0, 2.0)] * (count // 4), count)
    mixed = rng.sample([True] * (count // 4) + [False] * (count - count // 4), count)
    ratios, cached, starts, peaks = (_strata(count, rng) for _ in range(4))
    loads = []
    for n in range(count):
        ratio, share, start_s = 100.0 * 0.0025 ** ratios[n], MOST_CACHED * cached[n], 60.0 * 15.0 ** starts[n]
        loads.append(_load(f"{group}-{n}", rates[n], ratio, share, slow[n], mixed[n], start_s, 3.0 + 3.0 * peaks[n], rng))
    return loads


def _load(
    name: str, rate: LoadRate, ratio: float, cached: float, slow: tuple[float, float], mixed: bool, start_s: float, peak: float,
    rng: Random,
) -> Load:  # fmt: skip
    prefill, decode = (LLAMA2_70B_A100.scaled(SLOWNESS * factor) for factor in slow)
    prompt, output = round(MEAN_TOKENS * math.sqrt(ratio)), round(MEAN_TOKENS / math.sqrt(ratio))
    ttft_s = TTFT_PROMPTS * prefill.prompt_s(prompt)
    tpot_s = TPOT_STEPS * decode.step_s(StepWork(decodes=1, context_tokens=prompt + output // 2))
    cached = _cached_tokens(prompt, cached) / prompt
    classes = [LoadTraffic(SloClass("default", ttft_s, tpot_s), 1.0 - 0.3 * mixed, prompt, output, cached)]
    if mixed:
        classes.append(LoadTraffic(SloClass("loose", 4.0 * ttft_s, 2.0 * tpot_s), 0.3, 2 * prompt, 2 * output, cached))
    return Load(name, rate, _levels(rate, rng), tuple(classes), peak, prefill, decode, start_s)


def _levels(rate: LoadRate, rng: Random) -> tuple[tuple[float, float], ...]:
    match rate:
        case LoadRate.STEADY:
            return ((0.0, 1.0),)
        case LoadRate.SEASON:
            return ()
        case LoadRate.STEPS:  # about every two hours of a day
            return tuple([(n / 12.0, level) for n, level in enumerate([0.6, *(0.2 + 0.8 * s for s in _strata(11, rng))])])
        case LoadRate.BURSTS:  # eight, of 10 to 40 minutes of a day each
            levels = [(0.0, 0.35)]
            for n in range(8):
                begins = (n + 0.1 + 0.6 * rng.random()) / 8.0
                levels += [(begins, 0.7 + 0.3 * rng.random()), (begins + rng.uniform(1.0, 4.0) / 144.0, 0.35)]
            return tuple(levels)


def _strata(count: int, rng: Random) -> list[float]:
    """Return one number of each of `count` equal parts of [0, 1), in a random order."""
    return [(part + rng.random()) / count for part in rng.sample(range(count), count)]
