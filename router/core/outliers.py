"""The rules by which a worker is an outlier of its pool: how often it fails, how slow it is, and how long it then stays out.
Pure.

They compare with the rest of the pool, so a fault that all workers share ejects nobody. Envoy's outlier detection has the same
parts: failures in a row, a rate against the pool, a share of the pool that stays, and times that grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, NamedTuple

from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from router.core.account import Account

FAILURES: Final = 4.5
"""An outlier has failed at least five times in a row, since each failure counts a little less than the next failure. Envoy's
`consecutive_5xx` is 5 as well."""
ON_TRIAL: Final = 0.5
"""One failure ends a trial."""
TIMES_THE_POOL: Final = 3.0
"""An outlier fails three times as large a share of its results as the rest of the pool does."""
SLOW: Final = 2.0
"""A worker whose steps take twice as long as the steps of its pool has a handicap. A smaller ratio is noise of load."""
TOO_SLOW: Final = 4.0
TOO_SLOW_S: Final = 10.0
LOOK_S_MIN: Final = 1.0
LOOK_S_MAX: Final = 4.0
"""A worker whose steps take four times as long for ten seconds is ejected. A look that sees new steps counts for a second, the
time between looks, or for the time of its steps if they took longer. It takes three looks in a row at least: one long step may
have been disturbed."""
COMPARED: Final = 3
"""Slowness is judged among at least three workers: of two workers, either may be the outlier."""
AWAY_S: Final = 30.0
"""The time for which a worker is ejected first, as Envoy's `base_ejection_time`."""
AWAY_AGAIN_S: Final = 300.0
AWAY_MAX_S: Final = 3600.0
"""A worker that fails again after its return has passed a probe in between, so probes do not show its fault. It stays out for
five minutes then, and twice as long each further time."""
WELL_S: Final = 3600.0
"""After this time without an ejection, the next ejection counts as the first again."""


def fails(account: Account, rest: Iterable[Account]) -> bool:
    """Tell whether a worker fails much more of its requests than the rest of its pool.

    The answer is no while the rest has no good result, since then no evidence says that others do better. A share of few
    results is uncertain by about one result. So one result is added in the worker's favour, and one failure to the rest.
    """
    if account.bad < (ON_TRIAL if account.trial_left else FAILURES):
        return False
    good = bad = 0.0
    for other in rest:
        good += other.good
        bad += other.bad
    least = account.bad / (account.bad + account.good + 1.0)
    most = (bad + 1.0) / (good + bad + 1.0)
    return good > 0 and least > TIMES_THE_POOL * most


def away_s(ejections: int) -> float:
    """Return for how long the ejection of this number, counted in a row from 1, lasts at least."""
    return AWAY_S if ejections <= 1 else min(AWAY_MAX_S, AWAY_AGAIN_S * 2.0 ** min(ejections - 2, 16))


class WorkerPace(NamedTuple):
    """The speed of a worker's recent steps, and the peaks of its device. A part that is 0 is unknown."""

    times: tuple[float, ...]  # of a step and of some units of work; the least ratio of all counts as the slowness
    peaks: tuple[float, float]  # operations and bytes a second, as the worker reports them


def pace_of(hello: WorkerHello, before: WorkerLoad, now: WorkerLoad) -> WorkerPace | None:
    """Return the pace of a worker's role between two heartbeats. None: it made no such steps, or its reports lack a number.

    A step of decodes takes a fixed time, some for each sequence and some for each byte of weights and KV that it reads. A step
    of prompts takes a fixed time, some for each token and some for each operation, which grow with the length of a prompt. The
    rate that a prefill worker reports counts as one more time: a single disturbed step changes it little.
    """
    peaks = hello.peak_flops_per_s, hello.peak_bytes_per_s
    if hello.role is Role.DECODE:
        busy_s, step_s = now.decode_busy_s - before.decode_busy_s, now.decode_step_s
        if busy_s <= 0.0 or step_s <= 0.0:
            return None
        return WorkerPace(
            (step_s, step_s / max(1, now.running_sequences), _each(busy_s, before, now, "decode_read_bytes")), peaks
        )
    busy_s, rate = now.prompt_busy_s - before.prompt_busy_s, now.prompt_tokens_per_s
    step_s = _each(busy_s, before, now, "prompt_steps")
    token_s = _each(busy_s, before, now, "computed_prompt_tokens")
    if min(step_s, token_s, rate) <= 0.0:
        return None
    return WorkerPace((step_s, token_s, _each(busy_s, before, now, "prompt_flops"), 1.0 / rate), peaks)


def slowness(paces: Sequence[WorkerPace]) -> list[float]:
    """Return for each worker the time of its steps as a multiple of the median. 1: it is not slow, or its pace is unknown.

    Different work alone makes a worker look at most three times as slow, which is below `TOO_SLOW`: one of the three parts of
    its time is a third or more, so its time for a unit of this part is at most three times what the unit costs every worker. A
    device that is slower by its reported peaks is no fault.
    """
    if len(paces) < COMPARED:
        return [1.0] * len(paces)
    times, peaks = _medians([pace.times for pace in paces]), _medians([pace.peaks for pace in paces])
    found = []
    for pace in paces:
        longer, slower_device = min(_ratios(pace.times, times), default=1.0), max(_ratios(peaks, pace.peaks), default=1.0)
        found.append(max(1.0, longer / max(1.0, slower_device)))
    return found


def _medians(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the median of the known values of each column. 0: no value is known."""
    return [median([value for value in column if value > 0] or [0.0]) for column in zip(*rows, strict=True)]


def _ratios(parts: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(parts, others, strict=True) if a > 0 and b > 0]


def _each(busy_s: float, before: WorkerLoad, now: WorkerLoad, unit: str) -> float:
    count = getattr(now, unit) - getattr(before, unit)
    return busy_s / count if count > 0 else 0.0
