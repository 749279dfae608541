"""The placement policies that the settings name, guarded so that a policy of the operator's own cannot end the router.

A policy that raises, or returns anything but a finite number, is counted and logged, and the built-in policy of its pool
makes that one choice. No request fails by it. A policy that does not return at all cannot be guarded against.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Final

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.core.worker import Role
from pdserve.plugins import resolve
from router.core.policy import (
    BUILT_IN,
    EVERYONE,
    Candidate,
    Policy,
    Ranking,
    Rankings,
    RequestView,
    Scorer,
    Shortlist,
    ranking_of,
)

logger = logging.getLogger(__name__)

BUILTINS: Final = {
    name: f"router.core.policy:{name}"
    for name in ("prefix_aware", "session_affinity", "goodput", "least_loaded", "power_of_two", "round_robin", "random")
}
MAX_LOGGED: Final = 16
"""One policy's faults are logged for this many different reasons, once each. All faults are counted."""


class _NotANumber(Exception):
    """The policy returned something else than a finite number."""


class GuardedPolicy:
    """The ranking of a policy that may raise or return nonsense."""

    def __init__(self, setting: str, policy: Policy, fallback: Scorer, count: Callable[[str], None]) -> None:
        """`fallback` ranks when the policy cannot. `count` gets the reason of each fault, "raised" or "not_a_number"."""
        self._setting = setting
        self._policy = policy
        self._fallback = fallback
        self._count = count
        self._logged: set[str] = set()

    def __call__(self, candidates: Sequence[Candidate], request: RequestView) -> Sequence[float]:
        """Return the policy's scores. If one of them is wrong, return the fallback's for all candidates, since the scores of
        two policies do not compare."""
        try:
            return [_number(self._policy(candidate, request)) for candidate in candidates]
        except _NotANumber as exc:
            self._fault("not_a_number", f"returned {exc}")
        except BaseException as exc:  # noqa: BLE001 - it is the operator's code: KeyboardInterrupt stays here as well
            self._fault("raised", f"raised {type(exc).__name__}", exc)
        return self._fallback(candidates, request)

    def _fault(self, reason: str, text: str, exc: BaseException | None = None) -> None:
        self._count(reason)
        if text not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(text)
            logger.error("%s: the policy %s; the built-in policy chooses instead", self._setting, text, exc_info=exc)


def rankings_of(config: RouterConfig, count: Callable[[str, str], None]) -> Rankings:
    """Return the rankings that the settings name. `count` gets the role and the reason of each fault of a policy.

    Raises `ConfigError` for an unknown name, with the known ones, and for a shortlist that is none.
    """
    return Rankings(
        prefill=_ranking("router.prefill_policy", config.prefill_policy, BUILT_IN.prefill, Role.PREFILL, count),
        decode=_ranking("router.decode_policy", config.decode_policy, BUILT_IN.decode, Role.DECODE, count),
    )


def _ranking(setting: str, name: str, fallback: Ranking, role: Role, count: Callable[[str, str], None]) -> Ranking:
    policy: Policy = resolve(name, BUILTINS, setting)
    if name in BUILTINS:
        return ranking_of(name, policy)
    guarded = GuardedPolicy(setting, policy, fallback.scores, lambda reason: count(role.value, reason))
    return Ranking(name, _shortlist(setting, policy), guarded)


def _shortlist(setting: str, policy: Policy) -> Shortlist:
    """Return the shortlist of the operator's own policy. Raises `ConfigError` for one that no pool could put together: each
    request would fail by it."""
    found = getattr(policy, "shortlist", EVERYONE)
    if not isinstance(found, Shortlist):
        raise ConfigError(f"{setting}: the policy's shortlist must be a Shortlist, got {found!r:.100}")
    for part in dataclasses.fields(found):
        value, kind = getattr(found, part.name), bool if isinstance(part.default, bool) else int
        if type(value) is not kind or value < 0:
            wanted = "True or False" if kind is bool else "a whole number of at least 0"
            raise ConfigError(f"{setting}: {part.name} of the policy's shortlist must be {wanted}, got {value!r:.100}")
    return found


def _number(value: Any) -> float:
    """Return a score as a float. Raises `_NotANumber` that says what it is instead."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _NotANumber(type(value).__name__)
    number = float(value)
    if not math.isfinite(number):
        raise _NotANumber(str(number))
    return number
