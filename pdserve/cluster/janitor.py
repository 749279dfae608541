"""A shell that removes our folder when this process has ended, however it ends.

A killed process cannot clean up, and a process that ends while it starts Ray has a thread that still writes. The shell
waits in a read of its standard input. This process holds the other end, so the read ends when this process does.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

SCRIPT = """
cat > /dev/null
for try in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$1" 2> /dev/null
    [ -e "$1" ] || exit 0
    sleep 0.3
done
"""
STOP_TIMEOUT_S = 5.0


class Janitor:
    """The shell of one folder. The owner of the folder removes the folder and calls `close`; if it dies, the shell acts."""

    def __init__(self, folder: Path) -> None:
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "pdserve-janitor", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the signals of a terminal do not reach the shell
        )

    def close(self) -> None:
        """Let the shell remove the folder, and wait for the shell to end. Idempotent."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
