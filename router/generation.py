"""One running request as its front end sees it: an iterator of deltas that can be closed at any moment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from pdserve.core.errors import PdserveError
from pdserve.core.ids import RequestId
from router.api import Delta, Report


class RunningGeneration:
    """Filled by the shell, drained by one front end. Holds at most the request's max_tokens deltas."""

    def __init__(self, request_id: RequestId, prompt_len: int, on_close: Callable[[RequestId], None], now_s: float) -> None:
        self.request_id: str = request_id
        self.prompt_len = prompt_len
        self.waiting_since_s: float | None = None
        """When the oldest delta that the client has not taken came; None when it has taken everything."""
        self._on_close = on_close
        self._deltas: deque[tuple[Delta, float]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._error: PdserveError | None = None
        self._report: Report | None = None
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._report is not None:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        delta, _ = self._deltas.popleft()
        self.waiting_since_s = self._deltas[0][1] if self._deltas else None
        return delta

    @property
    def report(self) -> Report:
        """Complete after the last delta; of a failed request, how far it came."""
        assert self._report is not None, "the request has not ended"
        return self._report

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._deltas.clear()
            if self._report is None:
                self._on_close(RequestId(self.request_id))

    # Called by the shell.

    def put(self, delta: Delta, now_s: float) -> None:
        if self._closed:
            return
        self._deltas.append((delta, now_s))
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        self._notify()

    def end(self, report: Report, error: PdserveError | None) -> None:
        self._report = report
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
