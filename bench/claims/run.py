"""A run over claims: what is measured now, what is taken over from an earlier run, and what the time does not allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Final

from bench.claims.claim import Claim
from bench.claims.results import Entry, Results
from bench.claims.setup import Rounds, Setup

Watch = Callable[[str, float], None]
"""A function that gets a claim's name and the share of its rounds that are done."""
SLACK: Final = 1.5  # a claim may take this multiple of its expected minutes before its rounds end early


@dataclass(frozen=True, slots=True)
class Identity:
    """The commit, the machine and the model of a run. Entries of an equal identity need not be measured again."""

    commit: str
    machine: str
    model: str


@dataclass
class Outcome:
    """The names of the claims by their outcome. `failed` also has the reasons."""

    measured: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    no_time: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run(
    claims: Sequence[Claim],
    setup: Setup,
    results: Results,
    identity: Identity,
    *,
    budget_s: float,
    again: bool = False,
    watch: Watch = lambda name, share: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measure the claims in their order, and write each entry as soon as it is complete.

    A claim that the results already answer for this identity is kept unless `again`. A claim whose expected minutes do not fit
    into the rest of the budget is left out, and a shorter one after it may still run. A claim that fails does not end the run.
    """
    outcome, end_s = Outcome(), clock() + budget_s
    for claim in claims:
        known = results.entries.get(claim.name)
        left_s = end_s - clock()
        if known is not None and not again and known.fits(**asdict(identity), quick=setup.quick):
            outcome.kept.append(claim.name)
        elif claim.minutes * 60 > left_s:
            outcome.no_time.append(claim.name)
        else:
            limit_s = 0.0 if setup.quick else min(left_s, SLACK * claim.minutes * 60)
            _measure(claim, setup, results, identity, outcome, limit_s, watch, clock)
    return outcome


def _measure(
    claim: Claim,
    setup: Setup,
    results: Results,
    identity: Identity,
    outcome: Outcome,
    limit_s: float,
    watch: Watch,
    clock: Callable[[], float],
) -> None:
    began_s = clock()
    watch(claim.name, 0.0)
    try:
        figures = claim.measure(setup, Rounds(limit_s, lambda share: watch(claim.name, share), clock))
    except Exception as exc:  # noqa: BLE001 - one claim must not cost the others; the run ends with status 1
        outcome.failed[claim.name] = f"{type(exc).__name__}: {exc}"
        return
    date = datetime.now(UTC).date().isoformat()
    minutes = round((clock() - began_s) / 60, 2)
    results.put(claim.name, Entry(date, **asdict(identity), quick=setup.quick, minutes=minutes, figures=figures))
    outcome.measured.append(claim.name)
