"""The view of a cluster that starts and runs: a live list on a terminal, and one line for each change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pdserve.cluster.events import (
    ActuatorReplaced,
    Event,
    EventPart,
    LogsKept,
    PartReady,
    PartStarted,
    PolicyChanged,
    PoolsResized,
    RayBack,
    RayLost,
    RouterAdopted,
    RouterBack,
    RouterLost,
    RouterReplaced,
    StartedWithout,
    WorkerChanged,
    WorkerLoads,
    WorkerPhase,
)

REFRESHES_S = 8
BAR_CELLS = 20
LINE_S = 5.0  # seconds between two lines about a worker that loads


class StartView:
    """A listener of `Cluster`. Inside `with`, on a terminal, it draws the start. Otherwise it prints a line for each event."""

    def __init__(self, console: Console, after_ray: Callable[[], None]) -> None:
        """Prepare the view. `after_ray` is called when Ray is ready."""
        self._after_ray = after_ray
        self._console = console
        self._live: Live | None = None
        self._parts: dict[EventPart, float | None] = {}
        self._workers: dict[str, WorkerChanged] = {}
        self._loads: dict[str, WorkerLoads] = {}
        self._line_s: dict[str, float] = {}
        self._spinner = Spinner("dots")
        self._began = time.monotonic()
        self.seconds: dict[EventPart, float] = {}

    def __enter__(self) -> StartView:
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=REFRESHES_S, transient=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        live, self._live = self._live, None
        if live:
            live.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, PartStarted):
            self._parts[event.part] = None
        elif isinstance(event, PartReady):
            self._parts[event.part] = self.seconds[event.part] = event.seconds
            if event.part is EventPart.RAY:
                self._after_ray()
        elif isinstance(event, WorkerChanged):
            self._workers[event.worker_id] = event
            self._loads.pop(event.worker_id, None)
        elif isinstance(event, WorkerLoads):
            self._loads[event.worker_id] = event
        if self._live is None:
            self._say(event)

    def _say(self, event: Event) -> None:
        if isinstance(event, WorkerLoads):
            now_s = time.monotonic()
            if now_s - self._line_s.get(event.worker_id, self._began) < LINE_S:
                return
            self._line_s[event.worker_id] = now_s
        line = _sentence(event)
        if line:
            self._console.print(
                f"[{time.monotonic() - self._began:6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True
            )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 1))
        for part, seconds in self._parts.items():
            took = Text("" if seconds is None else f"{seconds:.1f} s", "dim")
            grid.add_row(self._spinner if seconds is None else Text("✓", "green"), part.value, took)
        for worker_id, event in self._workers.items():
            done, waits = event.phase is WorkerPhase.READY, event.phase is WorkerPhase.WAITING
            shown: RenderableType = Text(_worker_says(event), "yellow" if waits else "dim", overflow="fold")
            if worker_id in self._loads:
                state = self._loads[worker_id].state
                bar = ProgressBar(state.total, state.done, width=BAR_CELLS)
                shown = Columns((bar, Text(str(state), "dim", overflow="fold")))
            grid.add_row(Text("✓", "green") if done else self._spinner, f"  {worker_id}", shown)
        yield grid


def _worker_says(event: WorkerChanged) -> str:
    return event.phase.value + (f"; {event.detail}" if event.detail else "")


def _sentence(event: Event) -> str:
    if isinstance(event, PartStarted):
        return f"{event.part.value} starting"
    if isinstance(event, PartReady):
        return f"{event.part.value} ready after {event.seconds:.1f} s"
    if isinstance(event, WorkerChanged):
        return f"{event.worker_id} {_worker_says(event)}"
    if isinstance(event, WorkerLoads):
        return f"{event.worker_id} {event.state}"
    if isinstance(event, RouterLost):
        return f"the router is gone ({event.detail}); starting it again in {event.delay_s:.1f} s"
    if isinstance(event, RayLost):
        return f"Ray is gone ({event.detail}); workers go on, and pools keep their sizes until Ray is back"
    if isinstance(event, RayBack):
        return "Ray is back; the workers that run were adopted"
    if isinstance(event, StartedWithout):
        return f"serving without {', '.join(event.worker_ids)}, started again meanwhile; `pdserve status` shows what is there"
    if isinstance(event, RouterAdopted):
        return f"the router of before goes on (pid {event.pid})"
    if isinstance(event, RouterReplaced):
        return f"the router of before (pid {event.pid}) {event.why}; it is stopped, and another one started"
    if isinstance(event, LogsKept):
        return f"logs kept in {event.folder}"
    if isinstance(event, PoolsResized | PolicyChanged):
        return event.text
    if isinstance(event, ActuatorReplaced):
        return f"another process changes the pools now: {event.detail}"
    assert isinstance(event, RouterBack)
    return f"the router is back (pid {event.pid})"
