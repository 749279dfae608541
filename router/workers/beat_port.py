"""The router's end of beats: one socket on the link's port, and a thread that answers there. `pdserve.rpc.beats` says why."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from pdserve.rpc.beats import KEY_BYTES
from router.core import events as ev

logger = logging.getLogger(__name__)

MAX_HEARD: Final = 1 << 14
"""The most beats that wait to be taken: the beats of 500 workers in half a minute. The oldest beats are dropped first."""
CLOSE_TIMEOUT_S: Final = 1.0  # the thread is woken, and does little else


class BeatPort:
    """Answers the beats of all links. Keys are added and taken out by the thread that owns the links, and `take` is called by
    any one thread."""

    def __init__(self, vouches: Callable[[], bool]) -> None:
        """`vouches` is asked on this object's thread before each answer. False: the router's loops hang, so no beat is
        answered."""
        self._vouches = vouches
        self._links: dict[bytes, ev.LinkId] = {}
        self._heard: deque[ev.LinkId] = deque(maxlen=MAX_HEARD)
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self, host: str, port: int) -> None:
        """Listen on the datagram port with the number of the link's port. Where that fails, links go without beats."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.bind(address)
        except OSError as exc:
            logger.warning("no beats are heard on UDP port %d, so workers' streams alone show that they live: %s", port, exc)
            return
        self._thread = threading.Thread(target=self._run, args=(self._socket,), name="beat port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._closed = True
        if self._socket is not None:
            if self._thread is not None:
                self._wake(self._socket)
                self._thread.join(CLOSE_TIMEOUT_S)
            self._socket.close()

    def add(self, key: bytes, link: ev.LinkId) -> None:
        """Hear and answer the beats of a link from now on."""
        self._links[key] = link

    def discard(self, key: bytes) -> None:
        """Neither hear nor answer this link any more."""
        self._links.pop(key, None)

    def take(self) -> set[ev.LinkId]:
        """Return the links that have beaten since the last call."""
        taken = set[ev.LinkId]()
        for _ in range(len(self._heard)):
            taken.add(self._heard.popleft())
        return taken

    def _wake(self, bound: socket.socket) -> None:
        with contextlib.suppress(OSError):
            bound.shutdown(socket.SHUT_RDWR)  # ends `recvfrom`, although the call itself fails with "not connected"

    def _run(self, bound: socket.socket) -> None:
        while not self._closed:
            try:
                data, sender = bound.recvfrom(KEY_BYTES + 1)
                link = self._links.get(data)
                if link is not None and self._vouches():
                    self._heard.append(link)
                    bound.sendto(data, sender)
            except OSError as exc:  # the previous answer could not be delivered
                if not self._closed:
                    logger.debug("a beat was not answered: %s", exc)
