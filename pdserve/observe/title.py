"""Process titles: `ps` and `top` show each process of pdserve by its name, such as `pdserve: decode-0`."""

from __future__ import annotations

import os
from typing import Final

import setproctitle

PREFIX: Final = "pdserve: "
KEEP_ENVIRONMENT: Final = "SPT_NOENV"  # the library reads it at its first call


def shown_name() -> str:
    """Return the name by which `set_title` has shown this process; "pdserve" when it has not."""
    title = setproctitle.getproctitle()
    return title.removeprefix(PREFIX) if title.startswith(PREFIX) else "pdserve"


def set_title(name: str) -> None:
    """Show this process as `pdserve: NAME`. From then on the title stands in /proc/PID/cmdline instead of the arguments.

    A title has the room that the arguments had. The library would also take the room of the environment, and
    /proc/PID/environ would be empty; it does not here.

    The library finds the arguments by walking back from the first variable of the environment, and finds nothing when that
    variable was set again. So a variable that stands already is left alone: Ray passes it on, in any place of the order.
    """
    if os.environ.get(KEEP_ENVIRONMENT):
        setproctitle.setproctitle(PREFIX + name)
        return
    os.environ[KEEP_ENVIRONMENT] = "1"
    try:
        setproctitle.setproctitle(PREFIX + name)
    finally:
        del os.environ[KEEP_ENVIRONMENT]  # our children decide for themselves
