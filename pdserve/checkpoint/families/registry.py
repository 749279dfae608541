"""The families by the name of their architecture, those of a user's own included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdserve.checkpoint.families.decilm import DECILM
from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import LLAMA
from pdserve.core.errors import ConfigError

FAMILIES: Final = (LLAMA, DECILM)


def family_of(architecture: str, more: Iterable[Family] = ()) -> Family:
    """Return the family of an architecture; one of `more` goes before a built-in one. Raises `ConfigError` with the known
    names."""
    known = {family.architecture: family for family in (*FAMILIES, *more)}
    if architecture not in known:
        raise ConfigError(f"architecture {architecture} is not supported; supported: {', '.join(known)}")
    return known[architecture]
