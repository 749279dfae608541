"""JSON of clients that every reader of JSON reads the same."""

from __future__ import annotations

from typing import Any, Final

MAX_DEPTH: Final = 64  # of nested JSON; parsers of calls read no deeper arguments
HUGE: Final = 1 << 64


def obstacle(values: Any) -> str:
    """Return what other readers may not take: deep nesting, or a huge number. Empty: there is nothing of this kind."""
    level = [values]
    for _ in range(MAX_DEPTH):
        if any(type(value) is int and abs(value) >= HUGE for value in level):
            return "holds too large a number"
        inner = [value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)]
        level = [value for values in inner for value in values]
        if not level:
            return ""
    return f"is nested in more than {MAX_DEPTH} levels"
