"""The file that takes what a process of a cluster writes to its standard error, and its bound.

A file that has grown is copied and emptied, and not renamed: whoever has it open for appending goes on in the empty one, a
native library or a child as well. So nobody can fill the disk, and no line of the log is lost, since the thread that writes the
lines also empties the file. What others write during the copying, which takes some milliseconds, may be lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from io import FileIO
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
MAX_BYTES: Final = 16 * MIB
"""A file has about so many bytes. A line takes 100 to 200, so it holds the last 100,000 of them."""
KEPT: Final = 3
"""The number of older files, `NAME.1` being the youngest. A process so takes at most 64 MiB of the disk."""
STDOUT: Final = "stdout"
"""The folder of logs that stands for no folder: the standard output of the container, which Kubernetes collects."""
CONTAINER_STDOUT: Final = Path("/proc/1/fd/1")  # of the container's first process, whoever started the process that logs


def log_file(folder: Path, name: str) -> Path:
    """Return the file of a log in a folder. `STDOUT` is the container's output, or files in the temporary folder where this
    user may not write to it."""
    if str(folder) != STDOUT:
        return folder / name
    if os.access(CONTAINER_STDOUT, os.W_OK):
        return CONTAINER_STDOUT
    return _own_folder() / name


def open_log(path: Path) -> FileIO:
    """Open the file for appending. It becomes the standard error of a process. It is emptied first if it is large.

    Raises `OSError` when it cannot be made.
    """
    if path.parent == _own_folder():
        _make_own(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    empty_if_large(path)
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644), "wb")


def _own_folder() -> Path:
    """Return the folder of this user's logs in the temporary folder, which all users share."""
    return Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}-logs"


def _make_own(folder: Path) -> None:
    """Make a folder of this user alone. In a folder that another user made, a log could be a link to any file of ours."""
    folder.mkdir(0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "it is not a folder of this user alone (mode 0700)", str(folder))


def empty_if_large(path: Path) -> None:
    """Empty a file that has `MAX_BYTES`, and keep these beside it. What is no file is left alone.

    If the disk is full the file is emptied all the same: it may be what fills the disk.
    """
    with contextlib.suppress(OSError):
        if not path.is_file() or path.stat().st_size < MAX_BYTES:
            return
        with contextlib.suppress(OSError):
            _keep(path)
        os.truncate(path, 0)


def _keep(path: Path) -> None:
    """Copy the last bytes of a file to the first of the older ones, each of which takes the place of the next."""
    older = [path.with_name(f"{path.name}.{number}") for number in range(1, KEPT + 1)]
    for place in range(KEPT - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            older[place - 1].replace(older[place])
    with path.open("rb") as source, older[0].open("wb") as copy:
        left = 2 * MAX_BYTES  # it is larger by the last line, or by what others write, who may be faster than this copy
        source.seek(max(0, path.stat().st_size - left))
        while left > 0 and (piece := source.read(min(left, MIB))):
            copy.write(piece)
            left -= len(piece)
