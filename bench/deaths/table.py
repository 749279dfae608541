"""The measurements of one death, and the table of all deaths. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

BEGIN: Final = "<!-- deaths begin -->"
END: Final = "<!-- deaths end -->"
HEAD: Final = ("what dies", "streams lost", "pause of the others: median, longest", "new requests are served", "processes")


@dataclass(frozen=True, slots=True)
class Span:
    """A stream that ran when the part died: whether it ended whole, and its longest time without a token from then on."""

    lost: bool
    pause_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """A short request after the death. Both times begin at the death."""

    sent_s: float
    ended_s: float
    served: bool


@dataclass(frozen=True, slots=True)
class Death:
    """The observations of one death. `before` and `after` are process ids by name; `window_s` is how long it was watched.

    `note` says what could not be measured, and why. The table shows it unchanged.
    """

    what: str
    spans: tuple[Span, ...]
    asks: tuple[Ask, ...]
    before: Mapping[str, int]
    after: Mapping[str, int]
    window_s: float
    note: str = ""


def served_again_s(asks: Sequence[Ask]) -> float | None:
    """Return when the first request after the last failed request was answered. None: the last request failed, or no request
    was sent."""
    ordered = sorted(asks, key=lambda ask: ask.sent_s)
    failed = [index for index, ask in enumerate(ordered) if not ask.served]
    later = ordered[failed[-1] + 1 :] if failed else ordered
    return min((ask.ended_s for ask in later), default=None)


def row(death: Death) -> tuple[str, ...]:
    """Return the cells of one death."""
    lost = sum(span.lost for span in death.spans)
    pauses = [span.pause_s for span in death.spans if not span.lost]
    reasons = sorted({span.error for span in death.spans if span.lost and span.error})
    streams = f"{lost} of {len(death.spans)}" + (f" ({'; '.join(reasons)})" if reasons else "")
    paused = f"{seconds(statistics.median(pauses))}, {seconds(max(pauses))}" if pauses else "-"
    return death.what, streams, paused, _served(death), "; ".join([_processes(death)] + ([death.note] if death.note else []))


def _served(death: Death) -> str:
    again_s = served_again_s(death.asks)
    failed = sum(not ask.served for ask in death.asks)
    if again_s is None:
        return f"not within {death.window_s:.0f} s ({failed} of {len(death.asks)} failed)"
    return f"after {seconds(again_s)}" + (f" ({failed} of {len(death.asks)} failed)" if failed else ", none failed")


def _processes(death: Death) -> str:
    """Say which processes are new, and which have gone."""
    new = [name for name in death.after if death.before.get(name) != death.after[name]]
    gone = [name for name in death.before if name not in death.after]
    if not new and not gone:
        return "all stayed"
    said = [f"new: {', '.join(sorted(new))}"] if new else []
    said += [f"gone: {', '.join(sorted(gone))}"] if gone else []
    return "; ".join([*said, "the others stayed"] if len(new) + len(gone) < len(death.before) else said)


def seconds(value: float) -> str:
    """Return a time for people."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def table(deaths: Sequence[Death], machine: str, commit: str, date: str, command: str) -> str:
    """Return the table in Markdown, below a line about the machine that was measured."""
    rows = [HEAD, ("---",) * len(HEAD), *map(row, deaths)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |" for cells in rows]
    return "\n".join([f"Measured on {machine}, commit {commit}, {date}, with `{command}`.", "", *lines])


def placed(document: str, text: str) -> str:
    """Return the document with `text` between its markers. Raises `ValueError` unless it has each marker once, in order."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"the document must have {BEGIN} and then {END}, once each")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
