"""A real worker whose weights can be broken and mended while it runs. Some rows of its embedding then are no numbers.

With all rows the worker is one with bad memory: every step gives logits that are no numbers, also those of probes. With the row
of one token on all workers, prompts with this token fail wherever they go. In every other way the process is that of its role:
it runs the module that `processes.MODULE` names.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any, Final

import torch

from pdserve.core.step_plan import StepPlan
from pdserve.engine.runner import ModelRunner, Pending
from testkit.processes import MODULE, Place

ENV: Final = "PDSERVE_TESTING_BREAK"
ALL: Final = "all"


class Breakage:
    """The tokens whose embeddings are broken, on the workers that obey it. First there are none."""

    def __init__(self, folder: Path, name: str) -> None:
        """`folder` holds its file."""
        self._file = folder / f"broken-{name}"

    @property
    def place(self) -> Place:
        """The place of the workers that obey it."""
        return Place(env={ENV: str(self._file)}, module="testkit.broken_worker")

    def set(self, token: int | None = None) -> None:
        """Break the embedding of a token from the next step on. None: those of all tokens."""
        whole = self._file.with_suffix(".new")
        whole.write_text(ALL if token is None else str(token))
        whole.replace(self._file)  # in one step, since engines read it all the time

    def mend(self) -> None:
        """Let all embeddings be as they were loaded, from the next step on."""
        self._file.unlink(missing_ok=True)


def main() -> None:
    """Let the engine look at the breakage before each step, and run the role's module."""
    file = Path(os.environ[ENV])
    launch = ModelRunner.launch
    now, kept = "", dict[str, torch.Tensor]()

    def launch_broken(self: ModelRunner, plan: StepPlan) -> Pending:
        nonlocal now
        told = file.read_text() if file.exists() else ""
        if told != now:
            with torch.inference_mode():
                model: Any = self._model
                embedding = (model if hasattr(model, "_embedding") else model._model)._embedding  # one of torch is wrapped
                embedding.copy_(kept.setdefault("whole", embedding.clone()))
                if told:
                    embedding[slice(None) if told == ALL else int(told)] = float("nan")
            now = told
        return launch(self, plan)

    ModelRunner.launch = launch_broken  # type: ignore[method-assign]
    runpy.run_module(os.environ[MODULE], run_name="__main__")


if __name__ == "__main__":
    main()
