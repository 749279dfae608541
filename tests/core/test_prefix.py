"""Hashes of KV blocks: equal exactly when the KV is."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.block_hash import DIGEST_BYTES, block_hashes

tokens = st.lists(st.integers(0, 2), max_size=12)


@given(a=tokens, b=tokens, block_size=st.integers(1, 4))
def test_hashes_are_equal_exactly_while_all_tokens_so_far_are(a, b, block_size):
    for i, (x, y) in enumerate(zip(block_hashes(a, block_size), block_hashes(b, block_size), strict=False)):
        end = (i + 1) * block_size
        assert (x == y) == (a[:end] == b[:end])


@given(a=tokens, block_size=st.integers(1, 4))
def test_only_full_blocks_have_a_hash(a, block_size):
    assert len(block_hashes(a, block_size)) == len(a) // block_size


def test_the_same_tokens_after_another_prefix_are_another_block():
    assert block_hashes([1, 2, 7, 8], 2)[1] != block_hashes([3, 4, 7, 8], 2)[1]


def test_a_salt_separates_tenants_from_the_first_block_on():
    assert not set(block_hashes([1, 2, 3, 4], 2, salt=b"a")) & set(block_hashes([1, 2, 3, 4], 2, salt=b"b"))


def test_a_salt_cannot_pass_for_a_prefix():
    (first, second) = block_hashes([1, 2], 1)
    assert second not in block_hashes([2], 1, salt=first)


def test_token_ids_of_any_size_are_told_apart():
    assert len({block_hashes([token], 1) for token in (0, 1, 255, 256, 2**16, 2**32 - 1)}) == 6
    assert all(len(h) == DIGEST_BYTES for h in block_hashes([1, 2], 1))
