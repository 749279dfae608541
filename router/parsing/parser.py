"""The parser of requests: small ones are parsed at once, large ones in a process of their own.

msgspec and protobuf hold the interpreter lock from a body's first byte to its last. 8 MiB take up to 0.5 s, during which no
token and no heartbeat would move, in any thread. So a child process parses the large ones, one after the other. The first large
request starts it, and it ends with the router.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Sequence
from typing import Final

from pdserve.core.errors import InternalBug, Overloaded
from pdserve.killable_child import ChildEnded, KillableChild
from router.parsing.child import Verdict, memory_bytes, unpack
from router.parsing.parse import Job, Parsed, parse
from router.service.loop_time.serial_thread import SerialThread

INLINE_BYTES: Final = 32 << 10
"""Requests up to this size are parsed on the loop: 2.5 ms at worst, for 256 prompts of token ids. Most requests are smaller,
and a child would cost them more than that."""
PARSE_TIMEOUT_S: Final = 20.0  # for one request, and for the start; 8 MiB take 0.5 s of a core, and the child starts in 0.5 s
WAIT_TIMEOUT_S: Final = 60.0  # for the requests before it and the request itself
MAX_WAITING: Final = 4096  # the front ends hold the bytes of those that wait, and bound them before
COMMAND: Final = (sys.executable, "-m", "router.parsing.child")


class RequestParser:
    """Parses requests of all front ends. It owns a thread and a process; `close` it."""

    def __init__(self, max_body_bytes: int, command: Sequence[str] = COMMAND) -> None:
        """The front ends hold the bytes of requests that wait, and bound how many there may be."""
        self._thread = SerialThread("parse", MAX_WAITING)
        self._child = KillableChild(
            (*command, str(max_body_bytes)), start_timeout_s=PARSE_TIMEOUT_S, most_bytes=memory_bytes(max_body_bytes)
        )

    @property
    def child_pid(self) -> int | None:
        """The child's process id. None: no large request has started a child."""
        return self._child.pid

    async def parse(self, job: Job) -> Parsed:
        """Parse a request. Raises `InvalidRequest` naming the field, `Overloaded` when it takes too long, `Unavailable` after
        `close`, and `InternalBug` when the child ends."""
        if len(job.data) <= INLINE_BYTES:
            return parse(job)
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                return await self._thread.run(lambda: self._in_child(job), job.client, len(job.data))
        except TimeoutError:
            raise Overloaded(f"the request was not read within {WAIT_TIMEOUT_S:g} s", retry_after_s=1.0) from None

    def close(self) -> None:
        """Stop the thread and the child. Bounded. A caller that waits for the child gets an error."""
        self._thread.close()
        self._child.close()

    def _in_child(self, job: Job) -> Parsed:
        try:
            self._child.start()
            answer = self._child.ask(pickle.dumps(job, protocol=5), PARSE_TIMEOUT_S)
        except TimeoutError:
            raise Overloaded(f"the request was not read within {PARSE_TIMEOUT_S:g} s", retry_after_s=1.0) from None
        except ChildEnded as exc:
            raise InternalBug(f"the process that reads large requests ended: {exc}") from exc
        verdict: Verdict = unpack(answer)
        if isinstance(verdict, tuple):
            kind, message, field = verdict
            raise kind(message, field=field)
        return verdict
