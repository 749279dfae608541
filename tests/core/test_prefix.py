"""Hashes of KV blocks: equal exactly when the KV is."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.block_hash import (
    DIGEST_BYTES,
    block_hashes,
    chain_salt,
    encode_parts,
    next_hash,
    prompt_hash,
    root_hash,
)

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


PARTS = st.lists(st.binary(max_size=12), max_size=4)
SALTS = st.text(st.sampled_from("ab?\x00\x01\ud800\udc80\ufffd"), max_size=4)


def decoded(encoded: bytes) -> list[bytes]:
    """A reader of `encode_parts`. Its existence is the proof that no two lists of parts have the same bytes."""
    parts = []
    while encoded:
        size = int.from_bytes(encoded[:8], "little")
        parts.append(encoded[8 : 8 + size])
        encoded = encoded[8 + size :]
    return parts


@given(parts=PARTS)
def test_the_parts_of_a_salt_can_be_read_back(parts):
    assert decoded(encode_parts(*parts)) == parts


@given(one=st.tuples(SALTS, SALTS), other=st.tuples(SALTS, SALTS))
def test_two_salts_are_equal_exactly_while_model_and_tenant_are(one, other):
    salts = [chain_salt(model.encode(errors="surrogatepass"), tenant) for model, tenant in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)


def test_a_tenant_cannot_name_the_end_of_another_models_digest():
    assert chain_salt(b"model", "x") != chain_salt(b"modelx", "")


def test_salts_that_no_text_can_encode_stay_apart():
    """An encoding that replaces them would let the tenants share their blocks."""
    assert len({chain_salt(b"m", salt) for salt in ("\ud800", "\udc80", "?", "\ufffd")}) == 4


@given(salt=SALTS, ids=st.binary(max_size=8), other=SALTS, other_ids=st.binary(max_size=8))
def test_a_prompts_name_has_its_salt_and_its_ids_apart(salt, ids, other, other_ids):
    assert (prompt_hash(ids, salt) == prompt_hash(other_ids, other)) == ((salt, ids) == (other, other_ids))


def test_a_root_is_never_the_hash_of_a_block():
    """A client who knows a block's parent could otherwise choose a salt that is the parent and the block's tokens."""
    parent, content = bytes(32), bytes(4)
    assert root_hash(parent + content) != next_hash(parent, content)
