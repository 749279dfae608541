"""A real worker of another release, as far as versions go: `ENV` in its environment says which ones it speaks.

In every other way the process is that of its role: it runs the module that `processes.MODULE` names.
"""

from __future__ import annotations

import os
import runpy
from typing import Final

import pdserve.core.worker as core_worker
from pdserve.core.worker import VersionRange
from testkit.processes import MODULE, Place

ENV: Final = "VERSIONS_OF_TESTED_WORKER"
"""The zygote is not free to fork a process with this variable: its modules have read the versions already."""


def place(link: VersionRange, peer: VersionRange) -> Place:
    """Return the place of a worker that speaks these versions of the link's protocol and of that between workers."""
    return Place(env={ENV: " ".join(map(str, (*link, *peer)))}, module="testkit.versioned_worker")


def main() -> None:
    """Set the versions before any other part reads them, and run the role's module."""
    oldest_link, link, oldest_peer, peer = map(int, os.environ[ENV].split())
    core_worker.LINK_VERSIONS = VersionRange(oldest_link, link)  # type: ignore[misc]
    core_worker.PEER_VERSIONS = VersionRange(oldest_peer, peer)  # type: ignore[misc]
    runpy.run_module(os.environ[MODULE], run_name="__main__")


if __name__ == "__main__":
    main()
