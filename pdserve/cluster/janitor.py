"""The janitor ends what must not outlive this process, and removes its folder, when this process has ended, however it ends.

A killed process cannot clean up, and a process that ends while it starts Ray has a thread that still writes. So a shell waits
in a read of its standard input, whose other end this process holds: the read ends when this process does. Then the processes
with the mark of the folder in their environment are killed, whoever their parents are by now: Ray's agents of a node look for
their parent only every few seconds, and are adopted by others meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from pdserve.cluster.record import MARK, TIED, carrying

SCRIPT: Final = """
read -r word
[ "$word" = clean ] || "$2" -m pdserve.cluster.janitor "$1"
for try in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$1" 2> /dev/null
    [ -e "$1" ] || exit 0
    sleep 0.3
done
"""
STOP_TIMEOUT_S: Final = 5.0
SWEEP_S: Final = 10.0  # those that are killed may have started others meanwhile; a round takes some milliseconds
PAUSE_S: Final = 0.1
ROOT: Final = Path(__file__).resolve().parents[2]


class Janitor:
    """The shell of one folder. The owner of the folder removes the folder and calls `close`; if it dies, the shell acts."""

    def __init__(self, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in (MARK, TIED)}
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "pdserve-janitor", str(folder), sys.executable],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the signals of a terminal do not reach the shell
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def close(self) -> None:
        """Let the shell remove the folder, and wait for the shell to end. The processes have ended before. Idempotent."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # the second: it was closed before
            self._child.stdin.write(b"clean\n")
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def sweep(folder: str) -> None:
    """Kill every process that is tied to the folder, until two looks in a row find none."""
    deadline = time.monotonic() + SWEEP_S
    found_none = 0
    while found_none < 2 and time.monotonic() < deadline:
        tied = carrying(TIED, folder)
        for process in tied:
            process.send(signal.SIGKILL)
        found_none = 0 if tied else found_none + 1
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sweep(sys.argv[1])
