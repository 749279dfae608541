"""A scripted target in virtual time, and a run against it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdserve_bench.load.generator import run_load
from pdserve_bench.load.schedule import RunLimits
from pdserve_bench.load.target import LoadAnswer, LoadCall
from pdserve_bench.load.watch import LoadWatch, RunProgress, watch_nothing
from pdserve_bench.row import BenchRow
from pdserve_bench.workload.request import BenchRequest
from sim.world.clock import SimLoop, Timeline


@dataclass(frozen=True)
class Script:
    """How one request is answered: the delay of each token, and how it ends."""

    delays_s: tuple[float, ...] = (0.1, 0.1)
    error: str = ""


@dataclass
class FakeTarget:
    """Answers by a script. Token i of request n is 1000 * n + i."""

    script: Callable[[int], Script] = lambda number: Script()
    calls: list[LoadCall] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def send(self, call: LoadCall, answer: LoadAnswer) -> None:
        loop = asyncio.get_running_loop()
        self.calls.append(call)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            script = self.script(call.number)
            for index, delay_s in enumerate(script.delays_s):
                await asyncio.sleep(delay_s)
                answer.arrivals.append((loop.time(), 1))
                answer.ids.append(1000 * call.number + index)
                answer.texts.append(f"<{call.number}.{index}>")
            answer.error = script.error
            answer.ended_s = loop.time()
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


def run_virtually(
    requests: list[BenchRequest] | Iterator[BenchRequest],
    target: FakeTarget,
    limits: RunLimits,
    watch: LoadWatch = watch_nothing,
    *,
    cancel_at_s: float | None = None,
    progress: RunProgress | None = None,
    until_s: float = 1e6,
    late_s: Callable[[], float] = lambda: 0.0,
) -> list[BenchRow]:
    """Run the generator on a virtual clock. Nothing is left behind it. `late_s` moves the generator's clock ahead of it."""
    timeline = Timeline()
    loop = SimLoop(timeline, "generator")
    rows: list[BenchRow] = []

    def keep(row: BenchRow) -> bool:
        rows.append(row)
        return watch(row)

    asyncio.events._set_running_loop(loop)
    try:
        task = loop.create_task(
            run_load(iter(requests), target, limits, keep, progress=progress, clock=lambda: loop.time() + late_s(), poll_s=0.0),
            name="run",
        )
    finally:
        asyncio.events._set_running_loop(None)
    if cancel_at_s is not None:
        loop.call_at(cancel_at_s, task.cancel)
    assert timeline.run(task.done, until_s=until_s)
    assert not timeline.errors
    assert target.running == 0
    if cancel_at_s is None:
        assert task.result() == rows
    return rows
