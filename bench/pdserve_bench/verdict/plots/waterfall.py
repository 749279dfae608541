"""One request as a waterfall: its phases one below the other, by the time since it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_bench.row import BenchRow
from pdserve_bench.verdict.plots.chart import Material
from pdserve_bench.verdict.plots.theme import Theme
from pdserve_bench.verdict.units import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class BarPhase:
    """One bar: from `begin_s` to `end_s` since the request was sent. hidden: nothing waits for it."""

    name: str
    begin_s: float
    end_s: float
    hidden: bool = False


def typical(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Return the answered request of median length of time that says most about itself. None: none was answered."""
    answered = [row for row in rows if row.ok and not row.warm_up and len(row.arrivals) > 1]
    told = [row for row in answered if row.served.queue_s is not None and row.served.prefill_s is not None]
    moved = [row for row in told if row.served.transfer_s]
    found = sorted(moved or told or answered, key=lambda row: row.e2e_s)
    return found[len(found) // 2] if found else None


def phases(row: BenchRow) -> list[BarPhase]:
    """Return the phases of a request. What the server did not say is one phase until the first token.

    The transfer ends when its exposed part ends, which begins with the first token. The hidden part lies before.
    """
    first_s = row.ttft_s
    assert first_s is not None
    served = row.served
    found = []
    if served.queue_s is None or served.prefill_s is None:
        found.append(BarPhase("until the first token", 0.0, first_s))
    else:
        end = min(first_s, served.queue_s)
        found.append(BarPhase("queue", 0.0, end))
        found.append(BarPhase("prefill", max(end, first_s - served.prefill_s), first_s))
    exposed_s = served.exposed_transfer_s or 0.0
    if served.transfer_s:
        hidden_s = max(0.0, served.transfer_s - exposed_s)
        if hidden_s:
            found.append(BarPhase("transfer, hidden", max(0.0, first_s - hidden_s), first_s, hidden=True))
        if exposed_s:
            found.append(BarPhase("transfer, exposed", first_s, first_s + exposed_s))
    last_s = row.arrivals[-1][0] - row.sent_s
    begin = min(first_s + exposed_s, last_s)
    found.append(BarPhase("decode", begin, last_s))
    return found


def draw_waterfall(panels: list[Axes], material: Material, theme: Theme) -> None:
    """Draw the typical request of the first run that has one."""
    axes = panels[0]
    row = next(row for rows in material.runs.values() if (row := typical(rows)) is not None)
    bars = phases(row)
    inks = {"queue": theme.queue, "prefill": theme.together, "decode": theme.apart, "until the first token": theme.together}
    end = max(one.end_s for one in bars)
    for place, one in enumerate(bars):
        ink = inks.get(one.name, theme.good)
        width = max(one.end_s - one.begin_s, end / 500)
        axes.barh(place, 1e3 * width, left=1e3 * one.begin_s, height=0.6, color=ink, alpha=0.45 if one.hidden else 0.9)
    tokens = [1e3 * (time - row.sent_s) for time, _ in row.arrivals]
    axes.plot(tokens, [len(bars) - 1] * len(tokens), "|", color=theme.ink, markersize=9, markeredgewidth=0.8)
    names = [f"{one.name}  {seconds(one.end_s - one.begin_s)}" for one in bars]
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set(xlabel="ms since the request was sent; a stroke is a message with tokens", title="One typical request")
    axes.set_xlim(0, 1e3 * end * 1.02)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", linewidth=0.6)
