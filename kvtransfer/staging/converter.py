"""The converter thread: it sums and converts the KV that was read into staging blocks, so that neither the loop, the transfer
thread nor the engine thread waits for that work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Converter(Protocol):
    """An executor that runs one piece of work after the other, in order."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work`, wait for its end, and return its result. Raises what `work` raises."""
        ...

    def close(self) -> None:
        """Drop the work that has not begun. Work that has begun goes on. Idempotent."""
        ...


class ConverterThread:
    """A converter with a thread of its own, which starts with the first work."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pdserve-convert")

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Drop the work that has not begun, and do not wait for the rest."""
        self._executor.shutdown(wait=False, cancel_futures=True)
