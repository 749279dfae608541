"""Beats: small datagrams beside a link's stream, which show that a process lives, whatever waits in the stream.

A worker sends its link's key to the link's port once an interval, from a thread and a socket of their own, and the router
answers with the same bytes, also from a thread and a socket of their own. So a beat stands behind no token, no engine step
and no turn of a loop, in either direction. A beat that gets lost costs nothing: several go out before anyone is missed. Where
a network carries no datagrams, the stream alone shows life.

The sockets are not connected: an answer may come from another address of the router than the one that was asked, and the key
tells whose it is. A name may have several addresses, and gRPC does not say which one it took, so a beat goes to all of them.

Each side beats only while the loops that serve its link still turn, since a process whose loops hang is of no use to its peer.

A silent peer is judged by evidence. Load makes both sides late. So the time by which this process was itself late counts
against nobody, and a peer that still beats beside a silent stream lives: then only the stream may be broken, for which there
is far more patience.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from typing import Any, Final

STUCK_S: Final = 30.0
"""A loop that has made no turn for so long hangs, and a stream on which nothing came for so long is broken. No load that was
measured held a loop for more than 3 s."""


class Silence:
    """The evidence that one side has of a silent peer."""

    def __init__(self, *, lost_s: float, due_s: float, stuck_s: float = STUCK_S) -> None:
        """A peer of which nothing is heard for `lost_s` is lost. The owner looks every `due_s`."""
        self._lost_s = lost_s
        self._due_s = due_s
        self._stuck_s = max(stuck_s, lost_s)
        self._stream_s = self._beats_s = 0.0
        self._beats = 0

    def heard(self) -> None:
        """Note that a message came on the stream, whatever it says."""
        self._stream_s = 0.0

    def look(self, passed_s: float, beats: int = 0) -> str:
        """Count the time since the last look. Return why the peer is lost, or an empty text.

        `beats` counts the beats that the peer has answered so far. A look that comes late counts as one in time: what the peer
        said meanwhile may wait to be read.
        """
        counted_s = min(passed_s, self._due_s)
        self._stream_s += counted_s
        self._beats_s = 0.0 if beats != self._beats else self._beats_s + counted_s
        self._beats = beats
        if min(self._stream_s, self._beats_s) > self._lost_s:
            return f"nothing was heard for {self._stream_s:.1f} s"
        if self._stream_s > self._stuck_s:
            return f"the stream brought nothing for {self._stream_s:.1f} s, though beats beside it were answered"
        return ""


log = logging.getLogger(__name__)

KEY_BYTES: Final = 16
"""The length of a link's key. It is random, and only the two ends of the link know it."""
MAX_ADDRESSES: Final = 4  # of a host in two networks, each with IPv4 and IPv6
UNANSWERED_S: Final = STUCK_S  # whoever answers no beat for so long never will: no load that was measured held one for so long


class Beats:
    """Sends the beats of one link. The loop that serves the link calls all methods; it calls `turned` once an interval while
    the link has a stream."""

    def __init__(self, router_address: str, key: bytes, interval_s: float) -> None:
        """Start to beat. `router_address` is the link's host:port."""
        self.answers = 0
        """The beats that the router has answered so far."""
        self._router_address = router_address
        self._interval_s = interval_s
        self._key = key
        self._turned_s = time.monotonic()
        self._answers_seen = 0
        self._turns = 0  # since an answer was seen
        self._told = False  # that nothing is answered
        self._closed = False
        self._wake: socket.socket | None = None  # closing it wakes the thread, which owns it
        host, _, port = router_address.rpartition(":")
        self._thread = threading.Thread(target=self._run, args=(host.strip("[]"), int(port)), name="beats", daemon=True)
        self._thread.start()

    def turned(self) -> None:
        """Note that the loop turns, and log once when the router answers no beats though its stream lives."""
        self._turned_s = time.monotonic()
        self._turns = self._turns + 1 if self.answers == self._answers_seen else 0
        self._answers_seen = self.answers
        if self._turns * self._interval_s > UNANSWERED_S and not self._told:
            self._told = True
            log.warning(
                "router %s has answered no beat for %.0f s, so the stream alone shows that it lives: do datagrams (UDP) pass "
                "to that port and back?",
                self._router_address,
                UNANSWERED_S,
            )

    def close(self) -> None:
        """Stop to beat. Idempotent. The thread ends at once, or as soon as a resolver that it asks has answered; nobody waits
        for that."""
        self._closed = True
        if self._wake is not None:
            self._wake.close()

    def _run(self, host: str, port: int) -> None:
        with contextlib.ExitStack() as stack:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
                self._wake, woken = (stack.enter_context(end) for end in socket.socketpair())
            except OSError as exc:
                log.warning("no beats go to %s:%d, so the stream alone shows that the router lives: %s", host, port, exc)
                self._told = True
                return
            waits = stack.enter_context(selectors.PollSelector())
            waits.register(woken, selectors.EVENT_READ)
            ways: list[tuple[socket.socket, Any]] = []
            for family, kind, protocol, _, address in found[:MAX_ADDRESSES]:
                with contextlib.suppress(OSError):  # this machine may have no such network
                    made = stack.enter_context(socket.socket(family, kind, protocol))
                    made.setblocking(False)
                    waits.register(made, selectors.EVENT_READ)
                    ways.append((made, address))
            while not self._closed:
                self._beat(ways, waits)

    def _beat(self, ways: list[tuple[socket.socket, Any]], waits: selectors.BaseSelector) -> None:
        """Send one beat, and take answers until the next one is due, also to the beats before."""
        due_s = time.monotonic() + self._interval_s
        if time.monotonic() - self._turned_s < STUCK_S:
            for made, address in ways:
                with contextlib.suppress(OSError):
                    made.sendto(self._key, address)
        while not self._closed and (left_s := due_s - time.monotonic()) > 0:
            for ready, _ in waits.select(left_s):
                assert isinstance(ready.fileobj, socket.socket)
                with contextlib.suppress(OSError):
                    self.answers += ready.fileobj.recv(KEY_BYTES + 1) == self._key
