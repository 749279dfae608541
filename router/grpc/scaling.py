"""The mailbox between operators and the actuator: orders one way, reports the other. It decides nothing about sizes.

It also keeps the term of the actuator. The first poll of an actuator begins a term, which ends the term of any other one, so
that two processes never change the pools against each other. What the mailbox keeps is bounded, whatever callers send.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import InvalidRequest, StaleOrder, Unavailable
from pdserve.rpc.v1 import common_pb2, scaling_pb2

ACTUATOR_LOST_S: Final = 10.0  # an actuator polls about once a second, so it has then missed ten polls
HISTORY: Final = 256  # events that are kept
NEEDS: Final = ("demand_tokens_per_s", "worker_tokens_per_s", "correction", "raw_workers")
MODES: Final = ("fixed", "automatic")
MOST_WORKERS: Final = 1_000_000  # of a pool in an order or a report
MOST_AGE_S: Final = 1e9  # 30 years; tables stay readable
MAX_NAME_CHARS: Final = 200
MAX_TEXT_CHARS: Final = 1_000
MOST_MEMBERS: Final = 1_024  # in one report; the largest message of the port has room for fewer
MOST_REASONS: Final = 32
MOST_EVENTS: Final = 64  # in one report


@dataclass(frozen=True, slots=True)
class _Past:
    at_s: float
    event: scaling_pb2.ScalingEvent


class ScalingMailbox:
    """The orders of operators and the reports of the actuator. All times are seconds of one monotonic clock, passed in."""

    def __init__(self, first_term: int) -> None:
        """`first_term` is at least 1. It is drawn at random, so that no term of another router is taken for one of this."""
        assert first_term >= 1
        self._next_term = first_term
        self._term = 0  # no actuator has polled yet
        self._actuator = ""
        self._polled_s = -math.inf
        self._report = scaling_pb2.ScalingReport()
        self._order: scaling_pb2.ScaleOrder | None = None
        self._followed = 0  # the order that an actuator of an earlier term took, which its successor knows from it
        self._history: deque[_Past] = deque(maxlen=HISTORY)

    def scale(self, sizes: scaling_pb2.ScaleRequest, now_s: float) -> int:
        """Leave an order for the actuator and return its number. Raises `InvalidRequest` and `Unavailable`."""
        given = [name for name in ("prefill", "decode") if sizes.HasField(name)]
        if sizes.automatic and given:
            raise InvalidRequest(f"automatic leaves the sizes to the planner, so {given[0]} must be unset", field="automatic")
        if not sizes.automatic and not given:
            raise InvalidRequest("give the size of a pool, or automatic", field="prefill")
        for name in given:
            _check_most(getattr(sizes, name), name, MOST_WORKERS)
        silent_s = now_s - self._polled_s
        if silent_s > ACTUATOR_LOST_S:
            since = f"for {silent_s:.0f} s" if self._term else "since its start"
            raise Unavailable(f"no actuator has polled this router {since}, so nobody would follow; is `pdserve up` running?")
        number = self._order.number + 1 if self._order is not None else 1
        self._order = scaling_pb2.ScaleOrder(number=number, sizes=sizes)
        return number

    def actuate(self, request: scaling_pb2.ActuateRequest, now_s: float) -> scaling_pb2.ActuateResponse:
        """Take the report of an actuator and return the last order. Raises `InvalidRequest` and `StaleOrder`."""
        _check_text(request.actuator, "actuator", MAX_NAME_CHARS)
        _check_report(request.report)
        if request.term:
            self.check_term(request.term)
        else:
            self._term, self._next_term = self._next_term, self._next_term + 1
            self._followed = max(self._followed, self._report.order)
        self._actuator, self._polled_s = request.actuator, now_s
        for event in request.report.events:
            self._history.append(_Past(now_s - event.age_s, event))
        self._report.CopyFrom(request.report)
        del self._report.events[:]
        order = self._order if self._order is not None and self._order.number != self._followed else None
        return scaling_pb2.ActuateResponse(term=self._term, order=order)

    def check_term(self, term: int) -> None:
        """Check that the term has not ended. 0, the term of an operator, never ends. Raises `StaleOrder`."""
        if term and term != self._term:
            holder = f"{self._actuator or 'an actuator'} has term {self._term}" if self._term else "no term has begun here"
            raise StaleOrder(f"term {term} is not the present one: {holder}")

    def state(self, now_s: float) -> scaling_pb2.ScalingState | None:
        """Return the last report and the history, with ages as of now. None: no actuator has polled yet."""
        if not self._term:
            return None
        state = scaling_pb2.ScalingState(
            actuator=self._actuator, term=self._term, age_s=now_s - self._polled_s, report=self._report
        )
        for past in self._history:
            kept = state.history.add()
            kept.CopyFrom(past.event)
            kept.age_s = now_s - past.at_s
        return state


def _check_report(report: scaling_pb2.ScalingReport) -> None:
    """Check what would be shown to operators: its size and its numbers. Raises `InvalidRequest`, which names the field."""
    if report.mode not in MODES and report.ByteSize():  # the first poll may have nothing to report
        raise InvalidRequest(f"report.mode is one of {', '.join(MODES)}", field="report.mode")
    for name in ("prefill", "decode"):
        _check_most(getattr(report, name), f"report.{name}", MOST_WORKERS)
    _check_most(len(report.members), "report.members", MOST_MEMBERS)
    _check_most(len(report.events), "report.events", MOST_EVENTS)
    _check_text(report.refused, "report.refused", MAX_TEXT_CHARS)
    _check_texts(report.reasons, "report.reasons")
    for member in report.members:
        _check_text(member.worker_id, "report.members.worker_id", MAX_NAME_CHARS)
        _check_text(member.phase, "report.members.phase", MAX_NAME_CHARS)
        _check_text(member.detail, "report.members.detail", MAX_TEXT_CHARS)
        _check_role(member.role, "report.members.role")
    for event in report.events:
        _check_age(event.age_s, "report.events.age_s")
        _check_text(event.text, "report.events.text", MAX_TEXT_CHARS)
    _check_age(report.plan.age_s, "report.plan.age_s")
    _check_texts(report.plan.reasons, "report.plan.reasons")
    _check_most(len(report.plan.pools), "report.plan.pools", 2)
    for pool in report.plan.pools:
        _check_texts(pool.limits, "report.plan.pools.limits")
        _check_role(pool.role, "report.plan.pools.role")
        for name in NEEDS:
            if not math.isfinite(getattr(pool, name)):
                raise InvalidRequest(f"report.plan.pools.{name} is a finite number", field=f"report.plan.pools.{name}")


def _check_texts(texts: Iterable[str], field: str) -> None:
    found = list(texts)
    _check_most(len(found), field, MOST_REASONS)
    for text in found:
        _check_text(text, field, MAX_TEXT_CHARS)


def _check_text(text: str, field: str, most_chars: int) -> None:
    if len(text) > most_chars or not text.isprintable():
        raise InvalidRequest(f"{field} has at most {most_chars} printable characters", field=field)


def _check_role(role: int, field: str) -> None:
    if role not in common_pb2.Role.values():
        raise InvalidRequest(f"{field}: {role} is no role", field=field)


def _check_age(age_s: float, field: str) -> None:
    if not 0 <= age_s <= MOST_AGE_S:
        raise InvalidRequest(f"{field} is a time from 0 to {MOST_AGE_S:g} s", field=field)


def _check_most(count: int, field: str, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{field}: {count} is over the limit of {most}", field=field)
