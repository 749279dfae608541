"""The folders of one cluster: a short private one for Ray and the router's settings, and one for the logs."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pdserve.cluster.janitor import Janitor
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
