"""A real worker whose engine can be made to hang: SIGUSR1 stops its engine thread within its next step, for good.

So does a device that never answers. All other threads go on: the loop beats, and reads and serves as ever. The process is
the role's own in every other way: it runs the module that `processes.MODULE` names.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading

from pdserve.core.step_plan import Sampled, StepPlan
from pdserve.engine.runner import ModelRunner
from testkit.processes import MODULE


def main() -> None:
    hang = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hang.set())
    execute = ModelRunner.execute

    def execute_or_hang(self: ModelRunner, plan: StepPlan) -> list[Sampled]:
        if hang.is_set():
            threading.Event().wait()
        return execute(self, plan)

    ModelRunner.execute = execute_or_hang  # type: ignore[method-assign]
    runpy.run_module(os.environ[MODULE], run_name="__main__")


if __name__ == "__main__":
    main()
