"""The fields of a request: their types, and the limits that both front ends, admission and workers apply.

A dataclass declares each field once, with its type, its limits and its meaning (`limited`). Everything that checks, carries or
describes the fields reads them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Protocol, TypeVar, get_type_hints

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


def limited(default: Any, *limits: Limit, means: str = "") -> Any:
    """Return a dataclass field with a default and limits. None is within every limit. `means` tells clients what it does."""
    return field(default=default, metadata={"limits": limits, "means": means})


def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return the type of each field that a caller of the dataclass sets, by name, in the order of the fields."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind) if one.init}


def meanings_of(kind: type[Any]) -> dict[str, str]:
    """Return what the dataclass's fields do, by name. Fields without a meaning are left out."""
    return {one.name: means for one in fields(kind) if (means := one.metadata.get("means"))}


def limits_of(kind: type[Any]) -> Mapping[str, tuple[Limit, ...]]:
    """Return the limits of the dataclass's fields by name, in the order of the fields. Fields without limits are left out."""
    return _checks_of(kind).limits


def limit_of(kind: type[Any], name: str, sort: type[One]) -> One:
    """Return the limit of type `sort` that a field of the dataclass has. Raises StopIteration when the field has no such
    limit."""
    return next(limit for limit in limits_of(kind)[name] if isinstance(limit, sort))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_int(i) and _is_real(bias) for i, bias in value.items())


_TYPES: Final[dict[Any, tuple[Callable[[Any], bool], str]]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_int, "an integer"),
    int | None: (_is_int, "an integer"),
    float: (_is_real, "a number"),
    str: (lambda value: isinstance(value, str), "a string"),
    tuple[str, ...]: (lambda value: isinstance(value, tuple) and all(isinstance(s, str) for s in value), "strings"),
    tuple[int, ...]: (lambda value: isinstance(value, tuple) and all(type(i) is int for i in value), "integers"),
    tuple[tuple[int, float], ...]: (_are_biases, "numbers by token id"),
}
"""The check of a client's value for each type that a field has, and the name of the type for clients."""


class _Checks(NamedTuple):
    """The checks of a dataclass, as its fields declare them."""

    limits: Mapping[str, tuple[Limit, ...]]
    types: Mapping[str, tuple[Callable[[Any], bool], str]]
    """The checks of those fields whose type a client can write."""
    defaults: Mapping[str, Any]


_CHECKS: Final[dict[type[Any], _Checks]] = {}


def _checks_of(kind: type[Any]) -> _Checks:
    if kind not in _CHECKS:
        limits = {one.name: limits for one in fields(kind) if (limits := one.metadata.get("limits"))}
        types = {name: _TYPES[one] for name, one in field_types(kind).items() if one in _TYPES}
        _CHECKS[kind] = _Checks(limits, types, {one.name: one.default for one in fields(kind)})
    return _CHECKS[kind]


def check_types(kind: type[Any], values: Mapping[str, Any], what: str) -> None:
    """Check names and types of values for a dataclass's fields, of which each is `what`. Raises `InvalidRequest` for a field
    that does not exist or has the wrong type."""
    checks = _checks_of(kind).types
    for name, value in values.items():
        if name not in checks:
            raise InvalidRequest(f"is not {what}", field=name)
        is_good, wanted = checks[name]
        if not is_good(value):
            raise InvalidRequest(f"must be {wanted}, got {value!r:.100}", field=name)


def check_limits(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Check the values of a dataclass's fields, which `values` holds by name. Fields without a value there are not checked.
    Raises `InvalidRequest`, which names the field and the limit."""
    for name, limits in limits_of(kind).items():
        value = values.get(name)
        if value is not None:
            for limit in limits:
                limit.check(name, value)


def check_fields(value: Any) -> None:
    """Check the fields of a dataclass's value. Raises `InvalidRequest`, which names the field and the limit.

    A default is within its limits, so only other values cost a check.
    """
    checks = _CHECKS.get(type(value)) or _checks_of(type(value))
    for name, limits in checks.limits.items():
        given = getattr(value, name)
        if given != checks.defaults[name]:
            for limit in limits:
                limit.check(name, given)
