"""The router's count of the prompts that wait on a worker, between the heartbeats of this worker."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.ids import Handle
from router.core.registry import Backlog


class BacklogMachine(RuleBasedStateMachine):
    """A worker that computes one prompt after the other. Commands take a while to it; its first tokens are heard at once."""

    def __init__(self) -> None:
        super().__init__()
        self.backlog = Backlog()
        self.on_the_way: deque[tuple[Handle, int]] = deque()
        self.queue: deque[tuple[Handle, int]] = deque()
        self.handles = 0
        self.last = 0
        self.foreign = 0
        """Prompt tokens that another router sent, as of the last heartbeat."""

    @rule(tokens=st.integers(1, 100))
    def send(self, tokens: int) -> None:
        self.handles += 1
        self.on_the_way.append((Handle(self.handles), tokens))
        self.backlog.sent(Handle(self.handles), tokens)

    @precondition(lambda self: self.on_the_way)
    @rule()
    def arrive(self) -> None:
        self.last = self.on_the_way[0][0]
        self.queue.append(self.on_the_way.popleft())

    @precondition(lambda self: self.queue)
    @rule(tokens=st.integers(1, 150))
    def compute(self, tokens: int) -> None:
        while tokens and self.queue:
            handle, left = self.queue.popleft()
            done = min(left, tokens)
            tokens -= done
            if left > done:
                self.queue.appendleft((handle, left - done))
            else:
                self.backlog.ended(handle)

    @precondition(lambda self: self.on_the_way)
    @rule()
    def withdraw_on_the_way(self) -> None:
        self.backlog.ended(self.on_the_way.pop()[0])

    @rule(foreign=st.integers(0, 50))
    def heartbeat(self, foreign: int) -> None:
        self.foreign = foreign
        waiting = sum(left for _, left in self.queue)
        self.backlog.heard(waiting + foreign, self.last)
        assert self.backlog.tokens == waiting + foreign + sum(tokens for _, tokens in self.on_the_way)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        mine = [*self.on_the_way, *self.queue]
        left = sum(tokens for _, tokens in mine)
        assert left <= self.backlog.tokens
        if not mine:
            assert self.backlog.tokens <= self.foreign
        self.backlog.check_invariants({handle for handle, _ in mine})


TestBacklog = BacklogMachine.TestCase
