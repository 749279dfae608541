"""The view of a run of the load generator: two lines on a terminal, drawn four times a second. A file gets none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from rich.console import Console
from rich.live import Live as LiveArea
from rich.text import Text

from pdserve_bench.load.live import Live, LiveFigures
from pdserve_bench.load.watch import RunProgress

INTERVAL_S: Final = 0.25


@asynccontextmanager
async def live_line(console: Console, figures: LiveFigures, progress: RunProgress) -> AsyncIterator[None]:
    """Draw the figures inside `async with`, on the event loop itself: a thread would take turns with it at any moment."""
    if not console.is_terminal:
        yield
        return
    with LiveArea(console=console, auto_refresh=False, transient=True) as area:
        task = asyncio.create_task(_draw(area, figures, progress))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _draw(area: LiveArea, figures: LiveFigures, progress: RunProgress) -> None:
    while True:
        area.update(Text(line(figures.of(progress))), refresh=True)
        await asyncio.sleep(INTERVAL_S)


def line(live: Live) -> str:
    """Write the figures as two lines."""
    eta = "" if live.eta_s is None else f", {live.eta_s:.0f} s left"
    return (
        f"{live.elapsed_s:.0f} s{eta}: {live.sent:,} sent, {live.running:,} running, {live.done:,} done, "
        f"{live.failed:,} failed\n"
        f"{live.requests_per_s:.2f} req/s, {live.tokens_per_s:,.0f} tok/s, TTFT p50 {_ms(live.ttft_p50_s)} "
        f"p99 {_ms(live.ttft_p99_s)}, ITL p99 {_ms(live.itl_p99_s)}, goodput {live.goodput_per_s:.2f}/s, "
        f"send lag p99 {_ms(live.lag_p99_s)}"
    )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1000:.1f} ms"
