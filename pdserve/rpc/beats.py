"""Beats: small datagrams beside a link's stream, which show that a process lives, whatever waits in the stream.

A worker sends its link's key to the link's port once an interval, from a thread and a socket of their own, and the router
answers with the same bytes, also from a thread and a socket of their own. So a beat stands behind no token, no engine step
and no turn of a loop, in either direction. A beat that gets lost costs nothing: several go out before anyone is missed. Where
a network carries no datagrams, the stream alone shows life.

Each side beats only while the loops that serve its link still turn, since a process whose loops hang is of no use to its peer.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Final

from pdserve.rpc.silence import STUCK_S

log = logging.getLogger(__name__)

KEY_BYTES: Final = 16
"""The length of a link's key. It is random, and only the two ends of the link know it."""
CLOSE_TIMEOUT_S: Final = 1.0


class Beats:
    """Sends the beats of one link. The loop that serves the link calls all methods; `turned` is called at least once in
    `STUCK_S`."""

    def __init__(self, router_address: str, key: bytes, interval_s: float) -> None:
        """Start to beat. `router_address` is the link's host:port."""
        self.answers = 0
        """The beats that the router has answered so far."""
        self._interval_s = interval_s
        self._key = key
        self._turned_s = time.monotonic()
        self._stop = threading.Event()
        self._socket: socket.socket | None = None
        host, _, port = router_address.rpartition(":")
        self._thread = threading.Thread(target=self._run, args=(host.strip("[]"), int(port)), name="beats", daemon=True)
        self._thread.start()

    def turned(self) -> None:
        """Note that the loop turns."""
        self._turned_s = time.monotonic()

    def close(self) -> None:
        """Stop to beat. Idempotent."""
        self._stop.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, host: str, port: int) -> None:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as made:
                made.connect(address)
                self._socket = made
                while not self._stop.is_set():
                    self._beat(made)
        except OSError as exc:
            log.warning("no beats go to %s:%d, so the stream alone shows that the router lives: %s", host, port, exc)

    def _beat(self, made: socket.socket) -> None:
        """Send one beat, and take answers until the next one is due. Nobody listens at a port that refuses a beat; a router
        that is started again does."""
        due_s = time.monotonic() + self._interval_s
        if time.monotonic() - self._turned_s < STUCK_S:
            with contextlib.suppress(OSError):
                made.send(self._key)
        while not self._stop.is_set() and (left_s := due_s - time.monotonic()) > 0:
            made.settimeout(left_s)
            try:
                self.answers += made.recv(KEY_BYTES + 1) == self._key
            except TimeoutError:
                return
            except OSError:
                self._stop.wait(max(0.0, due_s - time.monotonic()))
