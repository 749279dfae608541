"""The row that a benchmark keeps of each request. Pure.

All times are seconds since the start of the run, by the clock of the generator. They are taken at the client.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

STOPPED: Final = "stopped"
"""The error of a request that still ran when the run was ended early. No figure counts it."""

Arrival: TypeAlias = tuple[float, int]
"""A time, and the number of tokens that arrived then in one message."""


@dataclass(frozen=True, slots=True)
class Served:
    """The server's own report of a request. None: it did not say. Only our own router says most of it."""

    request_id: str = ""
    placement: str = ""
    """"disaggregated" or "colocated"."""
    prefill_worker: str = ""
    decode_worker: str = ""
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    exposed_transfer_s: float | None = None
    kv_bytes: int | None = None
    attempts: int | None = None
    cached_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One request of a run. A request that failed has an `error`, and all that is known about it."""

    number: int
    planned_s: float
    """The time at which it should have been sent."""
    sent_s: float
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    arrivals: tuple[Arrival, ...] = ()
    """The messages with tokens, in order."""
    warm_up: bool = False
    """The request only warmed the server up: no figure counts it."""
    slo_class: str = ""
    session: str = ""
    error: str = ""
    """The reason of a failure: our name of the error, or the status of the server. Empty: it was answered whole."""
    served: Served = Served()

    @property
    def ok(self) -> bool:
        """The request was answered whole."""
        return not self.error

    @property
    def cut(self) -> bool:
        """The run was ended early while the request still ran, so nothing is known about its end."""
        return self.error == STOPPED

    @property
    def counts(self) -> bool:
        """The request counts in figures: it neither warmed the server up nor was cut off."""
        return not self.warm_up and not self.cut

    @property
    def send_lag_s(self) -> float:
        """The time by which the generator was late."""
        return self.sent_s - self.planned_s

    @property
    def ttft_s(self) -> float | None:
        """The time from sending the request until its first token arrived. None: no token arrived."""
        return self.arrivals[0][0] - self.sent_s if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """The mean time of each token after the first one. None: fewer than two tokens arrived."""
        if self.output_tokens < 2 or not self.arrivals:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """The time from sending the request until its answer had ended."""
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """The times between messages with tokens that follow each other: the ITL, as clients see it."""
        times_s = [time_s for time_s, _ in self.arrivals]
        return tuple(b - a for a, b in pairwise(times_s))
