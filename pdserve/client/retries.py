"""The rule by which a client tries a request again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.error_table import TABLE, retry_after_s
from pdserve.core.errors import PdserveError, Unavailable


class NoServer(Unavailable):
    """No server of this kind has ever answered this client at its address. The address is wrong, or nothing runs there yet."""


@dataclass(frozen=True, slots=True)
class Retries:
    """The number of attempts of a client, and the waits between them.

    A request is tried again only after an error that the table of errors marks for clients, since it may succeed later. A wait
    is at least what the server asks for, and doubles with each attempt up to `longest_wait_s`. `Retries(1)` tries once.
    """

    attempts: int = 5
    longest_wait_s: float = 10.0
    wait_for_server: bool = False
    """Also try again where no server has answered yet. Without it, a wrong address is told at once."""

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.longest_wait_s < 0:
            raise ValueError(f"attempts must be at least 1 and longest_wait_s at least 0, got {self}")

    def wait_s(self, error: PdserveError, attempt: int, left_s: float | None, share: float) -> float | None:
        """Return how long to wait before attempt number `attempt` + 1. None: `error` is final.

        attempt: the number of attempts so far. left_s: what is left of the deadline; None: there is none. share: a random
        number in [0, 1), so that many clients do not come back together.
        """
        if isinstance(error, NoServer) and not self.wait_for_server:
            return None
        asked_s = retry_after_s(error)
        if not TABLE[error.code].client_retries or asked_s is None or attempt >= self.attempts:
            return None
        wait_s = max(min(asked_s, self.longest_wait_s), min(0.25 * 2.0**attempt, self.longest_wait_s)) * (1.0 + 0.25 * share)
        return None if left_s is not None and wait_s >= left_s else wait_s
