"""Several pieces of work of one call: all of them succeed, or one error is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the others and is raised alone."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as exc:
        raise exc.exceptions[0] from exc
    return [task.result() for task in tasks]
