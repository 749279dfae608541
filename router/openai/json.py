"""Reads a client's JSON strictly: an error names each value of the wrong type, and no value is converted.

Errors name the field as the client wrote it, with its place in a list (`messages[1].content[0].type`). JSON's `null` means
absent, as in OpenAI's own clients, which send it for arguments that were not given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from pdserve.core.errors import InvalidRequest

MAX_SHOWN_CHARS: Final = 60  # a message shows so much of a refused value


def refuse(field: str, message: str) -> InvalidRequest:
    """Return the error for one field. The name always leads, because a short one, such as `n`, is part of many words."""
    return InvalidRequest(f"{field}: {message}", field=field)


def show(value: Any) -> str:
    """Return a client's value for a message. It is ASCII and cut, so that a huge value makes no huge error."""
    text = ascii(value if not isinstance(value, str) else value[:MAX_SHOWN_CHARS])
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def kind(value: Any) -> str:
    """Return JSON's name for the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the body as an object. Raises `InvalidRequest` for anything that is not one, however hostile."""
    try:
        data = json.loads(body)
    except RecursionError as exc:
        raise refuse("body", "is nested too deeply") from exc
    except ValueError as exc:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise refuse("body", f"is not valid JSON: {show(str(exc))}") from exc
    if not isinstance(data, dict):
        raise refuse("body", f"must be a JSON object, got {kind(data)}")
    return data


def text(value: Any, field: str) -> str:
    """Return a string that can be encoded. Raises `InvalidRequest` for other types, and for half of a surrogate pair, which
    JSON's escapes can write."""
    if not isinstance(value, str):
        raise refuse(field, f"must be a string, got {kind(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise refuse(field, "holds an unpaired surrogate, which is no character") from exc
    return value


def integer(value: Any, field: str) -> int:
    """Return an integer. Raises `InvalidRequest` for other types, booleans included."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise refuse(field, f"must be an integer, got {show(value) if isinstance(value, float) else kind(value)}")
    return value


class Fields:
    """Typed access to one JSON object. Every reader returns None for a field that is absent or null, and raises
    `InvalidRequest` for the wrong type."""

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self._data = data
        self._prefix = prefix

    def path(self, name: str) -> str:
        """Return the name of a field as the client sees it, from the top of the body."""
        return self._prefix + name

    def raw(self, name: str) -> Any:
        """Return a value unchecked."""
        return self._data.get(name)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self._data.get(name)
        return None if value is None else text(value, self.path(name))

    def integer(self, name: str, low: int | None = None, high: int | None = None) -> int | None:
        """Return an integer. `low` and `high` are the smallest and largest that are allowed; None: no limit."""
        value = self._data.get(name)
        if value is None:
            return None
        number = integer(value, self.path(name))
        if (low is not None and number < low) or (high is not None and number > high):
            raise refuse(self.path(name), f"must be from {low} to {high}, got {show(number)}")
        return number

    def number(self, name: str) -> float | None:
        """Return a finite float. Python's JSON also reads NaN, Infinity and 1e999, which are refused."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise refuse(self.path(name), f"must be a number, got {kind(value)}")
        try:
            number = float(value)
        except OverflowError as exc:
            raise refuse(self.path(name), "is too large for a number") from exc
        if not math.isfinite(number):
            raise refuse(self.path(name), f"must be a finite number, got {number}")
        return number

    def boolean(self, name: str) -> bool | None:
        """Return a boolean."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, bool):
            raise refuse(self.path(name), f"must be true or false, got {kind(value)}")
        return value

    def array(self, name: str) -> list[Any] | None:
        """Return a list."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, list):
            raise refuse(self.path(name), f"must be a list, got {kind(value)}")
        return value

    def section(self, name: str) -> Fields | None:
        """Return a nested object."""
        value = self._data.get(name)
        if value is None:
            return None
        return section(value, self.path(name))


def section(value: Any, field: str) -> Fields:
    """Return the fields of a nested object. Errors name them `field.name`."""
    if not isinstance(value, dict):
        raise refuse(field, f"must be an object, got {kind(value)}")
    return Fields(value, f"{field}.")
