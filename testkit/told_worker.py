"""A real worker that does what a test tells it: its engine stands still, hangs or breaks, or it is one of another release.

In every other way the process is that of its role: it runs the module that `processes.MODULE` names. A `Place` makes a member
of a cluster such a worker, and its environment says what it obeys.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from testkit.processes import MODULE, Place

if TYPE_CHECKING:
    from pdserve.core.step_plan import StepPlan
    from pdserve.core.worker import VersionRange
    from pdserve.engine.runner import ModelRunner, Pending

ME: Final = "testkit.told_worker"
HOLD: Final = "PDSERVE_TESTING_HOLD"
BREAK: Final = "PDSERVE_TESTING_BREAK"
VERSIONS: Final = "VERSIONS_OF_TESTED_WORKER"
"""The zygote is not free to fork a process with this variable: its modules have read the versions already."""
LOOK_S: Final = 0.005
ALL: Final = "all"

HANGING: Final = Place(module=ME)
"""The place of a worker whose engine thread stops for good, within its next step, when it gets SIGUSR1. A device that never
answers has the same effect: all other threads go on, and the loop sends heartbeats, reads and serves as before."""


def of_versions(link: VersionRange, peer: VersionRange) -> Place:
    """Return the place of a worker that speaks these versions of the link's protocol and of that between workers."""
    return Place(env={VERSIONS: " ".join(map(str, (*link, *peer)))}, module=ME)


class Hold:
    """A position in tokens, prompt and output together, that no sequence passes while it is set.

    So a test can act at a known moment of a request; on a busy machine the request might be over before the test acts. The
    engine that reaches the position stands still as a whole: it computes nothing and takes no command. All other threads of its
    worker go on. Probes are shorter than the positions that tests set.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare a hold that is not set. `folder` holds its file."""
        self._file = folder / "hold"

    def places(self, *names: str) -> dict[str, Place]:
        """Return the places of the workers that obey this hold, by their names."""
        return dict.fromkeys(names, Place(env={HOLD: str(self._file)}, module=ME))

    @contextmanager
    def at(self, position: int) -> Iterator[None]:
        """Set the hold until the block ends, or until `release` is called."""
        _write(self._file, str(position))
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Let the engines go on. Nothing happens when the hold is not set."""
        self._file.unlink(missing_ok=True)


class Breakage:
    """The tokens whose embeddings are no numbers, on the workers that obey it. First there are none.

    With all rows the worker is one with bad memory: every step gives logits that are no numbers, also those of probes. With the
    row of one token on all workers, prompts with this token fail wherever they go.
    """

    def __init__(self, folder: Path, name: str) -> None:
        """`folder` holds its file."""
        self._file = folder / f"broken-{name}"

    @property
    def place(self) -> Place:
        """The place of the workers that obey it."""
        return Place(env={BREAK: str(self._file)}, module=ME)

    def set(self, token: int | None = None) -> None:
        """Break the embedding of a token from the next step on. None: those of all tokens."""
        _write(self._file, ALL if token is None else str(token))

    def mend(self) -> None:
        """Let all embeddings be as they were loaded, from the next step on."""
        self._file.unlink(missing_ok=True)


def _write(file: Path, text: str) -> None:
    whole = file.with_suffix(".new")
    whole.write_text(text)
    whole.replace(file)  # in one step, since engines read it all the time


def _read(name: str) -> str:
    """Return the text of the file that a variable of the environment names. Empty: there is none."""
    try:
        return Path(os.environ[name]).read_text()
    except (KeyError, FileNotFoundError):
        return ""


def obey(hang: threading.Event) -> None:
    """Let the engine of this process look before each step at what it is told."""
    import torch

    from pdserve.engine.runner import ModelRunner

    launch = ModelRunner.launch
    broken, kept = "", dict[str, torch.Tensor]()

    def launch_as_told(self: ModelRunner, plan: StepPlan) -> Pending:
        nonlocal broken
        if hang.is_set():
            threading.Event().wait()
        last = max((part.start + len(part.token_ids) for part in plan.slices), default=0)
        while (position := _read(HOLD)) and last > int(position):
            time.sleep(LOOK_S)
        told = _read(BREAK)
        if told != broken:
            with torch.inference_mode():
                model: Any = self._model
                embedding = (model if hasattr(model, "_embedding") else model._model)._embedding  # one of torch is wrapped
                embedding.copy_(kept.setdefault("whole", embedding.clone()))
                if told:
                    embedding[slice(None) if told == ALL else int(told)] = float("nan")
            broken = told
        return launch(self, plan)

    ModelRunner.launch = launch_as_told  # type: ignore[method-assign]


def main() -> None:
    """Set the versions before any other part reads them, let the engine obey, and run the role's module."""
    import pdserve.core.worker as core_worker

    if told := os.environ.get(VERSIONS):
        oldest_link, link, oldest_peer, peer = map(int, told.split())
        core_worker.LINK_VERSIONS = core_worker.VersionRange(oldest_link, link)  # type: ignore[misc]
        core_worker.PEER_VERSIONS = core_worker.VersionRange(oldest_peer, peer)  # type: ignore[misc]
    hang = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: hang.set())
    obey(hang)
    runpy.run_module(os.environ[MODULE], run_name="__main__")


if __name__ == "__main__":
    main()
