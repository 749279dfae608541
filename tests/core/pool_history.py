"""What random histories over the pools of several groups have in common: who holds blocks, and how holders end."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from tests.core.holders import inbound, lease, sequence


class PoolHistory(RuleBasedStateMachine):
    """A history over `pools`, which a test makes with `begin`. Keys are the numbers of holders."""

    pools: BlockPools

    def begin(self, pools: BlockPools) -> None:
        self.pools = pools
        self.running: dict[int, list[int]] = {}  # blocks, computed tokens
        self.pulling: dict[int, int] = {}  # tokens
        self.lent: dict[int, int] = {}  # tokens
        self.quarantined: list[int] = []
        self.last = 0

    @rule()
    def return_lease(self) -> None:
        if self.lent:
            number, _ = self.lent.popitem()
            self.pools.drop(lease(number))

    @rule()
    def pull_is_given_up(self) -> None:
        if self.pulling:
            number, _ = self.pulling.popitem()
            self.pools.quarantine(SeqId(number))
            self.quarantined.append(number)

    @rule()
    def pull_is_committed(self) -> None:
        if self.pulling:
            number, tokens = self.pulling.popitem()
            self.running[number] = [len(self.pools.blocks_of(inbound(number))[0]), tokens]
            self.pools.hand_over(inbound(number), sequence(number))
            self.committed(number, tokens)

    def committed(self, number: int, tokens: int) -> None:
        """Do what follows after a pulled sequence has got its blocks."""

    @rule()
    def read_stops(self) -> None:
        if self.quarantined:
            self.pools.end_quarantine(SeqId(self.quarantined.pop()))

    @rule(count=st.integers(1, 8))
    def churn(self, count: int) -> None:
        """Other work takes blocks and gives them back: small groups lose what they have cached."""
        self.last += 1
        if self.pools.allocate(sequence(self.last), count) is not None:
            self.pools.drop(sequence(self.last))

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        for number in self.running:
            self.pools.drop(sequence(number))
        while self.lent:
            self.return_lease()
        while self.pulling:
            self.pull_is_given_up()
        while self.quarantined:
            self.read_stops()
        self.pools.check_invariants()
        counts = self.pools.counts()
        assert counts.free + counts.cached == counts.total
