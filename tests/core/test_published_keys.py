"""A pool tells exactly the keys of the blocks that can be found in every group, whatever it does."""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pdserve.core.block_hash import KEY_BYTES, BlockHash, PublishedKeys, block_hashes, key_of
from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import SeqId

PROMPTS = [block_hashes(tokens, 1) for tokens in ((1, 2, 3), (1, 2, 4), (5, 6, 7))]


class KeysMachine(RuleBasedStateMachine):
    """Sequences come, publish, go wrong and leave, in pools so small that they evict each other's blocks."""

    sizes: tuple[int, ...] = (5,)

    def __init__(self) -> None:
        super().__init__()
        self.pools = BlockPools(*self.sizes)
        self.known: set[int] = set()
        self.live: dict[Holder, tuple[BlockHash, ...]] = {}
        self.count = 0

    @rule(prompt=st.sampled_from(PROMPTS))
    def come(self, prompt: tuple[BlockHash, ...]) -> None:
        self.count += 1
        holder = Holder(HolderKind.SEQUENCE, SeqId(self.count))
        if self.pools.reserve(holder, len(prompt), prompt) is not None:
            self.live[holder] = prompt

    @rule(data=st.data(), position=st.integers(0, 2))
    def publish(self, data: st.DataObject, position: int) -> None:
        if self.live:
            holder = data.draw(st.sampled_from(list(self.live)))
            self.pools.publish(holder, position, self.live[holder][position])

    @rule(data=st.data(), withdraws=st.booleans())
    def leave(self, data: st.DataObject, withdraws: bool) -> None:
        if self.live:
            holder = data.draw(st.sampled_from(list(self.live)))
            if withdraws:
                self.pools.withdraw(holder, 1)
            self.pools.drop(holder)
            del self.live[holder]

    @rule()
    def take(self) -> None:
        changes = self.pools.published.take()
        if changes is not None:
            assert changes.added or changes.removed
            assert not self.known & {*changes.added}
            assert self.known >= {*changes.removed}
            self.known = self.known - {*changes.removed} | {*changes.added}
            assert changes.digest == reduce(xor, self.known, 0)
        assert self.pools.published.take() is None
        assert self.known == self.found

    @property
    def found(self) -> set[int]:
        hashes = {block_hash for prompt in PROMPTS for block_hash in prompt}
        return {key_of(one) for one in hashes if all(pool.lookup([one]) for pool in self.pools.groups)}

    @invariant()
    def books_agree(self) -> None:
        assert self.pools.published.held() == self.found
        self.pools.check_invariants()


@pytest.mark.parametrize("sizes", [(5,), (5, 7)])
def test_keys_are_those_of_the_blocks_that_every_group_publishes(sizes: tuple[int, ...]) -> None:
    class Machine(KeysMachine):
        pass

    Machine.sizes = sizes
    run_state_machine_as_test(Machine)


def test_two_blocks_of_one_key_are_one_key() -> None:
    """Their hashes differ behind the key. Nobody can rule that out, and it costs a hint at most."""
    one, other = (BlockHash(b"k" * KEY_BYTES + end * 24) for end in (b"1", b"2"))
    keys = PublishedKeys(1)
    keys.publish(one)
    keys.publish(other)
    keys.remove(one)
    changes = keys.take()
    assert changes is not None
    assert (changes.added, changes.removed, changes.digest) == ((key_of(one),), (), key_of(one))
    keys.remove(other)
    changes = keys.take()
    assert changes is not None
    assert (changes.added, changes.removed, changes.digest) == ((), (key_of(one),), 0)
    assert not keys.held()
