"""The folders of one cluster: a short private one for Ray and the router's settings, and one for the logs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.cluster.record import MARK, TIED, carrying
from pdserve.core.errors import ConfigError
from pdserve.observe.log_files import STDOUT

SOCKET_PATH_LIMIT = 107  # bytes of a Unix socket's path on Linux (sun_path, without the final zero)
RAY_SUFFIX = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
PREFIX = "pd-"
LOG_PREFIX = "pdserve-logs-"


@dataclass(frozen=True, slots=True)
class Folders:
    """The two folders of one cluster, and the janitor that removes the private one if this process is killed."""

    private: Path  # always removed at the end
    logs: Path
    logs_are_ours: bool  # the log folder was made here: it is removed after a clean stop and kept after a failure
    janitor: Janitor

    @classmethod
    def create(cls, log_dir: str | None, before: Path | None = None) -> Folders:
        """Make the folders. `log_dir` None makes a temporary one, unless a lasting cluster has one from before.

        Raises `ConfigError` when a folder cannot be made.
        """
        private = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_short_parent()))
        try:
            logs = before if log_dir is None and before is not None and before.is_dir() else _logs(log_dir)
            return cls(private, logs, log_dir is None, Janitor(private))
        except OSError as exc:
            shutil.rmtree(private, ignore_errors=True)
            raise ConfigError(f"log_dir: cannot make {log_dir}: {exc.strerror}; give another with --log-dir") from exc

    def remove(self, *, keep_logs: bool) -> None:
        """Remove the private folder, and the logs as `remove_logs` does. Idempotent."""
        shutil.rmtree(self.private, ignore_errors=True)
        self.janitor.close()
        self.remove_logs(keep_logs)

    def remove_logs(self, keep_logs: bool) -> None:
        """Remove the log folder if it was made here. `keep_logs` keeps it, unless all its files are empty."""
        if self.logs_are_ours and not (keep_logs and any(file.stat().st_size for file in self.logs.glob("*"))):
            shutil.rmtree(self.logs, ignore_errors=True)


def _logs(log_dir: str | None) -> Path:
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix=LOG_PREFIX))
    if log_dir == STDOUT:
        return Path(STDOUT)
    folder = Path(log_dir).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _short_parent() -> Path:
    """Return the temporary folder, or /tmp when the path of Ray's sockets below it would be too long.

    Raises `ConfigError` when /tmp is missing as well.
    """
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        if len(str(parent)) + len(f"/{PREFIX}xxxxxxxx") + RAY_SUFFIX <= SOCKET_PATH_LIMIT and parent.is_dir():
            return parent
    raise ConfigError(f"TMPDIR {tempfile.gettempdir()} is too long for Unix sockets; set a shorter one")


# The janitor ends what must not outlive this process, and removes its folder, when this process has ended, however it ends.
#
# A killed process cannot clean up, and a process that ends while it starts Ray has a thread that still writes. So a shell waits
# in a read of its standard input, whose other end this process holds: the read ends when this process does. Then the processes
# with the mark of the folder in their environment are killed, whoever their parents are by now: Ray's agents of a node look for
# their parent only every few seconds, and are adopted by others meanwhile.

SCRIPT: Final = """
read -r word
[ "$word" = clean ] || "$2" -m pdserve.cluster.folders "$1"
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
