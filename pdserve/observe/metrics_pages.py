"""Pages of metrics, rendered at most once a second in a thread of their own, so that no scrape holds the tokens of streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from pdserve.observe.snapshot import ClusterSnapshot

MAX_AGE_S: Final = 1.0
"""A page serves all who ask within so long. Prometheus asks every 15 s, and a heartbeat changes the numbers once a second."""


@dataclass(slots=True)
class _Page:
    """One kind of page."""

    rendered_s: float = 0.0
    body: bytes = b""
    rendering: asyncio.Task[bytes] | None = None


class MetricsPages:
    """The page by pool, and the page that also has every worker. It is called on the router's loop; `close` it."""

    def __init__(
        self,
        snapshot: Callable[[], ClusterSnapshot],
        render: Callable[[ClusterSnapshot, bool], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`snapshot` is called on the loop; `render` in the thread, with True for every worker."""
        self._snapshot = snapshot
        self._render = render
        self._clock = clock
        self._pages = {False: _Page(), True: _Page()}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    async def page(self, *, per_worker: bool) -> bytes:
        """Return a page that is at most `MAX_AGE_S` older than this call. Callers that come together share one."""
        page = self._pages[per_worker]
        if page.body and self._clock() - page.rendered_s < MAX_AGE_S:
            return page.body
        if page.rendering is None:
            page.rendering = asyncio.create_task(self._rendered(page, per_worker))
        return await asyncio.shield(page.rendering)  # a caller that leaves does not end it for the others

    async def _rendered(self, page: _Page, per_worker: bool) -> bytes:
        try:
            page.rendered_s = self._clock()
            cluster = self._snapshot()
            page.body = await asyncio.get_running_loop().run_in_executor(self._thread, self._render, cluster, per_worker)
            return page.body
        finally:
            page.rendering = None

    def close(self) -> None:
        """Render nothing more. A page that is being rendered is finished."""
        self._thread.shutdown(wait=False, cancel_futures=True)
