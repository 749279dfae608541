"""One request as its front end holds it: a buffer between the core, which never waits, and a client, which may be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from pdserve.core.errors import Cancelled, InternalBug, PdserveError
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, SamplingParams
from router.api.answer import Delta

DELTA_BYTES: Final = 320  # of a delta with its text and one id, as CPython 3.11 counts
LISTED_BYTES: Final = 112  # of a likeliest token: a tuple of two, a float, an int and the reference
MAX_JOINED: Final = 256
"""At most this many deltas become one."""

MAX_JOINED_CHARS: Final = 4096
"""A delta that has so much text gets no more of it. To read calls and reasoning from it takes at most 15 ms (AMD EPYC: 3 us a
character), so nobody else waits for long."""

DEFAULTS: Final = SamplingParams()


class Deliveries:
    """The generations that got deltas in this turn of the loop, all of a step among them. They are served together in the next
    turn, which costs one wake-up."""

    def __init__(self) -> None:
        self._due: list[BufferedGeneration] = []

    def add(self, generation: BufferedGeneration) -> None:
        """Serve the generation in the next turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._serve)
        self._due.append(generation)

    def _serve(self) -> None:
        due, self._due = self._due, []
        for generation in due:
            generation.deliver()


class BufferedGeneration:
    """Implements `router.api.answer.Generation` for one iterating task. The request's max_tokens bounds the buffer. Deltas that
    pile up before a slow client are given out as one."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        released: Callable[[BufferedGeneration], None],
        deliveries: Deliveries | None = None,
        sampling: SamplingParams = DEFAULTS,
    ) -> None:
        """`released` is called once, when the client has taken everything or has left. `deliveries` are those of the service.
        None: the generation has its own. `sampling` has the strings and tokens that may stop the output."""
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.prompt_len = len(prompt_ids)
        self._released: Callable[[BufferedGeneration], None] | None = released
        self._sampling = sampling
        self._buffer: deque[Delta] = deque()
        self._deliveries = deliveries or Deliveries()
        self._due = False
        self._taker: Callable[[Delta], bool] | None = None
        self._in_hand = False  # a delta was taken and is still being written: the client has not come back for more
        self._cut = False  # the delta that was taken last had to leave others behind
        self._waiter: asyncio.Future[None] | None = None
        self._report: Report | None = None
        self._error: PdserveError | None = None
        self._ended = False
        self.finish_reason: FinishReason | None = None
        self._taken = 0
        self._seen_taken = 0
        self._stalled_since_s: float | None = None
        self._stall_callback: Callable[[], object] | None = None
        self.dropped: Cancelled | None = None
        """The reason why the client was dropped. None: it was not."""

    # The client's side -----------------------------------------------------------------------------------------------

    def __aiter__(self) -> BufferedGeneration:
        return self

    async def __anext__(self) -> Delta:
        self._in_hand = False
        if self._cut:
            self._cut = False
            await asyncio.sleep(0)  # a client that reads all at once what piled up must not hold the loop
        while not self._buffer:
            if self._ended:
                self._release()
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._taken += 1
        self._in_hand = True
        return self._joined()

    def _joined(self) -> Delta:
        """Take the first delta and those that wait behind it as one. Deltas with log-probabilities stay apart, because it takes
        long to write many of them."""
        first = self._buffer.popleft()
        if not self._buffer or first.logprobs or first.prompt_logprobs:
            return first
        parts, chars = [first], len(first.text)
        while self._buffer and not self._buffer[0].logprobs:
            if len(parts) == MAX_JOINED or chars >= MAX_JOINED_CHARS:
                self._cut = True
                break
            parts.append(self._buffer.popleft())
            chars += len(parts[-1].text)
        ids = tuple([token_id for part in parts for token_id in part.ids])
        last = parts[-1]
        text = "".join([part.text for part in parts])
        return Delta(first.index, ids, text, last.finish_reason, stop_reason=last.stop_reason)

    @property
    def report(self) -> Report:
        """Implements `Generation.report`."""
        if self._report is None:
            raise InternalBug(f"request {self.request_id} has no report before its end")
        return self._report

    def close(self) -> None:
        """Implements `Generation.close`."""
        self._buffer.clear()
        self._release()

    def take_by(self, taker: Callable[[Delta], bool]) -> None:
        """Implements `Generation.take_by`."""
        self._taker = taker

    def on_stalled(self, callback: Callable[[], object]) -> None:
        """Set a callback for when the client took nothing for too long. It ends a task that waits for the client to read."""
        self._stall_callback = callback

    # The router's side -----------------------------------------------------------------------------------------------

    def push(self, delta: Delta) -> None:
        """Add a delta for the client to take."""
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is FinishReason.STOP:
            delta = msgspec.structs.replace(delta, stop_reason=_stop_reason(delta, self._sampling))
        self._buffer.append(delta)
        if self._taker is None or delta.finish_reason is not None:
            self._wake()
        elif self._waits and not self._due:
            self._due = True
            self._deliveries.add(self)

    def deliver(self) -> None:
        """Give what is buffered to the taker, or wake the client's task if the taker does not take it. The task is woken for
        the last delta before this is called."""
        self._due = False
        if not self._buffer or not self._waits or self._taker is None:
            return
        delta = self._joined()
        try:
            taken = self._taker(delta)
        except Exception:  # noqa: BLE001 - the task meets the same error and reports it
            taken = False
        if taken:
            self._taken += 1
        else:
            self._buffer.appendleft(delta)
        if self._buffer:
            self._wake()

    @property
    def _waits(self) -> bool:
        """True while the client's task waits for a delta and has not been woken."""
        return self._waiter is not None and not self._waiter.done()

    def end(self, report: Report, error: PdserveError | None) -> None:
        """End the request with its report, and with its error if it failed. The client still takes what is buffered."""
        self._report, self._error, self._ended = report, self.dropped or error, True
        self._wake()

    def stalls(self, *, now_s: float, limit_s: float) -> bool:
        """Tell whether for `limit_s` there was something to take or to write, and the client took nothing. Each tick calls this
        once."""
        if not (self._buffer or self._in_hand) or self._taken != self._seen_taken:
            self._seen_taken, self._stalled_since_s = self._taken, None
            return False
        if self._stalled_since_s is None:
            self._stalled_since_s = now_s
        return now_s - self._stalled_since_s >= limit_s

    @property
    def owed_bytes(self) -> int:
        """The tokens that the client has yet to take hold about so much memory. All deltas of a request have as many likeliest
        tokens."""
        if not self._buffer:
            return 0
        first, last = self._buffer[0], self._buffer[-1]
        listed = sum(len(one.top) for one in last.logprobs)
        scored = sum(len(one.top) for one in first.prompt_logprobs)
        return len(self._buffer) * (DELTA_BYTES + listed * LISTED_BYTES) + scored * LISTED_BYTES

    def drop_client(self, error: Cancelled) -> None:
        """End the request for a client that takes too little. What the client did not take is dropped."""
        self._buffer.clear()
        self.dropped = self._error = error
        self._ended = True
        self._wake()
        self._release()
        if self._stall_callback is not None:
            self._stall_callback()

    def _wake(self) -> None:
        if self._waits:
            assert self._waiter is not None
            self._waiter.set_result(None)

    def _release(self) -> None:
        if self._released is not None:
            released, self._released = self._released, None
            released(self)


def slow_clients(
    generations: Iterable[BufferedGeneration], now_s: float, stalled_s: float, max_bytes: int
) -> dict[BufferedGeneration, str]:
    """Return the generations whose clients are to be dropped, with the reasons: those that took nothing for `stalled_s`, and,
    if clients leave more than `max_bytes` untaken together, those that leave the most. Each tick calls this once."""
    slow = {
        one: f"the client took nothing for {stalled_s:g} s" for one in generations if one.stalls(now_s=now_s, limit_s=stalled_s)
    }
    owed_bytes = {one: owed for one in generations if (owed := one.owed_bytes)}
    total_bytes = sum(owed_bytes.values())
    for one in sorted(owed_bytes, key=owed_bytes.__getitem__, reverse=True) if total_bytes > max_bytes else ():
        if total_bytes <= max_bytes:
            break
        total_bytes -= owed_bytes[one]
        slow.setdefault(
            one, f"the client is too slow: {max_bytes} bytes wait for all clients (router.max_inflight_answer_bytes)"
        )
    return slow


def _stop_reason(last: Delta, sampling: SamplingParams) -> int | str | None:
    """Return what stopped an output. The core does not do it: a recording has neither strings nor ids, and is replayed."""
    if last.stop_string:
        return sampling.stop[last.stop_string - 1]
    return last.ids[-1] if last.ids and last.ids[-1] in sampling.stop_token_ids else None
