"""What memory this machine has left for this process, and what the process has. Linux; read from /proc and /sys."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_RESET_PEAK: Final = "5"  # proc(5): clear_refs; since Linux 4.0


def available_bytes(root: Path = ROOT) -> int:
    """What could be taken without swapping or being killed: of the machine, and of each cgroup that this process is in."""
    return min([_fields(root / "proc/meminfo")["MemAvailable"], *_cgroup_rooms(root)])


def resident_bytes(root: Path = ROOT) -> int:
    return _fields(root / "proc/self/status")["VmRSS"]


def peak_bytes(root: Path = ROOT) -> int:
    """The most that was resident since the start, or since `reset_peak` where the kernel allows it."""
    return _fields(root / "proc/self/status")["VmHWM"]


def reset_peak(root: Path = ROOT) -> bool:
    """False: not allowed here, so `peak_bytes` tells of the whole life of the process."""
    try:
        (root / "proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def return_freed_memory() -> None:
    """After loading, glibc keeps what casting and packing freed (127 MiB a worker with SmolLM2) unless told otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def touch(address: int, nbytes: int) -> None:
    """Make fresh zeroed pages resident, which until then are only promised. What was written there is lost."""
    ctypes.memset(address, 0, nbytes)


def _fields(path: Path) -> dict[str, int]:
    """Bytes, of the lines `Name:  123 kB`."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What is left under the limit of each group, ours and those above it. A container may see only the last of them."""
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
    """None: no limit, or not visible. Cached files count as used and are given up before anyone is killed."""
    try:
        limit, usage = ((group / name).read_text().strip() for name in (limit_name, usage_name))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return int(limit) - int(usage) + cached
