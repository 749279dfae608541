"""The thread in which KV is converted that was read into staging blocks, and summed before that: off the loop, and beside
the transfer and engine threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Converter(Protocol):
    """Runs one piece of work after the other."""

    async def run(self, work: Callable[[], T]) -> T:
        """Returns what it returns, when it is done. Raises what it raises."""
        ...

    def close(self) -> None:
        """Work that has begun goes on; what has not never begins. Idempotent."""
        ...


class ConverterThread:
    """Starts with its first work."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pdserve-convert")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
