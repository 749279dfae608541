"""The callback by which long work on a checkpoint reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""A callback that takes (what is being done, units done, units in all). The converting thread calls it, so it must return
at once."""


def silent(what: str, done: int, total: int) -> None:
    """Show nothing."""
