"""Find the way by which UCX reads a peer's memory. UCX itself says which one it has chosen.

With `UCX_PROTO_INFO` set, UCX writes a table for each kind of transfer when the first one is made:

    | reader@2 intra-node cfg#2 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[0] |
    |                    0..inf | zero-copy                                 | cuda_ipc/cuda             |

"zero-copy" by cuda_ipc is a copy between two places of GPU memory. "software emulation" over tcp or sysv means that the
bytes go through host memory and active messages, some tens of times slower.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_READ = re.compile(r"remote memory read by ucp_get\S* into (?P<into>\S+)")
_ROW = re.compile(r"\|\s*(?:\d+\.\.)?(?:inf|\d+)\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<by>[^|]*?)\s*\|")


def ask_for_log(folder: Path) -> None:
    """Let this process, and those that it starts, write their choices into `folder`. Call it before UCX is loaded."""
    os.environ.update(UCX_PROTO_INFO="y", UCX_LOG_LEVEL="info", UCX_LOG_FILE=str(folder / "ucx.%p.log"))


def read_way(folder: Path) -> str:
    """Return how this process reads the longest blocks, such as "cuda_ipc/cuda, zero-copy"; "" when UCX did not say."""
    ctypes.CDLL(None).fflush(None)  # the C library would write the log of UCX only at the end of the process
    try:
        text = (folder / f"ucx.{os.getpid()}.log").read_text(errors="replace")
    except OSError:
        return ""
    return way_in(text)


def way_in(text: str) -> str:
    """Return the last row of the last table of reads into GPU memory, or of other reads when there are none."""
    found: dict[bool, str] = {}
    into_cuda: bool | None = None
    for line in text.splitlines():
        if read := _READ.search(line):
            into_cuda = read["into"].startswith("cuda")
        elif "cfg#" in line:  # a table of another kind, or a summary
            into_cuda = None
        elif into_cuda is not None and (row := _ROW.search(line)):
            found[into_cuda] = f"{row['by']}, {row['how']}"
    return found.get(True, found.get(False, ""))
