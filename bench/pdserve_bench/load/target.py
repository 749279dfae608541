"""The server that gets the load, as the generator sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdserve_bench.row import Arrival, Served
from pdserve_bench.workload.request import Ids


@dataclass(frozen=True, slots=True)
class LoadCall:
    """One request as it is sent: every part of its prompt is known."""

    number: int
    prompt: str | Ids
    max_tokens: int
    slo_class: str = ""
    session: str = ""


@dataclass(slots=True)
class LoadAnswer:
    """The answer to one call. The target fills it while it arrives; the generator reads it when the call has ended.

    All times are those of the generator's clock, not of the run.
    """

    sent_s: float = 0.0
    """The time at which the target got the call. If it has to connect first, the time of this counts in TTFT."""
    ended_s: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)
    """The messages with tokens, in order."""
    prompt_tokens: int | None = None
    """The tokens of the prompt, as the server counted them. None: it did not say."""
    output_tokens: int | None = None
    """The tokens of the answer, as the server counted them. None: it did not say, and the arrivals count."""
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    """The tokens, where the server says ids. A later prompt may hold them."""
    error: str = ""
    message: str = ""
    """What the server or the system said of the failure. It may hold anything, in any length."""
    served: Served = field(default_factory=Served)


class Target(Protocol):
    """A server. Its implementations are `GrpcTarget` and `HttpTarget`."""

    async def send(self, call: LoadCall, answer: LoadAnswer) -> None:
        """Send the call and fill `answer` until it has ended. A failure is written to `answer.error`; nothing is raised.

        A cancellation ends the call on the server as well.
        """

    async def close(self) -> None:
        """Close all connections. It may be called more than once."""
