"""Random token ids that stand for prompts: equal keys give equal tokens, and different numbers differ in their first tokens."""

from __future__ import annotations

from random import Random
from typing import Final, Protocol

import numpy as np

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import Ids

HEAD_STATES: Final = 1 << 32
"""The numbers that the first tokens of a part can tell apart: more than any run has requests."""
LEAST_IDS: Final = 16
"""A smaller vocabulary would need more than eight tokens to tell two prompts apart."""


class WorkloadTokenizer(Protocol):
    """The part of a tokenizer that workloads need. `pdserve.text.tokenizer.Tokenizer` has it."""

    @property
    def vocab_size(self) -> int:
        """All ids are below this number."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; special tokens add none."""


class Alphabet:
    """The token ids of which random prompts are made: all tokens but the special tokens."""

    def __init__(self, ids: range | list[int]) -> None:
        """Take the ids. Raises `ConfigError` if there are fewer than 16."""
        if len(ids) < LEAST_IDS:
            raise ConfigError(f"workload: the vocabulary has {len(ids)} usable token ids; at least {LEAST_IDS} are needed")
        self.ids = np.array(ids, dtype=np.int64)
        self.head_tokens = 1
        """The first tokens of each part that tell its number."""
        while len(ids) ** self.head_tokens < HEAD_STATES:
            self.head_tokens += 1

    @classmethod
    def of(cls, tokenizer: WorkloadTokenizer | None, vocab_size: int | None) -> Alphabet:
        """Take the ids of a tokenizer, below `vocab_size` where that is set. Raises `ConfigError` if neither is given."""
        if tokenizer is None and vocab_size is None:
            raise ConfigError("workload.vocab_size must be set when there is no tokenizer: random tokens are below it")
        if tokenizer is None:
            return cls(range(vocab_size or 0))
        known = range(min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size))
        return cls([one for one in known if tokenizer.token_bytes(one)])


class TokenMaker:
    """The token ids of one run. Another seed or run gives other tokens."""

    def __init__(self, alphabet: Alphabet, seed: int, run: int) -> None:
        """Choose where the numbers of this run begin."""
        self._alphabet = alphabet
        self._key = f"{seed}:{run}"
        self._states = len(alphabet.ids) ** alphabet.head_tokens
        self._first = Random(f"{self._key}:first").randrange(self._states)

    def ids(self, number: int, count: int, kind: str = "") -> Ids:
        """Return `count` tokens. Those of two numbers of one kind differ in one of the first `head_tokens`."""
        words = np.frombuffer(Random(f"{self._key}:{kind}:{number}").randbytes(4 * count), dtype=np.uint32)
        places, rest, base = words % len(self._alphabet.ids), (self._first + number) % self._states, len(self._alphabet.ids)
        for place in range(min(count, self._alphabet.head_tokens)):
            rest, places[place] = divmod(rest, base)
        return tuple(self._alphabet.ids[places].tolist())

    def number(self, kind: str, below: int) -> int:
        """Return a number of this run, from 0 up to `below`."""
        return Random(f"{self._key}:{kind}").randrange(below)
