"""uvicorn's HTTP/1.1 protocol with bounds on what a client may do before its request is complete.

httptools bounds neither the size of a request's head nor the time it takes to arrive, so that a connection could
hold memory, or itself, for ever. Here a head has a size and a time. The Date header is made when a request asks
for one and not by a timer, so an idle server does nothing.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 << 10  # h11's limit, which uvicorn has with its other parser
HEAD_TIMEOUT_S: Final = 30.0


class GuardedProtocol(HttpToolsProtocol):
    """`_head_bytes` counts a head from its second read on: the first, up to 256 KiB, may hold the body before it."""

    _head_open = True
    _head_begins = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._head_open:
            return
        self._head_bytes = 0 if self._head_begins else self._head_bytes + len(data)
        self._head_begins = False
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._head_open = self._head_begins = True
        self._arm()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._disarm()
        self._refresh_date()
        super().on_headers_complete()

    def _refuse_head(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("The request's head is too large.")
        else:  # pipelined behind an answer that is being written
            self.transport.abort()

    def _arm(self) -> None:
        self._disarm()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refresh_date(self) -> None:
        state: Any = self.server_state
        now_s = int(time.time())
        if getattr(state, "date_s", None) != now_s:
            state.date_s = now_s
            state.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]
