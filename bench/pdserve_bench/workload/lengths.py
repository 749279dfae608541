"""Distributions of numbers of tokens. Pure."""

from __future__ import annotations

import math
from random import Random
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.core.errors import ConfigError

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
