"""Selectors for the labels of Ray nodes. A pool asks for one value of a label, for one of several values, or for a node with
none of these values. Pure.

The notation is Ray's: `gpu`, `!spot`, `in(a100, h100)`, `!in(spot, preemptible)`. A node without the label matches only
negated selectors, as in Ray's scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_VALUE: Final = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # Kubernetes' rule for values, which Ray follows
_SELECTOR: Final = re.compile(rf"(!?)(?:({_VALUE})|in\(({_VALUE}(?:, ?{_VALUE})*)\))")
_KEY: Final = re.compile(rf"(?:(?:{_VALUE})(?:\.(?:{_VALUE}))*/)?{_VALUE}")


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """One condition on the value of one label."""

    negated: bool
    values: tuple[str, ...]  # sorted

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """Parse Ray's notation. Raises ValueError, which says what is accepted."""
        match = _SELECTOR.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a label selector; write a value, !value, in(one, other) or !in(one, other)")
        values = (match[2],) if match[2] else tuple(sorted({value.strip() for value in match[3].split(",")}))
        return cls(bool(match[1]), values)

    def __str__(self) -> str:
        """Return Ray's notation without spaces. Ray 2.60 takes a space after a comma as part of the value, which then matches
        no node."""
        several = f"in({','.join(self.values)})" if len(self.values) > 1 else self.values[0]
        return f"!{several}" if self.negated else several

    def matches(self, value: str | None) -> bool:
        """Tell whether a node with this value of the label matches. None: the node has no such label."""
        return (value in self.values) is not self.negated

    @property
    def example(self) -> str | None:
        """A value that matches. None: the selector is negated, so a node needs no such label."""
        return None if self.negated else self.values[0]


def match_all(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Tell whether a node with `labels` matches every selector. Both map a label's name to a text."""
    return all(LabelSelector.parse(text).matches(labels.get(name)) for name, text in selectors.items())


def check_key(name: str) -> None:
    """Check the name of a label. Raises ValueError for a name that Ray does not accept."""
    if not _KEY.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a label; write letters, digits, dashes, dots and underscores")
