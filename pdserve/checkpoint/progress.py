"""How long work on a checkpoint tells its caller where it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(what is being done, units done, units in all). Called from the converting thread; must return at once."""


def silent(what: str, done: int, total: int) -> None:
    """For callers that show nothing."""
