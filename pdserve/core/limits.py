"""The fields of a request: their types, and the limits that both front ends, admission and workers apply.

A dataclass names each field once, with its type and its limits (`limited`). Everything that checks or carries the fields reads
them from there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Protocol, TypeVar, get_type_hints

from pdserve.core.errors import InvalidRequest

MAX_MESSAGES: Final = 4096
"""The most chat messages in one request, and the most parts in one message. The router's loop stands still while the chat
template is applied to them."""


One = TypeVar("One")


class Limit(Protocol):
    """One limit on the value of a field."""

    def check(self, name: str, value: Any) -> None:
        """Raise `InvalidRequest`, which names the field and the limit, for a value beyond the limit."""


@dataclass(frozen=True, slots=True)
class IntRange:
    """Integers from `low` to `high`."""

    low: int
    high: int

    def check(self, name: str, value: int) -> None:
        """Raise `InvalidRequest` for a number outside the range."""
        if not self.low <= value <= self.high:
            raise InvalidRequest(f"must be from {self.low} to {self.high}, got {value}", field=name)


@dataclass(frozen=True, slots=True)
class RealRange:
    """Numbers in [`low`, `high`]."""

    low: float
    high: float

    def check(self, name: str, value: float) -> None:
        """Raise `InvalidRequest` for a number outside the range. NaN is in no range."""
        if not self.low <= value <= self.high:
            raise InvalidRequest(f"must be a number in [{self.low:g}, {self.high:g}], got {value}", field=name)


@dataclass(frozen=True, slots=True)
class MaxBytes:
    """Texts of at most `count` bytes of UTF-8."""

    count: int

    def check(self, name: str, value: str) -> None:
        """Raise `InvalidRequest` for a longer text."""
        if len(value.encode(errors="replace")) > self.count:
            raise InvalidRequest(f"must have at most {self.count} bytes", field=name)


@dataclass(frozen=True, slots=True)
class MaxCount:
    """Lists of at most `count` entries. An error calls the entries `noun`."""

    count: int
    noun: str

    def check(self, name: str, value: Collection[Any]) -> None:
        """Raise `InvalidRequest` for a longer list."""
        if len(value) > self.count:
            raise InvalidRequest(f"has {len(value)} {self.noun}; at most {self.count} are allowed", field=name)


@dataclass(frozen=True, slots=True)
class TextLengths:
    """Lists of texts of `low` to `high` characters."""

    low: int
    high: int

    def check(self, name: str, value: tuple[str, ...]) -> None:
        """Raise `InvalidRequest` for a list with a shorter or longer text."""
        if not all(self.low <= len(text) <= self.high for text in value):
            raise InvalidRequest(f"each string must have {self.low} to {self.high} characters", field=name)


def limited(default: Any, *limits: Limit) -> Any:
    """Return a dataclass field with a default and limits. None is within every limit."""
    return field(default=default, metadata={"limits": limits})


def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return the type of each field that a caller of the dataclass sets, by name, in the order of the fields."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind) if one.init}


_LIMITS: Final[dict[type[Any], Mapping[str, tuple[Limit, ...]]]] = {}


def limits_of(kind: type[Any]) -> Mapping[str, tuple[Limit, ...]]:
    """Return the limits of the dataclass's fields by name, in the order of the fields. Fields without limits are left out."""
    if kind not in _LIMITS:
        _LIMITS[kind] = {one.name: limits for one in fields(kind) if (limits := one.metadata.get("limits"))}
    return _LIMITS[kind]


def limit_of(kind: type[Any], name: str, sort: type[One]) -> One:
    """Return the limit of type `sort` that a field of the dataclass has. Raises StopIteration when it has none."""
    return next(limit for limit in limits_of(kind)[name] if isinstance(limit, sort))


def check_limits(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Check the values of a dataclass's fields, which `values` holds by name. Fields that it lacks are not checked. Raises
    `InvalidRequest`, which names the field and the limit."""
    for name, limits in limits_of(kind).items():
        value = values.get(name)
        if value is not None:
            for limit in limits:
                limit.check(name, value)


def check_fields(value: Any) -> None:
    """Check the fields of a dataclass's value. Raises `InvalidRequest`, which names the field and the limit.

    A default is within its limits, so only other values cost a check.
    """
    for name, default, limits in _CHECKS.get(type(value)) or _checks_of(type(value)):
        given = getattr(value, name)
        if given != default:
            for limit in limits:
                limit.check(name, given)


_CHECKS: Final[dict[type[Any], tuple[tuple[str, Any, tuple[Limit, ...]], ...]]] = {}


def _checks_of(kind: type[Any]) -> tuple[tuple[str, Any, tuple[Limit, ...]], ...]:
    defaults = {one.name: one.default for one in fields(kind)}
    _CHECKS[kind] = checks = tuple((name, defaults[name], limits) for name, limits in limits_of(kind).items())
    return checks
