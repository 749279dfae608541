"""The process that speaks with Ray: `python -m pdserve.cluster.driver.process`. It has the keepers of all workers.

Ray's library ends the process that uses it when Ray's control service or its own node is lost. So `pdserve up` leaves Ray to
this child, which may die at any time: lasting workers are processes of their own, and the next child adopts them. A private Ray
is a child of this process, and ends with it. This process ends with its parent, however that ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.cluster.driver.driver import Begin, DriverAnswer, Joined, Request
from pdserve.cluster.events import Event
from pdserve.core.errors import PdserveError
from pdserve.observe.logs import setup_logging
from pdserve.observe.title import set_title

if TYPE_CHECKING:
    from pdserve.cluster.ray_session import RaySession

PR_SET_PDEATHSIG: Final = 1
log = logging.getLogger(__name__)


def main() -> None:
    """Join Ray or start one, and serve requests until the parent's end of the connection is closed."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process in order
        signal.signal(number, signal.SIG_IGN)
    setup_logging("info", file=Path(sys.argv[2]))
    set_title("ray driver")
    with Connection(int(sys.argv[1])) as connection:
        begin: Begin = connection.recv()
        from pdserve.cluster.ray_session import RaySession

        try:
            session = RaySession.connect(begin.config, Path(begin.private), begin.name)
        except PdserveError as exc:
            connection.send(exc)
            return
        try:
            connection.send(Joined(session.node_host, session.nodes()))
            serve(connection, session)
        except (EOFError, OSError):
            log.info("the parent has closed the connection")
        finally:
            session.close()


def serve(connection: Connection, session: RaySession) -> None:
    """Answer requests until one asks to close. The first one launches the pool."""
    from pdserve.cluster.ray_pool import WorkerPool

    events: list[Event] = []
    first: Request = connection.recv()
    pool = WorkerPool(first.arguments[0], events.append, look=session.look)
    request = Request("launch")
    while True:
        if session.lost:
            log.error("Ray is lost; the next process starts another one")
            os._exit(1)  # what is left of Ray ends with this process
        getattr(pool, request.method)(*request.arguments)
        connection.send(DriverAnswer(tuple(events), tuple(member.shown() for member in pool.members)))
        events.clear()
        request = connection.recv()
        if request.method == "close":
            return


if __name__ == "__main__":
    main()
