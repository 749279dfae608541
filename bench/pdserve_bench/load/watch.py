"""The observers of a run: a watch that may end it, and the progress that others look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from pdserve_bench.load.target import LoadAnswer
from pdserve_bench.row import BenchRow

MAX_REASONS: Final = 32
"""The most reasons whose first message is kept."""
MAX_MESSAGE_CHARS: Final = 300


class LoadWatch(Protocol):
    """A function that the generator calls with each finished row, in the order in which requests end."""

    def __call__(self, row: BenchRow) -> bool:
        """Take a row. True ends the run: nothing more is sent, and what still runs is cut off (`BenchRow.cut`)."""


def watch_nothing(row: BenchRow) -> bool:
    """Let the run go on to its end."""
    return False


@dataclass(slots=True)
class RunProgress:
    """The state of a run, for a view. The generator changes it; everybody else only reads it."""

    now_s: float = 0.0
    """The time since the start of the run."""
    sent: int = 0
    done: int = 0
    failed: int = 0
    held: int = 0
    """Requests that had to wait for a place under `max_concurrency`, so that the load was less than was planned."""
    running: dict[int, LoadAnswer] = field(default_factory=dict)
    """The requests that run, by number. Their times are those of the generator's clock."""
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each reason of a failure, in one line of bounded length."""

    def explain(self, reason: str, message: str) -> None:
        """Keep the message if it is the first one of its reason."""
        if message and reason not in self.messages and len(self.messages) < MAX_REASONS:
            self.messages[reason] = one_line(message)


def one_line(message: str) -> str:
    """Return the beginning of a message from elsewhere, without characters that command a terminal."""
    begin = message[: 4 * MAX_MESSAGE_CHARS]
    line = " ".join("".join(char if char.isprintable() else " " for char in begin).split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + "..."
