"""Directories that are made once and then only read, on a disk that several processes share.

A directory appears under its final name complete or not at all: it is built under another name and then renamed. When two
processes build the same directory, the first rename wins, and the other process discards its copy, which is equal.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pdserve.core.errors import ConfigError

STALE_S: Final = 3600.0  # a conversion takes seconds to minutes; an older folder was left by a process that died
_BUILDING: Final = ".building-"


def default_cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/pdserve, or ~/.cache/pdserve when the variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`. If it does not exist yet, `build` first fills an empty directory that becomes `target`.

    Errors of `build` pass through, and nothing is left behind. An `OSError`, which means that the cache cannot be
    written, becomes a `ConfigError`.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        scratch = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=target.parent))
    except OSError as exc:
        raise _cannot_write(target.parent, exc) from exc

    try:
        build(scratch)
        _make_readable(scratch)
        _publish(scratch, target)
    except OSError as exc:  # most often a full disk
        raise _cannot_write(target.parent, exc) from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _cannot_write(folder: Path, exc: OSError) -> ConfigError:
    return ConfigError(f"cannot write the cache {folder}: {exc.strerror}; set XDG_CACHE_HOME to a folder that can be written")


def _make_readable(folder: Path) -> None:
    """Let other users read the folder, since a cache may be shared. Temporary folders and mapped files are private."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _publish(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # no other process was faster, so the rename failed
            raise


def _sweep(folder: Path) -> None:
    """Remove the folders that killed processes left behind."""
    for path in folder.glob(f"{_BUILDING}*"):
        try:
            age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:  # its owner has removed or renamed it
            continue
        if age_s > STALE_S:
            shutil.rmtree(path, ignore_errors=True)
