"""A shell that outlives us by a moment and removes our folder, however we end.

A killed process cannot clean up after itself, and one that ends in the middle of starting Ray has a thread that still
writes. The shell sleeps in a read of its standard input, whose other end is ours: at the end of the file we are gone.
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
    """Owned by whoever owns the folder; `close` after removing it, or let it be done by dying."""

    def __init__(self, folder: Path) -> None:
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "pdserve-janitor", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's signals are not for it
        )

    def close(self) -> None:
        """Let it do its work and wait for it. Idempotent."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
