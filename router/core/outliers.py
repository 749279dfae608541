"""The rules by which a worker is an outlier of its pool: how often it fails, how slow it is, and how long it then stays out.
Pure.

They compare with the rest of the pool, so a fault that all workers share ejects nobody. Envoy's outlier detection has the same
parts: failures in a row, a rate against the pool, a share of the pool that stays, and times that grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from pdserve.core.ids import WorkerId
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from router.core.events import LinkId

# The account of one place ---------------------------------------------------------------------------------------------
#
# The account of one place: what the results of its worker say about it.
#
# A place is a worker id on one machine, which means one device. So a process that is started anew there keeps the account.

KEEP: Final = 0.98
"""Each result keeps this share of the sums before it, so that about the last 50 count. They are counted and not timed: a rare
failure then weighs the same under any traffic."""
FAILURE_HANDICAP: Final = 4.0
"""A failure lets a worker sit out four of five picks: the next request goes elsewhere, and the worker's next result tells
more."""
HANDICAP_MAX: Final = 32.0
"""A worker that fails all it gets still takes part in one of 33 picks, because only work shows whether it fails."""
HALF_LIFE_S: Final = 10.0
"""A failure counts half after this time: a few failed reads of KV, each of which takes about six seconds."""
TRIAL_HANDICAP: Final = 16.0
TRIAL_HALF_LIFE_S: Final = 30.0
"""A worker that comes back gets one of 17 picks, then one of 9, and has its whole share after about three minutes."""
TRIAL_RESULTS: Final = 10.0
"""A worker that came back is on trial until this many requests have ended well there."""
NEGLIGIBLE: Final = 0.05
"""A smaller handicap is none."""


@dataclass(slots=True)
class Account:
    """The results of one place, and what has followed from them."""

    worker_id: WorkerId
    host: str
    good: float = 0.0
    bad: float = 0.0
    """The failures of which another worker has shown that they were not the request's fault."""
    slowness: float = 1.0
    """The step time of the worker divided by the step time of its pool, if the ratio is large. Otherwise 1."""
    slow_s: float = 0.0
    """The time for which the worker was too slow, at all looks in a row that saw new steps."""
    busy_s: float = 0.0
    """The time of all steps of its role, as of the last look that compared it."""
    ejections: int = 0
    """The ejections in a row: the worker was ejected again before it had been well for long enough."""
    ejected_until_s: float = 0.0
    """The worker is ejected at least until this time. 0: it never was."""
    reason: str = ""
    """Why the worker is ejected. Empty: it is not."""
    trial_left: float = 0.0
    """The good results that are missing until the trial is over. 0: the worker is not on trial."""
    link: LinkId | None = None
    """The link on which the worker served when it was ejected. On a later link the worker has shown nothing yet."""
    left_s: float | None = None
    """The time at which the worker left. None: it is linked."""
    _load: float = 0.0
    _load_s: float = 0.0

    @property
    def share(self) -> float:
        """The share of failures among the results."""
        return self.bad / (self.good + self.bad) if self.bad else 0.0

    def succeeded(self, weight: float = 1.0) -> None:
        """Count a good result."""
        self._fade(weight)
        self.good += weight
        self.trial_left = max(0.0, self.trial_left - weight)

    def failed(self, weight: float = 1.0) -> None:
        """Count a failure as this worker's, because another worker has gone further with the same request."""
        self._fade(weight)
        self.bad += weight

    def absolved(self, weight: float) -> None:
        """Take a failure back: the request fails everywhere."""
        self.bad = max(0.0, self.bad - weight)

    def _fade(self, weight: float) -> None:
        keep = 1.0 - (1.0 - KEEP) * weight
        self.good *= keep
        self.bad *= keep

    def loaded(self, weight: float, now_s: float) -> None:
        """Count a failure as load for a while, no matter whose fault it was."""
        self._load = min(HANDICAP_MAX, self._recent(now_s) + FAILURE_HANDICAP * weight)
        self._load_s = now_s

    def handicap(self, now_s: float) -> float:
        """Return the load that recent failures, slowness and a trial count as: the worker takes part in one of `1 + handicap`
        picks."""
        handicap = self._recent(now_s) + self.slowness - 1.0
        if self.ejections:
            handicap += TRIAL_HANDICAP * _halved(now_s - self.ejected_until_s, TRIAL_HALF_LIFE_S)
        return handicap if handicap > NEGLIGIBLE else 0.0

    def _recent(self, now_s: float) -> float:
        return self._load * _halved(now_s - self._load_s, HALF_LIFE_S)

    def begin_anew(self) -> None:
        """Forget the results: the router has acted on them."""
        self.good = self.bad = 0.0
        self.slowness, self.slow_s = 1.0, 0.0


def place_of(hello: WorkerHello) -> tuple[WorkerId, str]:
    """Return the worker id and the machine of a worker."""
    return hello.worker_id, hello.address.rpartition(":")[0]


def _halved(for_s: float, half_life_s: float) -> float:
    return float(0.5 ** (max(0.0, for_s) / half_life_s))


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
