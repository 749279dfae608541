"""The router's ledger against a list of what was promised where."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.errors import InternalBug
from pdserve.core.ids import RequestId
from router.core.events import LinkId
from router.core.registry import Ledger

NAMES = st.integers(0, 5).map(lambda n: RequestId(f"r{n}"))
LINKS = st.integers(1, 3).map(LinkId)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.promised: dict[RequestId, tuple[LinkId, int]] = {}

    @rule(name=NAMES, link=LINKS, tokens=st.integers(1, 100))
    def take(self, name: RequestId, link: LinkId, tokens: int) -> None:
        if name in self.promised:
            with pytest.raises(InternalBug, match="already"):
                self.ledger.take(name, link, tokens)
        else:
            self.ledger.take(name, link, tokens)
            self.promised[name] = (link, tokens)

    @rule(name=NAMES)
    def give_back(self, name: RequestId) -> None:
        if self.promised.pop(name, None) is None:
            with pytest.raises(InternalBug, match="no ledger entry"):
                self.ledger.give_back(name)
        else:
            self.ledger.give_back(name)

    @precondition(lambda self: self.promised)
    @rule(pick=st.integers(0, 100), link=LINKS, tokens=st.integers(1, 100))
    def move(self, pick: int, link: LinkId, tokens: int) -> None:
        """A rebind: returned here and taken there."""
        name = list(self.promised)[pick % len(self.promised)]
        self.ledger.give_back(name)
        self.ledger.take(name, link, tokens)
        self.promised[name] = (link, tokens)

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check_invariants()
        assert len(self.ledger) == len(self.promised)
        for name in (RequestId(f"r{n}") for n in range(6)):
            expected = self.promised.get(name)
            assert self.ledger.has(name) == (expected is not None)
            assert self.ledger.link_of(name) == (expected[0] if expected else None)
        for link in (LinkId(n) for n in range(4)):
            assert self.ledger.charged(link) == sum(t for at, t in self.promised.values() if at == link)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
