"""A child that does as each question says, well or badly. `python tests/odd_child.py` starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.killable_child import LENGTH, open_channel


def spin() -> bytes:
    """Never let another thread of the process run."""
    re.match(r"(a+)+$", "a" * 64 + "b")
    return b""


def sleep() -> bytes:
    time.sleep(600)
    return b""


def leave_a_child() -> bytes:
    return str(subprocess.Popen(["sleep", "600"]).pid).encode()


def prints() -> bytes:
    print("garbage " * 100_000, flush=True)
    os.write(1, b"garbage\n")
    return sys.stdin.read().encode()


def cry() -> bytes:
    sys.stderr.write("x" * 200_000 + "\nlast words\n")
    sys.stderr.flush()
    os._exit(3)


def lengthy() -> bytes:
    return bytes(1 << 20)


def garbage() -> bytes:
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, b"[" * 60_000)
        except OSError:
            continue
    return b""


def shout() -> bytes:
    """Announce an answer without end."""
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, LENGTH.pack(1 << 62))
        except OSError:
            continue
    return b""


def hang_up() -> bytes:
    os.closerange(3, 30)
    time.sleep(600)
    return b""


def descriptors() -> bytes:
    return " ".join(sorted(os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists())).encode()


DEEDS: dict[bytes, Callable[[], bytes]] = {
    name.encode(): deed
    for name, deed in {
        "spin": spin, "sleep": sleep, "leave a child": leave_a_child, "print": prints, "cry": cry, "lengthy": lengthy,
        "garbage": garbage, "shout": shout, "hang up": hang_up, "descriptors": descriptors,
    }.items()
}  # fmt: skip


def answer(question: bytes) -> bytes:
    deed = DEEDS.get(question)
    return question if deed is None else deed()


if __name__ == "__main__":
    open_channel("odd").serve(answer)
