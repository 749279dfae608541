"""The worker's part of the stories of its requests. Loop thread only. Both roles write it, and the router asks for it.

Nothing is written for a token: a request has an entry for each message, each chunk of its prompt and each preemption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final

from pdserve.observe.story import Story, StoryRing, Value
from pdserve.rpc.story import entries_to_wire
from pdserve.rpc.v1 import link_pb2, story_pb2

MAX_STORIES: Final = 512
MAX_ENTRIES: Final = 3072
"""A story has about 6 entries with 2 fields each, so 512 stories have so many. They take about 1 MiB."""


class WorkKind(Enum):
    """The things that may happen to a request on a worker."""

    RECEIVED = "received"
    RESERVED = "reserved"
    NO_ROOM = "no_room"
    REFUSED = "refused"
    GRANTED = "granted"
    COMPUTED = "computed"
    FIRST_TOKEN = "first_token"
    ATTACHED = "attached"
    PULLED = "pulled"
    COMMITTED = "committed"
    PREEMPTED = "preempted"
    LEASE_ENDED = "lease_ended"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


def _loop_time_s() -> float:
    return asyncio.get_running_loop().time()


class WorkStories:
    """The worker's stories of its latest requests."""

    def __init__(self, clock: Callable[[], float] = _loop_time_s) -> None:
        self._clock = clock
        self._ring: StoryRing[Story] = StoryRing(max_stories=MAX_STORIES, max_entries=MAX_ENTRIES)

    def note(self, request_id: str, kind: WorkKind, **fields: Value) -> None:
        """Write down what has just happened to a request."""
        story = self._ring.get(request_id)
        if story is None:
            story = Story()
            self._ring.keep(request_id, story)
        self._ring.grew(story.note(self._clock(), kind, **fields))

    def answer(self, question: story_pb2.ExplainWork) -> link_pb2.WorkerMessage:
        """Return the answer to a question of the router. It has no entries when no story of the request is kept."""
        story = self._ring.get(question.request_id) or Story()
        entries = entries_to_wire(story.entries, since_s=self._clock())
        explained = story_pb2.WorkExplained(question=question.question, entries=entries, left_out=story.left_out)
        return link_pb2.WorkerMessage(work_explained=explained)
