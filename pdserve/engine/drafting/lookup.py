"""Drafts by lookup: what followed the last tokens when they occurred before, in the sequence itself or in recent ones of its
group.

Text that repeats itself, quotes its prompt or edits it is guessed well by a copy (prompt lookup: Saxena, 2023; suffixes of
earlier outputs: SuffixDecoding, arXiv 2411.04975). The search is that of LZ77, as zlib does it: tables of chains lead from one
place where a pair of tokens occurred to the place before, and others do so for single tokens. The longest match among a few
candidates wins. A copy that reaches the present end goes on with what it has copied.

A proposal takes about 5 us with warm caches, and 10 us between the steps of a model, however long the sequence is: a step of a
small model takes a few milliseconds for all its sequences. The index of a sequence takes 20 to 32 bytes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from pdserve.core.ids import SeqId
from pdserve.engine.drafting.api import NO_DRAFT, Draft, DraftView

LONGEST: Final = 32
"""A match of so many tokens is long enough. Drafts of longer matches have the same odds, since almost all of them are right."""
CANDIDATES: Final = 8
"""The places that one search visits in one chain. More of them find hardly more, and fewer tell less of whether they agree."""
OWN_ENOUGH: Final = 4
"""Recent sequences are not searched when a sequence matches itself in so many tokens: they were not better then."""
GROUP_TOKENS: Final = 1 << 17
"""The most tokens that a group keeps of recent sequences. The older half leaves when there are more. To index the other half
anew takes about 3 ms, once in some hundred requests."""
ALL_TOKENS: Final = 1 << 20
"""The most tokens that all groups keep, at 28 to 40 bytes each. The group that was used least recently leaves."""
SMALL_GROUP: Final = 1 << 10
"""A group counts as so many tokens more than it keeps, since its tables take memory too. This bounds the number of groups."""
SEQUENCE_TOKENS: Final = 1 << 13
"""The most tokens that a group keeps of one sequence, the last ones. To index them takes less than 1 ms."""
CHUNK: Final = 64
"""A group remembers the hash of so many tokens, in order not to keep them twice."""
ONE_BY_ONE: Final = 32
"""So many new tokens are indexed one by one, since a few calls of numpy take as long."""
BREAK: Final = -1
"""It follows each text of a group, and is no token."""
_BUCKETS: Final = (1, 2, 3, 6, 16, LONGEST)
_AGREEMENT: Final = ("few", "some", "all")


class Match(NamedTuple):
    """A place where the last tokens of a sequence occurred before."""

    length: int
    """How many tokens are equal, at most `LONGEST`. 0: there is no such place."""
    at: int
    """The index of the token that followed them."""
    agreement: int
    """How many of the candidates that were visited go on with the same token. 0: fewer than half of them do. 1: at least half
    of them do, or there is no other candidate. 2: all of several candidates do."""


NO_MATCH: Final = Match(0, 0, 0)


class TokenIndex:
    """An index of the places in a list of tokens, by the one or two tokens before a place. Its owner appends to the list."""

    def __init__(self, tokens: MutableSequence[int]) -> None:
        self.tokens = tokens
        """The tokens. The place of a token is its index in them."""
        self._resize()

    def _resize(self) -> None:
        """Empty the tables, and make them large enough for half as many tokens again."""
        self._mask = (1 << max(9, (3 * len(self.tokens) // 2).bit_length())) - 1
        # The last place of each key, and for each place the place before it in its chain. Place 0 ends a chain.
        self._last_of_one, self._before_one = array("i", bytes(4 * self._mask + 4)), array("i", (0,))
        self._last_of_two, self._before_two = array("i", bytes(4 * self._mask + 4)), array("i", (0,))

    def catch_up(self) -> None:
        """Index the places of all tokens that are new. Raises `OverflowError` for a token id that needs more than 64 bits."""
        tokens, end = self.tokens, len(self.tokens)
        if end > self._mask:
            self._resize()
        begin, mask = len(self._before_one), self._mask
        if end - begin > ONE_BY_ONE:
            # Products wrap around in 64 bits. This changes no bit of the keys, which begin at bit 15.
            ids = np.array(tokens[max(begin - 2, 0) : end - 1], np.int64)
            pairs = (ids[:-1] * 0x9E3779B1 + ids[1:] * 0x85EBCA77) >> 15
            _chain(ids[begin - end :] & mask, self._last_of_one, self._before_one)
            if begin == 1:
                self._before_two.append(0)
            _chain(pairs & mask, self._last_of_two, self._before_two)
            return
        for place in range(begin, end):
            last = tokens[place - 1]
            key = last & mask
            self._before_one.append(self._last_of_one[key])
            self._last_of_one[key] = place
            if place == 1:
                self._before_two.append(0)
                continue
            key = ((tokens[place - 2] * 0x9E3779B1 + last * 0x85EBCA77) >> 15) & mask
            self._before_two.append(self._last_of_two[key])
            self._last_of_two[key] = place

    def find(self, sequence: Sequence[int], least: int, known: Match = NO_MATCH, longest: int = LONGEST) -> Match:
        """Return the longest match of the last tokens of a sequence among the candidates, the most recent one among equals.

        sequence: at least one token. It may be the list of this index, which has caught up with it.
        least: the fewest tokens of a match, 1 or 2. Single tokens are looked up only where a pair is not found.
        known: a match that holds. Only a longer one is preferred to it. longest: more tokens are not compared.
        """
        tokens, length, at = self.tokens, known.length, known.at
        longest = min(len(sequence), longest)
        if length >= longest:
            return known
        known_at = at if length else -1
        following = [tokens[at]] if length else []
        last = sequence[-1]
        if longest > 1:
            second = sequence[-2]
            chain = self._before_two
            place = self._last_of_two[((second * 0x9E3779B1 + last * 0x85EBCA77) >> 15) & self._mask]
            for _ in range(CANDIDATES):
                if not place:
                    break
                # Other pairs may have the same key.
                if tokens[place - 1] == last and tokens[place - 2] == second and place != known_at:
                    following.append(tokens[place])
                    most = longest if longest < place else place
                    if length < most and (length < 2 or tokens[place - length - 1] == sequence[-length - 1]):
                        equal = 2
                        while equal < most and tokens[place - equal - 1] == sequence[-equal - 1]:
                            equal += 1
                        if equal > length:
                            length, at = equal, place
                            if equal == longest:
                                break
                place = chain[place]
        if length < 2 and least == 1:
            chain = self._before_one
            place = self._last_of_one[last & self._mask]
            for _ in range(CANDIDATES):
                if not place:
                    break
                if tokens[place - 1] == last and place != known_at:
                    following.append(tokens[place])
                    if not length:
                        length, at = 1, place
                place = chain[place]
        if not length:
            return NO_MATCH
        agree, others = following.count(tokens[at]), len(following)
        return Match(length, at, 2 if 1 < agree == others else int(2 * agree >= others))


def _chain(keys: np.ndarray[Any, np.dtype[np.int64]], last_of: array[int], before: array[int]) -> None:
    """Append a place to `before` for each key, as a loop would: the last place of the key, which then becomes this one.

    keys: [places], int64, each an index of `last_of`.
    """
    if not len(keys):
        return
    first = len(before)
    ordered = np.sort((keys << 32) | np.arange(first, first + len(keys)))  # faster than a stable sort of indices
    keys, places = ordered >> 32, ordered.astype(np.int32)  # the lower half
    begins = np.append(True, keys[1:] != keys[:-1])
    table = np.frombuffer(last_of, np.int32)
    earlier = np.where(begins, table[keys], np.roll(places, 1))
    by_place = np.empty_like(places)
    by_place[places - first] = earlier
    before.frombytes(by_place.tobytes())
    ends = np.roll(begins, -1)
    table[keys[ends]] = places[ends]


class _Live:
    """A live sequence keeps its index here, and the match of its last proposal."""

    __slots__ = ("index", "last", "length", "lost", "match", "source")

    def __init__(self, tokens: list[int]) -> None:
        self.index = TokenIndex(tokens)
        self.length, self.last = 0, BREAK  # the number of its tokens then, and the last one of them
        self.source, self.match = self.index, NO_MATCH
        self.lost = 0  # the length of the last match that went on otherwise than the sequence

    def goes_on(self, tokens: list[int]) -> bool:
        """Tell whether these tokens are those of the last proposal, perhaps with others behind them. Takes the list over."""
        mine, length = self.index.tokens, self.length
        if len(tokens) < length or (length and tokens[length - 1] != self.last):
            return False
        if mine is not tokens:
            if mine[:length] != tokens[:length]:
                return False
            self.index.tokens = tokens
        return True

    def known(self, tokens: list[int]) -> Match:
        """Return the last match as it is behind the new tokens.

        Its length is 0 where the last token differs from the one that was guessed. A copy often goes on behind a token that was
        replaced by another one; if the next one differs as well, the match is given up.
        """
        length, at, _ = self.match
        theirs, new = self.source.tokens, len(tokens) - self.length
        if not at or at + new >= len(theirs):
            return NO_MATCH
        at += new
        for behind in range(1, new + 1):
            if theirs[at - behind] != tokens[-behind]:
                if not length:
                    return NO_MATCH
                self.lost = length
                return Match(behind - 1, at, 1)
        return Match(min(length + new, LONGEST), at, 1)


class _Group:
    """The last tokens of the sequences of one group that have ended."""

    __slots__ = ("index", "seen")

    def __init__(self) -> None:
        self.index = TokenIndex(array("q"))
        self.seen: dict[int, int] = {}
        """The place of the text that has a chunk, by the hash of its tokens. Chunks with equal hashes are taken for equal."""

    @property
    def size(self) -> int:
        """The tokens that it counts as."""
        return len(self.index.tokens) + SMALL_GROUP

    def add(self, tokens: Sequence[int]) -> None:
        """Keep the last tokens of a sequence, but not the chunks at their beginning that are here already."""
        begin = -(-max(0, len(tokens) - SEQUENCE_TOKENS) // CHUNK) * CHUNK
        hashes = [hash(tuple(tokens[at : at + CHUNK])) for at in range(begin, len(tokens) - CHUNK + 1, CHUNK)]
        known = 0
        while known < len(hashes) and hashes[known] in self.seen:
            known += 1
        begin += known * CHUNK
        if begin == len(tokens):
            return
        mine = self.index.tokens
        self.seen.update(dict.fromkeys(hashes[known:], len(mine)))
        mine.extend(tokens[begin:])
        mine.append(BREAK)
        if len(mine) > GROUP_TOKENS:
            cut = len(mine) - GROUP_TOKENS // 2
            self.seen = {chunk: place - cut for chunk, place in self.seen.items() if place >= cut}
            self.index = TokenIndex(mine[cut:])
        self.index.catch_up()


def _kinds(name: str) -> list[tuple[str, ...]]:
    """Return the kinds of drafts by the length of the match and by agreement."""
    starts = [max((start for start in _BUCKETS if start <= length), default=0) for length in range(LONGEST + 1)]
    return [
        tuple(f"{name} {start}" if start == LONGEST else f"{name} {start} {word}" for word in _AGREEMENT) for start in starts
    ]


_OWN: Final = _kinds("lookup")
_RECENT: Final = _kinds("recent")
_RESUMED: Final = [
    f"resumed {max((start for start in _BUCKETS if start <= length), default=0)}" for length in range(LONGEST + 1)
]


class LookupDrafter:
    """Guesses what followed the last tokens of a sequence before. It fulfils `Drafter`.

    The kind of a draft says where the match was found (`lookup`: in the sequence itself, `recent`: in another one), how long
    it is at least, and how many of the candidates go on with the same token, as `lookup 3 all`. A group never sees tokens of
    another one. Token ids fit into 64 bits.
    """

    def __init__(self, *, least: int = 1, longest: int = LONGEST, recent: bool = True) -> None:
        """least, longest: the fewest tokens of a match, and the most that are compared. recent: sequences that have ended are
        searched as well."""
        self._least, self._longest, self._recent = least, longest, recent
        self._live: dict[SeqId, _Live] = {}
        self._groups: dict[bytes, _Group] = {}  # the one that was used least recently is the first
        self._kept = 0  # the sum of their sizes

    def propose(self, views: Sequence[DraftView]) -> list[Draft]:
        """Return a draft for each of these sequences, with at most `most` tokens; `NO_DRAFT` where it has no guess."""
        return [self._propose(view) for view in views]

    def _propose(self, view: DraftView) -> Draft:
        tokens, live = view.tokens, self._live.get(view.seq_id)
        if live is None or not live.goes_on(tokens):
            live = self._live[view.seq_id] = _Live(tokens)
            if view.group in self._groups:
                self._groups[view.group] = self._groups.pop(view.group)
        own, group = live.index, self._groups.get(view.group)
        own.catch_up()
        was = live.source if group is not None and live.source is group.index else own
        known = live.known(tokens) if live.source is was else NO_MATCH
        source, kinds = own, _OWN
        match = own.find(tokens, 1, known if was is own else NO_MATCH, self._longest)
        if group is not None and (match.length < OWN_ENOUGH or was is not own):
            other = group.index.find(tokens, 2, known if was is not own else NO_MATCH, self._longest)
            if other.length > match.length:
                source, match, kinds = group.index, other, _RECENT
        if match.length:
            kind = kinds[match.length][match.agreement]
        else:
            source, match, kind = was, known, _RESUMED[live.lost]
        live.length, live.last, live.source, live.match = len(tokens), tokens[-1], source, match
        at, most = match.at, view.most
        if not at or match.length < self._least - 1 or 0 < match.length < self._least:
            return NO_DRAFT
        copied = tuple(source.tokens[at : at + most])
        if source is own:
            if len(copied) < most:
                copied = (copied * (most // len(copied) + 1))[:most]
        elif BREAK in copied:
            copied = copied[: copied.index(BREAK)]
        return Draft(copied, kind) if copied else NO_DRAFT

    def forget(self, seq_id: SeqId, tokens: Sequence[int], group: bytes) -> None:
        """Forget a sequence, which has ended with these tokens. Its group keeps the last of them."""
        self._live.pop(seq_id, None)
        if not tokens or not self._recent:
            return
        kept = self._groups.pop(group, None)
        self._kept -= 0 if kept is None else kept.size
        kept = self._groups[group] = kept or _Group()
        kept.add(tokens)
        self._kept += kept.size
        while self._kept > ALL_TOKENS and len(self._groups) > 1:
            self._kept -= self._groups.pop(next(iter(self._groups))).size
