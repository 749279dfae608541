"""Drafts by lookup, against a search of all places, and their bounds."""

from __future__ import annotations

import random
from array import array
from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.ids import SeqId
from pdserve.engine.drafting import lookup
from pdserve.engine.drafting.api import NO_DRAFT, Draft, DraftView
from pdserve.engine.drafting.lookup import LONGEST, LookupDrafter, Match, TokenIndex

texts = st.lists(st.integers(0, 3), max_size=120) | st.lists(st.integers(-(2**62), 2**62), max_size=40)
"""Few different tokens, so that they occur again, and ids that no vocabulary has."""
periods = st.lists(st.integers(0, 50_000), min_size=1, max_size=9, unique=True)


@pytest.fixture
def all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search visit all places."""
    monkeypatch.setattr(lookup, "CANDIDATES", 1 << 20)


def equal_before(tokens: list[int], place: int, sequence: list[int]) -> int:
    """Count the equal tokens before a place and at the end of a sequence."""
    length = 0
    while length < min(place, len(sequence), LONGEST) and tokens[place - 1 - length] == sequence[-1 - length]:
        length += 1
    return length


def longest_match(tokens: list[int], sequence: list[int], least: int) -> tuple[int, int]:
    """Return length and place of the longest match, the most recent one among equals, by a search of all places."""
    found = max(((equal_before(tokens, place, sequence), place) for place in range(1, len(tokens))), default=(0, 0))
    return found if found[0] >= least else (0, 0)


def draft_of(drafter: LookupDrafter, seq_id: int, tokens: list[int], most: int = 8, group: bytes = b"") -> Draft:
    """Ask for a draft of one sequence."""
    (draft,) = drafter.propose([DraftView(SeqId(seq_id), tokens, 1, group, most)])
    assert len(draft.token_ids) <= most
    assert bool(draft.token_ids) == bool(draft.kind)
    return draft


def replay(drafter: LookupDrafter, seq_id: int, prompt: list[int], output: list[int], group: bytes = b"") -> list[Draft]:
    """Walk through an output in steps that accept right drafts. Return the drafts of all steps."""
    tokens, drafts = list(prompt), list[Draft]()
    while len(tokens) < len(prompt) + len(output):
        drafts.append(draft_of(drafter, seq_id, tokens, 8, group))
        rest = output[len(tokens) - len(prompt) :]
        right = 0
        while right < min(len(drafts[-1].token_ids), len(rest)) and drafts[-1].token_ids[right] == rest[right]:
            right += 1
        tokens += rest[: right + 1]
    return drafts


@pytest.mark.usefixtures("all_candidates")
class TestAllCandidates:
    """A search that visits all places finds what a search without tables finds."""

    @given(tokens=texts.filter(len))
    def test_it_finds_the_longest_match_and_the_most_recent_one_of_these(self, tokens: list[int]) -> None:
        index = TokenIndex(tokens)
        index.catch_up()
        assert index.find(tokens, 1)[:2] == longest_match(tokens, tokens, 1)

    @given(tokens=texts, sequence=texts.filter(len))
    def test_it_finds_the_tokens_of_another_sequence(self, tokens: list[int], sequence: list[int]) -> None:
        index = TokenIndex(array("q", tokens))
        index.catch_up()
        assert index.find(sequence, 2)[:2] == longest_match(tokens, sequence, 2)

    @given(tokens=texts.filter(len))
    def test_agreement_tells_how_many_candidates_go_on_alike(self, tokens: list[int]) -> None:
        index = TokenIndex(tokens)
        index.catch_up()
        length, at, agreement = index.find(tokens, 1)
        if 2 <= length < min(LONGEST, len(tokens)):
            following = [tokens[place] for place in range(2, len(tokens)) if equal_before(tokens, place, tokens) >= 2]
            share = following.count(tokens[at]) / len(following)
            assert agreement == (2 if share == 1 and len(following) > 1 else int(share >= 0.5))


@pytest.mark.parametrize(
    ("following", "agreement"),
    [
        ("aaaa", "all"),
        ("abab", "some"),
        ("abcb", "some"),
        ("abca", "some"),
        ("abcd", "few"),
        ("aabbc", "few"),
        ("aacbb", "few"),
        ("a", "some"),
    ],
)
def test_the_kind_says_how_many_candidates_agree(following: str, agreement: str) -> None:
    tokens = [token for number, letter in enumerate(following) for token in (1000 + number, 1, 2, ord(letter))]
    draft = draft_of(LookupDrafter(), 0, [*tokens, 5, 1, 2])
    assert draft.kind == f"lookup 2 {agreement}"
    assert draft.token_ids[0] == ord(following[-1])


def test_tokens_with_the_same_key_are_not_taken_for_equal() -> None:
    index = TokenIndex([token for second in range(2000) for token in (second, 7, 8)])
    index.catch_up()
    for second in range(2000, 12_000):
        assert index.find([second, 7], 2) == (0, 0, 0)
    for last in range(10_000, 20_000):
        assert index.find([last], 1) == (0, 0, 0)


@given(tokens=texts.filter(len), known=st.integers(1, 119))
def test_a_match_is_one_and_a_known_one_gives_way_only_to_a_longer_one(tokens: list[int], known: int) -> None:
    index = TokenIndex(tokens)
    index.catch_up()
    place = known % len(tokens)
    length = equal_before(tokens, place, tokens)
    match = index.find(tokens, 1, Match(length, place, 1))
    assert match.length == (equal_before(tokens, match.at, tokens) if match.at else 0)
    assert match.length > length or match[:2] == ((length, place) if length else (0, 0))


@given(tokens=texts, cuts=st.lists(st.integers(0, 120), max_size=6), shift=st.integers(0, 40))
def test_an_index_that_catches_up_equals_one_that_is_made_at_once(tokens: list[int], cuts: list[int], shift: int) -> None:
    tokens = tokens * 3 + tokens[:shift]
    whole, pieces = TokenIndex(tokens), TokenIndex([])
    whole.catch_up()
    for cut in [*sorted(cuts), len(tokens)]:
        pieces.tokens.extend(tokens[len(pieces.tokens) : cut])
        pieces.catch_up()
    for end in range(1, len(tokens) + 1):
        assert pieces.find(tokens[:end], 1) == whole.find(tokens[:end], 1)
        assert pieces.find([tokens[end - 1]], 1) == whole.find([tokens[end - 1]], 1)


def test_the_tables_grow_with_a_long_output() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(40) for _ in range(30)]
    grown = TokenIndex(tokens)
    for _ in range(5000):
        tokens.append(rng.randrange(40))
        grown.catch_up()
    whole = TokenIndex(tokens)
    whole.catch_up()
    for _ in range(300):
        sequence = [rng.randrange(40) for _ in range(6)]
        assert grown.find(sequence, 2) == whole.find(sequence, 2)


@given(period=periods, times=st.integers(3, 9), most=st.integers(1, 30))
def test_a_copy_goes_on_with_what_it_has_copied(period: list[int], times: int, most: int) -> None:
    draft = draft_of(LookupDrafter(), 0, period * times, most)
    assert draft.token_ids == tuple((period * most)[:most])


@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=60), output=st.lists(st.integers(0, 9), max_size=60))
def test_each_draft_is_what_followed_somewhere(prompt: list[int], output: list[int]) -> None:
    tokens = list(prompt)
    drafter = LookupDrafter()
    for token in output:
        draft = draft_of(drafter, 0, tokens, 3)
        if draft.kind.startswith("resumed"):
            tokens.append(token)
            continue
        length = int(draft.kind.split()[1]) if draft.kind else 0
        repeated = [(tokens + list(draft.token_ids), place) for place in range(1, len(tokens))]
        assert not draft.kind or any(
            equal_before(tokens, place, tokens) >= length and tuple(more[place : place + 3]) == draft.token_ids
            for more, place in repeated
        )
        tokens.append(token)


def test_a_quoted_prompt_is_drafted_whole() -> None:
    rng = random.Random(2)
    passage = [rng.randrange(1000) for _ in range(100)]
    drafts = replay(LookupDrafter(), 0, [1, *passage, 2], passage)
    assert len(drafts) <= 14
    assert drafts[-1].kind == f"lookup {LONGEST}"


def test_a_copy_goes_on_behind_a_token_that_was_replaced() -> None:
    passage = list(range(100, 140))
    edited = [*passage[:20], 7, *passage[21:]]
    drafts = replay(LookupDrafter(), 0, [1, *passage, 2], edited)
    assert [draft.kind for draft in drafts if draft.kind.startswith("resumed")] == ["resumed 16"]
    assert len(drafts) <= 9
    tokens = [1, *passage, 2, *passage[:20]]
    drafter = LookupDrafter()
    draft_of(drafter, 0, tokens)
    tokens.append(7)
    resumed = draft_of(drafter, 0, tokens)
    assert resumed == Draft(tuple(passage[21:29]), "resumed 16")
    assert draft_of(drafter, 0, tokens) == resumed, "asked again without new tokens"
    tokens.append(8)
    assert draft_of(drafter, 0, tokens) == NO_DRAFT, "two tokens in turn were replaced"


def test_the_most_recent_text_of_a_group_is_drafted() -> None:
    drafter = LookupDrafter()
    drafter.forget(SeqId(1), [5, 6, 7, 8, 9], b"")
    drafter.forget(SeqId(2), [5, 6, 7, 8, 10], b"")
    assert draft_of(drafter, 3, [4, 6, 7]) == Draft((8, 10), "recent 2 all")
    assert draft_of(drafter, 4, [4, 7, 8]) == Draft((10,), "recent 2 some")
    assert draft_of(drafter, 5, [4, 8, 10]) == NO_DRAFT, "a text ends there"


def test_an_output_that_is_generated_again_is_drafted_whole() -> None:
    rng = random.Random(3)
    prompt, output = ([rng.randrange(1000) for _ in range(100)] for _ in range(2))
    drafter = LookupDrafter()
    first = replay(drafter, 0, prompt, output)
    drafter.forget(SeqId(0), prompt + output, b"")
    again = replay(drafter, 1, prompt, output)
    assert len(again) <= len(output) // 9 + 2 < len(first)


@given(
    events=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=9), st.booleans()),
        max_size=30,
    )
)
def test_a_group_sees_nothing_of_the_others(events: list[tuple[int, int, list[int], bool]]) -> None:
    together = LookupDrafter()
    apart = [LookupDrafter() for _ in range(3)]
    sequences: dict[int, list[int]] = {}
    for group, number, tokens, ends in events:
        seq_id, name = 10 * group + number, bytes([group])
        sequence = sequences.setdefault(seq_id, [])
        sequence.extend(tokens)
        assert draft_of(together, seq_id, sequence, 8, name) == draft_of(apart[group], seq_id, sequence, 8, name)
        if ends:
            for drafter in (together, apart[group]):
                drafter.forget(SeqId(seq_id), sequences[seq_id], name)
            del sequences[seq_id]


def test_the_text_of_one_salt_is_no_draft_for_another() -> None:
    drafter = LookupDrafter()
    secret = list(range(50))
    drafter.forget(SeqId(0), secret, b"one salt")
    assert draft_of(drafter, 1, secret[:10], group=b"another salt") == NO_DRAFT
    assert draft_of(drafter, 2, secret[:10], group=b"one salt").token_ids == tuple(secret[10:18])


@given(
    texts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(0, 2)), max_size=40), seed=st.integers(0, 99)
)
def test_what_is_kept_is_bounded(texts: list[tuple[int, int, int]], seed: int) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"GROUP_TOKENS": 200, "ALL_TOKENS": 500, "SMALL_GROUP": 10, "SEQUENCE_TOKENS": 64, "CHUNK": 8}
        for name, size in sizes.items():
            patch.setattr(lookup, name, size)
        drafter = LookupDrafter()
        live: dict[int, list[int]] = {}
        for number, (group, length, place) in enumerate(texts):
            tokens = [rng.randrange(4) for _ in range(length)]
            drafter.forget(SeqId(number), tokens, bytes([group]))
            kept = drafter._groups
            assert all(len(one.index.tokens) <= 200 for one in kept.values())
            assert all(len(one.seen) <= 200 for one in kept.values())
            assert drafter._kept == sum(len(one.index.tokens) + 10 for one in kept.values()) <= 500
            if tokens:
                assert next(reversed(kept)) == bytes([group]), "the one that was used least recently stands first"
            sequence = live.setdefault(place, [place])
            sequence.extend(tokens[:5])
            draft_of(drafter, 1000 + place, sequence, 8, bytes([place]))
        for place, sequence in live.items():
            drafter.forget(SeqId(1000 + place), sequence, bytes([place]))
        assert not drafter._live


def test_a_group_that_is_full_drops_its_older_half() -> None:
    rng = random.Random(4)
    drafter = LookupDrafter()
    old, new = ([rng.randrange(1 << 20) for _ in range(200)] for _ in range(2))
    drafter.forget(SeqId(0), old, b"")
    asked = old[:50]
    assert draft_of(drafter, 1, asked).token_ids == tuple(old[50:58])
    for number in range(lookup.GROUP_TOKENS // lookup.SEQUENCE_TOKENS):
        tokens = [rng.randrange(1 << 20) for _ in range(lookup.SEQUENCE_TOKENS)]
        drafter.forget(SeqId(2 + number), tokens, b"")
    drafter.forget(SeqId(99), new, b"")
    assert draft_of(drafter, 1, [*asked, old[50]]) == NO_DRAFT, "also a sequence that was copying it has lost it"
    assert draft_of(drafter, 100, new[:50]).token_ids == tuple(new[50:58])
    drafter.forget(SeqId(101), old, b"")
    assert draft_of(drafter, 102, asked).token_ids == tuple(old[50:58]), "it is kept again"


def test_a_group_that_is_used_stays_and_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "ALL_TOKENS", 3 * lookup.SMALL_GROUP + 50)
    drafter = LookupDrafter()
    for group in (b"a", b"b", b"c"):
        drafter.forget(SeqId(0), [1, 2, 3], group)
    assert draft_of(drafter, 1, [1, 2], group=b"a")
    drafter.forget(SeqId(2), [1, 2, 3], b"d")
    found = {group for group in (b"a", b"b", b"c", b"d") if draft_of(drafter, 3 + ord(group), [1, 2], group=group).token_ids}
    assert found == {b"a", b"c", b"d"}


def test_a_sequence_that_copies_a_recent_one_goes_on_with_it() -> None:
    """It also matches itself in some tokens, but the other match is longer."""
    drafter = LookupDrafter()
    drafter.forget(SeqId(0), [10, 11, 12, 13, 1, 2, 3, 4, 5, 6], b"")
    tokens = [1, 2, 3, 4, 9, 10, 11]
    for token in (12, 13, 1, 2, 3, 4):
        assert draft_of(drafter, 1, tokens).token_ids[0] == token
        tokens.append(token)
    draft = draft_of(drafter, 1, tokens)
    assert draft == Draft((5, 6), "recent 6 some")


def test_a_conversation_is_kept_once() -> None:
    rng = random.Random(5)
    drafter = LookupDrafter()
    tokens: list[int] = []
    for turn in range(20):
        tokens = tokens + [rng.randrange(50_000) for _ in range(150)]
        drafter.forget(SeqId(turn), tokens, b"")
    kept = drafter._groups[b""].index.tokens
    assert len(kept) < len(tokens) + 20 * (lookup.CHUNK + 1)
    for at in range(0, len(tokens) - 60, 37):
        draft = draft_of(drafter, 100 + at, tokens[at : at + 40]).token_ids
        assert draft
        assert draft == tuple(tokens[at + 40 : at + 40 + len(draft)])


def test_the_end_of_a_long_sequence_is_kept() -> None:
    tokens = list(range(3 * lookup.SEQUENCE_TOKENS))
    drafter = LookupDrafter()
    drafter.forget(SeqId(0), tokens, b"")
    assert draft_of(drafter, 1, tokens[-20:-10]).token_ids == tuple(tokens[-10:-2])
    assert draft_of(drafter, 2, tokens[:10]) == NO_DRAFT


class CountedList(list[int]):
    """A list that counts how many of its tokens were read."""

    read = 0

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(found, list) else 1
        return found


@pytest.mark.parametrize("period", [1, 2, 3, 1000])
def test_a_step_reads_few_tokens_however_long_a_hostile_sequence_is(period: int) -> None:
    tokens = CountedList([*(i % period for i in range(100_000))])
    drafter = LookupDrafter()
    draft_of(drafter, 0, tokens)
    for token in [*range(period), *[10**6, 0, 1] * 5, *[0] * 5][:30]:
        tokens.append(token)
        tokens.read = 0
        draft_of(drafter, 0, tokens)
        assert tokens.read < 2 * lookup.CANDIDATES * (LONGEST + 3)


def test_a_sequence_begins_anew_when_its_tokens_are_not_those_of_before() -> None:
    drafter = LookupDrafter()
    tokens = [1, 2, 3, 4, 1, 2]
    assert draft_of(drafter, 0, tokens).token_ids[:2] == (3, 4)
    assert draft_of(drafter, 0, [*tokens, 3]).token_ids[:1] == (4,), "another list with the same tokens first"
    assert draft_of(drafter, 0, [5, 6, 7, 8, 9, 5, 6, 7, 8]).token_ids[:1] == (9,)
    assert draft_of(drafter, 0, [7, 8, 7]).token_ids[:1] == (8,)
    tokens[2:] = [1]
    assert draft_of(drafter, 0, tokens).token_ids[:2] == (2, 1)
    del tokens[1:]
    assert draft_of(drafter, 0, tokens) == NO_DRAFT


def test_other_tokens_behind_an_equal_last_one_are_indexed_anew() -> None:
    drafter = LookupDrafter()
    draft_of(drafter, 0, [1, 2, 3, 4, 5])
    assert draft_of(drafter, 0, [8, 9, 7, 8, 5, 8, 9]).token_ids[:1] == (7,), "another list"
    tokens = [1, 2, 3, 4, 5]
    draft_of(drafter, 1, tokens)
    tokens[:] = [8, 9, 7, 8, 6, 8, 9]
    assert draft_of(drafter, 1, tokens).token_ids[:1] == (7,), "the same list"


def test_unknown_and_empty_sequences_may_be_forgotten() -> None:
    drafter = LookupDrafter()
    drafter.forget(SeqId(7), [], b"")
    drafter.forget(SeqId(7), [1], b"")
    drafter.forget(SeqId(7), [1], b"")
    assert draft_of(drafter, 7, [1]) == NO_DRAFT
    drafter.forget(SeqId(7), [1], b"")
    assert not drafter._live
