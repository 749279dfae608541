"""The account of one place: what the results of its worker say about it. Pure.

A place is a worker id on one machine, which means one device. So a process that is started anew there keeps the account.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.ids import WorkerId
from pdserve.core.worker import WorkerHello
from router.core.events import LinkId

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
