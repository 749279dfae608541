"""The stories of requests in the router's core: what was decided about each request, and why. Pure.

Each part of the core adds an entry where it decides. Tokens after the first token make no entry. A request that ends
leaves its story here, and failures are kept apart, so that a flood of good requests does not push them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final

from pdserve.core.errors import UnknownRequest
from pdserve.core.ids import Incarnation, RequestId, WorkerId
from pdserve.core.worker import Role, WorkerHello
from pdserve.observe.story import Story, StoryRing
from router.core.events import Submit
from router.core.request_machine import RequestState

MAX_STORIES: Final = 512
MAX_ENTRIES: Final = 8192
"""Both bounds hold for the failed requests and, separately, for all others. Most stories have 9 entries, so there is room for
512 stories; their entries take about 3 MiB."""


class StoryKind(Enum):
    """The things that may happen to a request in the router."""

    QUEUED = "queued"
    BEHIND = "behind"
    """The request waits for the KV of its leader, which has the same prompt."""
    FOLLOWS = "follows"
    """The leader's KV is on the named decode worker. If no worker is named, the leader has ended or shares no blocks."""
    NO_WORKER = "no_worker"
    WAITS = "waits"
    SHED = "shed"
    PLACED = "placed"
    RESERVED = "reserved"
    NO_ROOM = "no_room"
    REFUSED = "refused"
    REQUEUED = "requeued"
    PREFILL_SENT = "prefill_sent"
    LEASE_GRANTED = "lease_granted"
    ATTACHED = "attached"
    FIRST_TOKEN = "first_token"
    COMMITTED = "committed"
    LOST = "lost"
    REBOUND = "rebound"
    CLEARED = "cleared"
    """The request was suspected of ending its workers, and has run alone without doing so."""
    MIGRATED = "migrated"
    """The worker was to be empty, and the request goes on elsewhere."""
    RETRIED = "retried"
    ENDED = "ended"


class RequestStory(Story):
    """The story of one request, and the workers that took part in it."""

    __slots__ = ("arrived_s", "correlation_id", "outcome", "request_id", "workers")

    def __init__(self, submit: Submit) -> None:
        super().__init__()
        self.request_id = submit.request_id
        self.correlation_id = submit.correlation_id
        self.arrived_s = submit.arrived_s
        self.outcome: RequestState | None = None
        """The state in which the request has ended. None: it runs."""
        self.workers: dict[tuple[WorkerId, Incarnation], Role] = {}

    def waits(self, now_s: float, workers: int) -> None:
        """Write down that none of the `workers` that could serve the request has room. Repeated calls are one entry."""
        if self.last_kind is not StoryKind.WAITS:
            self.note(now_s, StoryKind.WAITS, workers=workers)

    def took_part(self, hello: WorkerHello) -> None:
        """Note that the request was placed on a worker."""
        self.workers[hello.worker_id, hello.incarnation] = hello.role


class Stories:
    """The stories of requests that have ended, bounded in number and in entries."""

    def __init__(self, *, max_stories: int = MAX_STORIES, max_entries: int = MAX_ENTRIES) -> None:
        self._max_stories = max_stories
        self._failed: StoryRing[RequestStory] = StoryRing(max_stories=max_stories, max_entries=max_entries)
        self._others: StoryRing[RequestStory] = StoryRing(max_stories=max_stories, max_entries=max_entries)

    def ended(self, story: RequestStory, outcome: RequestState) -> None:
        """Take in the story of a request that has just ended."""
        story.outcome = outcome
        ring = self._failed if outcome is RequestState.FAILED else self._others
        ring.keep(story.request_id, story)

    def get(self, request_id: RequestId) -> RequestStory | None:
        """Return the story of a request that has ended. None: no story is kept."""
        return self._failed.get(request_id) or self._others.get(request_id)

    def find(self, name: str, live: Iterable[RequestStory]) -> list[RequestStory]:
        """Return the stories that belong to an id, the newest first. `name` is the id of a request or a correlation id.

        A request's own id goes before correlation ids. `live` are the stories of requests that run. Raises `UnknownRequest`
        when no story has the id.
        """
        known = [*live, *self]
        found = [s for s in known if s.request_id == name] or [s for s in known if s.correlation_id == name and name]
        if not found:
            raise UnknownRequest(
                f"this router keeps no story of {name!r}: it keeps those of running requests, and of the last "
                f"{self._max_stories} that failed and {self._max_stories} that did not, since its start",
                field="request_id",
            )
        return sorted(found, key=lambda story: story.arrived_s, reverse=True)

    def __iter__(self) -> Iterator[RequestStory]:
        yield from self._failed
        yield from self._others

    def check_invariants(self) -> None:
        """Assert that both rings keep their bounds, and that every story here has ended."""
        for ring in (self._failed, self._others):
            ring.check_invariants()
        assert all(story.outcome is not None for story in self)
