"""One request of a workload, its lengths, the times of arrivals, and random tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from random import Random
from typing import Annotated, Final, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer

# One request of a benchmark, before it is sent. Pure.


@dataclass(frozen=True, slots=True)
class AnswerOf:
    """The tokens that an earlier request of the workload was answered with. They become a part of a later prompt."""

    number: int


Ids: TypeAlias = tuple[int, ...]
PromptPart: TypeAlias = str | Ids | AnswerOf
"""Text, token ids, or an earlier answer."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    It is sent at `send_at_s` or, where that is None, as soon as the generator has room for it. A request with `after` waits
    until all of these requests have ended, and then for `think_s`. Two requests after the same one are a fork, and one request
    after two is a join.
    """

    number: int
    """The requests of a workload count from 0, in the order in which they may be sent."""
    prompt: tuple[PromptPart, ...]
    """The parts follow each other without anything between them. Text and token ids are not mixed in one prompt."""
    max_tokens: int
    send_at_s: float | None = None
    """The time since the start of the run."""
    after: tuple[int, ...] = ()
    think_s: float = 0.0
    slo_class: str = ""
    """The class of the request. Empty: the default class."""
    session: str = ""
    """The conversation that the request belongs to. Empty: none."""
    prompt_tokens: int | None = None
    """The tokens of the prompt, where the workload knows them. A prompt with an earlier answer counts its `max_tokens`."""


# Distributions of numbers of tokens. Pure.


MOST_TOKENS: Final = 1 << 24
"""The longest length: more than the context of any published model."""
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


class Uniform(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """Whole numbers from `mean * (1 - range_ratio)` to `mean * (1 + range_ratio)`: `--random-range-ratio` of vLLM."""

    mean: Tokens
    range_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    @property
    def least(self) -> int:
        """The shortest length."""
        return max(1, math.floor(self.mean * (1 - self.range_ratio)))

    @property
    def most(self) -> int:
        """The longest length."""
        return math.ceil(self.mean * (1 + self.range_ratio))

    def draw(self, random: Random) -> int:
        """Draw one length."""
        return random.randint(self.least, self.most)


class Lognormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Lognormal lengths with a mean, and `sigma` of their logarithm. A length above `most` becomes `most`."""

    mean: Tokens
    sigma: Annotated[float, Meta(gt=0, le=5)]
    most: Tokens

    def draw(self, random: Random) -> int:
        """Draw one length."""
        drawn = random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(self.most, round(drawn)))


class Listed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="list"):
    """Lengths from a list, each as likely as its weight says. A histogram is a list with weights."""

    values: Annotated[tuple[Tokens, ...], Meta(min_length=1)]
    weights: tuple[Annotated[float, Meta(ge=0)], ...] = ()
    """One weight for each value. None at all: all values are equally likely."""

    def __post_init__(self) -> None:
        """Check that each value has a weight. Raises `ConfigError`."""
        if self.weights and (len(self.weights) != len(self.values) or not 0 < sum(self.weights) < math.inf):
            raise ConfigError(f"weights must be {len(self.values)} numbers with a sum above 0, one for each of values")

    @property
    def most(self) -> int:
        """The longest length."""
        return max(self.values)

    def draw(self, random: Random) -> int:
        """Draw one length."""
        return random.choices(self.values, self.weights or None)[0]


Lengths: TypeAlias = Tokens | Uniform | Lognormal | Listed
"""A plain number is a fixed length."""


def draw(lengths: int | Uniform | Lognormal | Listed, random: Random) -> int:
    """Draw one length."""
    return lengths if isinstance(lengths, int) else lengths.draw(random)


def most(lengths: int | Uniform | Lognormal | Listed) -> int:
    """Return the longest length that may be drawn."""
    return lengths if isinstance(lengths, int) else lengths.most


# The times at which requests are sent. Pure.
#
# The gaps between requests are drawn for a mean rate of one request a second and then divided by the rate. Another rate moves
# the same requests closer together and changes nothing else, so layouts are compared on the same requests.


ArrivalKind = Literal["poisson", "gamma", "constant", "inf", "trace", "closed"]
ARRIVAL_KINDS: tuple[str, ...] = get_args(ArrivalKind)


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The process of arrivals.

    `poisson`, `gamma` and `constant` need `rate_per_s`. `inf` sends all requests at once. `trace` takes the recorded times. If
    `rate_per_s` is set, it scales these times to that mean rate. `closed` gives no times: the generator sends a request as soon
    as one of its `max_concurrency` places is free.
    """

    kind: ArrivalKind = "poisson"
    rate_per_s: float | None = None
    """The mean rate of all requests, those of later turns included. None: not chosen yet, or the recorded rate of a trace."""
    burstiness: float = 1.0
    """The shape of `gamma`, as in vLLM: 1 is Poisson, less is more bursty, more is more even."""

    def __post_init__(self) -> None:
        """Check the fields. Raises `ConfigError`."""
        if self.kind not in ARRIVAL_KINDS:
            raise ConfigError(f"arrivals.kind must be one of {', '.join(ARRIVAL_KINDS)}, got {self.kind!r}")
        if self.rate_per_s is not None and not (0 < self.rate_per_s < math.inf):
            raise ConfigError(f"arrivals.rate_per_s must be above 0 and finite, got {self.rate_per_s}; all at once is kind inf")
        if self.rate_per_s is not None and self.kind in ("inf", "closed"):
            raise ConfigError(f"arrivals.rate_per_s has no meaning with kind {self.kind}: leave it out")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"arrivals.burstiness must be above 0 and finite, got {self.burstiness}")
        if self.burstiness != 1 and self.kind != "gamma":
            raise ConfigError(f"arrivals.burstiness has no meaning with kind {self.kind}: take kind gamma")

    def with_rate(self, rate_per_s: float) -> Arrivals:
        """Return the same process at another mean rate. Raises `ConfigError` for kinds without a rate."""
        return msgspec.structs.replace(self, rate_per_s=rate_per_s)

    def times_s(self, seed: int, share: float = 1.0) -> Iterator[float | None]:
        """Return the endless times of the requests that wait for no other one. None: as soon as a place is free.

        `share` is the share of such requests among all requests. Recorded times, of kind `trace`, are not known here.
        Raises `ConfigError` without a rate.
        """
        assert self.kind != "trace", "the source has the recorded times"
        if self.kind == "closed":
            return repeat(None)
        if self.kind == "inf":
            return repeat(0.0)
        if self.rate_per_s is None:
            raise ConfigError(f"arrivals.rate_per_s must be set for kind {self.kind}")
        return self._drawn_s(seed, self.rate_per_s * share)

    def _drawn_s(self, seed: int, rate_per_s: float) -> Iterator[float | None]:
        """Yield drawn times. The sum is kept in units of the mean gap, so that a rate only divides it."""
        random, shape, elapsed = Random(f"{seed}:arrivals"), self.burstiness, 0.0
        while True:
            elapsed += 1.0 if self.kind == "constant" else random.gammavariate(shape, 1.0 / shape)
            yield elapsed / rate_per_s


# Random token ids that stand for prompts: equal keys give equal tokens, and different numbers differ in their first tokens.


HEAD_STATES: Final = 1 << 32
"""The numbers that the first tokens of a part can tell apart: more than any run has requests."""
LEAST_IDS: Final = 16
"""A smaller vocabulary would need more than eight tokens to tell two prompts apart."""


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
    def of(cls, tokenizer: Tokenizer | None, vocab_size: int | None) -> Alphabet:
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
