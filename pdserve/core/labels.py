"""What a pool asks of the labels of a Ray node: one value, one of several, or none of them. Pure.

The notation is Ray's: `gpu`, `!spot`, `in(a100, h100)`, `!in(spot, preemptible)`. A node without the label matches only
what is negated, as in Ray's scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_VALUE: Final = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # Kubernetes' rule for names and values, which Ray keeps
_SELECTOR: Final = re.compile(rf"(!?)(?:({_VALUE})|in\(({_VALUE}(?:, ?{_VALUE})*)\))")
_KEY: Final = re.compile(rf"(?:(?:{_VALUE})(?:\.(?:{_VALUE}))*/)?{_VALUE}")


@dataclass(frozen=True, slots=True)
class LabelSelector:
    negated: bool
    values: tuple[str, ...]  # sorted

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """Raises ValueError saying what is accepted."""
        match = _SELECTOR.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a label selector; write a value, !value, in(one, other) or !in(one, other)")
        values = (match[2],) if match[2] else tuple(sorted({value.strip() for value in match[3].split(",")}))
        return cls(bool(match[1]), values)

    def __str__(self) -> str:
        """Without spaces: Ray takes those after commas for part of the value, which then matches no node (Ray 2.60)."""
        several = f"in({','.join(self.values)})" if len(self.values) > 1 else self.values[0]
        return f"!{several}" if self.negated else several

    def matches(self, value: str | None) -> bool:
        """Whether a node with this value of the label will do; None: it has no such label."""
        return (value in self.values) is not self.negated

    @property
    def example(self) -> str | None:
        """A value that matches; None: a node needs no such label."""
        return None if self.negated else self.values[0]


def match_all(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with `labels` satisfies every selector."""
    return all(LabelSelector.parse(text).matches(labels.get(name)) for name, text in selectors.items())


def check_key(name: str) -> None:
    """Raises ValueError for what cannot be the name of a label."""
    if not _KEY.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a label; write letters, digits, dashes, dots and underscores")
