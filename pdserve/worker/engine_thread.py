"""The engine thread. No other thread touches scheduler, block pool, model and device.

One step takes the commands, plans, tells the loop which blocks were lent and reserved, computes, collects the tokens,
publishes them, and sums the final blocks. An idle engine blocks on its queue, so it costs no core.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import SumBlocks
from pdserve.core.errors import InternalBug, Overloaded
from pdserve.core.roofline.step_counts import StepCounts
from pdserve.core.step_plan import Sampled, StepPlan
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_steps import EngineSteps
from pdserve.worker.messages import Command, StepEvents

MAX_COMMANDS: Final = 65536
"""The most commands in the queue. A router's bounded queue sends far fewer between two steps, so a full queue means that the
engine is stuck."""


class Runner(Protocol):
    """The model, as the engine thread uses it."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the step of a plan. Return an opaque value for `collect`, which follows before the next launch."""

    def collect(self, pending: Any) -> list[Sampled]:
        """Wait until the step is done. Return one token for each sample of the plan, in the order of the plan."""


class EngineThread:
    """A thread that runs `build`, then step after step. It calls `publish`, and `on_death` with an error that ends it."""

    def __init__(
        self,
        build: Callable[[], tuple[Runner, Scheduler, BlockPools]],
        publish: Callable[[StepEvents], None],
        on_death: Callable[[BaseException], None],
        sums_of: Callable[[], Sequence[SumBlocks] | None] = lambda: None,
        counts_of: Callable[[], StepCounts] = StepCounts,
    ) -> None:
        """`sums_of` is called after `build` and returns a function for each KV group that sums its blocks. None: no block is
        summed. `counts_of` is called then as well, and returns what counts the steps."""
        self._counts_of = counts_of
        self._build = build
        self._sums_of = sums_of
        self._publish = publish
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Start the thread and return when the model is loaded. Raises what `build` raised; `InternalBug` after `timeout_s`."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise InternalBug(f"the engine did not load within {timeout_s:.0f} s")
        if self._failure is not None:
            raise self._failure

    def submit(self, command: Command) -> None:
        """Queue a command. The loop thread calls this; it never blocks. Raises `Overloaded` when the queue is full."""
        if self._commands.qsize() >= MAX_COMMANDS:
            raise Overloaded("the engine's command queue is full", retry_after_s=1.0)
        self._commands.put(command)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step. Return False when it still runs after `timeout_s`."""
        self._stopping = True
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            runner, scheduler, pool = self._build()
        except BaseException as exc:  # noqa: BLE001 - re-raised by `start` in the caller's thread
            self._failure = exc
            self._ready.set()
            return
        self._ready.set()
        try:
            steps = EngineSteps(scheduler, pool, self._sums_of(), self._counts_of())
            while not self._stopping:
                self._step(runner, steps)
        except BaseException as exc:  # noqa: BLE001 - the thread's last act is to report its death
            self._on_death(exc)

    def _step(self, runner: Runner, steps: EngineSteps) -> None:
        commands = self._take_commands(block=not steps.has_work)
        began_s = time.perf_counter()
        plan, early = steps.begin(commands)
        if early is not None:
            self._publish(early)
        if plan.slices:
            sampled = runner.collect(runner.launch(plan))
            self._publish(steps.finish(sampled, time.perf_counter() - began_s))
            if (sealed := steps.seal()) is not None:
                self._publish(sealed)

    def _take_commands(self, *, block: bool) -> list[Command]:
        """Return all queued commands; with `block`, wait for the first. None in the queue asks the thread to stop."""
        taken: list[Command] = []
        while block or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                break
            taken.append(command)
            block = False
        return taken
