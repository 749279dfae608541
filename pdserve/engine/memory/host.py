"""Free memory of this machine and used memory of this process, read from Linux's /proc and /sys."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
HUGE_BYTES: Final = 2 << 20
MADV_HUGEPAGE: Final = 14
_RESET_PEAK: Final = "5"  # see clear_refs in proc(5); since Linux 4.0


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes that this process can take without swapping or being killed.

    The machine and each cgroup of this process set a limit; the smallest one counts.
    """
    return min([_fields(root / "proc/meminfo")["MemAvailable"], *_cgroup_rooms(root)])


def resident_bytes(root: Path = ROOT) -> int:
    """Return the resident bytes of this process."""
    return _fields(root / "proc/self/status")["VmRSS"]


def anonymous_bytes(root: Path = ROOT) -> int:
    """Return the resident bytes of this process that no file holds, so that the system cannot drop them."""
    return _fields(root / "proc/self/status")["RssAnon"]


def peak_bytes(root: Path = ROOT) -> int:
    """Return the most resident bytes since the start, or since `reset_peak` if the kernel allows the reset."""
    return _fields(root / "proc/self/status")["VmHWM"]


def reset_peak(root: Path = ROOT) -> bool:
    """Start a new period for `peak_bytes`. False means that the kernel does not allow it."""
    try:
        (root / "proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def return_freed_memory() -> None:
    """Return freed memory to the system. glibc would keep what loading freed, 127 MiB in a worker with SmolLM2."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def touch(address: int, nbytes: int) -> None:
    """Overwrite [address, address + nbytes) with zeros, so that all its pages become resident.

    They are huge pages where the kernel gives them: 256 MiB of pages of 4 KiB take half a second of kernel time.
    """
    first, end = -(-address // HUGE_BYTES) * HUGE_BYTES, (address + nbytes) // HUGE_BYTES * HUGE_BYTES
    if end > first:  # advice only, so its failure changes nothing
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)
    ctypes.memset(address, 0, nbytes)


def _fields(path: Path) -> dict[str, int]:
    """Return the sizes of a file's lines `Name:  123 kB`, in bytes by name."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield the bytes left under the limit of each cgroup of this process, parents included.

    A container may see only its root group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, mount = ("memory.max", "memory.current", ""), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names, mount = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), root / "sys/fs/cgroup/memory"
        else:
            continue
        inner = Path(path.strip("/"))
        for group in (inner, *inner.parents):
            room = _room(mount / group, *names)
            if room is not None:
                yield room


def _room(group: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    """Return the bytes left in a cgroup; None when it has no limit or is not visible.

    The kernel counts cached files as used, but gives them up before it kills a process, so they are added.
    """
    try:
        limit, usage = ((group / name).read_text().strip() for name in (limit_name, usage_name))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return int(limit) - int(usage) + cached
