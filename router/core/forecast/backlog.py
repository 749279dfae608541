"""The prompt tokens that one worker still has to compute, as the router knows it between two heartbeats. Pure.

A heartbeat tells what waits on the worker, and is soon of the past: commands were on their way, and prompts come and go. The
router hears the first token of each of its own prompts, so it knows which of them are over.
"""

from __future__ import annotations

from collections.abc import Container

from pdserve.core.ids import Handle


class Backlog:
    """The prompts that were sent to one worker and have not been computed, and what its last heartbeat said."""

    __slots__ = ("_counted", "_counted_tokens", "_others_tokens", "_reported_tokens", "_sent", "_sent_tokens")

    def __init__(self) -> None:
        self._sent: dict[Handle, int] = {}  # no heartbeat includes them yet; in the order of sending
        self._sent_tokens = 0
        self._counted: dict[Handle, int] = {}  # the last heartbeat includes them, perhaps partly computed
        self._counted_tokens = 0
        self._reported_tokens = 0
        self._others_tokens = 0  # reported tokens that are none of these prompts

    @property
    def tokens(self) -> int:
        """The prompt tokens that wait on the worker or are on their way to it. Each prompt counts whole, or as far as the last
        heartbeat tells, until it is over."""
        return min(self._reported_tokens, self._counted_tokens + self._others_tokens) + self._sent_tokens

    def sent(self, handle: Handle, tokens: int) -> None:
        """Count a prompt that was sent to the worker. Handles grow."""
        self._sent[handle] = tokens
        self._sent_tokens += tokens

    def ended(self, handle: Handle) -> None:
        """Forget a prompt that is computed or withdrawn. Nothing happens for one that is not known."""
        self._sent_tokens -= self._sent.pop(handle, 0)
        self._counted_tokens -= self._counted.pop(handle, 0)

    def heard(self, queued_tokens: int, last_handle: int) -> None:
        """Take in a heartbeat: the tokens that wait, which include all commands up to `last_handle`."""
        while self._sent and (oldest := next(iter(self._sent))) <= last_handle:
            tokens = self._counted[oldest] = self._sent.pop(oldest)
            self._sent_tokens -= tokens
            self._counted_tokens += tokens
        self._reported_tokens = queued_tokens
        self._others_tokens = max(0, queued_tokens - self._counted_tokens)

    def check_invariants(self, running: Container[Handle]) -> None:
        """Assert that the sums are right, and that only prompts of work that runs are counted."""
        assert self._sent_tokens == sum(self._sent.values())
        assert self._counted_tokens == sum(self._counted.values())
        assert list(self._sent) == sorted(self._sent)
        assert all(handle in running for handle in (*self._sent, *self._counted))
