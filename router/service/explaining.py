"""Explanations of requests: the router's own story, and the parts of the workers, which are asked over their links.

A question to a worker is numbered, and is over after `ANSWER_S`. A worker that has not answered by then is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from pdserve.core.errors import Overloaded
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role
from router.api.explanation import Explanation, WorkerPart
from router.core.events import LinkId
from router.core.live_request import RequestStory
from router.core.registry import Worker
from router.core.router_core import RouterCore
from router.workers.link import Links
from router.workers.wire import WorkExplained, question_to_wire

ANSWER_S: Final = 2.0
"""A worker answers on its loop, within milliseconds. One whose loop is held longer is worth a look of its own."""
MAX_QUESTIONS: Final = 256
"""At most this many questions wait for an answer. An explanation asks each worker that took part, mostly two to eight."""


class Explainer:
    """Asks workers for their parts. It runs on the router's main loop."""

    def __init__(self, core: RouterCore, links: Links, clock: Callable[[], float]) -> None:
        self._core = core
        self._links = links
        self._clock = clock
        self._asked = 0
        self._waiting: dict[int, tuple[LinkId, asyncio.Future[WorkExplained]]] = {}

    async def explain(self, name: str) -> Explanation:
        """Explain the newest request with this request id or correlation id, within `ANSWER_S`. Raises `UnknownRequest`, and
        `Overloaded` when too many questions wait."""
        story, *others = self._core.stories_of(name)
        if len(self._waiting) + len(story.workers) > MAX_QUESTIONS:
            raise Overloaded(f"{len(self._waiting)} questions to workers wait already", retry_after_s=ANSWER_S)
        parts = await asyncio.gather(*[self._ask(story, *worker, role) for worker, role in story.workers.items()])
        return Explanation(
            request_id=story.request_id,
            correlation_id=story.correlation_id,
            arrived_s=story.arrived_s,
            outcome="" if story.outcome is None else story.outcome.value,
            entries=story.entries,
            left_out=story.left_out,
            parts=tuple(parts),
            others=tuple([other.request_id for other in others]),
        )

    def answered(self, event: WorkExplained) -> None:
        """Take the answer of a worker. An answer is dropped that comes too late, or from a worker that was not asked."""
        link, waits = self._waiting.get(event.question, (None, None))
        if waits is not None and link == event.link and not waits.done():
            waits.set_result(event)

    async def _ask(self, story: RequestStory, worker_id: WorkerId, incarnation: Incarnation, role: Role) -> WorkerPart:
        worker = self._core.registry.find(worker_id)
        if worker is None:
            return WorkerPart(worker_id, role.value, missing="it is not linked to this router now")
        if worker.hello.incarnation != incarnation:
            return WorkerPart(worker_id, role.value, missing="that process has ended; another one has its id now")
        try:
            answer = await self._question(worker, story)
        except TimeoutError:
            return WorkerPart(worker_id, role.value, missing=f"it did not answer within {ANSWER_S:g} s")
        if not answer.entries:
            return WorkerPart(worker_id, role.value, missing="it keeps no story of the request any more, or never heard of it")
        now_s = self._clock()
        entries = tuple([entry._replace(at_s=entry.at_s + now_s) for entry in answer.entries])
        return WorkerPart(worker_id, role.value, entries, answer.left_out)

    async def _question(self, worker: Worker, story: RequestStory) -> WorkExplained:
        self._asked += 1
        number = self._asked
        waits: asyncio.Future[WorkExplained] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (worker.link, waits)
        try:
            self._links.send(worker.link, question_to_wire(number, story.request_id))
            async with asyncio.timeout(ANSWER_S):
                return await waits
        finally:
            del self._waiting[number]
