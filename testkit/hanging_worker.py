"""A real worker whose engine can be made to hang. SIGUSR1 stops its engine thread for good, within its next step.

A device that never answers has the same effect. All other threads go on: the loop sends heartbeats, reads and serves as before.
In every other way the process is that of its role: it runs the module that `processes.MODULE` names.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading

from pdserve.core.step_plan import StepPlan
from pdserve.engine.runner import ModelRunner, Pending
from testkit.processes import MODULE


def main() -> None:
    """Install the signal handler, and run the role's module."""
    hang = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hang.set())
    launch = ModelRunner.launch

    def launch_or_hang(self: ModelRunner, plan: StepPlan) -> Pending:
        if hang.is_set():
            threading.Event().wait()
        return launch(self, plan)

    ModelRunner.launch = launch_or_hang  # type: ignore[method-assign]
    runpy.run_module(os.environ[MODULE], run_name="__main__")


if __name__ == "__main__":
    main()
