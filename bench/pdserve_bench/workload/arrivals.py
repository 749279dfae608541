"""The times at which requests are sent. Pure.

The gaps between requests are drawn for a mean rate of one request a second and then divided by the rate. Another rate moves
the same requests closer together and changes nothing else, so layouts are compared on the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from random import Random
from typing import Literal, get_args

import msgspec

from pdserve.core.errors import ConfigError

ArrivalKind = Literal["poisson", "gamma", "constant", "inf", "trace", "closed"]
ARRIVAL_KINDS: tuple[str, ...] = get_args(ArrivalKind)


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The process of arrivals.

    `poisson`, `gamma` and `constant` need `rate_per_s`. `inf` sends all requests at once. `trace` takes the recorded times. If
    `rate_per_s` is set, it scales these times to that mean rate. `closed` gives no times: the generator sends a request as soon
    as one of its `max_concurrency` places is free.
    """

    kind: ArrivalKind = "poisson"
    rate_per_s: float | None = None
    """The mean rate of all requests, those of later turns included. None: not chosen yet, or the recorded rate of a trace."""
    burstiness: float = 1.0
    """The shape of `gamma`, as in vLLM: 1 is Poisson, less is more bursty, more is more even."""

    def __post_init__(self) -> None:
        """Check the fields. Raises `ConfigError`."""
        if self.kind not in ARRIVAL_KINDS:
            raise ConfigError(f"arrivals.kind must be one of {', '.join(ARRIVAL_KINDS)}, got {self.kind!r}")
        if self.rate_per_s is not None and not (0 < self.rate_per_s < math.inf):
            raise ConfigError(f"arrivals.rate_per_s must be above 0 and finite, got {self.rate_per_s}; all at once is kind inf")
        if self.rate_per_s is not None and self.kind in ("inf", "closed"):
            raise ConfigError(f"arrivals.rate_per_s has no meaning with kind {self.kind}: leave it out")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"arrivals.burstiness must be above 0 and finite, got {self.burstiness}")
        if self.burstiness != 1 and self.kind != "gamma":
            raise ConfigError(f"arrivals.burstiness has no meaning with kind {self.kind}: take kind gamma")

    def with_rate(self, rate_per_s: float) -> Arrivals:
        """Return the same process at another mean rate. Raises `ConfigError` for kinds without a rate."""
        return msgspec.structs.replace(self, rate_per_s=rate_per_s)

    def times_s(self, seed: int, share: float = 1.0) -> Iterator[float | None]:
        """Return the endless times of the requests that wait for no other one. None: as soon as a place is free.

        `share` is the share of such requests among all requests. Recorded times, of kind `trace`, are not known here.
        Raises `ConfigError` without a rate.
        """
        assert self.kind != "trace", "the source has the recorded times"
        if self.kind == "closed":
            return repeat(None)
        if self.kind == "inf":
            return repeat(0.0)
        if self.rate_per_s is None:
            raise ConfigError(f"arrivals.rate_per_s must be set for kind {self.kind}")
        return self._drawn_s(seed, self.rate_per_s * share)

    def _drawn_s(self, seed: int, rate_per_s: float) -> Iterator[float | None]:
        """Yield drawn times. The sum is kept in units of the mean gap, so that a rate only divides it."""
        random, shape, elapsed = Random(f"{seed}:arrivals"), self.burstiness, 0.0
        while True:
            elapsed += 1.0 if self.kind == "constant" else random.gammavariate(shape, 1.0 / shape)
            yield elapsed / rate_per_s
