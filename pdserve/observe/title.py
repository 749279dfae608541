"""Process titles: `ps` and `top` show each process of pdserve by its name, such as `pdserve: decode-0`."""

from __future__ import annotations

import os
from typing import Final

import setproctitle

PREFIX: Final = "pdserve: "
KEEP_ENVIRONMENT: Final = "SPT_NOENV"  # the library reads it at its first call


def set_title(name: str) -> None:
    """Show this process as `pdserve: NAME`. From then on the title stands in /proc/PID/cmdline instead of the arguments.

    A title has the room that the arguments had. The library would also take the room of the environment, and
    /proc/PID/environ would be empty; it does not here.
    """
    before = os.environ.get(KEEP_ENVIRONMENT)
    os.environ[KEEP_ENVIRONMENT] = "1"
    try:
        setproctitle.setproctitle(PREFIX + name)
    finally:
        if before is None:
            del os.environ[KEEP_ENVIRONMENT]  # our children decide for themselves
        else:
            os.environ[KEEP_ENVIRONMENT] = before
