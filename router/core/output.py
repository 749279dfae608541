"""One request's output in order of index: duplicates are dropped, and tokens after a gap are held until the gap closes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.core.errors import InternalBug
from pdserve.core.logprobs import unpack_logprobs
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FINISH_BY_NUMBER
from router.api.answer import Delta
from router.core.events import Row


class OrderedOutput:
    """Accepts deltas in any order and gives them out in order. Holds at most `max_tokens` of them."""

    __slots__ = ("_held", "_max_tokens", "next_index")

    def __init__(self, max_tokens: int) -> None:
        self.next_index = 0
        self._max_tokens = max_tokens
        self._held: dict[int, Delta] = {}

    def is_repeat(self, index: int, count: int) -> bool:
        """Tell whether the delta has tokens and all of them went out already."""
        return index + count <= self.next_index and count > 0

    def pass_first(self, index: int) -> None:
        """Count the first token of an attempt as gone out. Raises `InternalBug` if its index is not the next one."""
        if index != self.next_index:
            raise InternalBug(f"the first token has index {index}, expected {self.next_index}")
        self.next_index += 1

    def restart(self) -> None:
        """Drop the deltas that are held. Their attempt is over, and the next one draws these tokens again."""
        self._held.clear()

    def hold(self, delta: Delta, *, after: int = 0) -> None:
        """Keep a delta for later. Raises `InternalBug` if it begins before index `after` or ends past `max_tokens`."""
        end = delta.index + len(delta.ids)
        if delta.index < after or end > self._max_tokens:
            raise InternalBug(f"tokens [{delta.index}, {end}), expected within [{after}, {self._max_tokens})")
        self._held.setdefault(delta.index, delta)

    def accept(self, delta: Delta) -> Sequence[Delta]:
        """Take a delta and return the deltas that may go out now. Raises `InternalBug` for tokens past the limit, or for a
        delta of which only a part went out."""
        count = len(delta.ids)
        if delta.index == self.next_index and not self._held and delta.index + count <= self._max_tokens:
            self.next_index += count
            return (delta,)
        if self.is_repeat(delta.index, count):
            return ()
        if delta.index < self.next_index:
            raise InternalBug(f"tokens [{delta.index}, {delta.index + count}) overlap the {self.next_index} that went out")
        self.hold(delta)
        return self.drain()

    def drain(self) -> Sequence[Delta]:
        """Return the held deltas that are next in order, up to the first gap or the end of the output."""
        ready: list[Delta] = []
        while (delta := self._held.pop(self.next_index, None)) is not None:
            self.next_index += len(delta.ids)
            ready.append(delta)
            if delta.finish_reason is not None:
                break
        return ready


def delta_of(row: Row, spec: RequestSpec) -> Delta:
    """Return the delta of a row, with the log-probabilities that the request asks for. Raises `InternalBug` for text that is
    not UTF-8, an unknown finish reason or stop string, or log-probabilities of another number of tokens."""
    try:
        ids = tuple(row.ids[:])  # the slice is a list, which is read faster than the message's container
        found = unpack_logprobs(row.logprobs, len(ids)) if spec.sampling.logprobs is not None else ()
        delta = Delta(row.index, ids, row.text.decode(), FINISH_BY_NUMBER[row.finish_reason], found)
        if delta.finish_reason is not None and row.stop_string:
            if row.stop_string > len(spec.sampling.stop):
                raise ValueError(f"there is no stop string {row.stop_string}")
            delta = msgspec.structs.replace(delta, stop_string=row.stop_string)
        if row.index == 0 and spec.sampling.prompt_logprobs is not None:
            scores = unpack_logprobs(row.prompt_logprobs, len(spec.prompt_ids) - 1)
            return msgspec.structs.replace(delta, prompt_logprobs=scores)
        return delta
    except (ValueError, KeyError) as exc:
        raise InternalBug(f"row {row.index} of handle {row.handle} cannot be read: {type(exc).__name__}: {exc}") from exc
