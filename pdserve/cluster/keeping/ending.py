"""The end of a lasting cluster, also of one whose `pdserve up` has died: everything that carries its mark on this machine."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.cluster.keeping.elsewhere import Say, drain_elsewhere
from pdserve.cluster.keeping.order import running_workers
from pdserve.cluster.launch import reachable
from pdserve.cluster.record import ClusterRecord, ProcessId, marked

UP_MARGIN_S: Final = 90.0
"""A living `pdserve up` ends its cluster itself: streams get `router.drain_s`, and the rest at most so long. On an idle machine
it takes seconds; a lost Ray is waited for up to 60 s."""
TERM_TIMEOUT_S: Final = 15.0
"""A router or a worker that is told to end takes less than ten seconds."""
KILL_TIMEOUT_S: Final = 5.0
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The rest of a cluster after `end_cluster`: processes here, and workers of other machines. A clean end leaves none."""

    processes: tuple[ProcessId, ...]
    elsewhere: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Tell whether nothing is left."""
        return not self.processes and not self.elsewhere


def end_cluster(name: str, say: Say) -> WorkerEnded:
    """End a cluster: its `pdserve up` if one lives, its workers on other machines, its router, its workers, and its record.

    say: gets a line for each step. Raises `ConfigError` for a wrong name or a folder of somebody else.
    """
    record = ClusterRecord.find(name)
    owner = record.owner if record is not None else None
    if owner is not None:
        say(f"stopping `pdserve up` (pid {owner.pid})")
        facts = record.facts if record is not None else None
        _send([owner], signal.SIGTERM)
        _send([owner], signal.SIGCONT)  # one that was stopped takes no other signal but SIGKILL
        _wait_gone([owner], (facts.drain_s if facts is not None else 0.0) + UP_MARGIN_S)
        if owner.alive:
            say(f"killing `pdserve up` (pid {owner.pid}), which does not end")
            _send([owner], signal.SIGKILL)  # or it would start again what ends below
            _wait_gone([owner], KILL_TIMEOUT_S)
    elsewhere = drain_elsewhere(record, reachable, say) if record is not None else ()
    router = record.router if record is not None else None
    names = {facts.process: worker_id for worker_id, facts in running_workers(record).items()}
    if router is not None:
        names[router.process] = "the router"
    found = marked(name)
    for process in found:
        say(f"stopping {names.get(process, 'a process')} (pid {process.pid})")
    first = [process for process in found if router is not None and process == router.process]
    for group in (first, found):  # the router first: it tells its clients, and takes nothing new
        _send(group, signal.SIGTERM)
        _wait_gone(group, TERM_TIMEOUT_S)
    _send(marked(name), signal.SIGKILL)  # also what was started meanwhile
    _wait_gone(marked(name), KILL_TIMEOUT_S)
    left = (*marked(name), *([owner] if owner is not None and owner.alive else []))
    if record is not None and not left and not elsewhere:  # those elsewhere know its secret
        _remove(record)
    return WorkerEnded(left, elsewhere)


def _remove(record: ClusterRecord) -> None:
    """Remove the record, and the logs if their folder was made for the cluster."""
    facts = record.facts
    record.own()
    try:
        if facts is not None and facts.logs_are_ours:
            shutil.rmtree(Path(facts.logs), ignore_errors=True)
        record.remove()
    finally:
        record.release()


def _send(processes: Iterable[ProcessId], number: int) -> None:
    for process in processes:
        process.send(number)


def _wait_gone(processes: Sequence[ProcessId], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.alive for process in processes) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
