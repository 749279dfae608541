"""A real worker whose engine stands still where a test says, so that the test can act at a known moment of a request.

Without it a test would race with the request: on a busy machine the request may be over before the test acts. In every other
way the process is that of its role: it runs the module that `processes.MODULE` names.
"""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pdserve.core.step_plan import StepPlan
from pdserve.engine.runner import ModelRunner, Pending
from testkit.processes import MODULE, Place

ENV: Final = "PDSERVE_TESTING_HOLD"
LOOK_S: Final = 0.005


class Hold:
    """A position in tokens, prompt and output together, that no sequence passes while it is set.

    The engine that reaches the position stands still as a whole: it computes nothing and takes no command. All other threads
    of its worker go on. Probes are shorter than the positions that tests set.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare a hold that is not set. `folder` holds its file."""
        self._file = folder / "hold"

    def places(self, *names: str) -> dict[str, Place]:
        """Return the places of the workers that obey this hold, by their names."""
        return dict.fromkeys(names, Place(env={ENV: str(self._file)}, module="testkit.held_worker"))

    @contextmanager
    def at(self, position: int) -> Iterator[None]:
        """Set the hold until the block ends, or until `release` is called."""
        whole = self._file.with_suffix(".new")
        whole.write_text(str(position))
        whole.replace(self._file)  # in one step, since engines read it all the time
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Let the engines go on. Nothing happens when the hold is not set."""
        self._file.unlink(missing_ok=True)


def position_of(file: Path) -> int | None:
    """Return the position that a file sets. None: the hold is not set."""
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None


def main() -> None:
    """Let the engine look at the hold before each step, and run the role's module."""
    file = Path(os.environ[ENV])
    launch = ModelRunner.launch

    def launch_when_released(self: ModelRunner, plan: StepPlan) -> Pending:
        last = max((part.start + len(part.token_ids) for part in plan.slices), default=0)
        while (position := position_of(file)) is not None and last > position:
            time.sleep(LOOK_S)
        return launch(self, plan)

    ModelRunner.launch = launch_when_released  # type: ignore[method-assign]
    runpy.run_module(os.environ[MODULE], run_name="__main__")


if __name__ == "__main__":
    main()
