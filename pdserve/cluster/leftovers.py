"""A check whether a stopped cluster left anything on this machine: processes, folders, ports, shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdserve.cluster import processes

SHARED_MEMORY = Path("/dev/shm")
END_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class Leftovers:
    """One line for each thing that was left. A clean stop leaves none."""

    found: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.found)


@dataclass(frozen=True, slots=True)
class Before:
    """The child processes and the shared memory segments that existed before the cluster was started."""

    children: frozenset[psutil.Process]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Before:
        """Record the present state."""
        return cls(frozenset(processes.descendants(os.getpid())), frozenset(_segments()))

    def compare(self, folders: Sequence[Path], addresses: Sequence[str], known: Sequence[psutil.Process]) -> Leftovers:
        """Return what exists now and did not exist before. Processes get `END_TIMEOUT_S` to end.

        folders, addresses: must be gone, and must not answer. known: processes seen while the cluster ran, which may have
        lost their parents since.
        """
        ours = [process for process in {*processes.descendants(os.getpid()), *known} if process not in self.children]
        left = processes.wait_gone(ours, END_TIMEOUT_S)
        found = [f"process {process.pid}: {processes.command(process)[:80]}" for process in left]
        found += [f"folder {folder}" for folder in folders if folder.exists()]
        found += [f"port {address}" for address in addresses if _answers(address)]
        found += [f"shared memory {SHARED_MEMORY / name}" for name in _abandoned(frozenset(_segments()) - self.segments)]
        return Leftovers(tuple(found))


def _segments() -> list[str]:
    return os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []


def _abandoned(names: frozenset[str]) -> list[str]:
    """Return the segments that no living process maps. Other programs of this machine make segments too, and map them.

    A segment is found by its inode: a semaphore is mapped while it still has another name, and is renamed afterwards.
    """
    if not names:
        return []
    used = "".join(map(_maps, psutil.pids()))
    return sorted(name for name in names if (inode := _inode(SHARED_MEMORY / name)) and f" {inode} " not in used)


def _inode(path: Path) -> str:
    """Return device and inode of a file as memory maps write them; empty when the file is gone."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino}"


def _maps(pid: int) -> str:
    """Return the memory maps of a process; empty when it has ended or belongs to another user.

    psutil's `Process.memory_maps` reads `smaps`, which counts every page and takes ten times as long.
    """
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return ""


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
