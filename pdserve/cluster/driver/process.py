"""The process that speaks with Ray: `python -m pdserve.cluster.driver.process`. It has the keepers of all workers.

Ray's library ends the process that uses it when Ray's control service or its own node is lost. So `pdserve up` leaves Ray to
this child, which may die at any time: lasting workers are processes of their own, and the next child adopts them. A private Ray
is a child of this process, and ends with it. This process ends with its parent, however that ends.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cluster.driver.driver import Begin, DriverAnswer, Joined, Request
from pdserve.cluster.events import Event
from pdserve.core.errors import PdserveError
from pdserve.killable_child import open_channel
from pdserve.observe.logs import setup_logging

if TYPE_CHECKING:
    from pdserve.cluster.ray_pool import WorkerPool
    from pdserve.cluster.ray_session import RaySession

log = logging.getLogger(__name__)


class Driver:
    """The answers to `pdserve up`: first to `Begin`, then to the request that launches the pool, then to all others."""

    def __init__(self) -> None:
        self._session: RaySession | None = None
        self._pool: WorkerPool | None = None
        self._events: list[Event] = []

    def answer(self, message: bytes) -> bytes:
        """Answer one message. The process ends if Ray is lost, and what is left of Ray ends with it."""
        asked = pickle.loads(message)  # noqa: S301 - our own parent wrote it
        if isinstance(asked, Begin):
            return pickle.dumps(self._join(asked))
        assert self._session is not None
        if self._pool is None:
            from pdserve.cluster.ray_pool import WorkerPool

            self._pool = WorkerPool(asked.arguments[0], self._events.append, look=self._session.look)
            asked = Request("launch")
        if self._session.lost:
            log.error("Ray is lost; the next process starts another one")
            os._exit(1)
        getattr(self._pool, asked.method)(*asked.arguments)
        answer = DriverAnswer(tuple(self._events), tuple(member.shown() for member in self._pool.members))
        self._events.clear()
        return pickle.dumps(answer)

    def close(self) -> None:
        """Leave Ray, and end a private Ray."""
        if self._session is not None:
            self._session.close()

    def _join(self, begin: Begin) -> Joined | PdserveError:
        from pdserve.cluster.ray_session import RaySession

        try:
            self._session = RaySession.connect(begin.config, Path(begin.private), begin.name)
        except PdserveError as exc:
            return exc
        return Joined(self._session.node_host, self._session.nodes())


def main() -> None:
    """Join Ray or start one, and serve requests until the parent closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process in order
        signal.signal(number, signal.SIG_IGN)
    channel = open_channel("ray driver")
    setup_logging("info", file=Path(sys.argv[1]))
    driver = Driver()
    try:
        channel.serve(driver.answer)
    finally:
        driver.close()
    log.info("the parent has closed the pipe")


if __name__ == "__main__":
    main()
